"""What writes captions looks like from outside, and which one a name means."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from PIL import Image

from sd_scripts.schema.captioning import KEY_VARIABLE, TOY, CaptionSection
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.model import is_hub_id

PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.onnx", "*.csv")
TAGGER = "model.onnx"
"""The file by which the folder of a tagger is known."""


class Captioner(Protocol):
    """Looks at images."""

    about: str
    """Who it is, in words."""

    def captions(self, images: Sequence[Image.Image]) -> list[str]:
        """What it says of each RGB image, as it says it; empty where it says nothing. Raises OptionError where it can go on no more."""
        ...


def captioner_of(options: CaptionSection) -> Captioner:
    """The one that the options name, loaded. Raises OptionError."""
    if options.endpoint is not None:
        from .endpoint import Endpoint

        return Endpoint(options, os.environ.get(KEY_VARIABLE, ""))
    if options.caption_model == TOY:
        from .toy_reader import ToyReader

        return ToyReader()
    folder = folder_of("caption_model", options.caption_model)
    if (folder / TAGGER).is_file():
        from .tagger import Tagger

        return Tagger(folder, options)
    from .vision_models import VisionModel

    return VisionModel(folder, options)


def folder_of(option: str, model: str) -> Path:
    """The folder of a model by its path or hub id, from which it is fetched where it is not here yet. Raises OptionError."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or not is_hub_id(model):
        raise OptionError(Problem(option, f"{option}: there is no folder {model}; give one with config.json, or a hub id (owner/name)"))
    from sd_scripts.runs.downloads import fetched

    return fetched(option, model, PATTERNS)
