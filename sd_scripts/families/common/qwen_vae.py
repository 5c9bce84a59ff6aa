"""Qwen-Image's VAE, as several families load it and call it, and a small one. It is one for films: an image is a film of one frame.

Its files have diffusers' names or those of Wan's, which it is made from. Shapes: B images, H W their sides in pixels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLQwenImage
from torch import Tensor

from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.common import Companion, PartSpec
from sd_scripts.library.loading.layouts import Stored

from .images import pixels_of, posterior_mean
from .qwen_vae_signs import VAE
from .scheduled import ScheduledFamily

_RESIDUAL = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6", "conv_shortcut": "shortcut"}
_VAE_ENDS = {
    "encoder.conv_in": "encoder.conv1",
    "encoder.norm_out": "encoder.head.0",
    "encoder.conv_out": "encoder.head.2",
    "decoder.conv_in": "decoder.conv1",
    "decoder.norm_out": "decoder.head.0",
    "decoder.conv_out": "decoder.head.2",
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
}


def _layout(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """Wan's names: blocks of a level and what changes its size are numbered through."""
    # A level of the decoder has one residual block more than one of the encoder, and then what enlarges it.
    blocks = config["num_res_blocks"] + 1

    def stored(key: str) -> Stored:
        layer, _, kind = key.rpartition(".")
        if layer in _VAE_ENDS:
            return Stored(f"{_VAE_ENDS[layer]}.{kind}")
        if match := re.fullmatch(r"(encoder|decoder)\.mid_block\.resnets\.(\d)\.(\w+)", layer):
            return Stored(f"{match[1]}.middle.{2 * int(match[2])}.{_RESIDUAL[match[3]]}.{kind}")
        if match := re.fullmatch(r"(encoder|decoder)\.mid_block\.attentions\.0\.(\w+)", layer):
            return Stored(f"{match[1]}.middle.1.{match[2]}.{kind}")
        if match := re.fullmatch(r"encoder\.down_blocks\.(\d+)\.(.+)", layer):
            return Stored(f"encoder.downsamples.{match[1]}.{_RESIDUAL.get(match[2], match[2])}.{kind}")
        if match := re.fullmatch(r"decoder\.up_blocks\.(\d+)\.resnets\.(\d+)\.(\w+)", layer):
            return Stored(f"decoder.upsamples.{(blocks + 1) * int(match[1]) + int(match[2])}.{_RESIDUAL[match[3]]}.{kind}")
        if match := re.fullmatch(r"decoder\.up_blocks\.(\d+)\.upsamplers\.0\.(.+)", layer):
            return Stored(f"decoder.upsamples.{(blocks + 1) * int(match[1]) + blocks}.{match[2]}.{kind}")
        raise KeyError(f"{key} has no place in the original layout")

    return stored


QWEN_VAE_PART = PartSpec(
    "vae",
    "AutoencoderKLQwenImage",
    AutoencoderKLQwenImage.from_config,
    _layout,
    ("vae.", "first_stage_model."),
    (VAE,),
    companion=Companion("vae", "the VAE", "qwen_image_vae.safetensors"),
)


class QwenVaeFamily(ScheduledFamily):
    """What families do with it; see protocols.ModelFamily."""

    latent: ClassVar[tuple[int, int]] = (16, 8)

    @torch.no_grad()
    def encode_images(self, parts: Parts, pixels: Tensor) -> Tensor:
        """Scaled latents of RGB images: (B, 3, H, W) in [-1, 1] -> (B, 16, H/8, W/8) float32; the mean of the posterior.

        Raises ValueError for sides off the grid.
        """
        latents = posterior_mean(parts, pixels[:, :, None], self.grid)[:, :, 0]
        mean, std = statistics(parts, latents)
        return (latents - mean) / std

    @torch.no_grad()
    def decode(self, parts: Parts, latents: Tensor) -> Tensor:
        """Images of scaled latents: (B, 16, h, w) -> (B, 3, 8h, 8w) in [-1, 1], float32."""
        latents = latents.to(parts.bring(parts.vae)).float()
        mean, std = statistics(parts, latents)
        return pixels_of(parts, (latents / (1.0 / std) + mean)[:, :, None])[:, :, 0]


def statistics(parts: Parts, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of latents, (1, C, 1, 1), float32."""
    config: Any = parts.vae.config
    mean, std = (torch.tensor(row, device=like.device).view(1, -1, 1, 1) for row in (config.latents_mean, config.latents_std))
    return mean, std


def tiny_qwen_vae() -> AutoencoderKLQwenImage:
    """A VAE that shrinks sides to an eighth, to 16 channels of the real statistics."""
    return AutoencoderKLQwenImage(base_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1, temperal_downsample=[False, True, True])
