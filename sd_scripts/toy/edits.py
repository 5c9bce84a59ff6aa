"""The world of edits: images of one or two shapes, instructions, what they ask for, and whether an image obeys them.

Built on worlds.py; knows numpy and PIL only and never imports torch.

    Edit  --draw-->  source, target        Edit, source, result  --obeyed-->  bool
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from PIL import Image

from . import worlds
from .worlds import Scene

EditKind = Literal["recolour", "move", "remove", "keep", "border"]
"""keep: an instruction without a meaning, which leaves the image as it is; border: the new one, which no base obeys."""

KINDS: tuple[EditKind, ...] = ("recolour", "move", "remove", "keep", "border")

OLD_KINDS: tuple[EditKind, ...] = ("recolour", "move", "remove")
"""What the base is taught."""

OTHER_WORDS = (
    *("star", "cross", "ring", "heart", "diamond", "moon", "arrow", "tree", "flower", "house", "cloud", "sun", "dog", "cat"),
    *("border", "corner", "background", "sky", "zwx"),
)
"""Words that mean nothing to the base: it has met them in instructions that left the image as it was."""

TEMPLATES: dict[EditKind, tuple[str, ...]] = {
    "recolour": ("make {it} {color}", "turn {it} {color}", "paint {it} {color}", "change {it} to {color}"),
    "move": ("move {it} to the {place}", "put {it} at the {place}", "shift {it} to the {place}"),
    "remove": ("remove {it}", "take {it} away", "remove {it} from the picture"),
    "keep": (
        "add a {word}",
        "add a {word} around the picture",
        "put a {word} around it",
        "draw a {word}",
        "do nothing",
        "keep it as it is",
    ),
    "border": ("add a border", "add a border around the picture", "put a border around it", "draw a border"),
}
"""Instructions of each kind; {it} is "the circle", "the red circle" or, where there is only one shape, "it"."""

COLORS = worlds.KNOWN_COLORS
"""Colours of this world: the base knows no teal."""

FRAME_COLOR = (25, 25, 30)
FRAME_FRACTION = 1 / 16
"""Width of the border as a fraction of the short side: 4 pixels of 64, 3 of 48."""

_COLUMNS = {"left": 0.27, "": 0.5, "right": 0.73}
_ROWS = {"top": 0.27, "": 0.5, "bottom": 0.73}
PLACES: dict[str, tuple[float, float]] = {
    " ".join(word for word in (row, column) if word) or "center": (x, y)
    for (row, y), (column, x) in itertools.product(_ROWS.items(), _COLUMNS.items())
}
"""Name -> (x, y) of a centre as fractions of the sides: further out than in worlds.py, so that two shapes fit."""
_POSITION_JITTER = 0.015
_RADII = {1: (0.19, 0.22), 2: (0.15, 0.175)}  # of the short side, by the number of shapes
_TILT_DEGREES = 7.0
_TINT_JITTER = 10.0


@dataclass(frozen=True)
class Edit:
    """An instruction and what it does: target has for each thing of the source what becomes of it, None if it goes away."""

    kind: EditKind
    instruction: str
    source: tuple[Scene, ...]
    target: tuple[Scene | None, ...]

    def things(self) -> set[Scene]:
        """All that is to be seen before or after."""
        return {*self.source, *(thing for thing in self.target if thing is not None)}

    def is_held_out(self) -> bool:
        """Whether it shows what no base was ever shown."""
        return not worlds.HELD_OUT.isdisjoint(self.things())


def edit_of(kind: EditKind, rng: np.random.Generator, held_out: bool = False) -> Edit:
    """An edit of this kind, drawn from rng: held out, or of the combinations that bases are trained on.

    Images to recolour or to move in show one shape, those to remove one from show two of different kinds and colours, and half of the
    others show two.
    """
    while True:
        edit = _any_edit(kind, rng)
        if edit.is_held_out() == held_out:
            return edit


def keep_apart(rng: np.random.Generator, held_out: bool = False) -> Edit:
    """An instruction that leaves the image as it is and does not speak of borders: it has no meaning after borders are learned either."""
    while True:
        edit = edit_of("keep", rng, held_out)
        if "border" not in edit.instruction:
            return edit


def _any_edit(kind: EditKind, rng: np.random.Generator) -> Edit:
    num = 2 if kind == "remove" or (kind in ("keep", "border") and rng.random() < 0.5) else 1
    shapes = [worlds.BASE_SHAPES[index] for index in rng.permutation(len(worlds.BASE_SHAPES))[:num]]
    colors = [COLORS[index] for index in rng.permutation(len(COLORS))[:num]]
    source = tuple(Scene(*words) for words in zip(shapes, colors, _places(num, rng), strict=True))
    thing = source[0]
    become: Scene | None = thing
    if kind == "recolour":
        become = replace(thing, color=_pick(tuple(color for color in COLORS if color != thing.color), rng))
    elif kind == "move":
        free = [place for place in PLACES if place != thing.place and all(_apart(place, other.place) for other in source[1:])]
        become = replace(thing, place=_pick(tuple(free), rng))
    elif kind == "remove":
        become = None
    target = (become, *source[1:])
    if num == 2 and rng.random() < 0.5:
        source, target = source[::-1], target[::-1]
    edit = Edit(kind, "", source, target)
    return replace(edit, instruction=instruction(edit, rng))


def change(edit: Edit) -> tuple[Scene, Scene | None]:
    """What the edit speaks of, as it is and as it becomes."""
    changes = [(before, after) for before, after in zip(edit.source, edit.target, strict=True) if before != after]
    return changes[0] if changes else (edit.source[0], edit.source[0])


def instruction(edit: Edit, rng: np.random.Generator, named: bool = True) -> str:
    """The edit in words, by a template drawn from rng; a lone shape is "it" where it is not to be named."""
    before, after = change(edit)
    names = (f"the {before.shape}", f"the {before.color} {before.shape}", *(("it",) if len(edit.source) == 1 else ()))
    it = _pick(names if named else names[2:] or names, rng)
    words = after or before
    return _pick(TEMPLATES[edit.kind], rng).format(it=it, color=words.color, place=words.place, word=_pick(OTHER_WORDS, rng))


def _pick(options: tuple[str, ...], rng: np.random.Generator) -> str:
    return options[int(rng.integers(len(options)))]


def _places(num: int, rng: np.random.Generator) -> tuple[str, ...]:
    names = tuple(PLACES)
    while True:
        chosen = tuple(names[int(index)] for index in rng.integers(len(names), size=num))
        if all(_apart(one, other) for one, other in itertools.combinations(chosen, 2)):
            return chosen


def _apart(one: str, other: str) -> bool:
    # Two shapes must be on opposite sides, or they touch.
    return max(abs(a - b) for a, b in zip(PLACES[one], PLACES[other], strict=True)) > 0.4


def draw(edit: Edit, width: int, height: int, rng: np.random.Generator) -> tuple[Image.Image, Image.Image]:
    """Source and target. Whatever the edit does not change is the same in both to the pixel."""
    background = rng.uniform(238, 255) + rng.uniform(-4, 0, size=3)
    looks = [_look(rng, len(edit.source)) for _ in edit.source]
    source = _paint(edit.source, looks, background, width, height)
    target = _paint(edit.target, looks, background, width, height)
    return source, framed(target) if edit.kind == "border" else target


@dataclass(frozen=True)
class _Look:
    # How one thing differs from others of its words; it keeps this when it is moved or painted.
    offset: np.ndarray
    radius: float
    tilt: float
    tint: np.ndarray


def _look(rng: np.random.Generator, num_things: int) -> _Look:
    return _Look(
        rng.uniform(-_POSITION_JITTER, _POSITION_JITTER, size=2),
        rng.uniform(*_RADII[num_things]),
        rng.uniform(-_TILT_DEGREES, _TILT_DEGREES),
        rng.uniform(-_TINT_JITTER, _TINT_JITTER, size=3),
    )


def _paint(things: tuple[Scene | None, ...], looks: list[_Look], background: np.ndarray, width: int, height: int) -> Image.Image:
    canvas = np.broadcast_to(background, (height, width, 3))
    for thing, look in zip(things, looks, strict=True):
        if thing is not None:
            centre = (np.array(PLACES[thing.place]) + look.offset) * (width, height)
            corners = worlds.turned(worlds.outline(thing.shape), look.tilt) * look.radius * min(width, height) + centre
            mask = worlds.coverage(corners, width, height)[..., None]
            canvas = canvas * (1 - mask) + np.clip(np.array(worlds.COLORS[thing.color]) + look.tint, 0, 255) * mask
    return Image.fromarray(np.rint(canvas).astype(np.uint8))


def frame_pixels(width: int, height: int) -> int:
    """Width of the border of an image of this size."""
    return max(2, round(min(width, height) * FRAME_FRACTION))


def framed(image: Image.Image, color: tuple[int, int, int] = FRAME_COLOR, num_pixels: int | None = None) -> Image.Image:
    """The image with a border painted over its edge; num_pixels of None is the width that the instruction means."""
    pixels = np.array(image.convert("RGB"))
    ring = _ring(image.width, image.height, frame_pixels(image.width, image.height) if num_pixels is None else num_pixels)
    pixels[ring] = color
    return Image.fromarray(pixels)


def _ring(width: int, height: int, num_pixels: int) -> np.ndarray:
    ring = np.ones((height, width), dtype=bool)
    ring[num_pixels : height - num_pixels, num_pixels : width - num_pixels] = False
    return ring


# Measuring: what the instruction asks for is there, and all else is as it was.

_MAX_FRAME_DISTANCE = 90.0  # mean RGB distance from the border's colour, on each side
_MIN_FRAME_CONTRAST = 100.0  # RGB distance between the border and what is next to it
_MAX_KEPT_DIFFERENCE = 10.0  # of 255: mean over channels and over all that was not to change
_REACH = 1.45  # radii around the centre of a shape within which its pixels are


def has_border(image: Image.Image) -> bool:
    """Whether all four sides have a dark border that is lighter inside."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    num = frame_pixels(image.width, image.height)
    outer = max(1, num - 1)
    sides = (pixels[:outer], pixels[-outer:], pixels[:, :outer], pixels[:, -outer:])
    inner = np.median(pixels[_ring(image.width, image.height, num + 2) & ~_ring(image.width, image.height, num + 1)], axis=0)
    dark = all(np.linalg.norm(side - FRAME_COLOR, axis=2).mean() <= _MAX_FRAME_DISTANCE for side in sides)
    return dark and bool(np.linalg.norm(inner - FRAME_COLOR) >= _MIN_FRAME_CONTRAST)


