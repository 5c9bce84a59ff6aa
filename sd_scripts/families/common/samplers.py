"""Samplers by name: which diffusers scheduler, with which configuration, renders a model."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import diffusers
from diffusers import FlowMatchEulerDiscreteScheduler, SchedulerMixin
from torch import Tensor

from sd_scripts.library.core.diffusion import is_flow
from sd_scripts.schema.errors import OptionError

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
            raise OptionError(f"sampler: {sampler} cannot render a flow-matching model; take {' or '.join(FLOW)}")
        return FlowEuler.from_config(_without_class(config))
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


def _without_class(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the name of its class: that of another class only makes diffusers warn."""
    return {key: value for key, value in config.items() if not key.startswith("_")}
