"""Prior preservation (Ruiz et al. 2023, arXiv 2208.12242): regularisation images that the base model makes before training.

Images are found again by name, so a run that was killed makes only the missing ones, and a later run with the same base model,
prompt and size makes none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sd_scripts.dataset.images import EXTENSIONS
from sd_scripts.dataset.progress import Bar
from sd_scripts.library.core.protocols import Preview
from sd_scripts.library.core.rng import seed_for
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.prompts import Defaults, nearest_size
from sd_scripts.schema.runs import RunOptions

from .renderer import Renderer, at_once
from .sample import save_image

FOLDER = "class_pictures"
"""Folder inside output_dir for images that were made without a reg_data_dir."""


@dataclass(frozen=True)
class ClassImages:
    """Which images a run wants, and where they are."""

    folder: Path
    """What reg_data_dir is set to."""
    target: Path
    """Where missing images are written: the folder itself, or kohya's 1_<class> inside it."""
    requests: tuple[Preview, ...]
    """One for each missing image."""
    first: int
    """Number of the first missing image."""

    def path(self, index: int) -> Path:
        """The file of a missing image."""
        return self.target / f"class-{self.first + index:05d}.png"

    def make(self, renderer: Renderer, progress: Callable[[str, int, int], None]) -> None:
        """Renders the missing images. progress is told (what, done, total), and may stop the work by an exception."""
        self.target.mkdir(parents=True, exist_ok=True)
        total = len(self.requests)
        with Bar(total=total, desc="class images", unit="image", leave=False) as bar:
            together = at_once((self.requests[0].width, self.requests[0].height))
            for start in range(0, total, together):
                progress("class images", start, total)
                batch = self.requests[start : start + together]
                for index, (image, request) in enumerate(zip(renderer.render(batch), batch, strict=True), start):
                    save_image(image, self.path(index), request, renderer.parts.source)
                bar.update(len(batch))
        progress("class images", total, total)


def wanted(options: RunOptions, grid: int) -> ClassImages | None:
    """The class images that num_class_images asks for; None when it is 0. Without requests none are missing.

    Raises OptionError for a model that is made by its run.
    """
    data = options.dataset
    if not data.num_class_images:
        return None
    if options.method == "scratch" and options.model.pretrained_model_name_or_path is None:
        text = "num_class_images: a new model can make no images yet; set it to 0, or give images of your own in reg_data_dir"
        raise OptionError(Problem("num_class_images", text))
    folder = Path(data.reg_data_dir) if data.reg_data_dir else Path(options.output.output_dir) / FOLDER / _digest(options)
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0].isdigit()) if folder.is_dir() else []
    target = inside[0] if inside else folder
    found = sum(1 for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS) if folder.is_dir() else 0
    missing = max(0, data.num_class_images - found)
    first = 1 + max((int(path.stem[6:]) for path in target.glob("class-[0-9]*.png") if path.stem[6:].isdigit()), default=-1)
    return ClassImages(folder, target, tuple(_request(options, grid, first + index) for index in range(missing)), first)


def _request(options: RunOptions, grid: int, number: int) -> Preview:
    samples = options.samples
    width, height = nearest_size(Defaults(samples, options.dataset.resolution, grid, 0))
    return Preview(
        prompt=options.dataset.class_prompt,
        negative_prompt=samples.sample_negative_prompt,
        width=width,
        height=height,
        seed=seed_for(options.training.seed, number, "class picture"),
        steps=samples.sample_steps,
        cfg_scale=samples.sample_cfg_scale,
        sampler=samples.sampler,
        guidance=getattr(samples, "sample_guidance_scale", Preview.guidance),
        scheduler=samples.scheduler,
        shift=samples.shift,
    )


def _digest(options: RunOptions) -> str:
    """A name for everything that the images depend on, apart from their number."""
    request = _request(options, 1, 0)
    model = options.model.model_dump(mode="json")
    asked = {name: value for name, value in vars(request).items() if name != "controls"}
    return hashlib.sha256(json.dumps([model, asked], sort_keys=True).encode()).hexdigest()[:12]
