"""How images are drawn from a Qwen-Image model: noise levels, guidance, the loop.

Shapes: B images, h w latent sides, N = h/2 * w/2 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from diffusers import SchedulerMixin
from torch import Tensor

from sd_scripts.families.common.packing import packed, unpacked
from sd_scripts.library.core.protocols import OnStep

Predict = Callable[[Tensor, Tensor], Tensor]
"""From latents (B, 16, h, w) and times (B,) to velocities (B, 16, h, w)."""


def noise(seeds: Sequence[int], height: int, width: int) -> Tensor:
    """Noise (B, 16, height, width), float32, of each seed alone: the numbers that diffusers' pipelines draw for one image."""
    return torch.cat([torch.randn((1, 16, height, width), generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def guided(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Guidance of velocities (B, 16, h, w) with the length of each token's prediction kept (diffusers, pipeline_qwenimage.py).

    v = n + scale (p - n), then v |p| / |v| token by token.
    """
    p, n = packed(positive), packed(negative)
    v = n + scale * (p - n)
    smallest = torch.finfo(v.dtype).tiny
    v = v * (torch.norm(p, dim=-1, keepdim=True) / torch.norm(v, dim=-1, keepdim=True).clamp(min=smallest))
    return unpacked(v, positive.shape[-2], positive.shape[-1])


def draw(
    latents: Tensor, scheduler: SchedulerMixin, positive: Predict, negative: Predict | None, scale: float, on_step: OnStep | None
) -> Tensor:
    """Latents (B, 16, h, w) from noise, guided away from `negative` where it is given."""
    total = len(scheduler.timesteps)
    for step, clock in enumerate(scheduler.timesteps, start=1):
        t = clock.expand(len(latents)) / 1000
        velocity = positive(latents, t)
        if negative is not None:
            velocity = guided(velocity, negative(latents, t), scale)
        clean = latents - t.view(-1, 1, 1, 1) * velocity
        latents = scheduler.step(velocity, clock, latents, return_dict=False)[0]
        if on_step is not None:
            on_step(step, total, clean)
    assert math.prod(latents.shape) and latents.dtype == torch.float32, f"latents are {latents.dtype}"
    return latents
