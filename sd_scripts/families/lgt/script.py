"""What the script lgt_infer.py does: images in another style, as files with what made them inside, and told of."""

from __future__ import annotations

import math
import re
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sd_scripts.dataset.buckets import BucketRules, cut_for
from sd_scripts.dataset.images import EXTENSIONS, BadImage, crop, decode, read_size, resize
from sd_scripts.dataset.progress import Bar
from sd_scripts.families.common.images import as_images
from sd_scripts.families.common.made import check_size, saved_model, size_multiple, trained_size
from sd_scripts.library.core.devices import best_device, device_of
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.loading.common import tried
from sd_scripts.library.memory.oom_advice import is_out_of_memory
from sd_scripts.library.render.sample import MAX_SEED, grid_of, save_image
from sd_scripts.library.tools.report import Report
from sd_scripts.runs.states import sha256
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.files import new_image

from .model import AVERAGE, Lgt, style_weights
from .options import LgtModelOptions
from .tools import TransferSection
from .transfer import Settings, guess_source, num_calls
from .transfer import transfer as transfer_latents

AUTO = "auto"
SHEET_PAIRS = 64
"""Images that a sheet shows at most."""

Size = tuple[int, int]


@dataclass(frozen=True)
class Order:
    """One image to transfer."""

    file: Path
    size: Size
    """(width, height) to work at, in pixels."""
    seed: int


@dataclass
class _Made:
    """What there is so far; one entry for each image."""

    sources: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    pairs: list[tuple[Image.Image, Image.Image]] = field(default_factory=list)
    """Source and result, the first SHEET_PAIRS of them where there is a sheet."""


def transfer(options: TransferSection) -> Report:
    """Transfers what the options name. Raises OptionError for what cannot be read, transferred or held in memory."""
    device = device_of("device", options.device, best_device())
    files = _files(options.image)
    family = Lgt()
    parts = saved_model(family, LgtModelOptions, options.ckpt, device, options.precision, "lgt_train.py")
    orders = _orders(options, family, parts, files)
    began = time.monotonic()
    made = _transferred(family, parts, options, orders)
    sheet = None
    if options.layout != "single":
        sheet = _save(sheet_of(made.pairs), orders[0], parts.source, options, made.sources[0], f"sheet-{orders[0].seed}", "-sheet")
    return _report(options, made, orders, sheet, time.monotonic() - began)


def _files(image: str) -> list[Path]:
    """The image, or all images of the folder by name."""
    path = Path(image).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise OptionError(Problem("image", f"image: there is no {image}; give an image, or a folder of images"))
    found = sorted(file for file in path.iterdir() if file.is_file() and file.suffix.lower() in EXTENSIONS and file.name[0] != ".")
    if not found:
        text = f"image: the folder {image} has no images; those are files that end in {', '.join(EXTENSIONS)}, not in its sub-folders"
        raise OptionError(Problem("image", text))
    return found


def _orders(options: TransferSection, family: Lgt, parts: Parts, files: Sequence[Path]) -> list[Order]:
    """Every image with its size and seed, read from headers alone. Raises OptionError with every problem."""
    problems: list[Problem] = []
    tried(problems, lambda: style_weights(parts, options.target, "target"))
    if options.source != AUTO:
        tried(problems, lambda: style_weights(parts, options.source, "source"))
    if options.size is not None:
        tried(problems, partial(check_size, family, parts, options.size))
    sizes = [tried(problems, partial(_read_size, file)) for file in files]
    refuse(problems)
    seed = secrets.randbelow(MAX_SEED) if options.seed is None else options.seed
    multiple, area = size_multiple(family, parts), math.prod(trained_size(parts))
    return [
        Order(file, options.size or size_for(size, area, multiple), seed + number)
        for number, (file, size) in enumerate(zip(files, sizes, strict=True))
        if size is not None
    ]


def _read_size(file: Path) -> Size:
    try:
        return read_size(file)
    except BadImage as err:
        raise _bad_image(file, err) from err


def _bad_image(file: Path, err: BadImage) -> OptionError:
    return OptionError(Problem("image", f"image: {file.name} {err}; put it right, or take it out"))


def size_for(size: Size, area: int, multiple: int) -> Size:
    """(width, height) of about this area in the aspect ratio of an image of `size`, each side the nearest multiple, at least one."""
    width = math.sqrt(area * size[0] / size[1])
    return max(multiple, round(width / multiple) * multiple), max(multiple, round(area / width / multiple) * multiple)


