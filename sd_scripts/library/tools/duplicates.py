"""Near duplicates by the cosine distance of what a model makes of images. What pixels tell of duplicates is in dataset/triage.py."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sd_scripts.dataset import images
from sd_scripts.dataset.progress import Bar
from sd_scripts.library.captioning.captioner import folder_of
from sd_scripts.library.core.devices import best_device
from sd_scripts.schema.duplicates import DuplicateSection
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import write_atomically

from .beside_images import SHOWN, named
from .faces import sights
from .rating import ImageViewer
from .report import Report

ENDING = ".vector"
"""Of the files in vector_dir: little-endian float32, a unit vector each."""
_BLOCK = 1024
Group = list[tuple[int, float]]
"""Places of images that are nearly the same, with their cosine distance from the first, which is the one to keep."""


def find(options: DuplicateSection) -> Report:
    """Names the near duplicates. Raises OptionError."""
    root = Path(options.image_dir).expanduser().absolute()
    listed = sights(options.image_dir, options.image_list, root)
    looker = Looker(options)
    names, vectors, sizes, bad = [], [], [], []
    with Bar(total=len(listed), unit="image", mininterval=0.5) as bar:
        for sight in listed:
            try:
                vector, num_pixels = looker.look(sight.path)
            except (images.BadImage, OSError) as err:
                bad.append(f"{sight.name} {err}")
            else:
                names.append(sight.name)
                vectors.append(vector)
                sizes.append(num_pixels)
            bar.update(1)
    order = sorted(range(len(names)), key=lambda place: (-sizes[place], names[place]))
    found = groups_of(np.stack([vectors[place] for place in order]), options.duplicate_distance) if order else []
    groups = [[{"file": names[order[place]], "distance": round(distance, 4)} for place, distance in group] for group in found]
    lines = [
        f"near duplicates: {len(groups)} groups, {sum(map(len, groups))} of {len(names)} images, up to a distance of "
        f"{options.duplicate_distance:g}"
    ]
    lines += [_line(group) for group in groups[:SHOWN]] + (["…"] if len(groups) > SHOWN else [])
    lines += [f"cannot be read: {named(bad)}"] if bad else []
    return Report(lines, {"groups": groups, "images": len(names), "model": looker.name, "unreadable": bad})


def _line(group: Sequence[dict[str, Any]]) -> str:
    first, *others = group
    return f"{first['file']}: " + ", ".join(f"{one['file']} ({one['distance']:.4f})" for one in others)


def groups_of(vectors: NDArray[np.float32], distance: float) -> list[Group]:
    """Groups of two and more among unit vectors (N, D), the better images first.

    Each of a group is as near to its first as distance, a cosine distance, so that no chain of small steps joins what is not alike; an
    image is in one group, that of the best image which is near.
    """
    free = np.ones(len(vectors), np.bool_)
    found = []
    for start in range(0, len(vectors), _BLOCK):
        away = 1 - vectors[start : start + _BLOCK] @ vectors[start:].T
        for row, distances in enumerate(away, start):
            if not free[row]:
                continue
            # Rounding makes a distance of equal images a little more or less than 0.
            near = np.flatnonzero(free[start:] & (distances <= distance + 1e-6)) + start
            others = near[near > row]
            if len(others):
                free[others] = False
                found.append([(row, 0.0), *((int(place), max(0.0, float(distances[place - start]))) for place in others)])
            free[row] = False
    return found


class Looker:
    """A model that looks at images, and remembers in a folder what it made of them."""

    def __init__(self, options: DuplicateSection) -> None:
        """Raises OptionError."""
        device = best_device(options.device)
        folder = folder_of("image_model", options.image_model)
        self.name = folder.name
        self._viewer = ImageViewer("image_model", str(folder), device)
        self._kept = Path(options.vector_dir).expanduser() if options.vector_dir is not None else None
        self._model = _digest(folder) if self._kept is not None else ""

    def look(self, path: Path) -> tuple[NDArray[np.float32], int]:
        """A unit vector (D,) of an image file, and how many pixels the image has. Raises BadImage, OSError and OptionError."""
        with images.opened(path) as image:
            num_pixels = image.width * image.height
        place = self._place(path)
        if place is not None:
            with suppress(OSError, ValueError):
                return np.frombuffer(place.read_bytes(), "<f4"), num_pixels
        vector: NDArray[np.float32] = self._viewer.of(Image.fromarray(images.decode(path).rgb)).numpy()
        if place is not None:
            try:
                write_atomically(place, vector.astype("<f4").tobytes())
            except OSError as err:
                # Not the image's fault, and the same for all that follow.
                raise OptionError(Problem("vector_dir", f"vector_dir: {place.parent} cannot be written: {err.strerror or err}")) from err
        return vector, num_pixels

    def _place(self, path: Path) -> Path | None:
        if self._kept is None:
            return None
        with path.open("rb") as file:
            image = hashlib.file_digest(file, "sha256").hexdigest()
        name = hashlib.sha256(f"{self._model} {image}".encode()).hexdigest()[:40]
        return self._kept / name[:2] / f"{name}{ENDING}"


def _digest(folder: Path) -> str:
    """Of a model: of its files' contents."""
    whole = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        with path.open("rb") as file:
            whole.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()
