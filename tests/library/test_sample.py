"""Previews in a run folder: what is rendered is what inference renders, and what cannot be rendered does not end the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sd_scripts.families import family
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.render.renderer import Renderer
from sd_scripts.library.render.sample import Previews, request_of, save_image
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.prompts import PromptSpec

PROMPTS = [
    PromptSpec("a red cat", "", 64, 64, 1, 2, 3.0, "auto"),
    PromptSpec("a wide dog", "blurry", 96, 64, 2, 2, 3.0, "ddim"),
    PromptSpec("кошка", "", 64, 64, 3, 2, 3.0, "auto"),
]


@pytest.fixture(scope="module")
def parts() -> Parts:
    return family("sdxl").tiny()


def previews(folder: Path, parts: Parts, prompts: list[PromptSpec]) -> tuple[Previews, RunDirectory]:
    run = RunDirectory(folder)
    return Previews(Renderer(family("sdxl"), parts), prompts, run, "lora"), run


def test_images_are_those_of_the_familys_own_preview(tmp_path: Path, parts: Parts) -> None:
    made, run = previews(tmp_path, parts, PROMPTS)
    made.render(40)
    assert sorted(path.name for path in run.samples.iterdir()) == [f"lora-000040-{index:02d}.png" for index in range(3)]
    for index, spec in enumerate(PROMPTS):
        wanted = family("sdxl").preview(parts, [request_of(spec)])[0]
        with Image.open(made.path(40, index)) as found:
            assert found.size == (spec.width, spec.height)
            assert np.abs(np.asarray(found).astype(int) - np.asarray(wanted).astype(int)).max() <= 1
    logged = {event["index"]: event for event in run.events()[0]}
    assert logged[1] | {"time": 0} == {
        "time": 0, "kind": "sample", "step": 40, "index": 1, "file": "samples/lora-000040-01.png", "prompt": "a wide dog", "seed": 2,
    }  # fmt: skip


def test_an_image_says_what_made_it(tmp_path: Path, parts: Parts) -> None:
    made, _ = previews(tmp_path, parts, PROMPTS)
    made.render(7)
    with Image.open(made.path(7, 1)) as image:
        text: dict[str, Any] = dict(image.text)
    assert text["parameters"].splitlines()[:2] == ["a wide dog", "Negative prompt: blurry"]
    assert "Steps: 2, Sampler: ddim, CFG scale: 3.0, Seed: 2, Size: 96x64" in text["parameters"]
    assert json.loads(text["request"])["step"] == 7 and json.loads(text["request"])["seed"] == 2


def test_rendering_leaves_random_state_and_modes_as_they_were(tmp_path: Path, parts: Parts) -> None:
    made, _ = previews(tmp_path, parts, [replace(PROMPTS[0], sampler="euler_a")])
    parts.backbone.train()
    before = torch.get_rng_state()
    made.render(1)
    assert torch.equal(torch.get_rng_state(), before) and parts.backbone.training
    parts.backbone.eval()


def test_an_image_that_cannot_be_rendered_is_a_warning(tmp_path: Path, parts: Parts) -> None:
    made, run = previews(tmp_path, parts, [replace(PROMPTS[0], width=65), PROMPTS[1]])
    made.render(3)
    events = run.events()[0]
    assert sorted(event["kind"] for event in events) == ["sample", "warning"]
    assert "preview 0 could not be rendered: image sides 65 x 64" in next(event["text"] for event in events if event["kind"] == "warning")


def test_only_missing_images_are_rendered_again(tmp_path: Path, parts: Parts) -> None:
    made, run = previews(tmp_path, parts, PROMPTS)
    made.render(5)
    made.path(5, 2).unlink()
    made.render(5, missing_only=True)
    assert [event["index"] for event in run.events()[0]].count(2) == 2 and len(run.events()[0]) == 4


def test_control_images_are_opened_upright_in_rgb(tmp_path: Path) -> None:
    turned = Image.new("RGB", (40, 30), "navy")
    exif = Image.Exif()
    exif[274] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    Image.new("L", (20, 10), 128).save(tmp_path / "grey.png")
    spec = replace(PROMPTS[0], controls=(str(tmp_path / "turned.jpg"), str(tmp_path / "grey.png")))
    request = request_of(spec)
    assert [(image.mode, image.size) for image in request.controls] == [("RGB", (30, 40)), ("RGB", (20, 10))]
    save_image(Image.new("RGB", (8, 8)), tmp_path / "made.png", request, "model", 3, spec.controls)
    with Image.open(tmp_path / "made.png") as image:
        assert json.loads(image.text["request"])["controls"] == ["turned.jpg", "grey.png"]  # type: ignore[attr-defined]


def test_a_control_image_that_went_bad_is_a_warning_and_the_others_are_rendered(tmp_path: Path, parts: Parts) -> None:
    (tmp_path / "bad.png").write_text("no image")
    bad = replace(PROMPTS[0], controls=(str(tmp_path / "bad.png"),))
    with pytest.raises(OptionError, match=r"sample_prompts: the control image .*bad\.png is not an image"):
        request_of(bad)
    made, run = previews(tmp_path, parts, [bad, PROMPTS[2]])
    made.render(3)
    events = run.events()[0]
    assert sorted(event["kind"] for event in events) == ["sample", "warning"]
    assert "preview 0 could not be rendered" in next(event["text"] for event in events if event["kind"] == "warning")
