"""The noise of one sample, with the usual additions. Every draw comes from a generator of the sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from sd_scripts.library.core.rng import rng_for
from sd_scripts.schema.objective import ObjectiveOptions, RegressionOptions

Draw = Callable[[str], Generator]
"""Gives the sample's generator for a named stream."""
NoiseOf = Callable[[Tensor, Draw], tuple[Tensor, Tensor]]
"""One latent (C, h, w) -> its noise in the input and in the target, both on the CPU."""


def draws(seed: int, number: int) -> Draw:
    """The generators of one sample, by stream."""
    return lambda stream: rng_for(seed, number, stream)


def noises_of(noise: NoiseOf, x0: Tensor, streams: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """The noise of inputs and of targets of samples x0 (B, C, h, w), on their device; one tensor where both are the same."""
    pairs = [noise(sample, draw) for sample, draw in zip(x0, streams, strict=True)]
    wanted = torch.stack([target for _, target in pairs]).to(x0.device, non_blocking=True)
    if all(given is target for given, target in pairs):
        return wanted, wanted
    return torch.stack([given for given, _ in pairs]).to(x0.device, non_blocking=True), wanted


def plain(x0: Tensor, draw: Draw) -> Tensor:
    """Standard normal noise like one latent x0 (C, h, w), float32, on the CPU."""
    return torch.randn(x0.shape, generator=draw("noise"))


def offset(x0: Tensor, draw: Draw, options: ObjectiveOptions) -> Tensor:
    """What noise offset adds, (C, 1, 1): strength times one normal number a channel (Guttenberg 2023, "Diffusion with offset noise").

    The strength of a channel grows with adaptive_noise_scale times the absolute mean of the latent there, and is never negative.
    """
    rng = draw("noise offset")
    strength = options.noise_offset * (torch.rand((), generator=rng).item() if options.noise_offset_random_strength else 1.0)
    adaptive = options.adaptive_noise_scale * x0.mean(dim=(1, 2), keepdim=True).abs().cpu()
    return (strength + adaptive).clamp(min=0) * torch.randn((x0.shape[0], 1, 1), generator=rng)


def multires(noise: Tensor, draw: Draw, iterations: int, discount: float) -> Tensor:
    """Noise (C, h, w) with coarser and coarser noise added, scaled back to unit deviation (Whitaker 2023, "Multi-resolution noise").

    Level i is a normal image with sides divided by r^i, r drawn from [2, 4) a level, enlarged bilinearly, times discount^i; a level
    with a side of one latent pixel is the last. The deviation is taken over the sample (kohya takes it over the batch, which would
    make a sample depend on its neighbours).
    """
    channels, height, width = noise.shape
    rng = draw("multires noise")
    total = noise
    for i in range(iterations):
        r = 2 + 2 * torch.rand((), generator=rng).item()
        h, w = max(1, int(height / r**i)), max(1, int(width / r**i))
        level = torch.randn((1, channels, h, w), generator=rng)
        total = total + F.interpolate(level, (height, width), mode="bilinear", align_corners=False)[0] * discount**i
        if h == 1 or w == 1:
            break
    return total / total.std()


def perturbation(x0: Tensor, draw: Draw, options: RegressionOptions) -> Tensor:
    """What input perturbation adds to the noise of the input, not of the target (Ning et al. 2023, arXiv 2301.11706)."""
    rng = draw("input perturbation")
    strength = options.ip_noise_gamma * (torch.rand((), generator=rng).item() if options.ip_noise_gamma_random_strength else 1.0)
    return strength * torch.randn(x0.shape, generator=rng)
