"""Batches of loaders that are not ours, for QwenImageEditTrainer: images of any kind, and encoded samples with their sizes.

Shapes: B samples, N image tokens of 16 x 16 pixels, h w latent sides, L text rows, D text width.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sd_scripts.library.render.predict import read_images
from sd_scripts.schema.errors import OptionError

ImageLike: TypeAlias = Image.Image | str | Path | np.ndarray | Tensor
Grid = tuple[int, int]
"""Rows and columns of image tokens."""
Entries = dict[str, Tensor]

TOKEN = 16
"""Pixels along the side of an image token."""
CACHED = ("pixel_latent", "control_latent", "prompt_embed")
"""What a batch holds that needs no encoder."""
SHAPES = "img_shapes"
_PADDED = ("prompt_embed", "prompt_embeds_mask", "empty_prompt_embed", "empty_prompt_embeds_mask")
log = logging.getLogger("sd_scripts")


def images_of(given: ImageLike | Sequence[ImageLike]) -> list[Image.Image]:
    """RGB images of files, PIL's images, arrays and tensors, one or several.

    Arrays are (H, W, 3) or (3, H, W), with a further axis in front for several, whole numbers to 255 or fractions in [0, 1].
    """
    if isinstance(given, Image.Image | str | Path):
        return read_images([given])
    if isinstance(given, np.ndarray | Tensor):
        values = given.detach().cpu().float().numpy() if isinstance(given, Tensor) and given.is_floating_point() else np.asarray(given)
        return [_image(one) for one in values] if values.ndim == 4 else [_image(values)]
    return [image for one in given for image in images_of(one)]


def _image(values: np.ndarray) -> Image.Image:
    if values.ndim == 3 and values.shape[0] == 3 and values.shape[-1] != 3:
        values = values.transpose(1, 2, 0)
    if values.ndim != 3 or values.shape[-1] != 3:
        raise OptionError(f"an image of shape {tuple(values.shape)} is none in colour; give (height, width, 3) or (3, height, width)")
    if values.dtype.kind == "f":
        if not np.isfinite(values).all() or values.min() < 0 or values.max() > 1:
            raise OptionError(
                f"an image of fractions goes from {values.min():g} to {values.max():g}; 0 to 1 is allowed, or whole numbers to 255"
            )
        values = (values * 255).round()
    return Image.fromarray(np.ascontiguousarray(values.astype(np.uint8)))


def grids_of(batch: Mapping[str, Any], sized: Callable[[tuple[int, int]], list[tuple[int, int]]]) -> list[Grid]:
    """The grids of an encoded batch, the target's first, then those of its control images.

    They follow from img_shapes, as the transformer takes them; else from height and width in pixels or from the images beside; else the
    images were square, which is said. sized: sizes at which an image (width, height) may have been given to the VAE. Raises OptionError.
    """
    target, controls = batch["pixel_latent"].shape[1], batch["control_latent"].shape[1]
    if batch.get(SHAPES) is not None:
        shapes = torch.as_tensor(batch[SHAPES]).reshape(batch["pixel_latent"].shape[0], -1, 3)
        if bool((shapes != shapes[:1]).any()):
            raise OptionError("the samples of a batch have different sizes; put those of one size into a batch")
        return [(int(rows), int(columns)) for _, rows, columns in shapes[0]]
    first = _grid(target, _sizes(batch, "image", sized))
    beside = [size for size in _sizes(batch, "control", sized) if _tokens(size) == controls]
    if controls % target == 0 and not beside:
        return [first] * (1 + controls // target)
    return [first, _grid(controls, beside)]


def _sizes(batch: Mapping[str, Any], name: str, sized: Callable[[tuple[int, int]], list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """What size the images of this name may have been encoded at."""
    found = []
    if name == "image" and batch.get("height") is not None and batch.get("width") is not None:
        found = [(int(torch.as_tensor(batch["width"]).max()), int(torch.as_tensor(batch["height"]).max()))]
    if batch.get(name) is not None:
        own = images_of(batch[name])[0].size
        found += [own, *sized(own)]
    return found


def _tokens(size: tuple[int, int]) -> int:
    return (size[0] // TOKEN) * (size[1] // TOKEN)


def _grid(tokens: int, sizes: Sequence[tuple[int, int]]) -> Grid:
    for width, height in sizes:
        if _tokens((width, height)) == tokens:
            return height // TOKEN, width // TOKEN
    side = isqrt(tokens)
    if side * side != tokens:
        raise OptionError(
            f"the batch holds images of {tokens} tokens and does not say how many are in a row; give img_shapes as cache_step does, or "
            "height and width in pixels"
        )
    log.info("images of %d tokens are taken for squares of %d pixels, as nothing in the batch says their size", tokens, side * TOKEN)
    return side, side


def stacked(samples: Sequence[Entries]) -> Entries:
    """Encoded samples as one batch; texts are padded with zeros, which their masks say. Raises OptionError for different sizes."""
    if len({tuple(map(tuple, sample[SHAPES].tolist())) for sample in samples}) > 1:
        raise OptionError("the samples of a batch have different sizes; put those of one size into a batch, or take batches of 1")

    def together(name: str) -> Tensor:
        values = [sample[name] for sample in samples]
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True) if name in _PADDED else torch.stack(values)

    return {name: together(name) for name in samples[0]}


def without_end(batches: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The batches, again and again. Raises OptionError when there is none, or none any more."""
    while True:
        number = 0
        for batch in batches:
            number += 1
            yield batch
        if number == 0:
            raise OptionError(
                "train_dataloader gives no batch (any more), and the run is not at its end; give what can be read again and is not empty, "
                "such as a list or a DataLoader, or fewer max_train_steps"
            )


def digest(image: Image.Image) -> str:
    """Tells RGB images apart by what they show."""
    return hashlib.blake2b(image.tobytes(), digest_size=16).hexdigest()
