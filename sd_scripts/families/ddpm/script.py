"""What the script ddpm_sample.py does: images drawn with a saved model, as files with what made them inside, and told of."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image
from torch import Tensor

from sd_scripts.dataset.progress import Bar
from sd_scripts.families.common.made import check_size, saved_model, trained_size
from sd_scripts.library.core.devices import best_device, device_of
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.memory.oom_advice import is_out_of_memory
from sd_scripts.library.render.renderer import Renderer
from sd_scripts.library.render.sample import MAX_SEED, grid_of, save_image
from sd_scripts.library.tools.report import Report
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import new_image

from .model import Ddpm
from .options import DdpmModelOptions
from .rendering import Settings, sampler_of
from .solvers import num_calls
from .tools import DrawSection


@dataclass
class _Made:
    """What there is so far."""

    images: list[Image.Image]
    files: list[Path]


def draw(options: DrawSection) -> Report:
    """Draws what the options ask for. Raises OptionError for what cannot be read, drawn or held in memory."""
    device = device_of("device", options.device, best_device())
    family = Ddpm()
    parts = saved_model(family, DdpmModelOptions, options.ckpt, device, options.precision, "ddpm_train.py")
    requests = _requests(options, family, parts)
    began = time.monotonic()
    try:
        made = _drawn(family, parts, options, requests)
    except (RuntimeError, MemoryError) as err:
        if not is_out_of_memory(err):
            raise
        text = f"batch_size: {options.batch_size} images of this size at once do not fit into the memory of {device}; take a smaller one"
        raise OptionError(Problem("batch_size", text)) from err
    grid = None
    if options.layout == "grid" or (options.layout == "both" and options.n > 1):
        grid = _save(grid_of(made.images), requests[0], parts.source, options, "grid")
    return _report(made, grid, requests[0], time.monotonic() - began)


def _requests(options: DrawSection, family: Ddpm, parts: Parts) -> list[Preview]:
    width, height = size = trained_size(parts) if options.size is None else options.size
    check_size(family, parts, size)
    seed = secrets.randbelow(MAX_SEED) if options.seed is None else options.seed
    return [
        Preview(options.prompt, options.neg_prompt, width, height, seed + number, options.steps, options.cfg, options.sampler)
        for number in range(options.n)
    ]


def _settings(options: DrawSection) -> Settings:
    return Settings(options.spacing, options.eta, options.clamp, options.guidance_rescale)


def _drawn(family: Ddpm, parts: Parts, options: DrawSection, requests: Sequence[Preview]) -> _Made:
    """Draws batch by batch; single images are written as soon as their batch is finished, with a bar on standard error."""
    renderer, made = Renderer(family, replace(parts, denoising={**parts.denoising, "drawing": _settings(options)})), _Made([], [])
    with Bar(total=options.n * options.steps, desc="drawing", unit="step", file=sys.stderr) as bar:

        def advance(step: int, total: int, clean: Tensor) -> None:
            bar.update(len(clean))

        for start in range(0, options.n, options.batch_size):
            batch = requests[start : start + options.batch_size]
            images = renderer.render(batch, advance)
            made.images += images
            if options.layout != "grid":
                made.files += [_save(image, one, parts.source, options, "image") for image, one in zip(images, batch, strict=True)]
    return made


def _save(image: Image.Image, request: Preview, source: str, options: DrawSection, name: str) -> Path:
    """Writes a PNG that tells what made it; the path, which is new."""
    addition = "" if name == "grid" or options.n == 1 else f"-{request.seed}"
    with new_image(options.out, f"{name}-{request.seed}", addition) as path:
        save_image(image, path, request, source, more=vars(_settings(options)))
    return path.resolve()


def _report(made: _Made, grid: Path | None, first: Preview, seconds: float) -> Report:
    count, calls = len(made.images), num_calls(sampler_of(first), first.steps)
    number = f"{count} {'image' if count == 1 else 'images'}"
    told = f"{number}, seed {first.seed}, each with {calls} network calls in {seconds / count:.2f} s"
    values = {
        "outputs": [str(path) for path in made.files],
        "grid": None if grid is None else str(grid),
        "seed": first.seed,
        "network_calls": calls,
        "seconds": round(seconds, 3),
        "seconds_per_image": round(seconds / count, 3),
    }
    return Report([*map(str, made.files), *([str(grid)] if grid is not None else []), told], values)
