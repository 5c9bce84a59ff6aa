"""At which noise levels ComfyUI asks a network: the levels that it knows, and the schedulers that choose among them by name.

Legend: sigma noise level, for a noise schedule s / a of its path x_t = a x0 + s noise, for flow matching the time t itself; alpha shift;
clock what a network is told of a level.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sd_scripts.library.core.diffusion import NoiseSchedulePath
from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.errors import OptionError

NEARLY_NOISE = 4.8973451890853435e-08
"""Signal of the last step of a schedule with zero terminal SNR, where sigma would not be finite."""
_NOTHING = 1e-5
"""Levels below this are the clean image."""


class Levels(Protocol):
    """The noise levels of a model."""

    @property
    def table(self) -> Tensor:
        """Those that it was trained at, rising."""
        ...

    def clock(self, sigma: float) -> float:
        """Where a level stands on the clock by which uniform schedulers count."""
        ...

    def sigma(self, clock: float) -> float:
        """The level that uniform schedulers take at this place."""
        ...

    def time(self, sigma: float) -> float:
        """The canonical time at which the network is asked."""
        ...


@dataclass(frozen=True)
class FlowLevels:
    """Levels of flow matching: sigma = alpha u / (1 + (alpha - 1) u) (Esser et al. 2024, arXiv 2403.03206, equation 23)."""

    alpha: float
    count: int = 1000

    @property
    def table(self) -> Tensor:
        u = torch.arange(1, self.count + 1, dtype=torch.float64) / self.count
        return self.alpha * u / (1 + (self.alpha - 1) * u)

    def clock(self, sigma: float) -> float:
        """The level, which is shifted once more when it is looked up."""
        return sigma

    def sigma(self, clock: float) -> float:
        return self.alpha * clock / (1 + (self.alpha - 1) * clock)

    def time(self, sigma: float) -> float:
        return sigma


def exponential_shift(mu: float) -> FlowLevels:
    """Levels shifted by e^mu, in the fine table that FLUX and what followed it have."""
    return FlowLevels(math.exp(mu), 10000)


@dataclass(frozen=True)
class ScheduleLevels:
    """Levels of a noise schedule; between two steps the logarithm of sigma is a line, and a network is asked at the nearest step.

    In float32, because uniform schedulers often land halfway between two steps, and rounding then decides which one is asked.
    """

    path: NoiseSchedulePath

    @property
    def table(self) -> Tensor:
        return self._exact.float()

    @property
    def _exact(self) -> Tensor:
        signal = self.path.alphas_cumprod.double().clamp(min=NEARLY_NOISE)
        return ((1 - signal) / signal).sqrt()

    def clock(self, sigma: float) -> float:
        return float((torch.tensor(sigma, dtype=torch.float32).log() - self._exact.log().float()).abs().argmin())

    def sigma(self, clock: float) -> float:
        logs, place = self._exact.log().float(), torch.tensor(clock, dtype=torch.float32)
        share = place.frac()
        return float(((1 - share) * logs[int(place.floor())] + share * logs[int(place.ceil())]).exp())

    def time(self, sigma: float) -> float:
        return (self.clock(sigma) + 1) / self.path.num_steps


@dataclass(frozen=True)
class Graph:
    """How a model is usually drawn with in ComfyUI: what its loader and the nodes of its published graph set."""

    scheduler: str = "normal"
    """auto are the model's own levels, in flow models."""
    shift: FlowLevels | None = None
    """Of flow models."""


def levels_of(parts: Parts, graph: Graph, shift: float | None) -> Levels:
    """The levels of a model as ComfyUI counts them; shift as its nodes ModelSamplingSD3 and ModelSamplingAuraFlow take it, None usual.

    Raises OptionError for a shift of a model that has none.
    """
    if isinstance(parts.path, NoiseSchedulePath):
        if shift is not None:
            raise OptionError(f"shift: {shift:g} means nothing to a model with a noise schedule; leave it out")
        return ScheduleLevels(parts.path)
    # A UNet that was trained for flow matching has the shift of its own configuration.
    usual = graph.shift or FlowLevels(float(parts.scheduler_config.get("shift") or 1.0))
    return usual if shift is None else FlowLevels(shift)


