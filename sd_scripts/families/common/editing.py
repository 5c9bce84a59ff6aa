"""What families that edit share: control images in conditions, conditions of previews with control images, and what follows from both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from PIL import Image
from torch import Tensor

from sd_scripts.library.core.protocols import Condition, EditingFamily, Parts, Preview, dtype_of
from sd_scripts.schema.errors import OptionError

from .transformer_options import control_area
from .transformers import TransformerFamily


def pixels_at(image: Image.Image, size: tuple[int, int]) -> Tensor:
    """An RGB image as the VAE gets it at this (width, height): (3, H, W) in [-1, 1]."""
    width, height = size
    pixels: Tensor = VaeImageProcessor().preprocess(image, height, width)
    return pixels[0]


class EditingTransformerFamily(TransformerFamily):
    """Families whose instructions are read without the control images, and that may have none; see protocols.EditingFamily."""

    reader: ClassVar[str] = "te1"
    """The text encoder that makes the rows."""

    def num_controls(self, parts: Parts) -> tuple[int, int]:
        """None, or as many as the model takes."""
        return 0, self.loader.options.own_controls.most

    def control_area(self, options: Any) -> int:
        """See EditingFamily."""
        return control_area(options)

    def control_size(self, parts: Parts, size: tuple[int, int]) -> tuple[int, int]:
        """(width, height) at which a control image of this size is given to the VAE: made smaller where it has more than the area."""
        scale = min(1.0, math.sqrt(parts.settings["control_area"] / (size[0] * size[1])))
        width, height = (max(self.grid, int(side * scale) // self.grid * self.grid) for side in size)
        return width, height

    def control_pixels(self, parts: Parts, image: Image.Image) -> Tensor:
        """A reference image as the VAE gets it, (3, H, W) in [-1, 1]: made smaller where it has more than the area, then cut."""
        width, height = self.control_size(parts, image.size)
        smaller = Flux2ImageProcessor._resize_if_exceeds_area(image.convert("RGB"), parts.settings["control_area"])
        pixels: Tensor = Flux2ImageProcessor().preprocess(smaller, height, width, resize_mode="crop")
        return pixels[0]

    def encode_instructions(self, parts: Parts, controls: Sequence[Tensor], captions: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """Nothing that instructions share, and the rows of each, which have not seen the control images; see EditingFamily."""
        return self.no_rows(parts), [condition["text"] for condition in self.encode_prompts(parts, captions)]

    def no_rows(self, parts: Parts) -> Tensor:
        """(0, D), as the text encoder makes them."""
        encoder, width = parts.text_encoders[self.reader], self.text_shape(parts, 0, 0).width
        return torch.zeros(0, width, device=parts.bring(encoder), dtype=dtype_of(encoder))

    def conditions_of(self, parts: Parts, requests: Sequence[Preview]) -> tuple[list[Condition], list[Condition] | None]:
        """See EditingFamily."""
        # Each of them has what the protocol asks for besides.
        family: Any = self
        return conditions_with_controls(family, parts, requests, self.loader.spec.label)


def conditions_with_controls(
    family: EditingFamily, parts: Parts, requests: Sequence[Preview], label: str
) -> tuple[list[Condition], list[Condition] | None]:
    """Conditions of the requests' prompts, and of their negative prompts where guidance is on: with cfg_scale above 1.

    Raises OptionError, naming the model by its label, for a number of control images that it does not take.
    """
    guided = requests[0].cfg_scale > 1
    fewest, most = family.num_controls(parts)
    for request in requests:
        _check_controls(len(request.controls), fewest, most, label)
    positive: list[Condition] = [{} for _ in requests]
    negative: list[Condition] = [{} for _ in requests]
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        alike.setdefault(tuple(id(control) for control in request.controls), []).append(index)
    for indices in alike.values():
        controls = [family.control_pixels(parts, control) for control in requests[indices[0]].controls]
        latents = {f"control_{i}": family.encode_images(parts, pixels[None])[0] for i, pixels in enumerate(controls)}
        prompts = [requests[index].prompt for index in indices]
        prompts += [requests[index].negative_prompt for index in indices] if guided else []
        prefix, suffixes = family.encode_instructions(parts, controls, prompts)
        texts = [{"text": torch.cat([prefix, suffix]), **latents} for suffix in suffixes]
        for place_in, index in enumerate(indices):
            positive[index] = texts[place_in]
            negative[index] = texts[len(indices) + place_in] if guided else {}
    return positive, negative if guided else None


def _check_controls(count: int, fewest: int, most: int, label: str) -> None:
    """Raises OptionError unless a model takes this many control images."""
    if fewest <= count <= most:
        return
    allowed = str(fewest) if fewest == most else f"{fewest} to {most}"
    raise OptionError(f"control images: {count} were given, but {label} takes {allowed}")
