"""The mathematics of noising, written once: paths from image to noise, training targets, conversions between predictions.

Convention: t in [0, 1], 0 is the clean image and 1 is noise; x_t = a(t) x0 + s(t) noise; velocity is noise - x0.
Legend: a, s path coefficients; k step of a discrete schedule, counted from 0; T number of its steps; abar the product of alphas up to k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from sd_scripts.schema.errors import OptionError

from .protocols import Kind, NetworkPath, Path

BETA_SCHEDULES = ("scaled_linear", "linear", "squaredcos_cap_v2")


@dataclass(frozen=True)
class NoiseSchedulePath:
    """A discrete variance-preserving schedule (Ho et al. 2020): a = sqrt(abar_k), s = sqrt(1 - abar_k), with t = (k + 1) / T.

    t = 1 is the last step; times between steps are looked up at the nearest step, times below 1 / T at step 0.
    """

    alphas_cumprod: Tensor
    """(T,) float64, falling."""
    _on_device: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.alphas_cumprod)

    def steps(self, t: Tensor) -> Tensor:
        """Step k, int64 in [0, T), nearest to times t (B,)."""
        return (t.float() * self.num_steps).round().long().sub(1).clamp(0, self.num_steps - 1)

    def times(self, k: Tensor) -> Tensor:
        """Times (B,) of steps k (B,), float32."""
        return (k + 1).float() / self.num_steps

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """a and s of times t (B,) in [0, 1], float32, shape (B,)."""
        table = self._on_device.get(t.device)
        if table is None:
            table = torch.stack([self.alphas_cumprod.sqrt(), (1 - self.alphas_cumprod).sqrt()]).float().to(t.device)
            self._on_device[t.device] = table
        a, s = table[:, self.steps(t)]
        return a, s

    def model_times(self, t: Tensor) -> Tensor:
        """The clock that a network trained on this schedule was given: the step number, float32."""
        return self.steps(t).float()


@dataclass(frozen=True)
class FlowPath:
    """The straight path of flow matching (Lipman et al. 2023, Liu et al. 2023): a = 1 - t, s = t."""

    num_steps: int = 1000
    on_steps: bool = False
    """Whether training times are multiples of 1 / num_steps, for models that know only these by heart."""

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """a and s of times t (B,) in [0, 1], float32, shape (B,)."""
        t = t.float()
        return 1 - t, t

    def model_times(self, t: Tensor) -> Tensor:
        """The clock of networks trained with diffusers' flow schedulers: 1000 t, float32."""
        return t.float() * self.num_steps


def betas_of(config: Mapping[str, Any]) -> Tensor:
    """The betas (T,), float64, that a diffusers scheduler configuration describes, not rescaled. OptionError for an unknown one."""
    if config.get("trained_betas") is not None:
        return torch.tensor(config["trained_betas"], dtype=torch.float64)
    num_steps = config.get("num_train_timesteps", 1000)
    start, end = config.get("beta_start", 0.0001), config.get("beta_end", 0.02)
    schedule = config.get("beta_schedule", "linear")
    if schedule == "linear":
        return torch.linspace(start, end, num_steps, dtype=torch.float64)
    if schedule == "scaled_linear":
        return torch.linspace(start**0.5, end**0.5, num_steps, dtype=torch.float64) ** 2
    if schedule == "squaredcos_cap_v2":
        # Nichol and Dhariwal 2021 (arXiv 2102.09672), equation 17; betas are capped at 0.999.
        def abar(fraction: float) -> float:
            return math.cos((fraction + 0.008) / 1.008 * math.pi / 2) ** 2

        betas = [min(1 - abar((k + 1) / num_steps) / abar(k / num_steps), 0.999) for k in range(num_steps)]
        return torch.tensor(betas, dtype=torch.float64)
    raise OptionError(
        f"the model's scheduler configuration has beta_schedule = {schedule}, not known here; known: {', '.join(BETA_SCHEDULES)}"
    )


def zero_terminal_snr(alphas_cumprod: Tensor) -> Tensor:
    """Shifts and scales sqrt(abar): the last step becomes pure noise, the first stays (Lin et al. 2023, arXiv 2305.08891, algorithm 1)."""
    root = alphas_cumprod.sqrt()
    first, last = root[0], root[-1]
    if last == 0:
        return alphas_cumprod
    return ((root - last) * (first / (first - last))) ** 2


