"""WD14 taggers: a network in ONNX and the list of its tags. The network takes squares of BGR values from 0 to 255, padded with white."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sd_scripts.schema.captioning import CaptionSection
from sd_scripts.schema.errors import OptionError, Problem

from .captioner import TAGGER

TAGS = "selected_tags.csv"
GENERAL, CHARACTER = "0", "4"
"""Categories of tags; ratings (9) are not written."""
_LONGEST_FACE = 3
"""Tags such as ^_^ or o_o are faces; their line is no space."""


@dataclass(frozen=True)
class _Tag:
    name: str
    category: str


class Tagger:
    """A tagger in a folder. Needs onnxruntime."""

    def __init__(self, folder: Path, options: CaptionSection) -> None:
        self.about = f"the tagger {folder.name}"
        self._tags = _tags_of(folder / TAGS, options)
        self._limits = {GENERAL: options.general_threshold, CHARACTER: options.character_threshold}
        self._undesired = {tag.strip().replace(" ", "_") for tag in options.undesired_tags}
        self._session = session_of("caption_model", folder / TAGGER, options.device)
        (given,) = self._session.get_inputs()
        self._input, self._side = given.name, given.shape[1]
        if not isinstance(self._side, int) or given.shape[-1] != 3:
            raise OptionError(Problem("caption_model", f"caption_model: {folder.name} takes {given.shape}, not images as WD14 taggers do"))

    def captions(self, images: Sequence[Image.Image]) -> list[str]:
        return [self._caption(image) for image in images]

    def _caption(self, image: Image.Image) -> str:
        (said,) = self._session.run(None, {self._input: squared(image, self._side)[None]})
        chances = np.asarray(said)[0]
        if len(chances) != len(self._tags):
            raise OptionError(
                Problem(
                    "caption_model",
                    f"caption_model: the network tells {len(chances)} tags, {TAGS} has {len(self._tags)}; both belong to one model",
                )
            )
        found = [
            (chance, tag)
            for chance, tag in zip(chances.tolist(), self._tags, strict=True)
            if tag.category in self._limits and chance >= self._limits[tag.category] and tag.name.replace(" ", "_") not in self._undesired
        ]
        # Characters first, then what is most certain.
        found.sort(key=lambda item: (item[1].category != CHARACTER, -item[0]))
        return ", ".join(tag.name for _, tag in found)


def squared(image: Image.Image, side: int) -> NDArray[np.float32]:
    """(side, side, 3) BGR values from 0 to 255: the whole image in the middle of white."""
    longer = max(image.size)
    ground = Image.new("RGB", (longer, longer), (255, 255, 255))
    ground.paste(image.convert("RGB"), ((longer - image.width) // 2, (longer - image.height) // 2))
    resized = ground.resize((side, side), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(resized, np.float32)[..., ::-1])


def _tags_of(file: Path, options: CaptionSection) -> list[_Tag]:
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        return [_Tag(_spelled(row["name"], options.remove_underscore), row["category"]) for row in rows]
    except (OSError, KeyError, csv.Error, UnicodeError) as err:
        raise OptionError(Problem("caption_model", f"caption_model: {file} is no list of tags ({type(err).__name__})")) from err


def _spelled(name: str, without_lines: bool) -> str:
    return name.replace("_", " ") if without_lines and len(name) > _LONGEST_FACE else name


def session_of(option: str, file: Path, device: str) -> Any:
    """A network in ONNX. Raises OptionError."""
    try:
        import onnxruntime
    except ImportError as err:
        raise OptionError(Problem(option, f"{option}: {file.name} needs onnxruntime; `pip install onnxruntime` gets it")) from err
    wanted = [] if device == "cpu" else ["CUDAExecutionProvider"]
    providers = [name for name in (*wanted, "CPUExecutionProvider") if name in onnxruntime.get_available_providers()]
    try:
        return onnxruntime.InferenceSession(str(file), providers=providers)
    except Exception as err:  # its errors have no common class
        raise OptionError(Problem(option, f"{option}: {file} cannot be loaded ({type(err).__name__})")) from err