def opened(order: Order) -> Image.Image:
    """The image, upright in RGB, resized until it covers the size and cut in the middle."""
    try:
        pixels = decode(order.file).rgb
    except BadImage as err:
        raise _bad_image(order.file, err) from err
    height, width = pixels.shape[:2]
    cut = cut_for((width, height), BucketRules(order.size, enabled=False))
    left, top = (excess // 2 for excess in cut.excess)
    return Image.fromarray(crop(resize(pixels, cut.resized), (left, top), cut.bucket))


def _settings(options: TransferSection) -> Settings:
    return Settings(options.steps, options.sampler, options.strength, options.start, options.cfg, options.temperature, options.start_noise)


def _transferred(family: Lgt, parts: Parts, options: TransferSection, orders: Sequence[Order]) -> _Made:
    """Transfers one image after another; each is written as soon as it is finished, with a bar on standard error."""
    made, settings = _Made(), _settings(options)
    phases = 2 if settings.start == "inversion" else 1
    with Bar(total=phases * settings.steps * len(orders), desc="transferring", unit="step", file=sys.stderr) as bar:

        def advance(step: int, total: int, state: Tensor) -> None:
            bar.update(len(state))

        for order in orders:
            given = opened(order)
            try:
                pixels = torch.from_numpy(np.asarray(given) / np.float32(127.5) - 1).permute(2, 0, 1)[None]
                latents = family.encode_images(parts, pixels)
                source = guess_source(family, parts, latents)[0] if options.source == AUTO else options.source
                result = transfer_latents(family, parts, latents, [source], [options.target], [order.seed], settings, advance)
                (image,) = as_images(family.decode(parts, result))
            except (RuntimeError, MemoryError) as err:
                if not is_out_of_memory(err):
                    raise
                raise _no_memory(order, parts) from err
            made.sources.append(source)
            if options.layout != "grid":
                name = f"{order.file.stem}_to_{named(options.target)}"
                made.files.append(_save(image, order, parts.source, options, source, name))
            if options.layout != "single" and len(made.pairs) < SHEET_PAIRS:
                made.pairs.append((given, image))
    return made


def _no_memory(order: Order, parts: Parts) -> OptionError:
    device = next(parts.backbone.parameters()).device
    width, height = order.size
    text = f"size: {order.file.name} at {width} x {height} does not fit into the memory of {device}; take a smaller size"
    return OptionError(Problem("size", text))


def named(style: str) -> str:
    """A style, or a mixture, as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", style).strip("-") or AVERAGE


def _save(image: Image.Image, order: Order, model: str, options: TransferSection, source: str, name: str, addition: str = "") -> Path:
    """Writes a PNG that tells what made it; the path, which is new."""
    width, height = order.size
    request = Preview(options.target, "", width, height, order.seed, options.steps, options.cfg, options.sampler)
    more: dict[str, Any] = {"source_style": source, "strength": options.strength, "start": options.start}
    more |= {"temperature": options.temperature, "start_noise": options.start_noise, "image_sha256": sha256(order.file)}
    with new_image(options.out, name, addition) as path:
        save_image(image, path, request, model, controls=[str(order.file)], more=more)
    return path.resolve()


def sheet_of(pairs: Sequence[tuple[Image.Image, Image.Image]]) -> Image.Image:
    """Each image with what became of it to its right, in as many columns of pairs as the root of their number, rounded down."""
    return grid_of([image for pair in pairs for image in pair], 2 * math.isqrt(len(pairs)))


def _report(options: TransferSection, made: _Made, orders: Sequence[Order], sheet: Path | None, seconds: float) -> Report:
    count, calls = len(orders), num_calls(_settings(options))
    number = f"{count} {'image' if count == 1 else 'images'}"
    told = f"{number} to {options.target or AVERAGE}, seed {orders[0].seed}, each with {calls} network calls in {seconds / count:.2f} s"
    if options.source == AUTO:
        counts = {style: made.sources.count(style) for style in dict.fromkeys(made.sources)}
        told += f"; taken for {', '.join(f'{style} ({times})' for style, times in counts.items())}"
    shown = [f"the sheet has the first {SHEET_PAIRS} of them"] if sheet is not None and count > SHEET_PAIRS else []
    values = {
        "outputs": [str(path) for path in made.files],
        "grid": None if sheet is None else str(sheet),
        "images": [order.file.name for order in orders],
        "sources": made.sources,
        "seed": orders[0].seed,
        "network_calls": calls,
        "seconds": round(seconds, 3),
        "seconds_per_image": round(seconds / count, 3),
    }
    return Report([*map(str, made.files), *([str(sheet)] if sheet is not None else []), *shown, told], values)
