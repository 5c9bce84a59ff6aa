"""Masks of the data set that a page has open: where they lie, the weight in the loss that training makes of them, and what is drawn."""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sd_scripts.dataset import images, masks
from sd_scripts.dataset.caption_files import CaptionChange, Words
from sd_scripts.dataset.images import BadImage, Pixels
from sd_scripts.dataset.mask_files import MaskBook, png_of
from sd_scripts.dataset.records import ImageInfo
from sd_scripts.schema.errors import OptionError

if TYPE_CHECKING:
    from .room import Room

LONGEST_SIDE = 2048
"""Of a mask that is drawn on the page, in pixels; training brings it to the image's size."""
_TINT = (224, 36, 94)
_MOST_TINT = 170
"""Opacity, of 255, over what does not count at all."""


def place_of(room: Room, index: int) -> Path:
    """The file of an image's mask, there or not. Raises OptionError where training would read none, or none can be written."""
    if room.why_no_masks:
        raise OptionError(room.why_no_masks)
    image = room.view.plan.images[index]
    shared = bool(image.mask) and any(
        other.mask == image.mask and os.path.splitext(other.path)[0] != os.path.splitext(image.path)[0] for other in room.view.plan.images
    )
    # A mask that several images find by the end of their name is theirs; this one gets its own, which wins.
    return masks.place_of(replace(image, mask="") if shared else image, room.view.plan.subset_of(index)).absolute()


def book_of(room: Room, place: Path) -> MaskBook:
    """The book of a mask's file. Raises OptionError for one that lies in no folder of the form."""
    book = next((book for book in room.mask_books if place.is_relative_to(book.root)), None)
    if book is None:
        raise OptionError(f"The mask {place} lies outside of {' and '.join(str(book.root) for book in room.mask_books)}.")
    return book


def has_mask(room: Room, index: int) -> bool:
    """Whether there is a mask for an image as a file, read by training or not. Takes one look at the disk at most."""
    image, subset = room.view.plan.images[index], room.view.plan.subset_of(index)
    return bool(image.mask) if subset.options.masked_loss else masks.named(image, subset, image.mask).is_file()


def state_of(room: Room, index: int) -> dict[str, Any]:
    """What the page knows of an image's mask: version, file; or why there can be none."""
    try:
        place = place_of(room, index)
        words = book_of(room, place).read(place)
    except OptionError as err:
        return {"why": err.problems[0].message}
    return {"version": words.version, "file": place.name, "there": words.text is not None, "isRead": _is_read(room, index)}


def _is_read(room: Room, index: int) -> bool:
    return room.view.plan.subset_of(index).options.masked_loss


def drawn(room: Room, index: int) -> bytes | None:
    """The mask that the editor begins with, as a PNG of one channel: the file, or else the alpha channel, at most LONGEST_SIDE wide and
    high; None without either. Raises OptionError and BadImage."""
    place, image = place_of(room, index), room.view.plan.images[index]
    mask = images.decode_mask(place) if place.is_file() else images.decode(image.path, keep_alpha=True).alpha
    if mask is None:
        return None
    grey = Image.fromarray(mask)
    grey.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.BOX)
    return png_of(np.asarray(grey))


def write(room: Room, index: int, picture: str | None, version: str) -> dict[str, Any]:
    """Writes a mask (a PNG in base64; None takes it away) unless somebody else has since the version that the page knows.

    Raises OptionError.
    """
    place = place_of(room, index)
    book = book_of(room, place)
    try:
        after = None if picture is None else book.keep(png_of(_grey(picture)))
    except OSError as err:
        raise OptionError(f"{book.root} takes no more masks: {err.strerror or err}.") from err
    what = "mask drawn" if after is not None else "mask removed"
    done, _ = book.write(what, [CaptionChange(place, version, after)])
    if not done:
        return {"conflict": state_of(room, index)}
    return {"mask": state_of(room, index)}


