"""Samplers of noise schedules, as pure functions of an estimate of the image: which levels they visit, and what they do between two.

The state is x = a x0 + s noise with a^2 + s^2 = 1, in whatever floating-point type it begins with. In terms of the estimate D of x0 all
formulas are finite at pure noise (a = 0) and at the image (s = 0), and a changed D, such as a clamped one, changes the noise
(x - a D) / s with it.

Every sampler takes exactly as many steps as it is asked for; `num_calls` has the calls of the network that these need.

Legend: sigma = s / a, y = x / a, lambda = ln(a / s); a', s' where a step goes to; T steps of the schedule, k a step from 0, N steps taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sd_scripts.library.core.diffusion import NoiseSchedulePath
from sd_scripts.library.core.protocols import OnStep
from sd_scripts.schema.errors import OptionError, Problem

from .options import DdpmSampler, StepSpacing

KARRAS_RHO = 7.0
PURE_NOISE = 1e-3
"""Steps of the second-order samplers that begin with less signal than this are done in 1 / sigma: in sigma they would be thousands of
units long, and every error of the network would be multiplied by that."""


class Level(NamedTuple):
    """Shares of image and noise in a state, a^2 + s^2 = 1."""

    a: float
    s: float

    @property
    def sigma(self) -> float:
        """s / a; infinite for pure noise."""
        return self.s / self.a if self.a else math.inf

    @classmethod
    def of_sigma(cls, sigma: float) -> Level:
        """The level with this s / a, which may be infinite."""
        return cls(1 / math.hypot(1, sigma), 1 / math.hypot(1, 1 / sigma) if sigma else 0.0)


IMAGE = Level(1.0, 0.0)

Denoise = Callable[[Tensor, Level], Tensor]
"""(state (B, ...), its level) -> the estimate of x0, same shape and type."""
Step = Callable[[Tensor, Level, Level], Tensor]
"""(state, its level, the next level) -> the state there."""
Fresh = Callable[[], Tensor]
"""Standard normal noise of the shape of the state, new with every call."""


def solve(step: Step, x: Tensor, levels: Sequence[Level], on_step: OnStep | None = None) -> Tensor:
    """The state at the last level, from x at the first; on_step is told 1..N of N = len(levels) - 1."""
    total = len(levels) - 1
    for number, (here, there) in enumerate(pairwise(levels), start=1):
        x = step(x, here, there)
        if on_step is not None:
            on_step(number, total, x)
    return x


def stepper(sampler: DdpmSampler, denoise: Denoise, fresh: Fresh, eta: float = 0.0) -> Step:
    """The steps of one drawing, which must not be shared: dpmsolver++ remembers. eta belongs to ddim."""
    if sampler in ("ddpm", "ddim"):
        return ancestral(denoise, fresh, 1.0 if sampler == "ddpm" else eta)
    return {"euler": euler, "heun": heun, "dpm_solver": dpm_solver_2, "dpmsolver++": dpm_solver_multistep}[sampler](denoise)


def num_calls(sampler: DdpmSampler, steps: int) -> int:
    """Calls of the network in a drawing of N steps that ends at the image, a call with guidance counted once.

    N, and 2N - 1 for heun and dpm_solver: their last step is one of first order, because there is no noise left to ask about at its end.
    """
    return 2 * steps - 1 if sampler in ("heun", "dpm_solver") else steps


def _towards(x: Tensor, estimate: Tensor, here: Level, there: Level) -> Tensor:
    """The state at another level with the same image and the same noise: a' D + s' (x - a D) / s."""
    ratio = there.s / here.s
    return ratio * x + (there.a - ratio * here.a) * estimate


def euler(denoise: Denoise) -> Step:
    """y' = y + (sigma' - sigma) noise, which is ddim without fresh noise (Song et al. 2021, arXiv 2010.02502). First order, one call."""

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        return _towards(x, denoise(x, here), here, there)

    return step


def ancestral(denoise: Denoise, fresh: Fresh, eta: float) -> Step:
    """ddim with fresh noise, of eta times the deviation of the posterior; eta = 1 is ddpm on a part of the schedule (Song et al. 2021).

    The posterior's variance is (1 - abar') / (1 - abar) (1 - abar / abar') with abar = a^2 (their equation 16). One call.
    """

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        estimate = denoise(x, here)
        deviation = eta * (there.s / here.s) * math.sqrt(max(0.0, 1 - (here.a / there.a) ** 2))
        if not deviation:
            return _towards(x, estimate, here, there)
        kept = math.sqrt(max(0.0, there.s**2 - deviation**2))
        return _towards(x, estimate, here, Level(there.a, kept)) + deviation * fresh()

    return step


def heun(denoise: Denoise) -> Step:
    """Euler's step, repeated with the mean of the directions at its two ends (Karras et al. 2022, arXiv 2206.00364). Second order.

    Two calls, one in a step that ends at the image. From pure noise the mean is that of the estimates: z = x / s has dz/dtau = D with
    tau = a / s.
    """

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        estimate = denoise(x, here)
        end = _towards(x, estimate, here, there)
        if not there.s:
            return end
        second = denoise(end, there)
        if here.a < PURE_NOISE:
            return _towards(x, (estimate + second) / 2, here, there)
        direction = ((x - here.a * estimate) / here.s + (end - there.a * second) / there.s) / 2
        return _along(x, direction, here, there)

    return step


def dpm_solver_2(denoise: Denoise) -> Step:
    """DPM-Solver-2 (Lu et al. 2022, arXiv 2206.00927): the direction at the middle in lambda, sigma_m = sqrt(sigma sigma'), all the way.

    Second order. Two calls, one in a step that ends at the image. From pure noise it is the estimate of the middle in tau = a / s.
    """

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        estimate = denoise(x, here)
        if not there.s:
            return _towards(x, estimate, here, there)
        if here.a < PURE_NOISE:
            middle = Level.of_sigma(2 / (1 / here.sigma + 1 / there.sigma))
            return _towards(x, denoise(_towards(x, estimate, here, middle), middle), here, there)
        middle = Level.of_sigma(math.sqrt(here.sigma * there.sigma))
        half = _towards(x, estimate, here, middle)
        return _along(x, (half - middle.a * denoise(half, middle)) / middle.s, here, there)

    return step


def dpm_solver_multistep(denoise: Denoise) -> Step:
    """DPM-Solver++(2M): the estimate is extended by the one of the step before (Lu et al. 2022, arXiv 2211.01095). Second order, one call.

    x' = (s'/s) x - a' (exp(-h) - 1) D with D = D_i + (D_i - D_{i-1}) / (2r), h = lambda' - lambda, r = h_{i-1} / h_i. The first step, one
    after pure noise and one that ends at the image take D_i itself.
    """
    before: tuple[Tensor, Level] | None = None

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        nonlocal before
        estimate = used = denoise(x, here)
        if before is not None and before[1].a and there.s:
            last = math.log(before[1].sigma / here.sigma)
            used = estimate + (estimate - before[0]) * (math.log(here.sigma / there.sigma) / (2 * last))
        before = estimate, here
        return _towards(x, used, here, there)

    return step


def _along(x: Tensor, direction: Tensor, here: Level, there: Level) -> Tensor:
    """y' = y + (sigma' - sigma) direction, in x."""
    ratio = there.a / here.a
    return ratio * x + (there.s - ratio * here.s) * direction


def levels_of(path: NoiseSchedulePath, steps: int, spacing: StepSpacing) -> list[Level]:
    """The N + 1 levels of N steps, from the schedule's noisiest to the image. OptionError for fewer steps than 1 or more than T.

    trailing: every T/N-th step of the schedule, counted from its end (Lin et al. 2023, arXiv 2305.08891). lambda and karras: from the
    noisiest sigma to the smallest, evenly in ln sigma or in sigma^(1/7) (Karras et al. 2022, equation 5). Where the noisiest is pure noise
    the others lie as if they came from the next one.
    """
    total = path.num_steps
    if not 1 <= steps <= total:
        text = f"steps: {steps} is not possible; the model's noise schedule has {total} steps, so take 1 to {total}"
        raise OptionError(Problem("steps", text))
    if spacing == "trailing":
        # Halves go to the even number, as in diffusers' schedulers.
        return [*(level_at(path, round(Fraction(total * (steps - i), steps)) - 1) for i in range(steps)), IMAGE]
    sigmas = sigmas_of(path)
    most, least = (sigma for sigma in (sigmas[-1 if math.isfinite(sigmas[-1]) else -2], sigmas[0]))
    shares = [i / (steps - 1) for i in range(steps)] if steps > 1 else [0.0]
    if spacing == "lambda":
        chosen = [most ** (1 - share) * least**share for share in shares]
    else:
        high, low = most ** (1 / KARRAS_RHO), least ** (1 / KARRAS_RHO)
        chosen = [(high + share * (low - high)) ** KARRAS_RHO for share in shares]
    return [level_at(path, total - 1), *(Level.of_sigma(sigma) for sigma in chosen[1:]), IMAGE]


def level_at(path: NoiseSchedulePath, k: int) -> Level:
    """The level of a step of the schedule."""
    abar = float(path.alphas_cumprod[k])
    return Level(math.sqrt(abar), math.sqrt(1 - abar))


def sigmas_of(path: NoiseSchedulePath) -> list[float]:
    """sigma of every step, rising; the last one may be infinite."""
    sigmas: list[float] = ((1 - path.alphas_cumprod) / path.alphas_cumprod).sqrt().tolist()
    return sigmas


def clock_of(path: NoiseSchedulePath) -> Callable[[Level], float]:
    """The step k of the schedule at which a level lies, between two steps a fraction, linear in ln sigma; next to pure noise in 1 / sigma.

    What lies outside the schedule has the step at its end.
    """
    sigmas = torch.tensor(sigmas_of(path), dtype=torch.float64)

    def clock(level: Level) -> float:
        sigma = level.sigma
        above = int(torch.searchsorted(sigmas, sigma))
        if above == 0:
            return 0.0
        if above == len(sigmas):
            return float(len(sigmas) - 1)
        low, high = sigmas[above - 1].item(), sigmas[above].item()
        share = 1 - low / sigma if math.isinf(high) else math.log(sigma / low) / math.log(high / low)
        # A step of the schedule itself is a whole number, in spite of rounding.
        k = above - 1 + share
        return float(round(k)) if abs(k - round(k)) < 1e-6 else k

    return clock
