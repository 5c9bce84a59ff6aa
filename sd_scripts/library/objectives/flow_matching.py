"""Flow matching on the straight path, at given noise levels, with further terms, a prior of the base model and their log.

x = sigma noise + (1 - sigma) x0 is what the network sees and v* = noise - x0 what it should answer. The loss of sample b is

    w_b lambda_b (d(v_b, v*_b) + sum over k of lambda_kb term_kb + curvature),

w_b the weight of its noise level and lambda_b its own; everything is a sum over samples, nothing a mean over a batch times another, so
that batches of 4, 2 processes with 2 and accumulation train the same.

Shapes: B samples, C latent channels, h w latent sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import Batch, Denoiser, Losses, Path
from sd_scripts.library.core.rng import rng_for

from . import noise as noises
from .distances import Distance
from .levels import LevelsOf
from .regression import chosen_rows
from .terms import Compared, Term

Interpretation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(network's output, x_t, times (B,)) -> the velocity that is compared with noise - x0, (B, C, h, w)."""


@dataclass(frozen=True)
class Guidance:
    """Trains p + (scale - 1)(p - n) in place of the prediction p, with n for the empty caption, in this share of samples."""

    scale: float
    ratio: float


@dataclass(frozen=True)
class Curvature:
    """weight times the squared second difference of the velocity, in every interval-th optimizer step from start on."""

    weight: float
    interval: int
    start: int

    def is_due(self, step: int) -> bool:
        """Whether a step has the term; held-out images (step -1) never have."""
        return step >= self.start and step % self.interval == 0


@dataclass(frozen=True)
class Drawn:
    """What is drawn for a batch, on its device. t, weights, gaps (B,); noise, jitter (B, C, h, w).

    seen: the noise in the input, which is that of the target unless the input is perturbed.
    """

    t: Tensor
    weights: Tensor
    gaps: Tensor
    noise: Tensor
    seen: Tensor
    jitter: Tensor | None


