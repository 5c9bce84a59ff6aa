"""What real folders hold beside images with captions: odd names, odd files, links, and what other trainers leave there."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sd_scripts.dataset.images import Unreachable, decode, has_heif, read_size
from sd_scripts.families import RUNS
from sd_scripts.schema import command_line, flat
from sd_scripts.schema.errors import OptionError
from tests.dataset.test_scan import captions, image, scanned

ROOT = Path(__file__).resolve().parents[2]


def names(dataset: object) -> list[str]:
    return sorted(captions(dataset))  # type: ignore[arg-type]


def test_links_and_folders_that_look_like_images_are_left_out_and_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    image(data / "a.png")
    (data / "itself.png").symlink_to(data / "itself.png")
    (data / "gone.jpg").symlink_to(tmp_path / "nothing.jpg")
    (data / "folder.png").mkdir()
    os.mkfifo(data / "pipe.webp")
    found = scanned(tmp_path)
    assert names(found) == ["a.png"]
    (said,) = [text for text in found.warnings if "left out" in text]
    for part in (
        "links that lead nowhere (2): gone.jpg, itself.png",
        "the name of an image (1): folder.png",
        "pipes and devices (1): pipe.webp",
    ):
        assert part in said


def test_names_that_are_not_utf_8_are_left_out_and_named(tmp_path: Path) -> None:
    """Old archives have such names; no list, log or index can hold them."""
    data = tmp_path / "data"
    image(data / "a.png")
    (data / "a.png").rename(os.fsdecode(os.fsencode(data) + b"/b\xe4r.png"))
    image(data / "a.png")
    os.mkdir(os.fsencode(data) + b"/\xe4")
    found = scanned(tmp_path)
    assert names(found) == ["a.png"]
    assert any("names that are not UTF-8 (2)" in text and "b\ufffdr.png" in text for text in found.warnings)


def test_such_a_folder_is_checked_without_a_traceback_where_the_locale_is_c(tmp_path: Path) -> None:
    image(tmp_path / "data" / "käse.png", caption="ein Käse")
    (tmp_path / "data" / "x.png").symlink_to("x.png")
    os.link(tmp_path / "data" / "käse.png", os.fsencode(tmp_path / "data") + b"/\xff.png")
    script = ROOT / "sd_scripts" / "ddpm_train.py"
    given = [
        "--train_data_dir",
        str(tmp_path / "data"),
        "--output_dir",
        str(tmp_path / "out"),
        "--resolution",
        "64",
        "--min_bucket_reso",
        "32",
    ]
    environment = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, script, *given, "--dry_run"], capture_output=True, env=environment, check=False)
    assert ended.returncode == 0 and b"Traceback" not in ended.stderr, ended.stderr.decode(errors="replace")
    assert b"images: 1" in ended.stdout


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("caption", ["{}.txt", "{}.TXT", "{}.Txt"])
def test_a_caption_is_found_whatever_the_form_and_case_of_its_name(form: str, caption: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    image(data / f"{unicodedata.normalize('NFC', 'käse')}.png")
    (data / caption.format(unicodedata.normalize(form, "KÄse"))).write_text("cheese")
    assert list(captions(scanned(tmp_path)).values()) == ["cheese"]


def test_images_whose_names_differ_in_case_only_keep_their_own_captions(tmp_path: Path) -> None:
    for stem in ("cat", "Cat", "CAT"):
        image(tmp_path / "data" / f"{stem}.png", caption=f"of {stem}")
    assert captions(scanned(tmp_path)) == {f"{stem}.png": f"of {stem}" for stem in ("cat", "Cat", "CAT")}


def test_a_folder_linked_into_itself_counts_once(tmp_path: Path) -> None:
    data = tmp_path / "data"
    image(data / "a.png")
    image(data / "sub" / "b.png")
    (data / "loop").symlink_to(data)
    (data / "again").symlink_to(data / "sub")
    assert len(scanned(tmp_path).images) == 2


def test_what_other_trainers_leave_in_a_folder_is_no_image_to_train_on(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("a.png", "a-masklabel.png", "a-condlabel.png", "_latent_cache/a.png", "_controls/a.png", "b-masklabel.png"):
        image(data / name)
    found = scanned(tmp_path, masked_loss=True)
    # b-masklabel.png has no b.png, so it is an image like any other.
    assert names(found) == ["a.png", "b-masklabel.png"]
    assert {item.name: os.path.basename(item.mask) for item in found.images} == {"a.png": "a-masklabel.png", "b-masklabel.png": ""}
    (said,) = [text for text in found.warnings if "left out" in text]
    assert "conditions for a ControlNet (1): a-condlabel.png" in said and "folders of other trainers (2): _controls, _latent_cache" in said


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "CMYK", "I;16"])
@pytest.mark.parametrize("turn", [1, 6])
def test_tiff_is_read_like_any_other_format(mode: str, turn: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(random.getrandbits(64))
    shape = (20, 30) if mode in ("L", "I;16") else (20, 30, {"RGB": 3, "RGBA": 4, "CMYK": 4}[mode])
    values = draw.integers(0, 2**16, shape, dtype=np.uint16) if mode == "I;16" else draw.integers(0, 256, shape, dtype=np.uint8)
    source = Image.fromarray(values, None if mode != "CMYK" else "CMYK") if mode == "CMYK" else Image.fromarray(values)
    source.save(tmp_path / "a.png") if mode != "CMYK" else source.save(tmp_path / "a.jpg", quality=100)
    source.save(tmp_path / "a.tif", exif=Image.Exif() if turn == 1 else _turned(turn))
    expected = decode(tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")).rgb
    expected = np.rot90(expected, -1) if turn == 6 else expected
    assert read_size(tmp_path / "a.tif") == ((20, 30) if turn == 6 else (30, 20))
    difference = np.abs(decode(tmp_path / "a.tif").rgb.astype(int) - expected)
    assert difference.max() <= (8 if mode == "CMYK" else 0)


def _turned(turn: int) -> Image.Exif:
    exif = Image.Exif()
    exif[274] = turn
    return exif


@pytest.mark.parametrize(
    "given",
    [
        {"train_data_dir": ""},
        {"train_data_dir": "  "},
        {"reg_data_dir": ""},
        {"conditioning_data_dir": ""},
        {"dataset_config": ""},
        {"in_json": ""},
        {"network_weights": ""},
        {"vae": ""},
        {"cache_dir": ""},
        {"resume": ""},
        {"output_dir": ""},
    ],
    ids=lambda given: next(iter(given)),
)
def test_an_empty_place_is_not_given_and_never_the_present_folder(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    image(tmp_path / "private.png")
    monkeypatch.chdir(tmp_path)
    run = RUNS["sdxl", "network"]
    needed = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star"}
    values = {**needed, **given}
    if "train_data_dir" in given:
        with pytest.raises(OptionError, match="train_data_dir is missing"):
            flat.build(run, values)
        return
    assert flat.build(run, values) == flat.build(run, needed)
    arguments = [word for name, value in values.items() for word in (f"--{name}={value}",)]
    assert command_line.parse_cli(run, arguments).options == flat.build(run, needed)


def test_an_empty_place_in_a_dataset_file_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image(tmp_path / "private.png")
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "data.toml"
    config.write_text('[[datasets]]\n[[datasets.subsets]]\nimage_dir = ""\nconditioning_data_dir = ""\n')
    with pytest.raises(OptionError, match="has no image_dir"):
        scanned(tmp_path, train_data_dir=None, dataset_config=str(config))


def test_heic_is_read_where_its_decoder_is_installed_and_named_where_it_is_not(tmp_path: Path) -> None:
    file = tmp_path / "photo.heic"
    if has_heif():
        pixels = np.zeros((40, 64, 3), np.uint8)
        pixels[:20, :32] = (255, 0, 0)
        Image.fromarray(pixels).save(file, quality=95)
        assert read_size(file) == (64, 40)
        assert np.abs(decode(file).rgb.astype(int) - pixels).mean() < 3
    else:
        file.write_bytes(b"\0\0\0\x1cftypheic\0\0\0\0mif1heic" + bytes(64))
        with pytest.raises(Unreachable, match="is HEIC, and no decoder is installed; run pip install pillow-heif"):
            read_size(file)
