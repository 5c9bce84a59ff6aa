"""The script ddpm_sample.py as people start it: files, report, reproducible bytes, sentences and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sd_scripts.families.ddpm.model import Ddpm
from sd_scripts.families.ddpm.options import DdpmModelOptions
from sd_scripts.families.ddpm.script import draw
from sd_scripts.families.ddpm.tools import DdpmDraw, DrawSection
from sd_scripts.families.lgt.tools import LgtTransfer
from sd_scripts.families.qwen_edit.predict_options import QwenImagePredict
from sd_scripts.library.core.protocols import Beginning
from sd_scripts.library.tools import run
from sd_scripts.runs.command import SCRIPTS
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.flat import build, fields
from tests.forked import said_by_script
from tests.small_models import SMALL_DDPM

SMALL = DdpmModelOptions(**SMALL_DDPM, num_train_timesteps=40)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in pixels, 24 x 16, as a single file."""
    family = Ddpm()
    beginning = Beginning(torch.randint(2**31, ()).item(), ((24, 16),), family.files(SMALL, ["a red star"]))
    path = tmp_path_factory.mktemp("saved") / "small.safetensors"
    family.save(family.build(SMALL, beginning, torch.device("cpu"), torch.float32), path, "safetensors", None, {})
    return path


def drawn(saved: Path, out: Path, **options: Any) -> dict[str, Any]:
    """The values of the report of a drawing in this process."""
    given = {"prompt": "a red star", "steps": 3, "seed": 11, "n": 3, "device": "cpu"} | options
    return dict(draw(DrawSection(ckpt=str(saved), out=str(out), **given)).values)


def pixels(file: str) -> bytes:
    with Image.open(file) as image:
        return image.tobytes()


def test_the_script_draws_from_any_folder_and_says_what_it_drew(saved: Path, tmp_path: Path) -> None:
    words = f"--ckpt {saved} --steps 4 --device cpu --sampler diffusion --n 5 --cfg 2 --report r.json --out new/images --neg_prompt blue"
    code, said = said_by_script(SCRIPTS / "ddpm_sample.py", [*words.split(), "--prompt", "a red star"], tmp_path)
    assert code == 0 and "Traceback" not in said, said
    assert "\r" not in said, "a bar is for a terminal"
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    files = [tmp_path / "new" / "images" / f"image-{report['seed'] + number}.png" for number in range(5)]
    assert [Path(name) for name in report["outputs"]] == files and Path(report["grid"]).parent == files[0].parent
    assert report["network_calls"] == 4 and report["seconds"] == pytest.approx(5 * report["seconds_per_image"], abs=0.01)
    assert str(files[0]) in said and f"seed {report['seed']}" in said
    with Image.open(files[2]) as image, Image.open(report["grid"]) as grid:
        assert image.size == (24, 16) and grid.size == (2 * 24 + 2, 3 * 16 + 4)
        told = json.loads(image.text["request"])
        parameters = image.text["parameters"]
        assert grid.crop((0, 18, 24, 34)).tobytes() == image.tobytes() and "request" in grid.text
    wanted = {"prompt": "a red star", "negative_prompt": "blue", "seed": report["seed"] + 2, "steps": 4, "cfg_scale": 2.0}
    wanted |= {"sampler": "ddpm", "source": "small.safetensors", "spacing": "trailing", "eta": 0.0}
    assert told.items() >= wanted.items()
    assert "Steps: 4, Sampler: ddpm, CFG scale: 2.0" in parameters and "Negative prompt: blue" in parameters


def test_an_image_has_the_same_bytes_however_many_are_drawn(saved: Path, tmp_path: Path) -> None:
    for sampler in ("ddpm", "dpmsolver++"):
        several = drawn(saved, tmp_path / sampler, sampler=sampler, cfg=2.0)["outputs"]
        again = drawn(saved, tmp_path / sampler, sampler=sampler, cfg=2.0, batch_size=2)["outputs"]
        alone = drawn(saved, tmp_path / sampler, sampler=sampler, cfg=2.0, seed=13, n=1)
        assert [pixels(file) for file in again] == [pixels(file) for file in several]
        assert pixels(alone["outputs"][0]) == pixels(several[2]) != pixels(several[1]) and alone["grid"] is None


def test_files_that_are_there_stay(saved: Path, tmp_path: Path) -> None:
    tmp_path.joinpath("image-11.png").write_bytes(b"mine")
    report = drawn(saved, tmp_path)
    assert (tmp_path / "image-11.png").read_bytes() == b"mine"
    assert [Path(file).name for file in report["outputs"]] == ["image-11-2.png", "image-12.png", "image-13.png"]
    assert not [path for path in tmp_path.iterdir() if ".writing-" in path.name]


