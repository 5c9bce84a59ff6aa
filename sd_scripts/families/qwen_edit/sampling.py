"""How pictures are drawn from a Qwen-Image model: noise levels, guidance, the loop.

Shapes: B pictures, h w latent sides, N = h/2 * w/2 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import SchedulerMixin
from torch import Tensor

from sd_scripts.families.common.packing import packed, unpacked
from sd_scripts.families.common.samplers import scheduler_for
from sd_scripts.library.core.protocols import OnStep

Predict = Callable[[Tensor, Tensor], Tensor]
"""From latents (B, 16, h, w) and times (B,) to velocities (B, 16, h, w)."""


def noise(seeds: Sequence[int], height: int, width: int) -> Tensor:
    """Noise (B, 16, height, width), float32, of each seed alone: the numbers that diffusers' pipelines draw for one picture."""
    return torch.cat([torch.randn((1, 16, height, width), generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def schedule(sampler: str, config: Mapping[str, Any], steps: int, num_tokens: int, device: torch.device) -> SchedulerMixin:
    """A scheduler set to this many steps for pictures of N tokens: shifted by size, and stretched to end at shift_terminal.

    The shift is e^mu with mu linear in the tokens (Esser et al. 2024, section 5.3.2; figures of the scheduler's configuration). A
    schedule of one step is the one from noise to picture: stretching it would divide by zero.
    """
    scheduler = scheduler_for(sampler, {**config, "shift_terminal": None} if steps == 1 else config)
    own = scheduler.config
    base, longest = own.get("base_image_seq_len", 256), own.get("max_image_seq_len", 4096)
    slope = (own.get("max_shift", 1.15) - own.get("base_shift", 0.5)) / (longest - base)
    mu = num_tokens * slope + (own.get("base_shift", 0.5) - slope * base)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=device, mu=mu)
    scheduler.set_begin_index(0)
    return scheduler


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
        latents = scheduler.step(velocity, clock, latents, return_dict=False)[0]
        if on_step is not None:
            on_step(step, total, latents)
    assert math.prod(latents.shape) and latents.dtype == torch.float32, f"latents are {latents.dtype}"
    return latents
