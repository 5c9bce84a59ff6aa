"""One look at one image, and at its control images: where it is cut, whether it is mirrored, and what pixels and mask come out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from sd_scripts.dataset import images, masks
from sd_scripts.dataset.buckets import Cut, cut_for, rules_of
from sd_scripts.dataset.draws import fraction_for
from sd_scripts.dataset.images import BadImage, Pixels
from sd_scripts.dataset.plan import Plan, SampleRef
from sd_scripts.library.core.errors import TrainingError
from sd_scripts.library.core.protocols import Geometry
from sd_scripts.schema.dataset import DatasetOptions, Interpolation


@dataclass(frozen=True, slots=True)
class View:
    """An image at one of its training sizes. place is the (left, top) of the crop before mirroring; tint is a sample number or -1."""

    image: int
    resolution: int
    place: tuple[int, int]
    mirrored: bool = False
    tint: int = -1


@dataclass(frozen=True, slots=True)
class ControlView:
    """A control image as it is seen with its target: the index-th of an image; place and tint as in View."""

    image: int
    resolution: int
    index: int
    place: tuple[int, int]
    mirrored: bool = False
    tint: int = -1


Look = View | ControlView
"""Anything that becomes latents."""


@dataclass(frozen=True)
class Seen:
    """What a view shows: pixels (3, H, W) in [-1, 1] and, when the loss is masked, mask (1, H, W) in [0, 1]; None counts fully."""

    pixels: Tensor
    mask: Tensor | None


def cached_view(plan: Plan, seed: int, image: int, resolution: int, mirrored: bool = False) -> View:
    """The view that is cached: a random crop is drawn once for each image, from its content."""
    return View(image, resolution, _place(plan, image, resolution, seed, 0, f"crop/{plan.images[image].identity}"), mirrored)


def view_of(plan: Plan, seed: int, ref: SampleRef, cached: bool, fixed: bool = False) -> View:
    """The view of one sample; cached says whether its pixels are.

    fixed: a random crop is the cached view's although pixels are not cached, because texts are kept that saw the control images so.
    Held-out samples are never mirrored, tinted or cut at random places of their own.
    """
    options, mirrored = plan.subset_of(ref.image).options, plan.is_mirrored(ref)
    kept = cached_view(plan, seed, ref.image, ref.resolution, mirrored)
    if cached or ref.step < 0:
        return kept
    place = kept.place if fixed else _place(plan, ref.image, ref.resolution, seed, ref.number, "crop")
    return replace(kept, place=place, tint=ref.number if options.color_aug else -1)


def control_views(plan: Plan, view: View) -> tuple[ControlView, ...]:
    """The control images of a view: at its crop where they share the target's cut, whole otherwise; mirrored and tinted with it."""
    views = []
    for index in range(len(plan.images[view.image].controls)):
        place = view.place if plan.shares_cut(view.image, index) else (0, 0)
        views.append(ControlView(view.image, view.resolution, index, place, view.mirrored, view.tint))
    return tuple(views)


def _place(plan: Plan, image: int, resolution: int, seed: int, number: int, stream: str) -> tuple[int, int]:
    across, down = plan.cut(image, resolution).excess
    if not plan.subset_of(image).options.random_crop:
        return across // 2, down // 2
    return (
        int(fraction_for(seed, number, f"{stream}/left") * (across + 1)),
        int(fraction_for(seed, number, f"{stream}/top") * (down + 1)),
    )


def geometry_of(plan: Plan, view: View) -> Geometry:
    """How the image was cut, for the model's size condition; a mirrored image counts its crop from its own left."""
    item, cut = plan.images[view.image], plan.cut(view.image, view.resolution)
    left = cut.excess[0] - view.place[0] if view.mirrored else view.place[0]
    return Geometry((item.width, item.height), (left, view.place[1]), cut.bucket)


def facts_of(plan: Plan, view: View) -> dict[str, Any]:
    """Everything about a view that decides its pixels and mask, as plain JSON values."""
    item, cut, options = plan.images[view.image], plan.cut(view.image, view.resolution), plan.subset_of(view.image).options
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


