"""What Qwen3-VL makes of captions and of the images that they speak of, as Qwen-Image-2.1 reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from sd_scripts.families.common.reading import expanded
from sd_scripts.library.core.protocols import Parts

PAD = "<|image_pad|>"
"""Stands where an image is seen: once in a text that is given to states_before_norm, as often as it has tokens to the model."""


def states_before_norm(parts: Parts, name: str, ids: Sequence[int], images: Sequence[Tensor] = ()) -> Tensor:
    """States (L, D) of these tokens after the last layer of the language model, before its norm, in the encoder's precision.

    images: what is seen where PAD stands, (3, H, W) in [-1, 1] with sides of whole tokens, 32 pixels; their own states are left out.
    transformers 5 gives the normalised states in the place where version 4 has these. Runs with gradient when grad mode is on.
    """
    encoder = parts.text_encoders[name]
    device, language = parts.bring(encoder), encoder.model.language_model
    tokens, seen = _seen(encoder, ids, images) if images else (torch.tensor([list(ids)]), {})
    found: list[Tensor] = []
    handle = language.norm.register_forward_pre_hook(lambda module, given: found.append(given[0]))
    try:
        encoder.model(input_ids=tokens.to(device), use_cache=False, **{key: value.to(device) for key, value in seen.items()})
    finally:
        handle.remove()
    return found[0][0][tokens[0].to(device) != encoder.config.image_token_id]


def _seen(encoder: Any, ids: Sequence[int], images: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens (1, L) with as many for each image as it has, and the images as the model takes them, in the sizes that they have.

    Its own processor makes the same of images of 256 x 256 pixels and more, and enlarges smaller ones.
    """
    vision, pad = encoder.config.vision_config, encoder.config.image_token_id
    sizes = {"patch_size": vision.patch_size, "temporal_patch_size": vision.temporal_patch_size, "merge_size": vision.spatial_merge_size}
    processor = Qwen2VLImageProcessorPil(do_resize=False, do_rescale=False, do_normalize=False, do_convert_rgb=False, **sizes)
    seen = processor(images=[image.cpu() for image in images], return_tensors="pt")
    counts = [math.prod(grid) // vision.spatial_merge_size**2 for grid in seen["image_grid_thw"].tolist()]
    tokens = torch.tensor([expanded(ids, pad, counts)])
    pixels = seen["pixel_values"].to(next(encoder.model.visual.parameters()).dtype)
    return tokens, {"pixel_values": pixels, "image_grid_thw": seen["image_grid_thw"], "mm_token_type_ids": (tokens == pad).int()}
