"""What a data set is made of: images, the control images of edit pairs, and what is broken. Plain values, no files are opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .config import Subset
from .weights import Weights

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total); total is 0 while it is unknown."""


@dataclass(frozen=True, slots=True)
class ControlImage:
    """An image that shows a target before the edit. Sides are those of the upright image; identity is "" until verified."""

    path: str
    width: int
    height: int
    num_bytes: int
    mtime_ns: int
    identity: str = ""


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """One usable image file. Sides are in pixels after EXIF rotation; identity is the hash of its bytes, "" until verified."""

    path: str
    name: str
    """Path inside the subset's folder, with /: names the image in random draws, so that a moved folder trains the same."""
    subset: int
    width: int
    height: int
    caption: str
    """Raw content of the caption file, or the class tokens."""
    num_bytes: int
    mtime_ns: int
    mask: str = ""
    """Path of its mask image, or ""."""
    identity: str = ""
    mask_identity: str = ""
    controls: tuple[ControlImage, ...] = ()
    """What it is an edit of, first, second and third; empty for images that are not edits."""
    weights: Weights = ()
    """Its own weights in the loss, which win over those of its subset."""


@dataclass(frozen=True)
class UnusableImage:
    """A file that cannot be trained on, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} {self.reason}"


@dataclass(frozen=True)
class Dataset:
    """Everything a plan is made of."""

    subsets: tuple[Subset, ...]
    images: tuple[ImageInfo, ...]
    bad: tuple[UnusableImage, ...] = ()
    warnings: tuple[str, ...] = ()
