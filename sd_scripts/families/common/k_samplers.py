"""Samplers of k-diffusion, as ComfyUI has them, with any family's network and any noise levels.

Legend: x the state; sigma its noise level; D the estimate of the clean latents. For a noise schedule x = x0 + sigma noise, which is
x_t / a; for flow matching x is x_t and sigma is t. In both dx / dsigma = (x - D) / sigma. h is a step in the logarithm of 1 / sigma, or of
the signal by sigma.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sd_scripts.library.core.protocols import Condition, OnStep, Parts, Preview
from sd_scripts.schema.errors import OptionError

from .comfyui_levels import Graph, Levels, levels_of, sigmas_of
from .images import told_guidance
from .samplers import schedule

LARGEST_TIME = 1 - 1e-4
"""In place of 1, where there is no signal whose logarithm could be taken; before the shift."""
Denoised = Callable[[Tensor, float], Tensor]
"""D of a state at a level."""
Told = Callable[[int, Tensor], None]
"""Is told of each step, from 0, and of its first D."""


@dataclass(frozen=True)
class Problem:
    """What a sampler solves: D, levels falling to 0, fresh noise like the state, and whether the levels are those of flow matching."""

    denoised: Denoised
    sigmas: Sequence[float]
    fresh: Callable[[], Tensor]
    flow: bool
    told: Told

    @property
    def steps(self) -> list[tuple[int, float, float]]:
        """(number, level, next level) of each step."""
        return [(i, self.sigmas[i], self.sigmas[i + 1]) for i in range(len(self.sigmas) - 1)]

    def first(self, x: Tensor, i: int) -> Tensor:
        """D at the beginning of step i."""
        clean = self.denoised(x, self.sigmas[i])
        self.told(i, clean)
        return clean


def euler(problem: Problem, x: Tensor) -> Tensor:
    """Euler's steps (Karras et al. 2022, algorithm 2 without churn); for a noise schedule that is DDIM."""
    for i, sigma, after in problem.steps:
        x = x + (after - sigma) * (x - problem.first(x, i)) / sigma
    return x


def heun(problem: Problem, x: Tensor) -> Tensor:
    """Heun's steps, the last one Euler's (Karras et al. 2022, algorithm 2 without churn)."""
    for i, sigma, after in problem.steps:
        slope = (x - problem.first(x, i)) / sigma
        there = x + (after - sigma) * slope
        if after > 0:
            slope = (slope + (there - problem.denoised(there, after)) / after) / 2
        x = x + (after - sigma) * slope
    return x


def euler_ancestral(problem: Problem, x: Tensor) -> Tensor:
    """Euler's step to a lower level, and fresh noise up to the wanted one (Song et al. 2020, arXiv 2011.13456; eta 1).

    For flow matching the lower level is after^2 / sigma, and the state is scaled so that signal and noise add up to those of `after`.
    """
    for i, sigma, after in problem.steps:
        clean = problem.first(x, i)
        if after == 0:
            return clean
        if problem.flow:
            down = after * after / sigma
            scale = (1 - after) / (1 - down)
            up = math.sqrt(after**2 - (down * scale) ** 2)
        else:
            scale, up = 1.0, min(after, after * math.sqrt(sigma**2 - after**2) / sigma)
            down = math.sqrt(after**2 - up**2)
        x = scale * (clean + (down / sigma) * (x - clean)) + up * problem.fresh()
    return x


def dpmpp_2m(problem: Problem, x: Tensor) -> Tensor:
    """DPM-Solver++(2M) (Lu et al. 2022, arXiv 2211.01095, algorithm 2), with h = log(sigma / after) for flow matching too."""
    before, last_h = None, 0.0
    for i, sigma, after in problem.steps:
        clean = problem.first(x, i)
        if after == 0:
            return clean
        h = math.log(sigma / after)
        ahead = clean if before is None else clean + (h / (2 * last_h)) * (clean - before)
        x = (after / sigma) * x + (1 - after / sigma) * ahead
        before, last_h = clean, h
    return x


def dpmpp_2m_sde(problem: Problem, x: Tensor) -> Tensor:
    """The same for the stochastic equation (Lu et al. 2022, appendix; eta 1, midpoint), where h is in the signal by sigma."""
    before, last_h = None, 0.0
    for i, sigma, after in problem.steps:
        clean = problem.first(x, i)
        if after == 0:
            return clean
        signal_before, signal = (1 - sigma, 1 - after) if problem.flow else (1.0, 1.0)
        h = math.log(signal / after) - math.log(signal_before / sigma)
        towards = -signal * math.expm1(-2 * h)
        x = (after / sigma) * math.exp(-h) * x + towards * clean
        if before is not None:
            x = x + (towards * h / (2 * last_h)) * (clean - before)
        x = x + after * math.sqrt(-math.expm1(-2 * h)) * problem.fresh()
        before, last_h = clean, h
    return x