def facts_of_control(plan: Plan, view: ControlView) -> dict[str, Any]:
    """The same about a control image; where it is cut as a target with the same pixels is, the facts are the same, too."""
    control, cut = plan.images[view.image].controls[view.index], plan.control_cut(view.image, view.resolution, view.index)
    assert control.identity, "the dataset is verified before anything is cached"
    return {
        "picture": control.identity,
        "bucket": list(cut.bucket),
        "resized": list(cut.resized),
        "crop": list(view.place),
        "mirrored": view.mirrored,
        "interpolation": plan.subset_of(view.image).options.resize_interpolation,
        "alpha": "white",
        "mask": "",
    }


def see(plan: Plan, seed: int, view: View) -> Seen:
    """Decodes, resizes and cuts. Raises TrainingError, naming the file, for an image that has become unreadable."""
    item, cut, options = plan.images[view.image], plan.cut(view.image, view.resolution), plan.subset_of(view.image).options
    rgb, alpha = _decoded(item.path, (item.width, item.height), masks.reads_alpha(options))
    try:
        mask = masks.mask_of(item, options, alpha)
    except BadImage as err:
        raise _gone_bad(item.path, err) from err
    pixels = _cut(rgb, cut, view, options.resize_interpolation, seed)
    if mask is not None:
        mask = masks.as_cut(mask, cut, view.place)
        mask = images.mirror(mask) if view.mirrored else mask
    return Seen(_scaled(pixels), None if mask is None else torch.from_numpy(np.array(mask, dtype=np.float32)).div_(255)[None])


def see_file(path: str, options: DatasetOptions) -> Tensor:
    """Pixels (3, H, W) in [-1, 1] of an image that is not of the data set, resized and cut, in its middle, as training does with its
    images. Raises BadImage for one that cannot be read."""
    rgb = images.decode(path).rgb
    cut = cut_for((rgb.shape[1], rgb.shape[0]), rules_of(options)[0])
    place = (cut.excess[0] // 2, cut.excess[1] // 2)
    return _scaled(images.crop(images.resize(rgb, cut.resized, options.resize_interpolation), place, cut.bucket))


def see_control(plan: Plan, seed: int, view: ControlView) -> Tensor:
    """Pixels (3, H, W) of a control image in [-1, 1]. Raises TrainingError, naming the file, for one that has become unreadable."""
    control, cut = plan.images[view.image].controls[view.index], plan.control_cut(view.image, view.resolution, view.index)
    rgb, _ = _decoded(control.path, (control.width, control.height), keep_alpha=False)
    return _scaled(_cut(rgb, cut, view, plan.subset_of(view.image).options.resize_interpolation, seed))


def _decoded(path: str, size: tuple[int, int], keep_alpha: bool) -> tuple[Pixels, Pixels | None]:
    """RGB (H, W, 3) and alpha of a file that had this size (width, height) when the run started."""
    try:
        decoded = images.decode(path, keep_alpha)
    except BadImage as err:
        raise _gone_bad(path, err) from err
    if decoded.rgb.shape[:2] != size[::-1]:
        raise TrainingError(f"{path} was changed while the run was going on; start again, so that it is scanned afresh")
    return decoded.rgb, decoded.alpha


def _gone_bad(path: str, err: BadImage) -> TrainingError:
    return TrainingError(f"{path} {err}. It could be read when the run started; put it back, or start again without it")


def _cut(rgb: Pixels, cut: Cut, view: Look, interpolation: Interpolation, seed: int) -> Pixels:
    pixels = images.crop(images.resize(rgb, cut.resized, interpolation), view.place, cut.bucket)
    if view.tint >= 0:
        pixels = images.tint(pixels, seed, view.tint)
    return images.mirror(pixels) if view.mirrored else pixels


def _scaled(pixels: Pixels) -> Tensor:
    # A copy: what Pillow hands out is read-only, which torch does not want to know.
    return torch.from_numpy(np.array(pixels.transpose(2, 0, 1), dtype=np.float32)).div_(127.5).sub_(1)


def mask_at(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """A mask (1, H, W) at latent size (h, w): each value is the mean of the area it stands for."""
    return interpolate(mask[None], size=size, mode="area")[0]
