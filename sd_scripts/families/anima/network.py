"""Anima's transformer called for images: latents in, velocities out.

diffusers' own call is for films, and scales an empty mask of padding with torchvision, which nothing here needs; blocks, and what is around
them, are diffusers'. Shapes: B samples, C latent channels, h w latent sides, L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import CosmosTransformer3DModel
from torch import Tensor

from sd_scripts.families.common.blocks import through_blocks


class AnimaTransformer(CosmosTransformer3DModel):
    """See the module."""

    _repeated_blocks: ClassVar[list[str]] = ["CosmosTransformerBlock"]
    # What was to be kept in float32 is a table of positions that this model does not have.
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None

    def forward(self, latents: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """The prediction (B, C, h, w) for latents (B, C, h, w) with texts (B, L, D) at times (B,) in [0, 1]."""
        film = latents[:, :, None]
        if self.config.concat_padding_mask:
            film = torch.cat([film, torch.zeros_like(film[:, :1])], dim=1)
        rotations, tokens = self.rope(film), self.patch_embed(film).flatten(1, 3)
        modulation, embedded = self.time_embed(tokens, timestep)
        tokens = through_blocks(self, tokens, text, embedded, modulation, rotations)
        squares = self.proj_out(self.norm_out(tokens, embedded, modulation))
        (height, width), side = latents.shape[-2:], self.config.patch_size[1]
        # Numbers of a square stand the other way round than those that are read: channels last.
        squares = squares.unflatten(2, (side, side, -1)).unflatten(1, (height // side, width // side))
        prediction: Tensor = squares.permute(0, 5, 1, 3, 2, 4).reshape(len(latents), -1, height, width)
        return prediction


def made(config: Mapping[str, Any]) -> AnimaTransformer:
    """The network of this configuration. Raises ValueError for others of its class, which are for films."""
    network: AnimaTransformer = AnimaTransformer.from_config(dict(config))
    own = network.config
    if own.extra_pos_embed_type or own.img_context_dim_in or own.use_crossattn_projection or tuple(own.patch_size) != (1, 2, 2):
        raise ValueError("it is another model of the Cosmos family, for films")
    # How far positions are counted: diffusers stops at 2048 pixels with a mismatch of shapes.
    network.rope.max_size = [1024] * 3
    return network
