"""The toy VAE of FLUX.2's kind: the common one with the statistics of squares of its latents."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from torch import Tensor
from torch.nn.functional import pixel_unshuffle

from . import autoencoder, worlds

# Shapes: B samples, C = 16 latent channels, h w latent sides.


@torch.no_grad()
def as_squares(vae: AutoencoderKL, seed: int) -> AutoencoderKLFlux2:
    """The same VAE as one of FLUX.2's kind, which knows mean and variance of squares of 2 x 2 latents of the world's images."""
    config = vae.config
    names = ("block_out_channels", "layers_per_block", "norm_num_groups", "sample_size", "latent_channels")
    new = AutoencoderKLFlux2(**{name: config[name] for name in names})
    new.load_state_dict(vae.state_dict() | {key: value for key, value in new.state_dict().items() if key.startswith("bn.")})
    squares = []
    for index, (width, height) in enumerate(worlds.LARGE_SIZES):
        images = [worlds.draw(worlds.TRAINED[n], width, height, worlds.rng_for(seed, index, n)) for n in range(40)]
        latents = new.encode(autoencoder.to_pixels(images)).latent_dist.mode()
        squares.append(pixel_unshuffle(latents, 2).transpose(0, 1).flatten(1))
    together = torch.cat(squares, dim=1)
    new.bn.running_mean.copy_(together.mean(dim=1))
    new.bn.running_var.copy_(together.var(dim=1))
    return new.eval().requires_grad_(False)


def squares(vae: AutoencoderKLFlux2, latents: Tensor) -> Tensor:
    """Latents (B, C, h, w) -> normalised squares of 2 x 2 of them, (B, 4C, h/2, w/2)."""
    mean, variance = (row.view(1, -1, 1, 1) for row in (vae.bn.running_mean, vae.bn.running_var))
    return (pixel_unshuffle(latents, 2) - mean) / (variance + vae.config.batch_norm_eps).sqrt()