@dataclass(frozen=True)
class FlowMatching:
    """The objective of flow transformers: flow matching at times of a density, or AC-RF at the anchors of a sampler."""

    path: Path
    levels: LevelsOf
    noise: noises.NoiseOf
    distance: Distance
    interpret: Interpretation
    terms: Mapping[str, Term] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each term where a sample has none of its own; 0 leaves it out."""
    prior_weight: float = 0.0
    """Regularisation images: weight of the distance to the base model's velocity, in place of their pixels; 0 trains on their pixels."""
    curvature: Curvature | None = None
    guidance: Guidance | None = None
    latent_jitter: float = 0.0

    def draw(self, batch: Batch, seed: int) -> Drawn:
        """Levels and noise from seed and sample numbers only."""
        prior = self.has_prior(batch)
        device = batch.x0.device
        levels = self.levels(batch, seed, prior)
        t, weights, gaps = torch.stack([levels.t, levels.weights, levels.gaps]).to(device, non_blocking=True)
        streams = [noises.draws(seed, number) for number in batch.numbers.tolist()]
        seen, noise = noises.noises_of(self.noise, batch.x0, streams)
        jitter = None
        if self.latent_jitter:
            shape = batch.x0.shape[1:]
            fresh = torch.stack([torch.randn(shape, generator=draw("latent jitter")) for draw in streams])
            jitter = (self.latent_jitter * fresh * (~prior).view(-1, 1, 1, 1)).to(device, non_blocking=True)
        return Drawn(t, weights, gaps, noise, seen, jitter)

    def has_prior(self, batch: Batch) -> Tensor:
        """(B,) bool, on the CPU: samples that are held to the base model."""
        if not self.prior_weight or batch.regularisation is None:
            return torch.zeros(len(batch.names), dtype=torch.bool)
        return batch.regularisation.cpu()

    def __call__(self, model: Denoiser, batch: Batch, seed: int) -> Losses:
        """Loss of each sample (B,), times the weights of its level and its own.

        The log gets `unweighted`, the plain distance of the samples that are trained on pixels, and what each term adds to it before the
        weights of level and sample: under the term's name, `prior` and `curvature`.
        """
        drawn = self.draw(batch, seed)
        on_pixels = (~self.has_prior(batch)).to(batch.x0.device)
        x_t = self._at(batch, drawn, drawn.t)
        output = model(x_t, drawn.t).float()
        velocity = self.interpret(self._guided(model, output, x_t, drawn, batch, seed), x_t, drawn.t)
        wanted = drawn.noise - batch.x0.float()
        parts: dict[str, Tensor] = {}
        if self.prior_weight:
            wanted = self._with_base(model, wanted, x_t, drawn, batch)
        if self.curvature is not None:
            parts["curvature"] = self._curvature(model, output, drawn, batch) * on_pixels
        # Linear maps would be done in 16 bits otherwise.
        with torch.autocast(batch.x0.device.type, enabled=False):
            plain = self._plain(velocity - wanted, drawn.t, batch)
            if self.prior_weight:
                parts["prior"] = self.prior_weight * plain * ~on_pixels
                plain = plain * on_pixels
            for name, value in self._terms(velocity, wanted, drawn, batch).items():
                parts[name] = value * on_pixels
            loss = sum(parts.values(), plain) * drawn.weights * batch.weights
        return Losses(loss, {"unweighted": plain.detach(), **{name: value.detach() for name, value in parts.items()}})

    def _at(self, batch: Batch, drawn: Drawn, t: Tensor) -> Tensor:
        """The points of the samples' paths at times t (B,), (B, C, h, w)."""
        x_t = diffusion.add_noise(self.path, batch.x0, drawn.seen, t)
        return x_t if drawn.jitter is None else x_t + drawn.jitter

    def _plain(self, error: Tensor, t: Tensor, batch: Batch) -> Tensor:
        elements = self.distance(error, t)
        return (elements if batch.masks is None else elements * batch.masks).mean(dim=(1, 2, 3))

    def _guided(self, model: Denoiser, output: Tensor, x_t: Tensor, drawn: Drawn, batch: Batch, seed: int) -> Tensor:
        """The prediction with guidance, where it is trained; the gradient goes through both predictions."""
        if self.guidance is None:
            return output
        chances = torch.stack([torch.rand((), generator=rng_for(seed, number, "guidance")) for number in batch.numbers.tolist()])
        rows, count = chosen_rows((chances < self.guidance.ratio) & ~self.has_prior(batch), model)
        if not rows:
            return output
        without = model.only(rows).without_text(x_t[rows], drawn.t[rows]).float()
        strength = self.guidance.scale - 1 if count else 0.0
        return output.index_add(0, torch.tensor(rows, device=output.device), strength * (output[rows] - without))

    def _with_base(self, model: Denoiser, wanted: Tensor, x_t: Tensor, drawn: Drawn, batch: Batch) -> Tensor:
        """The targets, those of samples that are held to the base model replaced by its answers."""
        rows, count = chosen_rows(self.has_prior(batch), model)
        if not rows:
            return wanted
        answers = model.only(rows).base(x_t[rows], drawn.t[rows]).float()
        if not count:
            return wanted
        return wanted.index_copy(0, torch.tensor(rows, device=wanted.device), self.interpret(answers, x_t[rows], drawn.t[rows]))

    def _curvature(self, model: Denoiser, output: Tensor, drawn: Drawn, batch: Batch) -> Tensor:
        """weight * mean (v(t + d) - 2 v(t) + v(t - d))^2 on the sample's own straight path; the outer two without gradient.

        d is half the sampler's step, or less where t + d would be above 1 or t - d below 0: at pure noise there is no curvature.
        """
        assert self.curvature is not None
        if not self.curvature.is_due(batch.step):
            return torch.zeros_like(drawn.t)
        d = torch.minimum(drawn.gaps / 2, torch.minimum(1 - drawn.t, drawn.t))
        with torch.no_grad():
            above, below = (model(self._at(batch, drawn, t), t).float() for t in (drawn.t + d, drawn.t - d))
        elements = (above - 2 * output + below).square()
        elements = elements if batch.masks is None else elements * batch.masks
        return self.curvature.weight * elements.mean(dim=(1, 2, 3)) * (d > 0)

    def _terms(self, velocity: Tensor, wanted: Tensor, drawn: Drawn, batch: Batch) -> dict[str, Tensor]:
        """Weight times value of each term that the run, a data set or an image has, (B,) each."""
        weights = {name: batch.terms.get(name, torch.tensor(usual)) for name, usual in self.weights.items()}
        active = [name for name, usual in self.weights.items() if usual or name in batch.terms]
        if not active:
            return {}
        mask = batch.masks if batch.masks is not None else torch.ones_like(velocity[:, :1])
        seen = Compared(velocity, wanted, batch.x0.float(), drawn.t.view(-1, 1, 1, 1), mask)
        return {name: weights[name].to(velocity.device) * self.terms[name](seen) for name in active}