SAMPLERS: dict[str, Callable[[Problem, Tensor], Tensor]] = {
    "auto": euler,
    "euler": euler,
    "ddim": euler,
    "heun": heun,
    "euler_a": euler_ancestral,
    "dpmsolver++": dpmpp_2m,
    "dpmpp_2m_sde": dpmpp_2m_sde,
}
"""By our names; ComfyUI calls euler_a euler_ancestral and dpmsolver++ dpmpp_2m."""
SDE = "dpmpp_2m_sde"
FLOW = ("euler_a", "heun", "dpmsolver++", SDE)
"""Those that flow models take without a scheduler too, besides their own Euler."""


class Drawing(Protocol):
    """What is needed of a family."""

    def latent_in(self, parts: Parts) -> tuple[int, int]: ...

    def comfyui(self, parts: Parts) -> Graph: ...

    def mu(self, parts: Parts, num_tokens: int, steps: int) -> float | None: ...

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor: ...


def wanted(parts: Parts, request: Preview) -> bool:
    """Whether an image is drawn by these samplers, not by the family's own: with a scheduler, and flow models with a sampler, of a name."""
    return request.scheduler != "auto" or (parts.kind == "velocity" and request.sampler in FLOW)


@torch.no_grad()
def draw(
    family: Drawing,
    parts: Parts,
    requests: Sequence[Preview],
    positive: Sequence[Condition],
    negative: Sequence[Condition] | None,
    on_step: OnStep | None = None,
) -> Tensor:
    """Scaled latents (B, C, h, w), float32, of requests of one size, steps, guidance, sampler and scheduler, each from noise of its seed.

    Raises OptionError for a sampler that is none of these.
    """
    first = requests[0]
    if first.sampler not in SAMPLERS:
        known = ", ".join(name for name in SAMPLERS if name != "auto")
        raise OptionError(f"sampler: {first.sampler} does not take a scheduler; take {known}, or leave the scheduler at auto")
    device, flow = parts.bring(parts.backbone), parts.kind == "velocity"
    levels = levels_of(parts, family.comfyui(parts), first.shift)
    sigmas = _sigmas(family, parts, first, levels, device)
    drawn = [torch.Generator().manual_seed(request.seed) for request in requests]
    # Another stream than the first noise, the one that ComfyUI takes on a CPU.
    later = [torch.Generator().manual_seed(request.seed + 1) for request in requests]
    channels, factor = family.latent_in(parts)
    shape = (1, channels, first.height // factor, first.width // factor)

    def noise(generators: Sequence[torch.Generator]) -> Tensor:
        return torch.cat([torch.randn(shape, generator=generator) for generator in generators]).to(device)

    def told(i: int, clean: Tensor) -> None:
        if on_step is not None:
            on_step(i + 1, len(sigmas) - 1, clean)

    parts = told_guidance(parts, first.guidance)
    denoised = _denoiser(family, parts, levels, positive, negative, first.cfg_scale)
    start = sigmas[0]
    if flow and first.sampler == SDE and start >= 1:
        sigmas = [levels.sigma(LARGEST_TIME), *sigmas[1:]]
    if not flow and math.isclose(start, float(levels.table[-1]), rel_tol=1e-5):
        # As much as an image of variance 1 under this noise has.
        start = math.sqrt(1 + start**2)
    return SAMPLERS[first.sampler](Problem(denoised, sigmas, lambda: noise(later), flow, told), start * noise(drawn))


def _sigmas(family: Drawing, parts: Parts, request: Preview, levels: Levels, device: torch.device) -> list[float]:
    """The levels of the request's scheduler; comfyui is the graph's, auto the model's own."""
    name = family.comfyui(parts).scheduler if request.scheduler == "comfyui" else request.scheduler
    if name != "auto":
        return sigmas_of(levels, name, request.steps)
    num_tokens = request.height * request.width // 16**2
    mu = family.mu(parts, num_tokens, request.steps)
    return [float(sigma) for sigma in schedule("auto", parts.scheduler_config, request.steps, num_tokens, device, mu).sigmas]


def _denoiser(
    family: Drawing, parts: Parts, levels: Levels, positive: Sequence[Condition], negative: Sequence[Condition] | None, scale: float
) -> Denoised:
    """D by the family's network, with guidance."""

    def denoised(x: Tensor, sigma: float) -> Tensor:
        a = 1.0 if parts.kind == "velocity" else 1 / math.sqrt(1 + sigma**2)
        t = torch.full((len(x),), levels.time(sigma), device=x.device)
        x_t = a * x
        said = family.denoise(parts, x_t, t, positive)
        if negative is not None:
            away = family.denoise(parts, x_t, t, negative)
            said = away + scale * (said - away)
        if parts.kind == "sample":
            return said
        if parts.kind == "v_prediction":
            # a x_t - s v with s = a sigma.
            return a * (x_t - sigma * said)
        return x - sigma * said

    return denoised