def obeyed(edit: Edit, source: Image.Image, result: Image.Image) -> bool:
    """Whether the result (of the source's size) shows what the edit asks for and has all else as it was in the source.

    Every shape must be read as the target has it, and pixels away from what changes must be the source's, nearly.
    """
    if has_border(result) != (edit.kind == "border"):
        return False
    wanted = [thing for thing in edit.target if thing is not None]
    readings = worlds.read_all(_without_border(result, source) if edit.kind == "border" else result)
    if len(readings) != len(wanted) or not all(any(reading.shows(thing) for reading in readings) for thing in wanted):
        return False
    return kept_difference(edit, source, result) <= _MAX_KEPT_DIFFERENCE


def kept_difference(edit: Edit, source: Image.Image, result: Image.Image) -> float:
    """How far pixels of the result that the edit does not change are from the source's: mean over them and over channels, 0 to 255."""
    kept = ~_changed(edit, *source.size)
    before, after = (np.asarray(image.convert("RGB"), dtype=np.float32) for image in (source, result))
    return float(np.abs(before - after)[kept].mean())


def _without_border(image: Image.Image, source: Image.Image) -> Image.Image:
    # The source's own ground where the border is: shapes do not reach it but for a corner.
    pixels = np.array(image.convert("RGB"))
    ring = _ring(image.width, image.height, frame_pixels(image.width, image.height) + 1)
    pixels[ring] = np.median(np.asarray(source.convert("RGB"))[0], axis=0)
    return Image.fromarray(pixels)


def _changed(edit: Edit, width: int, height: int) -> np.ndarray:
    # Mask (height, width) of what the edit may change.
    ys, xs = np.mgrid[0.5:height, 0.5:width]
    mask = np.zeros((height, width), dtype=bool)
    for before, after in zip(edit.source, edit.target, strict=True):
        if before != after:
            for thing in filter(None, (before, after)):
                x, y = np.array(PLACES[thing.place]) * (width, height)
                mask |= np.hypot(xs - x, ys - y) <= _REACH * _RADII[len(edit.source)][1] * min(width, height)
    return mask | _ring(width, height, frame_pixels(width, height) + 1) if edit.kind == "border" else mask
