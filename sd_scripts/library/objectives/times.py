"""Densities of training times, each as its quantile function, so that one uniform number makes one time.

Quantile functions are monotone, which makes cutting a density to [low, high) exact: the uniform number is drawn between the two
probabilities, the shape inside stays, nothing is drawn twice. Everything is float64 until the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sd_scripts.schema.objective import SizeShift


@dataclass(frozen=True)
class Density:
    """A density on [0, 1]: quantile maps probabilities to times, cdf times to probabilities; both elementwise, float64, increasing."""

    quantile: Callable[[Tensor], Tensor]
    cdf: Callable[[Tensor], Tensor]

    def within(self, low: float, high: float, u: Tensor) -> Tensor:
        """Times in [low, high] from uniform numbers u in [0, 1), any shape."""
        if (low, high) == (0.0, 1.0):
            return self.quantile(u)
        p_low, p_high = self.cdf(torch.tensor([low, high], dtype=torch.float64))
        # Where the density has no mass to speak of, both probabilities round to the same number and the ends decide.
        return self.quantile(p_low + u * (p_high - p_low)).clamp(low, high)


UNIFORM = Density(quantile=lambda u: u, cdf=lambda t: t)


def logit_normal(mean: float, std: float) -> Density:
    """t = sigmoid(mean + std N), N standard normal (Esser et al. 2024, arXiv 2403.03206, section 3.1)."""
    return Density(
        quantile=lambda u: torch.sigmoid(mean + std * torch.special.ndtri(u)),
        cdf=lambda t: torch.special.ndtr((torch.logit(t) - mean) / std),
    )


def shifted(density: Density, shift: float) -> Density:
    """Times of another density moved towards noise: t' = s t / (1 + (s - 1) t) (Esser et al. 2024, section 5.3.2)."""
    return Density(
        quantile=lambda u: _shift(density.quantile(u), shift),
        cdf=lambda t: density.cdf(_shift(t, 1 / shift)),
    )


def resolution_shift(sides: tuple[int, int], line: SizeShift) -> float:
    """The shift e^mu of a model that is sampled by the image's size, at latent sides (h, w): mu is linear in the tokens (Black Forest Labs,
    sampling.py, get_lin_function)."""
    tokens = (sides[0] // line.patch) * (sides[1] // line.patch)
    (few, low), (many, high) = line.fewest, line.most
    return math.exp(low + (high - low) * (tokens - few) / (many - few))


def mode(scale: float) -> Density:
    """Mode sampling with heavy tails (Esser et al. 2024, section 3.1, equation 20), scale from -1 to 1.75.

    Written for v = 1 - u, which is uniform as well, so that the quantile increases: f(v) = v - scale (sin^2(pi v / 2) - v).
    """

    def quantile(v: Tensor) -> Tensor:
        return v - scale * (torch.sin(math.pi * v / 2) ** 2 - v)

    def cdf(t: Tensor) -> Tensor:
        # No closed form: halving the interval 60 times is exact to float64.
        low, high = torch.zeros_like(t), torch.ones_like(t)
        for _ in range(60):
            middle = (low + high) / 2
            below = quantile(middle) < t
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    return Density(quantile, cdf)


def _shift(t: Tensor, s: float) -> Tensor:
    # 1 + (s - 1) t written so that rounding leaves 1 where it is; beyond it there is no probability.
    return s * t / (s * t + (1 - t))
