"""Samplers by name: which diffusers scheduler, with which configuration, renders a model."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import wraps
from typing import Any, get_args

import diffusers
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SchedulerMixin
from torch import Tensor

from sd_scripts.library.core.diffusion import is_flow
from sd_scripts.library.core.protocols import OnStep
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.samples import FlowSampler

CLASSES = {
    "ddim": "DDIMScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_a": "EulerAncestralDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "dpmsolver++": "DPMSolverMultistepScheduler",
    "dpm_2": "KDPM2DiscreteScheduler",
    "dpm_2_a": "KDPM2AncestralDiscreteScheduler",
    "lms": "LMSDiscreteScheduler",
    "pndm": "PNDMScheduler",
}
"""diffusers' class of each sampler in schema.samples.SAMPLERS."""

ZERO_SNR = ("ddim", "euler", "euler_a", "dpmsolver++")
"""Samplers that can start from pure noise; the others divide by a signal that is not there."""

FLOW = ("auto", "euler")

LATENT_DEFAULTS = {
    "DDIMScheduler": {"clip_sample": False, "set_alpha_to_one": False},
    "DDPMScheduler": {"clip_sample": False},
    "PNDMScheduler": {"skip_prk_steps": True, "set_alpha_to_one": False},
}
"""What models of latents need and a configuration written for another class does not say: diffusers' defaults are made for pixels."""


class FlowEuler(FlowMatchEulerDiscreteScheduler):
    """Flow-matching Euler with the two members that pipelines of noise-schedule models ask for."""

    init_noise_sigma = 1.0

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
        """The sample itself: a flow model sees x_t as it is."""
        return sample


def scheduler_for(sampler: str, config: Mapping[str, Any]) -> SchedulerMixin:
    """A new scheduler of that name for a model with this scheduler configuration; auto takes the class named in it, or Euler.

    Zero-terminal-SNR models get trailing spacing, so that sampling starts at pure noise (Lin et al. 2023).
    Raises OptionError for a sampler that cannot render the model.
    """
    if is_flow(config):
        if sampler not in FLOW:
            raise OptionError(f"sampler: {sampler} cannot render a flow-matching model; take {', '.join(get_args(FlowSampler))}")
        return FlowEuler.from_config(_without_class(config))
    if sampler not in ("auto", *CLASSES):
        raise OptionError(f"sampler: {sampler} needs a scheduler; choose one, such as karras")
    wanted = dict(config)
    if wanted.get("rescale_betas_zero_snr"):
        wanted["timestep_spacing"] = "trailing"
        if sampler != "auto" and sampler not in ZERO_SNR:
            raise OptionError(f"sampler: {sampler} cannot render a model with zero terminal SNR; take {', '.join(ZERO_SNR)}")
    if sampler == "lms" and importlib.util.find_spec("scipy") is None:
        raise OptionError("sampler: lms needs the package scipy, which is not installed; take another sampler, or install scipy")
    name = config.get("_class_name", CLASSES["euler"]) if sampler == "auto" else CLASSES[sampler]
    if not name.endswith("Scheduler") or not hasattr(diffusers, name):
        raise OptionError(f"the model's scheduler {name} is not one of the installed diffusers; choose a sampler: {', '.join(CLASSES)}")
    return getattr(diffusers, name).from_config({**LATENT_DEFAULTS.get(name, {}), **_without_class(wanted)})


def watched(scheduler: SchedulerMixin, on_step: OnStep | None) -> SchedulerMixin:
    """The scheduler, which tells on_step of every step that a pipeline takes with it."""
    if on_step is None:
        return scheduler
    step, done = scheduler.step, 0

    # Pipelines look up which arguments it takes.
    @wraps(step)
    def told(model_output: Tensor, timestep: Any, sample: Tensor, *arguments: Any, **named: Any) -> Any:
        nonlocal done
        clean = clean_of(scheduler, model_output, timestep, sample)
        made = step(model_output, timestep, sample, *arguments, **named)
        done += 1
        on_step(done, len(scheduler.timesteps), clean)
        return made

    scheduler.step = told
    return scheduler


def clean_of(scheduler: SchedulerMixin, output: Tensor, timestep: Tensor, sample: Tensor) -> Tensor:
    """The estimate of the clean latents, float32, that follows from what the network said of a scheduler's state at this time.

    Samplers that stop between two of the schedule's times get what lies between.
    """
    output, clock = output.float(), torch.as_tensor(timestep, dtype=torch.float32)
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        return sample.float() - clock.to(sample.device) / scheduler.config.num_train_timesteps * output
    x, signals = scheduler.scale_model_input(sample, timestep).float(), scheduler.alphas_cumprod.to(sample.device, torch.float32)
    below = int(clock)
    signal = torch.lerp(signals[below], signals[min(below + 1, len(signals) - 1)], (clock - below).to(sample.device))
    a, s = signal.sqrt(), (1 - signal).sqrt()
    kind = scheduler.config.prediction_type
    if kind == "sample":
        return output
    return a * x - s * output if kind == "v_prediction" else (x - s * output) / a.clamp(min=1e-3)


def schedule(
    sampler: str, config: Mapping[str, Any], steps: int, num_tokens: int, device: torch.device, mu: float | None = None
) -> SchedulerMixin:
    """A scheduler of a flow-matching model, set to this many steps for images of N tokens: shifted by size, or by e^mu where mu is given,
    and stretched to end at shift_terminal, as far as the configuration has that.

    The shift by size is e^mu with mu linear in the tokens (Esser et al. 2024, section 5.3.2; figures of the configuration). A schedule of
    one step is the one from noise to image: stretching it would divide by zero.
    """
    scheduler = scheduler_for(sampler, {**config, "shift_terminal": None} if steps == 1 else config)
    own = scheduler.config
    base, longest = own.get("base_image_seq_len", 256), own.get("max_image_seq_len", 4096)
    slope = (own.get("max_shift", 1.15) - own.get("base_shift", 0.5)) / (longest - base)
    by_size = num_tokens * slope + (own.get("base_shift", 0.5) - slope * base)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=device, mu=by_size if mu is None else mu)
    scheduler.set_begin_index(0)
    return scheduler


def _without_class(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the name of its class: that of another class only makes diffusers warn."""
    return {key: value for key, value in config.items() if not key.startswith("_")}
