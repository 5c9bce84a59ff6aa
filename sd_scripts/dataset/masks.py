"""How training reads the mask of an image: from which file, cut as the image is, and as weights in the loss. No tensors are needed: the
trainer and the Data tab read by this code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError

from . import images
from .buckets import Cut
from .config import Subset
from .images import EXTENSIONS, Pixels
from .pairs import MASK_LABEL
from .records import ImageInfo


def reads_alpha(options: DatasetOptions) -> bool:
    """Whether an image's alpha channel is its mask, where it has no file."""
    return options.masked_loss and options.alpha_mask


def mask_of(image: ImageInfo, options: DatasetOptions, alpha: Pixels | None) -> Pixels | None:
    """The mask (H, W) of an image in a size of its own, 0 does not count and 255 counts fully; None counts whole. A file wins over the
    image's alpha channel, which is given where `reads_alpha`. Raises BadImage."""
    return images.decode_mask(image.mask) if options.masked_loss and image.mask else alpha


def as_cut(mask: Pixels, cut: Cut, place: tuple[int, int]) -> Pixels:
    """A mask resized and cut as its image is: (H, W) of the bucket. place: left and top of the crop."""
    # Bilinear also averages when it shrinks; the step down to latent size is by area.
    return images.crop(images.resize(mask, cut.resized, "bilinear"), place, cut.bucket)


def with_outside(mask: Any, weight: float) -> Any:
    """A mask in [0, 1], array or tensor, as weights in [weight, 1]: what it leaves black counts `weight`, what is white 1."""
    return weight + (1 - weight) * mask


def normalised(mask: Any) -> Any:
    """The mask, array or tensor, divided by its mean, so that small masks count as much as large ones; an empty mask stays empty."""
    mean = mask.mean()
    return mask / mean if mean > 0 else mask


def named(image: ImageInfo, subset: Subset, own: str = "") -> Path:
    """The file in which a mask of an image is looked for: its own, else a PNG of a name that no other image reads."""
    folder = subset.options.conditioning_data_dir or subset.masks
    if own:
        return Path(own)
    if folder:
        # With the folder's name: a mask a.png would also be that of every deeper a.png without its own.
        return Path(folder) / subset.folder.name / f"{os.path.splitext(image.name)[0]}.png"
    return Path(f"{os.path.splitext(image.path)[0]}{MASK_LABEL}.png")


def place_of(image: ImageInfo, subset: Subset) -> Path:
    """The file to write a mask of an image to, see `named`.

    Raises OptionError where training would read none, and where the file that is there is no PNG.
    """
    if subset.is_reg or subset.is_style:
        raise OptionError("Regularisation images and styles have no masks; all of each counts in the loss.")
    if subset.listed_only and not (image.mask or subset.options.conditioning_data_dir or subset.masks):
        raise OptionError(f"{subset.metadata_file} says which images there are; name masks there, or set conditioning_data_dir.")
    place = named(image, subset, image.mask)
    others = (place.with_suffix(ending) for ending in EXTENSIONS if ending != ".png")
    other = place if place.suffix.lower() != ".png" else next((file for file in others if file.is_file()), None)
    if other is not None:
        raise OptionError(f"The mask {other} is no PNG, in which no weight is lost; convert it to one, or move it away.")
    return place