def path_of(config: Mapping[str, Any], rescale: bool = False) -> NetworkPath:
    """The path that a diffusers scheduler configuration describes; rescale forces zero terminal SNR even where it does not say so."""
    try:
        if is_flow(config):
            return FlowPath(num_steps=int(config.get("num_train_timesteps", 1000)))
        alphas_cumprod = torch.cumprod(1 - betas_of(config), dim=0)
        if rescale or config.get("rescale_betas_zero_snr", False):
            alphas_cumprod = zero_terminal_snr(alphas_cumprod)
        return NoiseSchedulePath(alphas_cumprod)
    except OptionError:
        raise
    except (TypeError, ValueError, RuntimeError) as err:
        raise OptionError(f"the model's scheduler_config.json is damaged ({err}). Download the model again") from err


def is_flow(config: Mapping[str, Any]) -> bool:
    """Whether a diffusers scheduler configuration belongs to a flow-matching model."""
    return (
        "FlowMatch" in str(config.get("_class_name", ""))
        or config.get("prediction_type") in ("flow_prediction", "flow")
        or bool(config.get("use_flow_sigmas", False))
    )


def kind_of(config: Mapping[str, Any]) -> Kind:
    """What the network predicts, by its diffusers scheduler configuration. Raises OptionError for a kind that is not trained here."""
    if is_flow(config):
        return "velocity"
    if str(config.get("_class_name", "")).startswith("EDM"):
        raise OptionError(
            f"the model's scheduler is {config['_class_name']}: its network sees scaled latents "
            "(Karras et al. 2022), which cannot be trained here"
        )
    kind = config.get("prediction_type", "epsilon")
    if kind not in ("epsilon", "v_prediction", "sample"):
        raise OptionError(
            f"the model's scheduler configuration has prediction_type = {kind}; epsilon, v_prediction, sample and flow models can be "
            "trained here. If the file is mistaken, set prediction_type"
        )
    return kind


def add_noise(path: Path, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t = a x0 + s noise of latents x0 and noise (B, ...) at times t (B,), float32."""
    a, s = _coefficients(path, t, x0)
    return a * x0.float() + s * noise.float()


def target(kind: Kind, path: Path, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """What a perfect network of this kind predicts, float32, shape of x0.

    epsilon: noise; v_prediction: a noise - s x0 (Salimans and Ho 2022, arXiv 2202.00512); velocity: noise - x0; sample: x0.
    """
    x0, noise = x0.float(), noise.float()
    if kind == "sample":
        return x0
    if kind == "epsilon":
        return noise
    if kind == "velocity":
        return noise - x0
    a, s = _coefficients(path, t, x0)
    return a * noise - s * x0


def snr(path: Path, t: Tensor) -> Tensor:
    """Signal-to-noise ratio a^2 / s^2 at times t (B,), float32; 0 where a is 0 and infinite where s is 0."""
    a, s = path.coefficients(t)
    return (a / s) ** 2


def to_x0(kind: Kind, path: Path, x_t: Tensor, prediction: Tensor, t: Tensor) -> Tensor:
    """The clean latents that a prediction implies, float32; not finite for epsilon where a is 0: there it says nothing about them."""
    a, s = _coefficients(path, t, x_t)
    x_t, prediction = x_t.float(), prediction.float()
    if kind == "epsilon":
        return (x_t - s * prediction) / a
    if kind == "sample":
        return prediction
    if kind == "velocity":
        return (x_t - s * prediction) / (a + s)
    return (a * x_t - s * prediction) / (a**2 + s**2)


def _coefficients(path: Path, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """a and s shaped to multiply `like` (B, ...) sample by sample."""
    assert t.shape == like.shape[:1], f"times {tuple(t.shape)} for a batch of shape {tuple(like.shape)}"
    shape = (-1, *[1] * (like.ndim - 1))
    a, s = path.coefficients(t.to(like.device))
    return a.view(shape), s.view(shape)


def anchor_sigmas(num_steps: int, shift: float) -> list[float]:
    """Noise levels at which a sampler of num_steps Euler steps asks the network, falling from 1; the 0 it ends at is left out.

    sigma = s u / (1 + (s - 1) u) of u = 1 - i / num_steps (Esser et al. 2024, arXiv 2403.03206, equation 23), in float64: what a
    FlowMatchEulerDiscreteScheduler with shift s makes of these u.
    """
    return [shift * u / (1 + (shift - 1) * u) for u in even_sigmas(num_steps)]


def even_sigmas(num_steps: int) -> list[float]:
    """The u of anchor_sigmas, which a scheduler that shifts by itself is given: 1 - i / num_steps."""
    return [1 - i / num_steps for i in range(num_steps)]


KINDS: tuple[Kind, ...] = get_args(Kind)
