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

from sd_scripts.families import FACTS, RUNS, family
from sd_scripts.runs.command import launch_command, shown
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.command_line import fail
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import written_aside
from sd_scripts.schema.flat import build
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.toml_files import read_toml

from . import measure

if TYPE_CHECKING:
    from sd_scripts.library.core.protocols import ModelFamily, Parts

ROOT = Path(__file__).resolve().parents[2]
FAMILY, NAME = next((name, facts.demo) for name, facts in FACTS.items() if facts.demo is not None)
RUN = RUNS[FAMILY, "network"]
PRESET = ROOT / "presets" / Path(RUN.script).stem / f"{NAME}.toml"
SHOWN = 5
"""Prompts of each kind in the image."""
SIDE = 160
"""Longest side of an image in the sheet, in pixels."""

log = logging.getLogger("demo")


def renderer(model: ModelFamily, parts: Parts, steps: int, cfg_scale: float) -> measure.Render:
    """Draws prompts with the model, all of one size in one batch."""
    from sd_scripts.library.core.protocols import Preview
    from sd_scripts.library.render.renderer import Renderer

    def render(prompts: list[str], seeds: list[int], width: int, height: int) -> list[Image.Image]:
        requests = [Preview(p, "", width, height, s, steps, cfg_scale) for p, s in zip(prompts, seeds, strict=True)]
        return Renderer(model, parts).render(requests)

    return render


def train(options: RunOptions) -> tuple[RunDirectory, Path]:
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
    """An image with a line for each prompt: its text, what the model drew before, and after."""
    font, margin, text_width = ImageFont.load_default(18), 14, 330
    height = SIDE + margin
    canvas = Image.new("RGB", (text_width + 2 * (SIDE + margin) + margin, 44 + height * len(rows)), "white")
    draw = ImageDraw.Draw(canvas)
    for column, title in enumerate(("before", "after")):
        draw.text((text_width + column * (SIDE + margin), 12), title, "black", ImageFont.load_default(20))
    for number, (prompt, *images) in enumerate(rows):
        top = 44 + number * height
        draw.multiline_text((margin, top + SIDE // 2 - 12), _wrapped(prompt), "black", font)
        for column, image in enumerate(images):
            scale = SIDE / max(image.size)
            large = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
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


def demonstrate(output_dir: Path, num_images: int) -> Path:
    """Trains, renders, measures; returns the path of before_after.png. num_images of each kind are measured."""
    started = time.monotonic()
    options = build(RUN, read_toml(PRESET) | {"output_dir": str(output_dir), "resume": "none"}, PRESET.name)
    run, file = train(options)

    import torch

    from sd_scripts.library.adapters.merge import merge_into

    log.info("rendering the same prompts and seeds before and after")
    model = family(FAMILY)
    parts = model.load(options.model, torch.device("cpu"), torch.float32)
    render = renderer(model, parts, options.samples.sample_steps, options.samples.sample_cfg_scale)
    tasks = {"star": measure.prompts("star", num_images, seed=1), "old": measure.prompts("old", num_images, seed=1)}
    before = {kind: measure.render_tasks(render, chosen) for kind, chosen in tasks.items()}
    merge_into(parts, file, 1.0)
    after = {kind: measure.render_tasks(render, chosen) for kind, chosen in tasks.items()}

    rows = [(tasks[k][i].prompt, before[k][i], after[k][i]) for k in tasks for i in range(min(SHOWN, num_images))]
    image = run.path / "before_after.png"
    with written_aside(image) as aside:
        sheet(rows).save(aside, format="PNG")
    for kind, what in (("star", "the new shape, a star"), ("old", "the shapes it knew")):
        scenes = [task.scene for task in tasks[kind]]
        was, now = measure.score(scenes, before[kind]).shape, measure.score(scenes, after[kind]).shape
        log.info("%s: right in %.0f %% of %d images before, %.0f %% after", what, 100 * was, num_images, 100 * now)
    log.info("%.0f seconds in all", time.monotonic() - started)
    for what, path in (("before and after", image), ("LoRA", file), ("run folder", run.path)):
        log.info("%s: %s", what, path.resolve())
    return image


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m sd_scripts.toy.demo`."""
    parser = argparse.ArgumentParser(prog="demo", description="Train a LoRA on the built-in toy model and show what it learned.")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "output" / "demo", help="where the run's folder is made")
    parser.add_argument("--num_images", type=int, default=20, help="images of each kind that are measured, before and after")
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        if given.num_images < 1:
            raise OptionError(f"num_images: {given.num_images} is out of range; 1 or more is allowed")
        demonstrate(given.output_dir, given.num_images)
    except OptionError as err:
        fail(err, "demo")


if __name__ == "__main__":
    main()
