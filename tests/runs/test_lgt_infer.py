"""The script lgt_infer.py as people start it: files, report, reproducible bytes, sentences and exit codes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sd_scripts.families.lgt.model import Lgt
from sd_scripts.families.lgt.options import LgtSampleOptions
from sd_scripts.families.lgt.script import transfer
from sd_scripts.families.lgt.tools import TransferSection
from sd_scripts.library.render.sample import GAP
from sd_scripts.library.tools import run
from sd_scripts.runs.command import SCRIPTS
from tests.forked import said_by_script


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, made for 64 x 64, as a single file."""
    family = Lgt()
    path = tmp_path_factory.mktemp("saved") / "small.safetensors"
    family.save(family.tiny(), path, "safetensors", None, {})
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images of different sizes and a text."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(5)
    for name, (width, height) in {"b.png": (90, 60), "a.jpg": (40, 40), "c.webp": (33, 130)}.items():
        coarse = Image.fromarray(generator.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


def transferred(saved: Path, image: Path, out: Path, **options: Any) -> dict[str, Any]:
    """The values of the report of a transfer in this process."""
    given = {"target": "line", "steps": 2, "seed": 11, "device": "cpu"} | options
    return dict(transfer(TransferSection(ckpt=str(saved), image=str(image), out=str(out), **given)).values)


def pixels(file: str | Path) -> bytes:
    with Image.open(file) as image:
        return image.tobytes()


def test_the_script_transfers_a_folder_and_says_what_it_did(saved: Path, photos: Path, tmp_path: Path) -> None:
    arguments = f"--ckpt {saved} --image {photos} --steps 3 --device cpu --report r.json --out new/images --strength 0.8 --seed 7"
    code, said = said_by_script(SCRIPTS / "lgt_infer.py", [*arguments.split(), "--target", "line 0.7, night 0.3"], tmp_path)
    assert code == 0 and "3 images to line 0.7, night 0.3, seed 7" in said and "Traceback" not in said, said
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    folder = tmp_path / "new" / "images"
    assert [Path(file) for file in report["outputs"]] == [folder / f"{stem}_to_line-0.7-night-0.3.png" for stem in "abc"]
    assert (report["images"], report["seed"], report["network_calls"]) == (["a.jpg", "b.png", "c.webp"], 7, 12)
    assert len(report["sources"]) == 3 and set(report["sources"]) <= {"flat", "line", "night"}
    assert report["seconds"] == pytest.approx(3 * report["seconds_per_image"], abs=0.01)
    assert report["outputs"][0] in said and "seed 7" in said and "taken for" in said
    sizes = [(64, 64), (80, 48), (32, 128)]
    for number, (file, size) in enumerate(zip(report["outputs"], sizes, strict=True)):
        with Image.open(file) as image:
            assert image.size == size
            told = json.loads(image.text["request"])
        assert (told["prompt"], told["seed"], told["steps"], told["strength"]) == ("line 0.7, night 0.3", 7 + number, 3, 0.8)
        assert (told["controls"], told["source"], told["source_style"]) == (
            [report["images"][number]],
            "small.safetensors",
            report["sources"][number],
        )
        assert told["image_sha256"] == hashlib.sha256((photos / report["images"][number]).read_bytes()).hexdigest()
    with Image.open(report["grid"]) as sheet, Image.open(report["outputs"][1]) as second:
        assert sheet.size == (2 * (80 + GAP) - GAP, 3 * (128 + GAP) - GAP)
        corner = (80 + GAP, 128 + GAP)
        assert sheet.crop((*corner, corner[0] + 80, corner[1] + 48)).tobytes() == second.tobytes()


def test_an_image_has_the_same_bytes_whatever_it_is_transferred_with(saved: Path, photos: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"start": "noise", "strength": 0.6, "temperature": 0.3, "cfg": 2.0, "source": "flat"}
    together = transferred(saved, photos, tmp_path, **options)["outputs"]
    alone = transferred(saved, photos / "b.png", tmp_path, **(options | {"seed": 12}))["outputs"]
    other = transferred(saved, photos / "b.png", tmp_path, **options)["outputs"]
    assert pixels(alone[0]) == pixels(together[1]) != pixels(other[0])
    assert Path(alone[0]).name == "b_to_line-2.png", "files that are there stay"


def test_start_noise_is_that_of_the_seed_told_in_the_image_and_below_the_strength(saved: Path, photos: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"start_noise": 0.4, "source": "flat", "layout": "single"}
    changes: list[dict[str, Any]] = [{}, {}, {"seed": 12}, {"start_noise": 0.0}]
    files = [transferred(saved, photos / "b.png", tmp_path, **(options | change))["outputs"][0] for change in changes]
    assert pixels(files[0]) == pixels(files[1]) and len({pixels(file) for file in files}) == 3
    with Image.open(files[0]) as image:
        assert json.loads(image.text["request"])["start_noise"] == 0.4
    with pytest.raises(ValueError, match=r"start_noise \(0.4\) must be below strength \(0.3\)"):
        TransferSection(ckpt="m", image="i", target="line", start_noise=0.4, strength=0.3)
    with pytest.raises(ValueError, match=r"sample_start_noise \(0.4\) must be below sample_strength \(0.4\)"):
        LgtSampleOptions(sample_start_noise=0.4, sample_strength=0.4)


def test_the_layout_decides_which_files_there_are(saved: Path, photos: Path, tmp_path: Path) -> None:
    sheet = transferred(saved, photos, tmp_path / "sheet", layout="grid")
    single = transferred(saved, photos, tmp_path / "single", layout="single")
    named = transferred(saved, photos / "c.webp", tmp_path / "named" / "monet.png")
    assert {path.name for path in (tmp_path / "named").iterdir()} == {"monet.png", "monet-sheet.png"}, named
    assert sheet["outputs"] == [] and [path.name for path in (tmp_path / "sheet").iterdir()] == ["sheet-11.png"]
    assert single["grid"] is None and len(list((tmp_path / "single").iterdir())) == 3


def test_a_seed_that_is_not_given_is_drawn_and_a_size_may_be_another(saved: Path, photos: Path, tmp_path: Path) -> None:
    options = {"start": "noise", "size": (48, 80), "layout": "single"}
    first, second = (transferred(saved, photos / "a.jpg", tmp_path, seed=None, **options) for _ in range(2))
    assert first["seed"] != second["seed"] and pixels(first["outputs"][0]) != pixels(second["outputs"][0])
    with Image.open(first["outputs"][0]) as image:
        assert image.size == (48, 80)
    again = transferred(saved, photos / "a.jpg", tmp_path, seed=first["seed"], **options)
    assert pixels(again["outputs"][0]) == pixels(first["outputs"][0])


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (["--steps", "0"], ['steps: "0" is out of range; 1 to 1000 is allowed']),
        (["--sampler", "mid", "--strength", "0"], ["sampler", "euler", "strength"]),
        (
            ["--target", "nihgt", "--source", "monet 0.5, line 0.5", "--size", "64,60"],
            [
                "target: the model small.safetensors knows no style 'nihgt'; there are flat, line, night, average",
                "source: the model small.safetensors knows no style 'monet'",
                "size: 64 x 60 is not possible; the sides are multiples of 16",
            ],
        ),
        (["--target", "line 0, night 0"], ["target: the weights of 'line 0, night 0' are all 0"]),
        (["--image", "nowhere.png"], ["image: there is no nowhere.png"]),
        (["--cfg_scale", "2"], ["cfg_scale", "cfg"]),
        (["--device", "cuda:77"], ["device: cuda:77 asked"]),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_written(
    arguments: list[str], sentences: list[str], saved: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--ckpt": str(saved), "--image": str(photos), "--target": "line", "--out": str(tmp_path / "out")}
    given |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    with pytest.raises(SystemExit) as ended:
        run.main("lgt_infer", [text for pair in given.items() for text in pair])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and all(sentence in told for sentence in sentences) and "Traceback" not in told
    assert not (tmp_path / "out").exists()


def test_folders_and_images_that_cannot_be_used_are_sentences(
    saved: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    (tmp_path / "mixed").mkdir()
    for number in (1, 2):
        (tmp_path / "mixed" / f"bad{number}.png").write_bytes(b"not an image")
    (tmp_path / "mixed" / "good.jpg").write_bytes((photos / "a.jpg").read_bytes())
    for image, sentences in (("empty", ["has no images"]), ("mixed", ["bad1.png is not an image", "bad2.png is not an image"])):
        command = ["--ckpt", str(saved), "--image", str(tmp_path / image), "--target", "line", "--out", str(tmp_path / "out")]
        with pytest.raises(SystemExit) as ended:
            run.main("lgt_infer", command)
        told = capsys.readouterr().err
        assert ended.value.code == 2 and all(sentence in told for sentence in sentences) and not (tmp_path / "out").exists()


def test_what_is_no_model_is_told_by_the_name_of_the_option(
    saved: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(saved.read_bytes()[:500])
    for path, text in ((tmp_path / "none.safetensors", "there is no"), (tmp_path, "model_index.json"), (broken, "broken.safetensors")):
        with pytest.raises(SystemExit) as ended:
            run.main("lgt_infer", ["--ckpt", str(path), "--image", str(photos), "--target", "line"])
        told = capsys.readouterr().err
        assert ended.value.code == 2 and text in told and "ckpt" in told and "pretrained_model_name_or_path" not in told
