"""Photographs in several styles: as they are, in pencil, as halftone print, in pastel, by night.

Knows numpy and PIL only; never imports torch. The photographs lie in photographs/, with where they are from. Images of a style are crops
of them; one of the photographs is for tests alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

SIDE = 128
"""Sides of the images in pixels."""
TRAIN_IMAGES = 120
"""Images of each style to learn from."""
TEST_IMAGES = 6
"""Test images of each style, of the same crops."""
TRAINED, TESTED = ("astronaut", "coffee", "raccoon", "rocket"), "cat"
"""Names of the photographs whose crops are learned from, and of the one that no training image shows."""

FOLDER = Path(__file__).parent / "photographs"
_CROP = (0.45, 0.95)  # of the shorter side of a photograph
_PAPER = np.array([250.0, 247.0, 238.0])
_GRAPHITE = np.array([38.0, 38.0, 44.0])
_PRINT_PAPER, _PRINT_INK = np.array([252.0, 246.0, 228.0]), np.array([22.0, 30.0, 92.0])
_DOTS = 8  # pixels between the dots of a print, along its rows at 45 degrees
_LAMP = np.array([190.0, 150.0, 70.0])


def _brightness(pixels: np.ndarray) -> np.ndarray:
    # (h, w, 3) -> (h, w, 1), as ITU-R BT.601 weighs the colours.
    return (pixels @ np.array([0.299, 0.587, 0.114]))[..., None]


def _blurred(gray: np.ndarray, radius: float) -> np.ndarray:
    # (h, w, 1) of 0 to 255, blurred with this deviation in pixels.
    image = Image.fromarray(np.clip(gray[..., 0], 0, 255).astype(np.uint8))
    return np.asarray(image.filter(ImageFilter.GaussianBlur(radius)), dtype=np.float64)[..., None]


def _photo(image: Image.Image, _rng: np.random.Generator) -> np.ndarray:
    return np.asarray(image, dtype=np.float64)


def _pencil(image: Image.Image, _rng: np.random.Generator) -> np.ndarray:
    # Dark lines where a point is darker than what is around it, over a faint tone.
    gray = _brightness(np.asarray(image, dtype=np.float64))
    lines = np.clip(gray / np.maximum(_blurred(gray, 3), 1), 0, 1) ** 3
    light = 0.75 * lines + 0.25 * (0.24 + 0.76 * gray / 255)
    return _GRAPHITE + (_PAPER - _GRAPHITE) * light


def _halftone(image: Image.Image, _rng: np.random.Generator) -> np.ndarray:
    # Dots that grow with darkness, over a tint of the same ink.
    gray = np.clip((_brightness(np.asarray(image, dtype=np.float64)) - 12) / 225, 0, 1)
    y, x = np.mgrid[: image.height, : image.width][..., None] * (2 * np.pi / _DOTS)
    threshold = 0.5 - (np.cos(x + y) + np.cos(x - y)) / 4
    dots = 1 / (1 + np.exp(-9 * (1 - _blurred(255 * gray, 0.7) / 255 - threshold)))
    ink = 0.55 * dots + 0.45 * (1 - gray)
    return _PRINT_PAPER + (_PRINT_INK - _PRINT_PAPER) * ink


def _pastel(image: Image.Image, rng: np.random.Generator) -> np.ndarray:
    # Areas of few colours without small things in them, light, with the grain of the paper.
    small = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX).filter(ImageFilter.MedianFilter(3))
    areas = small.resize(image.size, Image.Resampling.BICUBIC).quantize(32, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    pixels = np.asarray(areas.convert("RGB").filter(ImageFilter.MedianFilter(3)), dtype=np.float64)
    gray = _brightness(pixels)
    return 105 + 0.58 * (gray + 1.3 * (pixels - gray)) + rng.normal(0, 4, gray.shape)


def _night(image: Image.Image, _rng: np.random.Generator) -> np.ndarray:
    # Dark and blue with little of the colours; what was very bright glows as a lamp.
    pixels = np.asarray(image, dtype=np.float64)
    gray = _brightness(pixels)
    moonlight = 0.55 * (np.array([8.0, 14.0, 42.0]) + gray / 255 * np.array([70.0, 85.0, 120.0]))
    return moonlight + 0.12 * pixels + _blurred((gray - 190) * 4, 2) / 255 * _LAMP


STYLES: dict[str, Callable[[Image.Image, np.random.Generator], np.ndarray]] = {
    "photo": _photo,
    "pencil": _pencil,
    "halftone": _halftone,
    "pastel": _pastel,
    "night": _night,
}
"""Name -> what a style makes of a photograph, as pixels (h, w, 3) of 0 to 255 and beyond."""


@cache
def photograph(name: str) -> Image.Image:
    """One of the photographs, 288 pixels on its shorter side."""
    with Image.open(FOLDER / f"{name}.jpg") as image:
        return image.convert("RGB")


def crop(name: str, rng: np.random.Generator, side: int = SIDE) -> Image.Image:
    """A square of a photograph, of a drawn place and size, half of them mirrored, as an RGB image of side x side pixels."""
    whole = photograph(name)
    length = int(min(whole.size) * rng.uniform(*_CROP))
    left, top = (int(rng.integers(room - length + 1)) for room in whole.size)
    image = whole.crop((left, top, left + length, top + length)).resize((side, side), Image.Resampling.LANCZOS)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image


def draw(image: Image.Image, style: str, rng: np.random.Generator) -> Image.Image:
    """The image in a style of STYLES; only the grain of pastel is drawn."""
    return Image.fromarray(np.clip(np.rint(STYLES[style](image, rng)), 0, 255).astype(np.uint8))
