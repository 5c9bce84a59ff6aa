"""Prior preservation: the base model makes the regularisation images that are missing, once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.library.core.protocols import Preview
from sd_scripts.library.render.class_images import FOLDER, wanted
from sd_scripts.library.train.launch import main
from sd_scripts.schema import flat
from tests.runs.conftest import Runs
from tests.small_models import NEW_MODEL

OPTIONS = {"class_prompt": "an image", "num_class_images": 5, "sample_steps": 3, "sample_cfg_scale": 1}


@pytest.fixture
def dreambooth(runs: Runs, tiny_bases: dict[str, Path]) -> Runs:
    runs.family, runs.method = "sd", "full"
    runs.base = tiny_bases["sd"]
    return runs


def made(runs: Runs) -> list[Path]:
    return sorted((runs.output / FOLDER).rglob("*.png"))


def test_missing_class_images_are_made_by_the_base_model_and_trained_on_as_regularisation(dreambooth: Runs) -> None:
    run = dreambooth.train(**OPTIONS, max_train_steps=2)
    images = made(dreambooth)
    assert [path.name for path in images] == [f"class-{number:05d}.png" for number in range(5)]
    assert len({path.read_bytes() for path in images}) == 5, "each has a seed of its own"
    assert json.loads(run.meta.read_text())["regularisation"] == 5

    options = run.options()
    request = wanted(options.model_copy(update={"output": options.output.model_copy(update={"output_dir": str(run.path)})}), 8)
    assert request is not None and isinstance(request.requests[3], Preview)
    family = families.family("sd")
    parts = family.load(options.model, torch.device("cpu"), torch.float32)
    again = np.asarray(family.preview(parts, [request.requests[3]])[0], dtype=np.int16)
    assert np.abs(again - np.asarray(Image.open(images[3]), dtype=np.int16)).max() <= 1


def test_class_images_are_used_again_and_only_missing_ones_are_made(dreambooth: Runs) -> None:
    dreambooth.train(**OPTIONS, max_train_steps=1)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in made(dreambooth)}
    lost = made(dreambooth)[-1]
    lost.unlink()
    dreambooth.train(**OPTIONS, max_train_steps=1, resume="none")
    assert made(dreambooth) == sorted(before)
    assert lost.read_bytes() == before[lost][1], "the same number gives the same image"
    assert all(path.stat().st_mtime_ns == before[path][0] for path in before if path != lost)


def test_blocks_that_are_swapped_make_the_same_class_images_and_train_the_same(dreambooth: Runs) -> None:
    plain = dreambooth.train(**OPTIONS, max_train_steps=2)
    pixels = {path.name: np.asarray(Image.open(path)) for path in made(dreambooth)}
    shutil.rmtree(dreambooth.output / FOLDER)
    swapped = dreambooth.train(**OPTIONS, max_train_steps=2, resume="none", blocks_to_swap=3)
    assert pixels.keys() == {path.name for path in made(dreambooth)}
    assert all(np.array_equal(np.asarray(Image.open(path)), pixels[path.name]) for path in made(dreambooth))
    assert [event["loss"] for event in swapped.events()[0] if event["kind"] == "step"] == [
        event["loss"] for event in plain.events()[0] if event["kind"] == "step"
    ]


def test_images_of_your_own_are_completed_in_their_folder(dreambooth: Runs, images: Path, tmp_path: Path) -> None:
    own = tmp_path / "reg" / "1_image"
    own.mkdir(parents=True)
    for path in sorted(images.glob("*.png"))[:2]:
        shutil.copy(path, own)
    dreambooth.train(**OPTIONS, max_train_steps=1, reg_data_dir=tmp_path / "reg")
    assert sorted(path.name for path in own.iterdir()) == ["class-00000.png", "class-00001.png", "class-00002.png", "p00.png", "p01.png"]
    assert not made(dreambooth)


def test_a_dry_run_says_how_many_would_be_made_and_makes_none(dreambooth: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main("sd", "full", dreambooth.arguments(**OPTIONS, dry_run=True))
    assert ended.value.code == 0
    assert "class images: 5 will be made before training" in capsys.readouterr().out
    assert not made(dreambooth)


def test_prompts_replace_the_names_of_folders(dreambooth: Runs, images: Path, tmp_path: Path) -> None:
    from sd_scripts.dataset.config import subsets_of

    for folder in ("train/3_name of folder", "reg/1_class of folder"):
        (tmp_path / folder).mkdir(parents=True)
        shutil.copy(next(images.glob("*.png")), tmp_path / folder)
    values = {"pretrained_model_name_or_path": "toy", "train_data_dir": str(tmp_path / "train"), "reg_data_dir": str(tmp_path / "reg")}
    run = RUNS["sd", "full"]
    given = flat.build(run, values | {"instance_prompt": "zwx dog", "class_prompt": "dog"}).dataset
    assert [subset.class_tokens for subset in subsets_of(given, tmp_path).items] == ["zwx dog", "dog"]
    assert [subset.class_tokens for subset in subsets_of(flat.build(run, values).dataset, tmp_path).items] == [
        "name of folder",
        "class of folder",
    ]


def test_a_model_that_a_run_has_made_makes_them_too(runs: Runs, tiny_bases: dict[str, Path]) -> None:
    runs.family, runs.method = "ddpm", "scratch"
    loaded = {**dict.fromkeys(NEW_MODEL), "pretrained_model_name_or_path": tiny_bases["ddpm"]}
    run = runs.train(**loaded, class_prompt="an image", num_class_images=1, sample_steps=1, max_train_steps=1)
    assert len(made(runs)) == 1 and json.loads(run.meta.read_text())["regularisation"] == 1
