"""What makes masks looks like from outside, and which one a name means."""

from __future__ import annotations

from typing import Protocol

from PIL import Image

from sd_scripts.dataset.images import Pixels
from sd_scripts.library.captioning.captioner import folder_of
from sd_scripts.schema.masking import MaskSection


class Segmenter(Protocol):
    """Separates the object in an image from its background."""

    about: str
    """Who it is, in words."""

    def mask(self, image: Image.Image) -> Pixels:
        """The mask (H, W) of an RGB image, 255 where the object is and 0 elsewhere. Raises OptionError where it can go on no more."""
        ...


def segmenter_of(options: MaskSection) -> Segmenter:
    """The model that the options name, loaded. Raises OptionError."""
    folder = folder_of("mask_model", options.mask_model)
    from .models import opened

    return opened(folder, options)