def test_the_layout_decides_which_files_there_are(saved: Path, tmp_path: Path) -> None:
    grid = drawn(saved, tmp_path / "grid", layout="grid")
    single = drawn(saved, tmp_path / "single", layout="single")
    assert grid["outputs"] == [] and [path.name for path in (tmp_path / "grid").iterdir()] == ["grid-11.png"]
    assert single["grid"] is None and len(list((tmp_path / "single").iterdir())) == 3
    assert Path(drawn(saved, tmp_path / "one", layout="grid", n=1)["grid"]).is_file()


def test_a_name_with_an_image_ending_is_a_file(saved: Path, tmp_path: Path) -> None:
    several = drawn(saved, tmp_path / "new" / "stars.png", n=2)
    assert several["grid"] == str((tmp_path / "new" / "stars.png").resolve())
    assert [Path(file).name for file in several["outputs"]] == ["stars-11.png", "stars-12.png"]
    assert [Path(file).name for file in drawn(saved, tmp_path / "new" / "one.PNG", n=1)["outputs"]] == ["one.png"]
    assert Path(drawn(saved, tmp_path / "new" / "stars.png", n=2, layout="grid")["grid"]).name == "stars-2.png", "what is there stays"
    (tmp_path / "folder.png").mkdir()
    assert Path(drawn(saved, tmp_path / "folder.png", n=1)["outputs"][0]).parent.name == "folder.png"
    for tool in (DdpmDraw, LgtTransfer, QwenImagePredict):
        with pytest.raises(OptionError, match=r"out: images are written as PNG.*take b/a.png"):
            build(tool, {name: "x" for name in ("ckpt", "image", "target") if name in fields(tool)} | {"out": "b/a.jpg"})


def test_a_seed_that_is_not_given_is_drawn_and_a_size_may_be_another(saved: Path, tmp_path: Path) -> None:
    first, second = (drawn(saved, tmp_path, seed=None, n=1, size=(32, 48)) for _ in range(2))
    assert first["seed"] != second["seed"]
    with Image.open(first["outputs"][0]) as image:
        assert image.size == (32, 48)
    again = drawn(saved, tmp_path, seed=first["seed"], n=1, size=(32, 48))
    assert pixels(again["outputs"][0]) == pixels(first["outputs"][0])


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (["--steps", "0"], ['steps: "0" is out of range; 1 to 10000 is allowed']),
        (["--steps", "41"], ["steps: 41 is not possible", "take 1 to 40"]),
        (["--sampler", "ddmi", "--n", "0"], ['sampler: "ddmi" is not one of ddpm, ddim,', "Did you mean", 'n: "0" is out of range']),
        (["--size", "24,17"], ["size: 24 x 17 is not possible; the sides are multiples of 8"]),
        (["--negative_prompt", "x"], ["neg_prompt"]),
        (["--device", "cuda:77"], ["device: cuda:77 asked"]),
        (["--device", "gpu"], ["device: 'gpu' is not a device"]),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_written(
    arguments: list[str], sentences: list[str], saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main("ddpm_sample", ["--ckpt", str(saved), "--out", str(tmp_path / "out"), "--seed", "1", *arguments])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and all(sentence in told for sentence in sentences) and "Traceback" not in told
    assert not (tmp_path / "out").exists()


def test_what_is_no_model_is_told_by_the_name_of_the_option(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(saved.read_bytes()[:500])
    for path, text in ((tmp_path / "none.safetensors", "there is no"), (tmp_path, "model_index.json"), (broken, "broken.safetensors")):
        with pytest.raises(SystemExit) as ended:
            run.main("ddpm_sample", ["--ckpt", str(path)])
        told = capsys.readouterr().err
        assert ended.value.code == 2 and text in told and "ckpt" in told and "pretrained_model_name_or_path" not in told


def test_help_and_wrong_options_need_no_torch() -> None:
    code = "import sys; from sd_scripts.library.tools.run import main\n"
    code += "try: main('ddpm_sample', sys.argv[1:])\nexcept SystemExit: print('torch' in sys.modules)"
    for arguments in (["--help"], ["--steps", "none"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=SCRIPTS.parent, capture_output=True, text=True, timeout=100)
        assert done.stdout.splitlines()[-1] == "False", done.stderr
