"""One look at one picture: where it is cut, whether it is mirrored, and the pixels and mask that come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from sd_scripts.dataset import images
from sd_scripts.dataset.draws import fraction_for, seed_for
from sd_scripts.dataset.images import BadImage
from sd_scripts.dataset.plan import Plan, SampleRef
from sd_scripts.library.errors import TrainingError
from sd_scripts.library.protocols import Geometry


@dataclass(frozen=True, slots=True)
class View:
    """A picture at one of its training sizes. place is the (left, top) of the crop before mirroring; tint is a sample number or -1."""

    picture: int
    resolution: int
    place: tuple[int, int]
    mirrored: bool = False
    tint: int = -1


@dataclass(frozen=True)
class Seen:
    """What a view shows: pixels (3, H, W) in [-1, 1] and, when the loss is masked, mask (1, H, W) in [0, 1]; None counts fully."""

    pixels: Tensor
    mask: Tensor | None


def cached_view(plan: Plan, seed: int, picture: int, resolution: int, mirrored: bool = False) -> View:
    """The view that is cached: a random crop is drawn once for each picture, from its content."""
    return View(picture, resolution, _place(plan, picture, resolution, seed, 0, f"crop/{plan.pictures[picture].identity}"), mirrored)


def view_of(plan: Plan, seed: int, ref: SampleRef, cached: bool) -> View:
    """The view of one sample. Held-out samples are never mirrored, tinted or cut at random places of their own."""
    options = plan.subset_of(ref.picture).options
    in_training = ref.step >= 0
    mirrored = in_training and options.flip_aug and seed_for(seed, ref.number, "flip") % 2 == 1
    if cached or not in_training:
        return cached_view(plan, seed, ref.picture, ref.resolution, mirrored)
    place = _place(plan, ref.picture, ref.resolution, seed, ref.number, "crop")
    return View(ref.picture, ref.resolution, place, mirrored, ref.number if options.color_aug else -1)


def _place(plan: Plan, picture: int, resolution: int, seed: int, number: int, stream: str) -> tuple[int, int]:
    across, down = plan.cut(picture, resolution).excess
    if not plan.subset_of(picture).options.random_crop:
        return across // 2, down // 2
    return (
        int(fraction_for(seed, number, f"{stream}/left") * (across + 1)),
        int(fraction_for(seed, number, f"{stream}/top") * (down + 1)),
    )


def geometry_of(plan: Plan, view: View) -> Geometry:
    """How the picture was cut, for the model's size condition; a mirrored picture counts its crop from its own left."""
    item, cut = plan.pictures[view.picture], plan.cut(view.picture, view.resolution)
    left = cut.excess[0] - view.place[0] if view.mirrored else view.place[0]
    return Geometry((item.width, item.height), (left, view.place[1]), cut.bucket)


def facts_of(plan: Plan, view: View) -> dict[str, Any]:
    """Everything about a view that decides its pixels and mask, as plain JSON values."""
    item, cut, options = plan.pictures[view.picture], plan.cut(view.picture, view.resolution), plan.subset_of(view.picture).options
    assert item.identity, "the dataset is verified before anything is cached"
    return {
        "picture": item.identity,
        "bucket": list(cut.bucket),
        "resized": list(cut.resized),
        "crop": list(view.place),
        "mirrored": view.mirrored,
        "interpolation": options.resize_interpolation,
        "alpha": "mask" if options.masked_loss and options.alpha_mask else "white",
        "mask": item.mask_identity if options.masked_loss else "",
    }


def see(plan: Plan, seed: int, view: View) -> Seen:
    """Decodes, resizes and cuts. Raises TrainingError, naming the file, for a picture that has become unreadable."""
    item, cut, options = plan.pictures[view.picture], plan.cut(view.picture, view.resolution), plan.subset_of(view.picture).options
    keep_alpha = options.masked_loss and options.alpha_mask
    try:
        decoded = images.decode(item.path, keep_alpha)
        mask = decoded.alpha
        if options.masked_loss and item.mask:
            mask = images.decode_mask(item.mask)
    except BadImage as err:
        raise TrainingError(f"{item.path} {err}. It could be read when the run started; put it back, or start again without it") from err
    if decoded.rgb.shape[:2] != (item.height, item.width):
        raise TrainingError(f"{item.path} was changed while the run was going on; start again, so that it is scanned afresh")
    pixels = images.resize(decoded.rgb, cut.resized, options.resize_interpolation)
    pixels = images.crop(pixels, view.place, cut.bucket)
    if view.tint >= 0:
        pixels = images.tint(pixels, seed, view.tint)
    if mask is not None:
        # Bilinear also averages when it shrinks; the step down to latent size is by area.
        mask = images.crop(images.resize(mask, cut.resized, "bilinear"), view.place, cut.bucket)
    if view.mirrored:
        pixels, mask = images.mirror(pixels), images.mirror(mask) if mask is not None else None
    # Copies: what Pillow hands out is read-only, which torch does not want to know.
    scaled = torch.from_numpy(np.array(pixels.transpose(2, 0, 1), dtype=np.float32)).div_(127.5).sub_(1)
    return Seen(scaled, None if mask is None else torch.from_numpy(np.array(mask, dtype=np.float32)).div_(255)[None])


def mask_at(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """A mask (1, H, W) at latent size (h, w): each value is the mean of the area it stands for."""
    return interpolate(mask[None], size=size, mode="area")[0]


def normalised(mask: Tensor) -> Tensor:
    """The mask divided by its mean, so that small masks count as much as large ones; an empty mask stays empty."""
    mean = mask.mean()
    return mask / mean if mean > 0 else mask
