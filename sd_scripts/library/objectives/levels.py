"""At which noise levels flow matching trains: at times of a density, or at the steps of a few-step sampler.

Legend: sigma noise level, the time t of the straight path; N anchors sigma_i, falling from 1, with sigma_N = 0; s shift of the sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sd_scripts.library.core.protocols import Batch
from sd_scripts.library.core.rng import rng_for

from .regression import Times
from .weights import Weight


@dataclass(frozen=True)
class Levels:
    """Noise levels of a batch, each (B,), float32, on the CPU."""

    t: Tensor
    weights: Tensor
    """Weight of each sample's loss."""
    gaps: Tensor
    """Length of the sampler's step that the level belongs to; 0 without anchors."""


class LevelsOf(Protocol):
    """How noise levels are chosen; from seed, sample numbers and progress only."""

    def __call__(self, batch: Batch, seed: int, bound: Tensor) -> Levels:
        """bound (B,) bool: samples that must be trained at an anchor, where there are anchors."""
        ...


@dataclass(frozen=True)
class FromDensity:
    """Times of a density, one uniform number a sample."""

    times: Times
    weight: Weight

    def __call__(self, batch: Batch, seed: int, bound: Tensor) -> Levels:
        uniform = [torch.rand((), generator=rng_for(seed, number, "time"), dtype=torch.float64) for number in batch.numbers.tolist()]
        height, width = batch.x0.shape[-2:]
        t = self.times(torch.stack(uniform), (height, width))
        return Levels(t, self.weight(t), torch.zeros_like(t))


@dataclass(frozen=True)
class FromAnchors:
    """The sampler's own noise levels, dealt to the samples like cards: N samples in a row get all N anchors, in a new order each time.

    So every micro-batch, process and resumed run knows the anchor of a sample from its number alone, and because the order of each N is
    drawn anew, no pattern in the order of images (every second one a regularisation image, say) can meet the same anchors always.
    """

    sigmas: Tensor
    """(N,) float64."""
    weights: Tensor
    """(N,) float64, their mean 1."""
    jitter: float
    """Spread around an anchor, in [0, 1], as a share of the way to the middle between it and its neighbours."""
    shift: float
    """s of S_s(u) = s u / (1 + (s - 1) u), which makes the anchors of u = 1 - i/N, and free levels of any u in (0, 1]."""
    free_share: Callable[[float], float]
    """Progress of the run in [0, 1] -> share of samples at free levels."""

    def anchor_of(self, seed: int, number: int) -> int:
        """Index i of the anchor that the sample of this number gets."""
        block, place = divmod(number, len(self.sigmas))
        return int(torch.randperm(len(self.sigmas), generator=rng_for(seed, block, "anchors"))[place])

    def around(self, anchor: int, u: float) -> float:
        """A level near an anchor, from a uniform number u in [0, 1).

        Uniform from half the way to the next level below to half the way to the one above, both times jitter. The first, pure noise, has
        nothing above: half of its samples are exactly 1, the others uniform below.
        """
        sigma, below, above = self._neighbours(anchor)
        if anchor == 0:
            return sigma - self.jitter * (sigma - below) / 2 * max(0.0, 1 - 2 * u)
        low, high = sigma - self.jitter * (sigma - below) / 2, sigma + self.jitter * (above - sigma) / 2
        return low + u * (high - low) if self.jitter else sigma

    def free(self, u: float) -> tuple[float, int]:
        """A level between the anchors from a uniform number u in [0, 1), and the anchor at which the sampler's step over it begins."""
        v = 1 - u
        return self.shift * v / (1 + (self.shift - 1) * v), min(int(u * len(self.sigmas)), len(self.sigmas) - 1)

    def __call__(self, batch: Batch, seed: int, bound: Tensor) -> Levels:
        share = self.free_share(batch.progress)
        rows = []
        for number, is_bound in zip(batch.numbers.tolist(), bound.tolist(), strict=True):
            sigma, anchor = self._level(seed, number, 0.0 if is_bound else share)
            here, below, _ = self._neighbours(anchor)
            rows.append((sigma, float(self.weights[anchor]), here - below))
        t, weights, gaps = torch.tensor(rows, dtype=torch.float64).float().T
        return Levels(t, weights, gaps)

    def _level(self, seed: int, number: int, free_share: float) -> tuple[float, int]:
        if free_share > 0:
            chance, u = torch.rand(2, generator=rng_for(seed, number, "free stream"), dtype=torch.float64).tolist()
            if chance < free_share:
                return self.free(u)
        anchor = self.anchor_of(seed, number)
        u = torch.rand((), generator=rng_for(seed, number, "time"), dtype=torch.float64).item()
        return self.around(anchor, u), anchor

    def _neighbours(self, anchor: int) -> tuple[float, float, float]:
        """An anchor, the level below it and the one above (1 has itself)."""
        last = anchor + 1 == len(self.sigmas)
        below = 0.0 if last else float(self.sigmas[anchor + 1])
        return float(self.sigmas[anchor]), below, float(self.sigmas[max(anchor - 1, 0)])
