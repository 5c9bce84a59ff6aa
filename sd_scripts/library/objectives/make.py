"""From options to an objective."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from sd_scripts.library.core.diffusion import FlowPath, NoiseSchedulePath, anchor_sigmas
from sd_scripts.library.core.protocols import Kind, Path
from sd_scripts.schema.anchored_flow import AnchoredFlowOptions
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.objective import FlowObjectiveOptions, ObjectiveOptions, ObjectiveSection, RegressionOptions

from . import noise as noises
from .distances import distance_of
from .flow_matching import Curvature, FlowMatching, Guidance, Interpretation
from .levels import FromAnchors, FromDensity, LevelsOf
from .regression import Regression, Times
from .terms import COLOUR_TERMS, terms_of
from .times import UNIFORM, Density, logit_normal, mode, resolution_shift, shifted
from .weights import anchor_weights, flow_weight_of, weight_of


def density_of(options: ObjectiveOptions | FlowObjectiveOptions, sides: tuple[int, int]) -> Density:
    """The density that timestep_sampling names, for latents of these sides (h, w)."""
    if options.target == "velocity":
        if options.timestep_sampling == "mode":
            return mode(options.mode_scale)
        if options.timestep_sampling == "sigma":
            return shifted(UNIFORM, options.discrete_flow_shift)
        if options.timestep_sampling in options.size_shifts:
            shift = resolution_shift(sides, options.size_shifts[options.timestep_sampling])
            return shifted(logit_normal(0.0, options.sigmoid_scale), shift)
    return {
        "uniform": lambda: UNIFORM,
        "sigmoid": lambda: logit_normal(0.0, options.sigmoid_scale),
        "logit_normal": lambda: logit_normal(options.logit_mean, options.logit_std),
        "shift": lambda: shifted(logit_normal(0.0, options.sigmoid_scale), options.discrete_flow_shift),
    }[options.timestep_sampling]()


def times_of(options: ObjectiveOptions | FlowObjectiveOptions, path: Path) -> Times:
    """Uniform numbers (B,) and latent sides -> training times (B,); on a discrete schedule that of the step the density falls into."""
    low, high = options.min_timestep / 1000, options.max_timestep / 1000
    num_steps = path.num_steps if isinstance(path, NoiseSchedulePath) else 0
    last_step = max(0, -(-options.max_timestep * num_steps // 1000) - 1)

    def times(u: Tensor, sides: tuple[int, int]) -> Tensor:
        t = density_of(options, sides).within(low, high, u)
        if isinstance(path, NoiseSchedulePath):
            return path.times((t * num_steps).floor().long().clamp(0, last_step))
        if isinstance(path, FlowPath) and path.on_steps:
            return ((t * path.num_steps).ceil().clamp(1, path.num_steps) / path.num_steps).float()
        # t = 0 has nothing to learn from and divides by zero in samplers; float32 keeps 1e-5 apart from it.
        return t.clamp(1e-5, 1.0).float()

    return times


def interpretation_of(options: FlowObjectiveOptions) -> Interpretation:
    """What model_prediction_type makes of the network's output before it is compared with noise - x0."""

    def raw(prediction: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        return prediction

    def additive(prediction: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        return prediction + x_t

    def sigma_scaled(prediction: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        return x_t - t.view(-1, 1, 1, 1) * prediction

    return {"raw": raw, "additive": additive, "sigma_scaled": sigma_scaled}[options.model_prediction_type]


def noise_of(options: RegressionOptions, plain: Callable[[Tensor, noises.Draw], Tensor] = noises.plain) -> noises.NoiseOf:
    """The noise of latents (C, h, w), perturbed in the input where the options say so."""

    def noise(x0: Tensor, draw: noises.Draw) -> tuple[Tensor, Tensor]:
        target = plain(x0, draw)
        return target + noises.perturbation(x0, draw, options) if options.ip_noise_gamma else target, target

    return noise


def additions_of(options: ObjectiveOptions) -> Callable[[Tensor, noises.Draw], Tensor]:
    """One latent (C, h, w) -> normal noise with offset and coarser levels."""

    def noise(x0: Tensor, draw: noises.Draw) -> Tensor:
        plain = noises.plain(x0, draw)
        if options.noise_offset:
            plain = plain + noises.offset(x0, draw, options)
        if options.multires_noise_iterations:
            plain = noises.multires(plain, draw, options.multires_noise_iterations, options.multires_noise_discount)
        return plain

    return noise


def levels_of(options: FlowObjectiveOptions, path: Path, scheduler_config: Mapping[str, Any]) -> LevelsOf:
    """The noise levels that are trained. Raises OptionError for a model whose sampler has no fixed levels."""
    if not options.num_anchors:
        return FromDensity(times_of(options, path), flow_weight_of(options))
    if scheduler_config.get("use_dynamic_shifting", False):
        text = "objective: the model's sampler takes other steps for other sizes of images (use_dynamic_shifting); acrf cannot train that"
        raise OptionError(Problem("objective", f"{text}, choose flow"))
    options = cast("AnchoredFlowOptions", options)
    # 1 is what diffusers takes for a configuration that does not say.
    shift = float(scheduler_config.get("shift", 1.0))
    sigmas = torch.tensor(anchor_sigmas(options.turbo_steps, shift), dtype=torch.float64)
    first = options.free_stream_ratio
    last = first if options.free_stream_final_ratio is None else options.free_stream_final_ratio
    return FromAnchors(
        sigmas, anchor_weights(options, sigmas), options.jitter_scale, shift, lambda progress: first + (last - first) * progress
    )


def check_prior(options: ObjectiveSection, has_regularisation: bool) -> None:
    """Raises OptionError where the objective compares regularisation images with the base model, and the data has none."""
    if options.prior_weight and not has_regularisation:
        text = "base_prior_weight compares with the base model on regularisation images, and the data set has none"
        raise OptionError(Problem("base_prior_weight", f"{text}; add a subset with is_reg = true or reg_data_dir, or set it to 0"))


def wants_colours(options: ObjectiveSection, own_terms: Collection[str]) -> bool:
    """Whether a term of the loss looks at colours: of the run, or of own_terms that data sets and images have weights for."""
    return any(weight > 0 or name in own_terms for name, weight in options.term_weights.items() if name in COLOUR_TERMS)


def check_styles(options: ObjectiveSection, styles: Collection[str]) -> None:
    """Raises OptionError where the objective has weights for styles that are not among those of the data."""
    if problems := options.style_problems(styles):
        raise OptionError(problems)


def check_sides(options: ObjectiveSection, sides: Collection[tuple[int, int]]) -> None:
    """Raises OptionError where latents of sides (h, w) are too small for what the objective compares in them."""
    if problems := options.size_problems(sides):
        raise OptionError(problems)


def flow_matching_of(
    options: FlowObjectiveOptions, path: Path, scheduler_config: Mapping[str, Any], colours: Tensor | None
) -> FlowMatching:
    """The objective of a flow transformer, see make."""
    plain = FlowMatching(
        path,
        levels_of(options, path, scheduler_config),
        noise_of(options),
        distance_of(options, path),
        interpretation_of(options),
        prior_weight=options.base_prior_weight,
    )
    if not options.has_terms:
        return plain
    options = cast("AnchoredFlowOptions", options)
    return replace(
        plain,
        terms=terms_of(options, colours),
        weights=options.term_weights,
        curvature=Curvature(options.curvature_weight, options.curvature_interval, options.curvature_start)
        if options.curvature_weight
        else None,
        guidance=Guidance(options.cfg_training_scale, options.cfg_training_ratio) if options.wants_empty_text else None,
        latent_jitter=options.latent_jitter,
    )


def make(
    options: ObjectiveSection,
    path: Path,
    kind: Kind,
    scheduler_config: Mapping[str, Any] = MappingProxyType({}),
    colours: Tensor | None = None,
) -> Regression | FlowMatching:
    """The objective of a model whose network predicts `kind` on `path`, and is sampled by the diffusers scheduler of this configuration; of
    a family without one of its own, see ModelFamily.objective.

    colours (3, C) maps latents to luminance and two colours; terms that look at them cannot do without. Raises OptionError for weights and
    levels that the model cannot have.
    """
    if options.target == "velocity":
        assert kind == "velocity"
        return flow_matching_of(cast("FlowObjectiveOptions", options), path, scheduler_config, colours)
    assert options.target == "noise", f"{type(options).__name__} makes an objective of its own"
    options = cast("ObjectiveOptions", options)
    return Regression(
        path,
        kind,
        times_of(options, path),
        noise_of(options, additions_of(options)),
        distance_of(options, path),
        weight_of(options, kind, path),
    )
