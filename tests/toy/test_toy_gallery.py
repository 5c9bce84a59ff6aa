"""The page of what the toys learn: its figures are those that were measured, its grid shows what was drawn, a second call goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from sd_scripts.schema.errors import OptionError
from sd_scripts.toy import gallery
from sd_scripts.toy.build import BASES
from sd_scripts.toy.gallery import TITLES, TOYS, Shown, Toy

ROOT = Path(__file__).parents[2]


def test_the_page_is_written_from_the_records_beside_its_images():
    records = [gallery.record_of(toy, ROOT / "docs") for toy in TOYS]
    assert any(record.is_file() for record in records)
    assert (ROOT / "docs" / "toys.md").read_text(encoding="utf-8") == gallery.page(ROOT / "docs")
    assert all(record.with_suffix(".webp").is_file() == record.is_file() for record in records)


def test_a_record_that_changes_changes_its_line_of_the_page(tmp_path):
    record = gallery.record_of(TOYS[0], tmp_path)
    record.parent.mkdir(parents=True)
    facts = {"preset": "0", "num": 8, "steps": 700, "seconds": 90, "right": {"star": {"before": 0.0, "after": 0.875}}}
    record.write_text(json.dumps(facts))
    text = gallery.page(tmp_path)
    assert f"| {TITLES['star']} | 0 % | 88 % |" in text and "700 steps, 1.5 CPU minutes" in text
    assert TOYS[1].name not in text


def test_every_toy_has_a_preset_and_a_title_for_its_words():
    for toy in TOYS:
        assert (gallery.PRESETS / f"{toy.preset}.toml").is_file()
        assert set(toy.words) <= TITLES.keys()
    names = [toy.name for toy in TOYS]
    assert len(set(names)) == len(names)


def test_a_grid_has_a_row_of_images_for_each_row_that_was_drawn():
    red, blue = Image.new("RGB", (64, 64), "red"), Image.new("RGB", (80, 48), "blue")
    one = gallery.grid({"old": Shown({"before": [red] * gallery.SHOWN}, {}, ["a word"] * gallery.SHOWN)})
    two = gallery.grid({"old": Shown({"before": [red] * gallery.SHOWN, "after": [blue] * gallery.SHOWN}, {}, ["a word"] * gallery.SHOWN)})
    assert two.height > one.height + gallery.CELL and two.width == one.width
    counts = {color: count for count, color in two.getcolors(1 << 20) or ()}
    assert counts[255, 0, 0] == gallery.SHOWN * gallery.CELL**2
    assert counts[0, 0, 255] == pytest.approx(gallery.SHOWN * gallery.CELL**2 * 0.6, rel=0.02)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "nothing has no toy"),
        (["sdxl", "--num_images=3"], "3 is out of range"),
        (["sdxl", "--jobs=0"], "jobs: 0 is out of range"),
    ],
)
def test_a_family_without_a_toy_and_too_few_images_are_refused_with_a_sentence(words, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        gallery.main([*words, "--output_dir", str(tmp_path / "out"), "--docs", str(tmp_path)])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_toys_side_by_side_each_have_a_log_and_one_that_fails_leaves_the_others(tmp_path, caplog):
    caplog.set_level("INFO", logger="toys")
    sdxl, sd = TOYS[:2]
    for suffix in (".json", ".webp"):
        there = gallery.record_of(sdxl, tmp_path / "docs").with_suffix(suffix)
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(gallery.record_of(sdxl, ROOT / "docs").with_suffix(suffix).read_bytes())
    assert gallery.is_there(sdxl, tmp_path / "docs", gallery.SHOWN) and not gallery.is_there(sd, tmp_path / "docs", gallery.SHOWN)
    gallery.side_by_side([sdxl, sdxl], tmp_path / "out", tmp_path / "docs", gallery.SHOWN, 2)
    assert (tmp_path / "out" / f"{sdxl.name}.log").read_text(encoding="utf-8").count("is there") == 2
    assert "2 of 2" in caplog.text
    with pytest.raises(OptionError, match=rf"2 of 2 toys failed.*{sd.name}\.log"):
        gallery.side_by_side([sdxl, sd], tmp_path / "out", tmp_path / "docs", 3, 2)
    assert "num_images: 3 is out of range" in (tmp_path / "out" / f"{sd.name}.log").read_text(encoding="utf-8")


def test_a_mark_is_of_the_preset_and_of_the_weights_of_its_model(tmp_path, monkeypatch):
    toy = next(toy for toy in TOYS if "/toy-edit-border" in toy.preset)
    was = gallery.mark_of(toy)
    monkeypatch.setattr(gallery, "BASES", tmp_path / "bases")
    monkeypatch.setattr(gallery, "PRESETS", tmp_path / "presets")
    preset, made = tmp_path / "presets" / f"{toy.preset}.toml", tmp_path / "bases" / "qwen_edit" / "BUILD.json"
    for path, own in ((preset, ROOT / "presets" / f"{toy.preset}.toml"), (made, BASES / "qwen_edit" / "BUILD.json")):
        path.parent.mkdir(parents=True)
        path.write_bytes(own.read_bytes())
    assert gallery.mark_of(toy) == was
    preset.write_bytes(preset.read_bytes() + b"#")
    other, record = gallery.mark_of(toy), json.loads(made.read_text(encoding="utf-8"))
    made.write_text(json.dumps(record | {"cpu_seconds": 1}), encoding="utf-8")
    assert gallery.mark_of(toy) == other != was
    made.write_text(json.dumps(record | {"scored_weights": "0"}), encoding="utf-8")
    assert gallery.mark_of(toy) not in (was, other)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "preset", "words", "steps"),
    [
        ("sd", "sd_train_network/toy-teal", ("teal", "old"), 40),
        ("qwen_edit", "qwen_image_train_network/toy-edit-border", ("border", "keep"), 2),
        ("ddpm", "ddpm_train/toy-shapes", ("old",), 2),
    ],
)
def test_a_toy_is_trained_drawn_and_measured_once_and_again_when_its_preset_changes(
    family, preset, words, steps, tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO", logger="toys")
    text = (gallery.PRESETS / f"{preset}.toml").read_text(encoding="utf-8")
    lines = [f"max_train_steps = {steps}" if line.startswith("max_train_steps") else line for line in text.splitlines()]
    shorter = tmp_path / "presets" / f"{preset}.toml"
    shorter.parent.mkdir(parents=True)
    shorter.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(gallery, "PRESETS", tmp_path / "presets")
    monkeypatch.setattr(gallery, "TOYS", (Toy(preset, words),))
    call = [family, "--output_dir", str(tmp_path / "out"), "--docs", str(tmp_path / "docs"), "--num_images", "8"]
    gallery.main(call)
    record = gallery.record_of(gallery.TOYS[0], tmp_path / "docs")
    facts = json.loads(record.read_text(encoding="utf-8"))
    assert facts["steps"] == steps and facts["seconds"] > 0
    whens = {"after"} if family == "ddpm" else {"before", "after"}
    assert {kind: set(right) for kind, right in facts["right"].items()} == dict.fromkeys(words, whens)
    if family == "sd":
        assert facts["right"]["teal"]["before"] == 0 and facts["right"]["old"]["before"] >= 0.9
    with Image.open(record.with_suffix(".webp")) as grid:
        assert grid.width > 800
    runs = sorted((tmp_path / "out").glob("*/*/"))
    gallery.main(call)
    assert "is there" in caplog.text and sorted((tmp_path / "out").glob("*/*/")) == runs
    shorter.write_text("\n".join([*lines, "# changed"]), encoding="utf-8")
    gallery.main(call)
    assert json.loads(record.read_text(encoding="utf-8"))["preset"] != facts["preset"]
