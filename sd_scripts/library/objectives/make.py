"""From options to an objective."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sd_scripts.library.diffusion import NoiseSchedulePath
from sd_scripts.library.objectives import noise as noises
from sd_scripts.library.objectives.distances import distance_of
from sd_scripts.library.objectives.regression import Regression
from sd_scripts.library.objectives.times import UNIFORM, Density, logit_normal, shifted
from sd_scripts.library.objectives.weights import weight_of
from sd_scripts.library.protocols import Kind, Path
from sd_scripts.schema.objective import ObjectiveOptions


def density_of(options: ObjectiveOptions) -> Density:
    """The density that timestep_sampling names."""
    return {
        "uniform": lambda: UNIFORM,
        "sigmoid": lambda: logit_normal(0.0, options.sigmoid_scale),
        "logit_normal": lambda: logit_normal(options.logit_mean, options.logit_std),
        "shift": lambda: shifted(logit_normal(0.0, options.sigmoid_scale), options.discrete_flow_shift),
    }[options.timestep_sampling]()


def times_of(options: ObjectiveOptions, path: Path) -> Callable[[Tensor], Tensor]:
    """Uniform numbers (B,) -> training times (B,); on a discrete schedule the time of the step that the density falls into."""
    density = density_of(options)
    low, high = options.min_timestep / 1000, options.max_timestep / 1000
    num_steps = path.num_steps if isinstance(path, NoiseSchedulePath) else 0
    last_step = max(0, -(-options.max_timestep * num_steps // 1000) - 1)

    def times(u: Tensor) -> Tensor:
        t = density.within(low, high, u)
        if isinstance(path, NoiseSchedulePath):
            return path.times((t * num_steps).floor().long().clamp(0, last_step))
        # t = 0 has nothing to learn from and divides by zero in samplers; float32 keeps 1e-5 apart from it.
        return t.clamp(1e-5, 1.0).float()

    return times


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


def make(options: ObjectiveOptions, path: Path, kind: Kind) -> Regression:
    """The objective of a model whose network predicts `kind` on `path`. Raises OptionError for weights that it cannot have."""
    return Regression(path, kind, times_of(options, path), noise_of(options), distance_of(options, path), weight_of(options, kind, path))
