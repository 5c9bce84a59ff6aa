"""The exact reader of the toy worlds: measures shape, colour and place from the pixels."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from sd_scripts.toy import worlds


class ToyReader:
    """Says "a red circle at the top left", and nothing of an image in which no shape is clear."""

    about = "the exact reader of the toy worlds"

    def captions(self, images: Sequence[Image.Image]) -> list[str]:
        return [_said(worlds.read(image)) for image in images]


def _said(reading: worlds.Reading) -> str:
    """In words, with all that is clear; empty without a shape."""
    if reading.shape is None:
        return ""
    place = f" at the {reading.place}" if reading.place else ""
    return f"a {reading.color + ' ' if reading.color else ''}{reading.shape}{place}"
