"""Which images of a pile are the same, nearly the same, blurred or framed, told from their pixels. Proposes, and changes nothing.

Two images are near duplicates when their perceptual hashes differ in few bits and their small grey copies correlate. The hash: signs of the
64 lowest frequencies of a cosine transform against their median (Zauner 2010, "Implementation and Benchmarking of Perceptual Image Hash
Functions"). Blur: how little of the neighbours' differences another blur takes away (Crete et al. 2007, "The blur effect").
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from . import images

Grey = NDArray[np.float32]
SIDE = 32
"""Of the small grey copy, which is not in the image's own shape."""
BLUR_SIDE = 512
"""Longest side of the copy whose sharpness is looked at; smaller images are looked at as they are."""
MOST_BITS = 14
"""Of 64 that may differ in the hashes of near duplicates."""
LEAST_CORRELATION = 0.97
MOST_SHAPE = 1.25
"""Factor by which the aspect ratios of near duplicates may differ."""
BLURRED = 0.62
"""From this blur on an image is called blurred."""
FRAMED = 0.02
"""From this share of a side on a border is one that training would learn."""
_EVEN = 10
"""Levels of 255 by which a border may differ from its mean; what is beside it differs by twice that."""
_LEAST_SPAN = 0.6
"""Of a line beside a border that what is no border reaches over, and half of that it fills."""
_BLOCK = 128
"""Images that are compared at once: of 10,000 that is 10 MB for each of the tables."""


@dataclass(frozen=True)
class Signs:
    """What an image is compared by. digest is that of the file; grey (SIDE, SIDE) in [0, 255]; blur in [0, 1]."""

    digest: str
    width: int
    height: int
    hash: int
    grey: NDArray[np.uint8]
    blur: float
    border: float
    """How wide a border of one colour is that lies along two opposite sides, as a share of the image; 0 without one."""


def signs_of(path: Path) -> Signs:
    """The signs of an image file. Raises BadImage."""
    pixels = images.decode(path).rgb
    grey = Image.fromarray(pixels).convert("L")
    # A copy: an array that looks into an image holds all of its memory, some 20 kB.
    small = np.array(grey.resize((SIDE, SIDE), Image.Resampling.BOX))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    grey.thumbnail((BLUR_SIDE, BLUR_SIDE), Image.Resampling.BOX)
    height, width = pixels.shape[:2]
    copy = np.asarray(grey, dtype=np.float32)
    return Signs(digest, width, height, hash_of(small), small, blur_of(copy), border_of(copy))


def hash_of(grey: NDArray[np.uint8]) -> int:
    """The perceptual hash (64 bits) of a grey image (SIDE, SIDE)."""
    matrix = cosines(SIDE)[:8]
    low = (matrix @ grey.astype(np.float64) @ matrix.T).ravel()
    # The first is the mean brightness, which says nothing about what is there.
    bits = low > np.median(low[1:])
    return int(np.packbits(bits).view(">u8")[0])


@cache
def cosines(size: int) -> NDArray[np.float64]:
    """The matrix of the orthonormal cosine transform (DCT-II) of so many values."""
    place, frequency = np.meshgrid(np.arange(size) + 0.5, np.arange(size))
    matrix: NDArray[np.float64] = np.cos(np.pi * place * frequency / size) * np.sqrt(2 / size)
    matrix[0] /= np.sqrt(2)
    return matrix


def blur_of(grey: Grey) -> float:
    """Blur of a grey image (H, W), 0 sharp to 1: the larger of both directions. 0 too for one that is even or too small to tell."""
    return max(_blur_along(grey), _blur_along(grey.T))