def _grey(picture: str) -> Pixels:
    """A mask (H, W) from what the page has drawn. Raises OptionError."""
    try:
        with Image.open(io.BytesIO(base64.b64decode(picture, validate=True)), formats=["PNG"]) as image:
            if max(image.size) > LONGEST_SIDE:
                raise ValueError(image.size)
            return np.array(image.convert("L"))
    except (binascii.Error, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as err:
        raise OptionError("This is no mask of the page; reload it.") from err


def weights_of(room: Room, index: int) -> NDArray[np.float64]:
    """The weight in the loss of each pixel (H, W) of the bucket in which an image is trained, by the trainer's own code; the trainer then
    takes the mean of it over each latent. Random crops are taken in the middle. Raises OptionError and BadImage."""
    plan, image = room.view.plan, _as_now(room, index)
    options, cut = plan.subset_of(index).options, plan.cut(index, 0)
    alpha = images.decode(image.path, keep_alpha=True).alpha if masks.reads_alpha(options) else None
    mask = masks.mask_of(image, options, alpha)
    if mask is None:
        return np.ones(cut.bucket[::-1])
    seen = masks.as_cut(mask, cut, (cut.excess[0] // 2, cut.excess[1] // 2))
    weights = masks.with_outside(seen.astype(np.float64) / 255, options.masked_loss_outside_weight)
    return np.asarray(masks.normalised(weights) if options.normalize_masked_loss else weights)


def _as_now(room: Room, index: int) -> ImageInfo:
    """An image with the mask that a scan would find now."""
    image = room.view.plan.images[index]
    try:
        place = place_of(room, index)
    except OptionError:
        return image
    return replace(image, mask=str(place)) if place.is_file() else replace(image, mask="") if image.mask == str(place) else image


def cells_of(weights: NDArray[np.float64], side: int) -> NDArray[np.float64]:
    """The weight of each latent: the mean over the square of pixels that it stands for. Sides are multiples of the latent's."""
    height, width = weights.shape
    cells: NDArray[np.float64] = weights.reshape(height // side, side, width // side, side).mean(axis=(1, 3))
    return cells


def overlay(room: Room, index: int) -> dict[str, Any]:
    """The weight in the loss of each latent as a picture to lay over the crop, a pixel for each: tinted the more the less it counts. With
    its mean, lowest and highest, and how many pixels of the image a latent is wide.

    Raises OptionError.
    """
    side = room.options.model.latent_side
    try:
        weights = cells_of(weights_of(room, index), side)
    except (BadImage, OSError) as err:
        raise OptionError(f"{room.view.plan.images[index].path}: {err}") from err
    highest = float(weights.max())
    share = weights / highest if highest > 0 else weights
    picture = np.empty((*weights.shape, 4), np.uint8)
    picture[..., :3] = _TINT
    picture[..., 3] = np.rint(_MOST_TINT * (1 - share))
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "PNG")
    return {
        "picture": base64.b64encode(stream.getvalue()).decode(),
        "mean": float(weights.mean()),
        "lowest": float(weights.min()),
        "highest": highest,
        "side": side,
        "isRead": _is_read(room, index),
    }


def news(room: Room, offsets: Sequence[int]) -> tuple[dict[int, bool], list[int]]:
    """Whether there is a mask now for those images whose masks were written, by whomever, since the histories had so many bytes; and how
    many they have now. Raises OptionError."""
    sizes = [book.size() for book in room.mask_books]
    if sizes == list(offsets):
        return {}, sizes
    places = {index: _place(room, index) for index in range(len(room.paths))}
    found: dict[Path, Words] = {}
    now = []
    for book, offset in zip(room.mask_books, [*offsets, *[0] * len(sizes)], strict=False):
        words, size = book.news(offset, {place for place in places.values() if place is not None})
        found |= words
        now.append(size)
    return {index: found[place].text is not None for index, place in places.items() if place in found}, now


def _place(room: Room, index: int) -> Path | None:
    image, subset = room.view.plan.images[index], room.view.plan.subset_of(index)
    return None if subset.is_reg or subset.is_style else masks.named(image, subset, image.mask).absolute()


def files_beside(room: Room, indices: Sequence[int]) -> set[Path]:
    """Masks and control images of some images that no other image of the data set has: left behind they would be trained as images."""
    plan = room.view.plan
    chosen = set(indices)

    def of(some: Sequence[int]) -> set[Path]:
        own = {Path(control.path) for index in some for control in plan.images[index].controls}
        return own | {place for index in some if (place := _place(room, index)) is not None}

    return of(list(chosen)) - of([index for index in range(len(plan.images)) if index not in chosen])
