"""The toy world in several styles: the same shapes as coloured areas, as outlines, or by night.

Knows numpy and PIL only; never imports torch. What an image shows is drawn first and from the same numbers in every style, so one seed
gives the same scene in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from . import worlds
from .worlds import Scene

SIDE = 128
"""Sides of the images in pixels."""
TRAIN_IMAGES = 120
"""Images of each style to learn from."""

_SPREAD = 0.9  # of the places around the middle, so that large shapes stay whole
_POSITION_JITTER = 0.02
_RADIUS = (0.23, 0.28)
_TILT_DEGREES = 15.0
_STROKE = 0.05  # of the side; the toy VAE loses thinner lines
_INK = 40.0
_NIGHT = (25.0, 30.0, 60.0)
_NIGHT_GLOW = 20.0


@dataclass(frozen=True)
class _Shape:
    # Corners (N, 2) around the middle of the shape for a radius of 1, where it lies and how large it is in pixels, its and the paper's
    # colour, and what is left of the image's draws for the style.
    corners: np.ndarray
    middle: np.ndarray
    radius: float
    tint: np.ndarray
    paper: np.ndarray
    rng: np.random.Generator
    side: int

    def coverage(self, shrunk_by: float = 0.0) -> np.ndarray:
        # (side, side, 1) in [0, 1].
        mask = worlds.coverage(self.corners * (self.radius - shrunk_by) + self.middle, self.side, self.side)
        return mask[..., None]


def _flat(shape: _Shape) -> np.ndarray:
    return _painted(shape.paper, shape.tint, shape.coverage())


def _line(shape: _Shape) -> np.ndarray:
    stroke = shape.coverage() - shape.coverage(_STROKE * shape.side)
    return _painted(shape.paper, np.full(3, _INK), stroke)


def _night(shape: _Shape) -> np.ndarray:
    sky = np.array(_NIGHT) + shape.rng.uniform(-8, 8, size=3)
    return _painted(sky, np.clip(shape.tint + _NIGHT_GLOW, 0, 255), shape.coverage())


def _painted(ground: np.ndarray, color: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return ground * (1 - mask) + color * mask


STYLES: dict[str, Callable[[_Shape], np.ndarray]] = {"flat": _flat, "line": _line, "night": _night}
"""Name -> how a shape is painted: a coloured area, a dark outline, a bright area on dark blue."""


def draw(scene: Scene, style: str, rng: np.random.Generator, side: int = SIDE) -> Image.Image:
    """An RGB image of the scene in a style of STYLES; place, radius, tilt and colours vary a little with rng.

    Generators of one seed give the same shape at the same place in every style.
    """
    places = np.array(worlds.PLACES[scene.place])
    middle = 0.5 + _SPREAD * (places - 0.5) + rng.uniform(-_POSITION_JITTER, _POSITION_JITTER, size=2)
    radius = rng.uniform(*_RADIUS)
    corners = worlds.turned(worlds.outline(scene.shape), rng.uniform(-_TILT_DEGREES, _TILT_DEGREES))
    tint = np.clip(np.array(worlds.COLORS[scene.color]) + rng.uniform(-10, 10, size=3), 0, 255)
    paper = rng.uniform(238, 255) + rng.uniform(-4, 0, size=3)
    shape = _Shape(corners, middle * side, radius * side, tint, paper, rng, side)
    return Image.fromarray(np.rint(STYLES[style](shape)).astype(np.uint8))
