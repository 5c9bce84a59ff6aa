"""Distances between prediction and target, element by element: (B, C, h, w) -> (B, C, h, w)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sd_scripts.library.core.diffusion import NoiseSchedulePath
from sd_scripts.library.core.protocols import Path
from sd_scripts.schema.objective import RegressionOptions

Distance = Callable[[Tensor, Tensor], Tensor]
"""(difference (B, C, h, w), times (B,)) -> distance of each element."""


def l2(difference: Tensor, t: Tensor) -> Tensor:
    """d^2."""
    return difference.square()


def l1(difference: Tensor, t: Tensor) -> Tensor:
    """|d|."""
    return difference.abs()


def charbonnier(difference: Tensor, t: Tensor) -> Tensor:
    """sqrt(d^2 + 1e-6) (Charbonnier et al. 1994, with an epsilon of 1e-3)."""
    return (difference.square() + 1e-6).sqrt()


def pseudo_huber(c_of: Callable[[Tensor], Tensor], scale_by_c: bool) -> Distance:
    """2 k (sqrt(d^2 + c^2) - c) with k = c (huber) or k = 1 (smooth_l1: l1 for large d); c_of gives c (B,) of times (B,)."""

    def distance(difference: Tensor, t: Tensor) -> Tensor:
        c = c_of(t).to(difference).view(-1, 1, 1, 1)
        # sqrt(d^2 + c^2) - c without cancellation for small d.
        root = difference.square() / (torch.sqrt(difference.square() + c**2) + c)
        return 2 * (c if scale_by_c else 1) * root

    return distance


def huber_threshold(options: RegressionOptions, path: Path) -> Callable[[Tensor], Tensor]:
    """c of times t (B,), by huber_schedule.

    exponential falls from huber_scale at the first of T steps (or t = 0) by c^(1/T) a step (c^t); snr is (1 - c)/(1 + sigma)^2 + c with
    sigma = s / a (Khrapov et al. 2024, arXiv 2403.16728).
    """
    c, scale = options.huber_c, options.huber_scale

    def exponential(t: Tensor) -> Tensor:
        passed = path.steps(t) / path.num_steps if isinstance(path, NoiseSchedulePath) else t
        return torch.exp(math.log(c) * passed) * scale

    def by_snr(t: Tensor) -> Tensor:
        a, s = path.coefficients(t)
        return (1 - c) * (a / (a + s)) ** 2 + c

    return {
        "constant": lambda t: torch.full_like(t, c * scale),
        "exponential": exponential,
        "snr": by_snr,
    }[options.huber_schedule]


def distance_of(options: RegressionOptions, path: Path) -> Distance:
    """The distance that loss_type names."""
    if options.loss_type in ("huber", "smooth_l1"):
        return pseudo_huber(huber_threshold(options, path), scale_by_c=options.loss_type == "huber")
    return {"l2": l2, "l1": l1, "charbonnier": charbonnier}[options.loss_type]
