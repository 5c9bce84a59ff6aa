"""The demonstration teaches: a shape that the base cannot draw is drawn afterwards, and the shapes it knew stay.

The real preset, the real `accelerate launch`, the exported file; measured from pixels.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from sd_scripts import families
from sd_scripts.library.adapters.merge import merge_into
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.toy import demo, measure
from tests.runs.learning import recorded


@pytest.mark.parametrize(
    ("steps", "least", "num_images"),
    [
        # 79 % stars.
        pytest.param(240, 0.45, 24, id="nearly half"),
        pytest.param(None, 0.80, 64, id="whole", marks=pytest.mark.long),
    ],
)
def test_the_demo_teaches_a_star_and_keeps_the_other_shapes(
    steps: int | None, least: float, num_images: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="demo")
    if steps is not None:
        preset = demo.PRESET.read_text(encoding="utf-8")
        shorter = re.sub(r"(max_train_steps|sample_every_n_steps|save_every_n_steps) = \d+", rf"\1 = {steps}", preset)
        (tmp_path / "shorter.toml").write_text(shorter, encoding="utf-8")
        monkeypatch.setattr(demo, "PRESET", tmp_path / "shorter.toml")
    image = demo.demonstrate(tmp_path / "out", num_images=4)
    with Image.open(image) as sheet:
        assert sheet.width > 400
    said = caplog.text
    assert "before and after" in said and str(image.resolve()) in said

    run = RunDirectory(image.parent)
    options = run.options()
    held_out = [event["step"] for event in run.events()[0] if event["kind"] == "validation"]
    assert held_out == ([steps] if steps else [250, 500, 700]), "Numbers and pick proposes one of the files by their held-out losses"
    losses = [event["loss"] for event in run.events()[0] if event["kind"] == "step"]
    assert len(losses) == options.training.max_train_steps == (steps or 700)
    quarter = min(len(losses) // 4, 100)
    assert sum(losses[-quarter:]) < 0.8 * sum(losses[:quarter])

    family = families.family("sdxl")
    parts = family.load(options.model, torch.device("cpu"), torch.float32)
    render = demo.renderer(family, parts, options.samples.sample_steps, options.samples.sample_cfg_scale)
    tasks = {kind: measure.prompts(kind, num_images, seed=11) for kind in ("star", "old")}
    before = {kind: recorded("sdxl", kind) for kind in tasks}
    merge_into(parts, image.parent / f"{options.output.output_name}.safetensors", 1.0)
    after = {kind: measure.obedience(render, chosen) for kind, chosen in tasks.items()}
    assert before["star"].shape < 0.05
    assert after["star"].shape >= least, f"stars before: {before['star']}; after: {after['star']}"
    assert after["old"].shape >= before["old"].shape - 0.10, f"old shapes before: {before['old']}; after: {after['old']}"