def _blur_along(grey: Grey) -> float:
    width = 11
    if grey.shape[0] < 2 * width:
        return 0.0  # too small to tell
    padded = np.pad(grey, ((width // 2, width // 2), (0, 0)), mode="edge")
    sums = np.cumsum(np.vstack([np.zeros((1, grey.shape[1]), np.float64), padded]), axis=0)
    smooth = (sums[width:] - sums[:-width]) / width
    sharp, again = np.abs(np.diff(grey, axis=0)), np.abs(np.diff(smooth, axis=0))
    whole = float(sharp.sum())
    return 1.0 - float(np.maximum(sharp - again, 0).sum()) / whole if whole > 0 else 0.0


def border_of(grey: Grey) -> float:
    """How wide the border of a grey image (H, W) is: along top and bottom, or left and right, each of one colour and with an end that is a
    straight line; the narrower of both, as a share of the side, the larger of both directions. An even background has no such end."""
    return max(min(_border_along(lines), _border_along(lines[::-1])) for lines in (grey, grey.T))


def _border_along(lines: Grey) -> float:
    even = (np.abs(lines - lines[0].mean()) <= _EVEN).all(axis=1)
    count = len(lines) if even.all() else int(np.argmin(even))
    if count == 0:
        return 0.0
    # Compression draws the border's end over a block of 8 lines. A thing on an even ground begins narrower.
    other = np.abs(lines[count + 1 : count + 10] - lines[0].mean()) > 2 * _EVEN
    spans = [np.ptp(np.flatnonzero(line)) / len(line) if line.any() else 0.0 for line in other]
    ends = any(span >= _LEAST_SPAN and line.mean() >= _LEAST_SPAN / 2 for span, line in zip(spans, other, strict=True))
    return count / len(lines) if ends else 0.0


def groups_of(signs: Sequence[Signs]) -> tuple[list[list[int]], list[list[int]]]:
    """Groups of images that are the same file, and groups that are nearly the same image; places in `signs`, the best image first.

    The best is the one with most pixels, then the sharpest, then the first. An image is in one group of each kind at most.
    """
    same: dict[str, list[int]] = {}
    for place, one in enumerate(signs):
        same.setdefault(one.digest, []).append(place)
    # Of equal files one is compared with the others.
    firsts = [places[0] for places in same.values()]
    leader = {place: place for place in firsts}

    def lead(place: int) -> int:
        while leader[place] != place:
            leader[place] = place = leader[leader[place]]
        return place

    for first, second in _near(signs, firsts):
        leader[lead(second)] = lead(first)
    near: dict[int, list[int]] = {}
    for place in firsts:
        near.setdefault(lead(place), []).append(place)

    def best_first(places: list[int]) -> list[int]:
        return sorted(places, key=lambda place: (-signs[place].width * signs[place].height, signs[place].blur, place))

    return [best_first(places) for places in same.values() if len(places) > 1], [
        best_first(places) for places in near.values() if len(places) > 1
    ]


def nearest(signs: Sequence[Signs], others: Sequence[Signs]) -> list[tuple[float, bool]]:
    """For each image the correlation of its small grey copy with the most alike of the others (one at least), and whether it is a near
    duplicate of one of them."""
    ours, theirs = _Compared.of(signs), _Compared.of(others)
    everything = np.arange(len(others))
    found = []
    for row in range(len(signs)):
        correlation = ours.correlations(row, theirs, everything)
        near = ours.may_be_near(slice(row, row + 1), theirs, slice(None))[0] & (correlation >= LEAST_CORRELATION)
        found.append((float(correlation.max()), bool(near.any())))
    return found


@dataclass(frozen=True)
class _Compared:
    """The signs of N images as arrays. greys (N, SIDE * SIDE); norms (N,) of their differences from their means, 1 for an even one."""

    hashes: NDArray[np.uint64]
    aspects: NDArray[np.float64]
    greys: NDArray[np.uint8]
    norms: Grey

    @classmethod
    def of(cls, signs: Sequence[Signs]) -> _Compared:
        greys = np.stack([one.grey.ravel() for one in signs])
        # Exact: 1024 squares of 255 fit into 64 bits, and into float64.
        squares = (
            np.array([np.square(grey, dtype=np.int64).sum() for grey in greys]) - greys.sum(axis=1, dtype=np.int64) ** 2 / greys.shape[1]
        )
        norms = np.where(squares == 0, 1, np.sqrt(squares)).astype(np.float32)
        hashes = np.array([one.hash for one in signs], dtype=np.uint64)
        return cls(hashes, np.array([one.width / one.height for one in signs]), greys, norms)

    def correlations(self, row: int, others: _Compared, columns: NDArray[np.intp]) -> Grey:
        """Of one grey copy with some others (K,); 0 with an even one."""
        own = self.greys[row].astype(np.float32)
        own = (own - own.mean()) / self.norms[row]
        # The own mean is 0, so that those of the others take nothing.
        parts = [others.greys[columns[start : start + _BLOCK]].astype(np.float32) @ own for start in range(0, len(columns), _BLOCK)]
        found: Grey = (np.concatenate([*parts, np.empty(0, np.float32)]) / others.norms[columns]).astype(np.float32)
        return found

    def may_be_near(self, part: slice, others: _Compared, theirs: slice) -> NDArray[np.bool_]:
        """Whether hashes and shapes of some images and some others differ little, one row for each of ours."""
        bits = np.bitwise_count(self.hashes[part, None] ^ others.hashes[None, theirs])
        ratio = self.aspects[part, None] / others.aspects[None, theirs]
        near: NDArray[np.bool_] = (bits <= MOST_BITS) & (ratio <= MOST_SHAPE) & (ratio * MOST_SHAPE >= 1)
        return near


def _near(signs: Sequence[Signs], places: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of near duplicates among some places."""
    if not places:
        return []
    all_of_them = _Compared.of([signs[place] for place in places])
    pairs = []
    for start in range(0, len(places), _BLOCK):
        near = all_of_them.may_be_near(slice(start, start + _BLOCK), all_of_them, slice(start, None))
        for row, asked in enumerate(near, start):
            columns = np.flatnonzero(asked[row - start + 1 :]) + row + 1
            correlation = all_of_them.correlations(row, all_of_them, columns)
            pairs += [(places[row], places[int(column)]) for column in columns[correlation >= LEAST_CORRELATION]]
    return pairs
