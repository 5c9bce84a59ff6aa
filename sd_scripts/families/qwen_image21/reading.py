"""What Qwen3-VL makes of captions and of the images that they speak of, as Qwen-Image-2.1 reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sd_scripts.library.core.protocols import Parts

PAD = "<|image_pad|>"
"""Stands where an image is seen: once in a text that is given to states_before_norm, as often as it has tokens to the model."""


def states_before_norm(parts: Parts, name: str, ids: Sequence[int], images: Sequence[Tensor] = ()) -> Tensor:
    """States (L, D) of these tokens after the last layer of the language model, before its norm, in the encoder's precision.

    images: what is seen where PAD stands, (3, H, W) in [-1, 1] with sides of whole tokens, 32 pixels; their own states are left out.
    transformers 5 gives the normalised states in the place where version 4 has these. Runs with gradient when grad mode is on.
    """
    encoder = parts.text_encoders[name]
    device = parts.bring(encoder)
    language: Any = encoder.model.language_model
    found: list[Tensor] = []
    handle = language.norm.register_forward_pre_hook(lambda module, given: found.append(given[0]))
    try:
        if not images:
            language(input_ids=torch.tensor([list(ids)], device=device), use_cache=False)
            return found[0][0]
        tokens, seen = _seen(encoder, ids, images)
        encoder.model(input_ids=tokens.to(device), use_cache=False, **{key: value.to(device) for key, value in seen.items()})
        return found[0][0][tokens[0].to(device) != encoder.config.image_token_id]
    finally:
        handle.remove()


def _seen(encoder: Any, ids: Sequence[int], images: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens (1, L) with as many for each image as it has, and the images as the model takes them: in patches, those of a token together.

    Its own processor makes the same of images of 256 x 256 pixels and more, and enlarges smaller ones.
    """
    vision, pad = encoder.config.vision_config, encoder.config.image_token_id
    side, merged = vision.patch_size, vision.spatial_merge_size
    grids = [(1, image.shape[1] // side, image.shape[2] // side) for image in images]
    following = iter(grids)
    tokens: list[int] = []
    for token in ids:
        tokens += [token] if token != pad else [pad] * (math.prod(next(following)) // merged**2)
    patches = []
    for image, (_, rows, columns) in zip(images, grids, strict=True):
        squares = image.reshape(3, rows // merged, merged, side, columns // merged, merged, side).permute(1, 4, 2, 5, 0, 3, 6)
        films = squares[:, :, :, :, :, None].expand(-1, -1, -1, -1, -1, vision.temporal_patch_size, -1, -1)
        patches.append(films.reshape(rows * columns, -1))
    row = torch.tensor([tokens])
    return row, {
        "pixel_values": torch.cat(patches).to(next(encoder.model.visual.parameters()).dtype),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (row == pad).int(),
    }
