"""From options to an objective."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sd_scripts.library.diffusion import FlowPath, NoiseSchedulePath
from sd_scripts.library.objectives import noise as noises
from sd_scripts.library.objectives.distances import distance_of
from sd_scripts.library.objectives.regression import Interpretation, Regression, Times, as_it_is
from sd_scripts.library.objectives.times import QWEN_MOST, UNIFORM, Density, logit_normal, mode, resolution_shift, shifted
from sd_scripts.library.objectives.weights import flow_weight_of, weight_of
from sd_scripts.library.protocols import Kind, Path
from sd_scripts.schema.objective import FlowObjectiveOptions, ObjectiveOptions


def density_of(options: ObjectiveOptions | FlowObjectiveOptions, sides: tuple[int, int]) -> Density:
    """The density that timestep_sampling names, for latents of these sides (h, w)."""
    if isinstance(options, FlowObjectiveOptions):
        if options.timestep_sampling == "mode":
            return mode(options.mode_scale)
        if options.timestep_sampling == "sigma":
            return shifted(UNIFORM, options.discrete_flow_shift)
        if options.timestep_sampling == "flux_shift":
            return shifted(logit_normal(0.0, options.sigmoid_scale), resolution_shift(sides))
        if options.timestep_sampling == "qwen_shift":
            return shifted(logit_normal(0.0, options.sigmoid_scale), resolution_shift(sides, QWEN_MOST))
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

    def additive(prediction: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        return prediction + x_t

    def sigma_scaled(prediction: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        return x_t - t.view(-1, 1, 1, 1) * prediction

    return {"raw": as_it_is, "additive": additive, "sigma_scaled": sigma_scaled}[options.model_prediction_type]


def noise_of(options: ObjectiveOptions) -> Callable[[Tensor, noises.Draw], tuple[Tensor, Tensor]]:
    """One latent (C, h, w) -> its noise in the input and in the target."""

    def noise(x0: Tensor, draw: noises.Draw) -> tuple[Tensor, Tensor]:
        target = noises.plain(x0, draw)
        if options.noise_offset:
            target = target + noises.offset(x0, draw, options)
        if options.multires_noise_iterations:
            target = noises.multires(target, draw, options.multires_noise_iterations, options.multires_noise_discount)
        if not options.ip_noise_gamma:
            return target, target
        return target + noises.perturbation(x0, draw, options), target

    return noise


def make(options: ObjectiveOptions | FlowObjectiveOptions, path: Path, kind: Kind) -> Regression:
    """The objective of a model whose network predicts `kind` on `path`. Raises OptionError for weights that it cannot have."""
    if isinstance(options, FlowObjectiveOptions):
        return Regression(
            path,
            kind,
            times_of(options, path),
            lambda x0, draw: (noise := noises.plain(x0, draw), noise),
            distance_of(options, path),
            flow_weight_of(options),
            interpretation_of(options),
        )
    return Regression(path, kind, times_of(options, path), noise_of(options), distance_of(options, path), weight_of(options, kind, path))
