"""The VAE of which squares of 2 x 2 latents, normalised by known statistics, are what a transformer sees, and a small one.

Shapes: B samples, h w sides in squares (a sixteenth of H W, the image's).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLFlux2
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.common import Companion
from sd_scripts.library.loading.layouts import Stored

from . import original_unet as original
from .images import pixels_of, posterior_mean
from .scheduled import ScheduledFamily
from .square_vae_signs import VAE
from .transformer_loading import AUTOENCODER


def _layout(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """As other VAEs; the convolutions around the latents stand in encoder and decoder, and the statistics of latents as they are."""
    usual, own = original.vae(config), {"quant_conv": "encoder.quant_conv", "post_quant_conv": "decoder.post_quant_conv", "bn": "bn"}

    def stored(key: str) -> Stored:
        start, _, rest = key.partition(".")
        return Stored(f"{own[start]}.{rest}") if start in own else usual(key)

    return stored


SQUARE_VAE = replace(
    AUTOENCODER,
    class_name="AutoencoderKLFlux2",
    make=AutoencoderKLFlux2.from_config,
    layout=_layout,
    kinds=(VAE,),
    companion=Companion("vae", "the VAE", "flux2-vae.safetensors"),
)


class SquareVaeFamily(ScheduledFamily):
    """What families do with it; see protocols.ModelFamily."""

    latent: ClassVar[tuple[int, int]] = (128, 16)

    @torch.no_grad()
    def encode_images(self, parts: Parts, pixels: Tensor) -> Tensor:
        """Normalised latents of RGB images: (B, 3, H, W) in [-1, 1] -> (B, 128, H/16, W/16) float32; the mean of the posterior."""
        latents = pixel_unshuffle(posterior_mean(parts, pixels, self.grid), 2)
        mean, deviation = _statistics(parts, latents)
        return (latents - mean) / deviation

    @torch.no_grad()
    def decode(self, parts: Parts, latents: Tensor) -> Tensor:
        """Images of normalised latents: (B, 128, h, w) -> (B, 3, 16h, 16w) in [-1, 1], float32."""
        mean, deviation = _statistics(parts, latents)
        return pixels_of(parts, pixel_shuffle(latents.float() * deviation + mean, 2))

    def latent_in(self, parts: Parts) -> tuple[int, int]:
        """Numbers of a square of 2 x 2 latents, and pixels along its side."""
        return 4 * parts.vae.config.latent_channels, 16


def _statistics(parts: Parts, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of squares of latents, (1, 128, 1, 1), float32."""
    known = parts.vae.bn
    mean, variance = (row.to(like.device, torch.float32).view(1, -1, 1, 1) for row in (known.running_mean, known.running_var))
    return mean, (variance + parts.vae.config.batch_norm_eps).sqrt()


def tiny_square_vae() -> AutoencoderKLFlux2:
    """Weights come from torch's generator as the caller has set it."""
    return AutoencoderKLFlux2(block_out_channels=(8, 8, 8, 16), layers_per_block=1, norm_num_groups=4, sample_size=64)
