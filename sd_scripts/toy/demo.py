"""The demonstration: teach the toy base a shape it has never seen, and show the same prompts before and after.

Runs what Start runs: the preset, `accelerate launch`, the exported file. Nothing here is a shortcut.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from sd_scripts.families.sdxl.options import SdxlNetwork
from sd_scripts.runs.command import launch_command, shown
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import written_aside
from sd_scripts.schema.flat import build, fail, read_toml

from . import measure

if TYPE_CHECKING:
    from sd_scripts.library.core.protocols import ModelFamily, Parts

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "presets" / "sdxl_train_network" / "toy-star.toml"
SHOWN = 5
"""Prompts of each kind in the picture."""
SIDE = 160
"""Longest side of a picture in the sheet, in pixels."""

log = logging.getLogger("demo")


def renderer(family: ModelFamily, parts: Parts, steps: int, cfg_scale: float) -> measure.Render:
    """Draws prompts with the model, all of one size in one batch."""
    from sd_scripts.library.core.protocols import Preview

    def render(prompts: list[str], seeds: list[int], width: int, height: int) -> list[Image.Image]:
        requests = [Preview(p, "", width, height, s, steps, cfg_scale) for p, s in zip(prompts, seeds, strict=True)]
        return family.preview(parts, requests)

    return render


def train(options: SdxlNetwork) -> tuple[RunDirectory, Path]:
    """Trains in a process of its own, exactly as the page does; returns the run and its file. Raises OptionError when it fails."""
    run = RunDirectory.create(Path(options.output.output_dir), options.output.output_name, options)
    command = launch_command(options, run.path)
    log.info("training: %s", shown(command))
    code = subprocess.run(command, check=False).returncode
    file = run.path / f"{options.output.output_name}.safetensors"
    if code != 0 or not file.exists():
        raise OptionError(f"the training ended with code {code}; its log is {run.events_file}")
    return run, file


def sheet(rows: Sequence[tuple[str, Image.Image, Image.Image]]) -> Image.Image:
    """A picture with a line for each prompt: its text, what the model drew before, and after."""
    font, margin, text_width = ImageFont.load_default(18), 14, 330
    height = SIDE + margin
    canvas = Image.new("RGB", (text_width + 2 * (SIDE + margin) + margin, 44 + height * len(rows)), "white")
    draw = ImageDraw.Draw(canvas)
    for column, title in enumerate(("before", "after")):
        draw.text((text_width + column * (SIDE + margin), 12), title, "black", ImageFont.load_default(20))
    for number, (prompt, *pictures) in enumerate(rows):
        top = 44 + number * height
        draw.multiline_text((margin, top + SIDE // 2 - 12), _wrapped(prompt), "black", font)
        for column, picture in enumerate(pictures):
            scale = SIDE / max(picture.size)
            large = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS)
            left = text_width + column * (SIDE + margin)
            box = (left + (SIDE - large.width) // 2, top + (SIDE - large.height) // 2)
            canvas.paste(large, box)
            draw.rectangle((box[0] - 1, box[1] - 1, box[0] + large.width, box[1] + large.height), outline="#bbbbbb")
    return canvas


def _wrapped(text: str, letters: int = 32) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= letters:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def demonstrate(output_dir: Path, num_pictures: int) -> Path:
    """Trains, renders, measures; returns the path of before_after.png. num_pictures of each kind are measured."""
    started = time.monotonic()
    options = build(SdxlNetwork, read_toml(PRESET) | {"output_dir": str(output_dir), "resume": "none"}, PRESET.name)
    assert isinstance(options, SdxlNetwork)
    run, file = train(options)

    import torch

    from sd_scripts import families
    from sd_scripts.library.adapters.merge import merge_into

    log.info("rendering the same prompts and seeds before and after")
    family = families.family("sdxl")
    parts = family.load(options.model, torch.device("cpu"), torch.float32)
    render = renderer(family, parts, options.samples.sample_steps, options.samples.sample_cfg_scale)
    tasks = {"star": measure.prompts("star", num_pictures, seed=1), "old": measure.prompts("old", num_pictures, seed=1)}
    before = {kind: measure.render_tasks(render, chosen) for kind, chosen in tasks.items()}
    merge_into(parts, file, 1.0)
    after = {kind: measure.render_tasks(render, chosen) for kind, chosen in tasks.items()}

    rows = [(tasks[k][i].prompt, before[k][i], after[k][i]) for k in tasks for i in range(min(SHOWN, num_pictures))]
    picture = run.path / "before_after.png"
    with written_aside(picture) as aside:
        sheet(rows).save(aside, format="PNG")
    for kind, what in (("star", "the new shape, a star"), ("old", "the shapes it knew")):
        scenes = [task.scene for task in tasks[kind]]
        was, now = measure.score(scenes, before[kind]).shape, measure.score(scenes, after[kind]).shape
        log.info("%s: right in %.0f %% of %d pictures before, %.0f %% after", what, 100 * was, num_pictures, 100 * now)
    log.info("%.0f seconds in all", time.monotonic() - started)
    for what, path in (("before and after", picture), ("LoRA", file), ("run folder", run.path)):
        log.info("%s: %s", what, path.resolve())
    return picture


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m sd_scripts.toy.demo`."""
    parser = argparse.ArgumentParser(prog="demo", description="Train a LoRA on the built-in toy model and show what it learned.")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "output" / "demo", help="where the run's folder is made")
    parser.add_argument("--num_pictures", type=int, default=20, help="pictures of each kind that are measured, before and after")
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        if given.num_pictures < 1:
            raise OptionError(f"num_pictures: {given.num_pictures} is out of range; 1 or more is allowed")
        demonstrate(given.output_dir, given.num_pictures)
    except OptionError as err:
        fail(err, "demo")


if __name__ == "__main__":
    main()
