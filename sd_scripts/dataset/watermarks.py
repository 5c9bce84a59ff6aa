"""Marks that lie at the same place over many images of a set: watermarks, logos, dates, found by the edges that these images share. No
model is asked, so a mark of one image alone, or one that moves, is not found.

The mean of the images' gradients shows what all of them have and nothing else (Dekel et al. 2017, "On the Effectiveness of Visible
Watermarks"). Here each gradient counts by its direction, so that a faint mark weighs as much as what lies under it. What was found in one
half of the images is asked of the other half, so that chance finds nothing; and an image has a mark where its edges fit much better at that
place than shifted to any other, so that subjects in the middle and skies above are none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .draws import numpy_for
from .images import Pixels

Field = NDArray[np.float32]
"""(2, H, W): across and down, directions of gradients of length 0 to 1."""

SIDE = 128
"""Of the square to which a whole image is brought."""
CORNER_SIDE = 64
CORNER_PIXELS = 256
"""Side of the piece of an image, in its own pixels, in which a mark of a fixed size is looked for at each corner."""
FEWEST = 12
"""With fewer images nothing is looked for: what few images share may be chance."""
MOST_LEARNT = 600
"""Images from which a mark is learnt; all are then asked for it."""
_FLOOR = 6.0
"""Gradients of fewer levels of 255 count as less than a direction: noise, and what JPEG leaves."""
_SEED, _CLEAR = 2.5, 3.0
"""Standard deviations by which the mean of directions stands out where a mark is: of all images, of which some have none, and of those that
fit."""
_SAME = 5.0
"""Standard deviations over all shifts by which edges fit a mark, for an image that has it."""
_FEWEST_PIXELS = 24
_FEWEST_ASKED = 3
_MOST_OF_FRAME = 0.4
_ROUNDS = 4
_JITTER = 1


@dataclass(frozen=True)
class Mark:
    """Edges that many images share. places: of those images. box: left, top, right and bottom of the mark as shares of the frame."""

    frame: str
    places: tuple[int, ...]
    box: tuple[float, float, float, float]


def frames_of(copy: Pixels, size: tuple[int, int]) -> dict[str, NDArray[np.int8]]:
    """The pieces of an image in which marks are looked for, as directions times 127, from a small copy (h, w, 3). size: width and height
    of the image itself."""
    picture = Image.fromarray(copy).convert("L")
    width, height = picture.size
    found = {"whole": _directions(picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC))}
    across, down = (min(side, CORNER_PIXELS * side / own) for side, own in zip((width, height), size, strict=True))
    for name, left, top in (("top left", 0, 0), ("top right", 1, 0), ("bottom left", 0, 1), ("bottom right", 1, 1)):
        box = (left * (width - across), top * (height - down), width if left else across, height if top else down)
        found[name] = _directions(picture.resize((CORNER_SIDE, CORNER_SIDE), Image.Resampling.BICUBIC, box=box))
    return found


def _directions(picture: Image.Image) -> NDArray[np.int8]:
    grey = np.asarray(picture, dtype=np.float32)
    field = np.zeros((2, *grey.shape), np.float32)
    field[0, :, 1:-1] = grey[:, 2:] - grey[:, :-2]
    field[1, 1:-1] = grey[2:] - grey[:-2]
    field /= np.maximum(np.hypot(field[0], field[1]), _FLOOR)
    rounded: NDArray[np.int8] = np.rint(127 * field).astype(np.int8)
    return rounded


def find(frames: Callable[[int], dict[str, NDArray[np.int8]]], sizes: Sequence[tuple[int, int]]) -> list[Mark]:
    """The marks of some images, most images first. frames(place) gives `frames_of` an image; sizes are those of the images."""
    if len(sizes) < FEWEST:
        return []
    order = numpy_for(0, 0, "watermarks").permutation(len(sizes))[:MOST_LEARNT]
    first = frames(int(order[0]))
    # Where all have one size, a corner is a part of the whole.
    names = ["whole"] if len(set(sizes)) == 1 else list(first)
    learnt = {name: np.empty((len(order), *first[name].shape), np.int8) for name in names}
    for row, place in enumerate(order):
        pieces = frames(int(place)) if row else first
        for name in names:
            learnt[name][row] = pieces[name]
    marks = {name: mark for name in names if (mark := _shared(learnt[name])) is not None}
    having: dict[str, list[int]] = {name: [] for name in marks}
    for place in range(len(sizes)) if marks else ():
        pieces = frames(place)
        for name, mark in marks.items():
            if _fits(pieces[name][None], mark)[0] > _SAME:
                having[name].append(place)
    return _apart([Mark(name, tuple(having[name]), _box_of(mark)) for name, mark in marks.items() if len(having[name]) >= FEWEST // 2])


def _shared(fields: NDArray[np.int8]) -> Field | None:
    """The edges that some images (N, 2, H, W) share, in both halves of them; None for none."""
    halves = fields[0::2], fields[1::2]
    first, second = (_learn(half) for half in halves)
    if first is None or second is None:
        return None
    # Each half is asked for what the other has taught.
    asked = [half[_fits(half, mark) > _SAME] for half, mark in zip(halves, (second, first), strict=True)]
    return None if min(map(len, asked)) < _FEWEST_ASKED else _clear(np.concatenate(asked))


def _learn(fields: NDArray[np.int8]) -> Field | None:
    """The edges that many of some images (N, 2, H, W) share; None where there are none."""
    chosen = np.ones(len(fields), np.bool_)
    mark = _clear(fields, _SEED)
    for _ in range(_ROUNDS):
        if mark is None:
            return None
        fits = _fits(fields, mark, own=chosen)
        now = fits > _SAME / 2
        if now.sum() < 3 or (now == chosen).all():
            break
        chosen = now
        mark = _clear(fields[chosen])
    return mark


def _clear(fields: NDArray[np.int8], least: float = _CLEAR) -> Field | None:
    """The mean direction where it stands out of what random ones would give, 0 elsewhere; None where that is nearly nowhere, or nearly
    everywhere, as in pictures of one scene."""
    # Summed up by whole numbers, exactly; as float32 all at once the fields of 600 images would take 79 MB, and their squares as much.
    mean = fields.sum(axis=0, dtype=np.int32) / (127 * len(fields))
    squares = sum(np.square(field, dtype=np.int32).sum(axis=0) for field in fields)
    spread = np.sqrt(squares) / (127 * len(fields)) + 1e-3
    length = np.hypot(mean[0], mean[1])
    # Halves of a set may have few images: below a third of a whole direction nothing is clear, however rare.
    stands = (length > least * spread) & (length > 0.33 * length.max())
    count = int(stands.sum())
    if count < _FEWEST_PIXELS or count > _MOST_OF_FRAME * stands.size:
        return None
    mark: Field = np.where(stands, mean, 0).astype(np.float32)
    return mark


def _fits(fields: NDArray[np.int8], mark: Field, own: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    """How much better each image (N, 2, H, W) fits a mark at its place than at all others, in standard deviations over all shifts.

    own: which images the mark is the mean of; their own part in it is left out.
    """
    count = 0 if own is None else int(own.sum())
    where = (mark != 0).any(axis=0)
    spectrum = np.conj(np.fft.rfft2(mark))
    result = np.empty(len(fields))
    for number, field in enumerate(fields):
        values = field.astype(np.float32) / 127
        asked = spectrum
        if own is not None and own[number] and count > 1:
            rest = (mark * count - values * where) / (count - 1)
            asked = np.conj(np.fft.rfft2(rest))
        shifted = np.fft.irfft2((np.fft.rfft2(values) * asked).sum(axis=0), s=mark.shape[1:])
        near = [shifted[down, across] for down in range(-_JITTER, _JITTER + 1) for across in range(-_JITTER, _JITTER + 1)]
        result[number] = (max(near) - shifted.mean()) / (shifted.std() + 1e-9)
    return result


def _box_of(mark: Field) -> tuple[float, float, float, float]:
    rows, columns = (np.flatnonzero((mark != 0).any(axis=(0, axis))) for axis in (2, 1))
    height, width = mark.shape[1:]
    return (columns[0] / width, rows[0] / height, (columns[-1] + 1) / width, (rows[-1] + 1) / height)


def _apart(marks: list[Mark]) -> list[Mark]:
    """Without those whose images are mostly those of a mark with more: a corner sees what the whole has seen."""
    kept: list[Mark] = []
    for mark in sorted(marks, key=lambda each: -len(each.places)):
        if not any(len(set(mark.places) & set(other.places)) > 0.8 * len(mark.places) for other in kept):
            kept.append(mark)
    return kept