def sigmas_of(levels: Levels, scheduler: str, steps: int) -> list[float]:
    """The levels of so many steps by ComfyUI's scheduler of this name, falling, with the 0 at the end; beta may have fewer."""
    return [*_SCHEDULERS[scheduler](levels, steps), 0.0]


def _normal(levels: Levels, steps: int) -> list[float]:
    """Uniform on the clock from the highest level to the lowest; one more where the lowest is the clean image already."""
    last = levels.clock(float(levels.table[0]))
    return _uniform(levels, steps + 1)[:-1] if levels.sigma(last) < _NOTHING else _uniform(levels, steps)


def _sgm_uniform(levels: Levels, steps: int) -> list[float]:
    """Uniform on the clock, without the lowest level (Stability's generative-models)."""
    return _uniform(levels, steps + 1)[:-1]


def _uniform(levels: Levels, count: int) -> list[float]:
    table = levels.table
    clocks = torch.linspace(levels.clock(float(table[-1])), levels.clock(float(table[0])), count)
    return [levels.sigma(float(clock)) for clock in clocks]


def _simple(levels: Levels, steps: int) -> list[float]:
    """Every so manyth level of the table, from the highest."""
    table = levels.table
    return [float(table[-1 - int(i * (len(table) / steps))]) for i in range(steps)]


def _ddim_uniform(levels: Levels, steps: int) -> list[float]:
    """Every so manyth level of the table, from the lowest but one (Song et al. 2020, arXiv 2010.02502): the highest may be left out, and
    there may be a step more or less."""
    table = levels.table
    nothing = float(table[1]) < _NOTHING
    stride = max(len(table) // (steps + nothing), 1)
    chosen = [float(sigma) for sigma in table[1::stride]]
    return chosen[::-1][: -1 if nothing else None]


def _karras(levels: Levels, steps: int) -> list[float]:
    """Uniform in sigma^(1/7) (Karras et al. 2022, arXiv 2206.00364, equation 5)."""
    return _between(levels, steps, lambda sigma: sigma ** (1 / 7), lambda root: root**7)


def _exponential(levels: Levels, steps: int) -> list[float]:
    """Uniform in the logarithm of sigma."""
    return _between(levels, steps, math.log, math.exp)


def _between(levels: Levels, steps: int, to: Callable[[float], float], back: Callable[[float], float]) -> list[float]:
    table = levels.table
    high, low = to(float(table[-1])), to(float(table[0]))
    return [back(high + (low - high) * i / max(steps - 1, 1)) for i in range(steps)]


def _beta(levels: Levels, steps: int) -> list[float]:
    """At the quantiles of the distribution Beta(0.6, 0.6) (Lee et al. 2024, arXiv 2407.12173); each level once."""
    table = levels.table
    places = [round(beta_quantile(1 - i / steps, 0.6) * (len(table) - 1)) for i in range(steps)]
    return [float(table[place]) for place in dict.fromkeys(places)]


def beta_quantile(p: float, shape: float) -> float:
    """Where the distribution Beta(shape, shape) has p of its weight below, by halving."""
    if p >= 0.5:
        # In the middle exactly: it lies between two levels of a table, and rounding decides.
        return 0.5 if p == 0.5 else 1 - beta_quantile(1 - p, shape)
    low, high = 0.0, 0.5
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _beta_weight(middle, shape) < p else (low, middle)
    return high if p > 0 else 0.0


def _beta_weight(x: float, shape: float) -> float:
    """The weight of Beta(shape, shape) below x, at most 0.5: its series (DLMF 8.17.7), of which each term is less than half of the last."""
    term, total = 1.0, 0.0
    for n in range(60):
        total += term / (shape + n)
        term *= (n + 1 - shape) / (n + 1) * x
    return total * x**shape * math.exp(math.lgamma(2 * shape) - 2 * math.lgamma(shape))


_SCHEDULERS: dict[str, Callable[[Levels, int], list[float]]] = {
    "normal": _normal,
    "karras": _karras,
    "exponential": _exponential,
    "simple": _simple,
    "sgm_uniform": _sgm_uniform,
    "ddim_uniform": _ddim_uniform,
    "beta": _beta,
}
