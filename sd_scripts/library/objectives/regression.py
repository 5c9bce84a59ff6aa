"""Regression of a U-Net's prediction on its target: noise prediction, v-prediction and flow matching are one class.

Shapes: B samples, C latent channels, h w latent sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import ESTIMATE, Batch, Denoiser, Kind, Losses, Path
from sd_scripts.library.core.rng import rng_for

from .distances import Distance
from .noise import NoiseOf, draws, noises_of
from .weights import Weight

Times = Callable[[Tensor, tuple[int, int]], Tensor]
"""Uniform numbers (B,) float64 and latent sides (h, w) -> times (B,) float32."""


@dataclass(frozen=True)
class Regression:
    """weight(t) * distance(prediction(x_t, t), target), averaged over the elements of each sample."""

    path: Path
    kind: Kind
    times: Times
    noise: NoiseOf
    distance: Distance
    weight: Weight
    self_conditioning_rate: float = 0.0
    """Chance that a sample is trained with the network's own estimate of x0, where it takes one (Chen et al. 2022, arXiv 2208.04202)."""

    def draw(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Times (B,) and the noise of input and target (B, C, h, w) on the batch's device; from seed and sample numbers only."""
        streams = [draws(seed, number) for number in batch.numbers.tolist()]
        uniform = torch.stack([torch.rand((), generator=draw("time"), dtype=torch.float64) for draw in streams])
        height, width = batch.x0.shape[-2:]
        return self.times(uniform, (height, width)).to(batch.x0.device), *noises_of(self.noise, batch.x0, streams)

    def __call__(self, model: Denoiser, batch: Batch, seed: int) -> Losses:
        """Loss of each sample (B,), times its weight and mask; the log gets the plain distance as `unweighted`."""
        t, noise_in, noise_target = self.draw(batch, seed)
        x_t = diffusion.add_noise(self.path, batch.x0, noise_in, t)
        if self.self_conditioning_rate and model.takes_estimate:
            model = self._with_estimates(model, batch, x_t, t, seed)
        difference = model(x_t, t).float() - diffusion.target(self.kind, self.path, batch.x0, noise_target, t)
        elements = self.distance(difference, t)
        if batch.masks is not None:
            elements = elements * batch.masks
        plain = elements.mean(dim=(1, 2, 3))
        return Losses(plain * self.weight(t) * batch.weights, {"unweighted": plain.detach()})

    def _with_estimates(self, model: Denoiser, batch: Batch, x_t: Tensor, t: Tensor, seed: int) -> Denoiser:
        """The model that is told its own estimates of the chosen samples, made without gradient; zeros, which are none, for the others."""
        chances = torch.stack([torch.rand((), generator=rng_for(seed, number, "self conditioning")) for number in batch.numbers.tolist()])
        rows, count = chosen_rows(chances < self.self_conditioning_rate, model)
        estimates = torch.zeros_like(x_t)
        if rows:
            with torch.no_grad():
                prediction = model.only(rows)(x_t[rows], t[rows])
            if count:
                estimates[rows] = diffusion.to_x0(self.kind, self.path, x_t[rows], prediction, t[rows])
        return model.told([{ESTIMATE: estimate} for estimate in estimates])


def chosen_rows(chosen: Tensor, model: Denoiser) -> tuple[list[int], int]:
    """The rows where chosen (B,) is True, and how many these are.

    Where all processes must call the network together, one row is named even when none is chosen.
    """
    rows = [index for index, is_chosen in enumerate(chosen.tolist()) if is_chosen]
    return (rows or [0], len(rows)) if model.in_step else (rows, len(rows))
