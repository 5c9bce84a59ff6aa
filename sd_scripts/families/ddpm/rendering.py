"""Images drawn with a model of the family ddpm: guidance, clamping and self-conditioning around the samplers of `solvers`.

The noise of an image comes from a generator of its own. On a CPU the network sees one image at a time (two rows with guidance): matrix
products of other sizes are rounded differently, and an image shall have the same bytes whatever it is drawn with. On a GPU images are
drawn together, and the company changes the last digits.

Shapes: B images, C channels, h w sides of the state, H W those of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from sd_scripts.families.common.images import evaluating
from sd_scripts.families.common.made import check_size, state_shape
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.diffusion import NoiseSchedulePath
from sd_scripts.library.core.protocols import ESTIMATE, OnStep, Parts, Preview
from sd_scripts.library.core.rng import rng_for
from sd_scripts.schema.errors import OptionError, Problem

from .loading import PixelSpace
from .options import DDPM_SAMPLERS, Clamp, DdpmSampler, StepSpacing
from .solvers import Denoise, Level, clock_of, levels_of, solve, stepper

if TYPE_CHECKING:
    from .model import Ddpm

DYNAMIC_QUANTILE = 0.995


@dataclass(frozen=True)
class Settings:
    """How images are drawn, beside what a Preview says; see schema.drawing."""

    spacing: StepSpacing = "trailing"
    eta: float = 0.0
    clamp: Clamp = "auto"
    guidance_rescale: float = 0.0


@dataclass(frozen=True)
class Drawn:
    """pixels (B, 3, H, W) in [-1, 1], float32; num_calls is how often the network was asked for one image, counted, guidance as one."""

    pixels: Tensor
    num_calls: int


@dataclass(frozen=True)
class _At:
    """A path that stands still, so that conversions have the coefficients of a level between two steps too."""

    level: Level

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(t, self.level.a), torch.full_like(t, self.level.s)


def render(family: Ddpm, parts: Parts, requests: Sequence[Preview], settings: Settings | None = None) -> Tensor:
    """Images (B, 3, H, W) in [-1, 1], float32, of requests of equal size, steps, cfg_scale and sampler; see `draw`."""
    return draw(family, parts, requests, settings or Settings()).pixels


def draw(family: Ddpm, parts: Parts, requests: Sequence[Preview], settings: Settings, on_step: OnStep | None = None) -> Drawn:
    """Images of requests of equal size, steps, cfg_scale and sampler, each from noise of its own seed; the sampler auto is ddim.

    on_step is told the steps of each group of images that is drawn together. Leaves devices, modes and the global random state as they
    were. Raises OptionError for a sampler that is none, more steps than the schedule has, and sides that the network cannot halve.
    """
    if not requests:
        return Drawn(torch.empty(0, 3, 0, 0), 0)
    first = requests[0]
    same = {(r.width, r.height, r.steps, r.cfg_scale, r.sampler) for r in requests}
    assert len(same) == 1, f"one batch has one size, steps, cfg_scale and sampler, not {same}"
    check_size(family, parts, (first.width, first.height))
    if first.sampler not in ("auto", *DDPM_SAMPLERS):
        raise OptionError(Problem("sampler", f"sampler: {first.sampler} cannot draw with this model; take {', '.join(DDPM_SAMPLERS)}"))
    together = 1 if parts.bring(parts.backbone).type == "cpu" else len(requests)
    groups = [requests[start : start + together] for start in range(0, len(requests), together)]
    with torch.no_grad(), evaluating(parts):
        drawn = [_draw(family, parts, group, settings, on_step) for group in groups]
    return Drawn(torch.cat([one.pixels for one in drawn]), drawn[0].num_calls)


def _draw(family: Ddpm, parts: Parts, requests: Sequence[Preview], settings: Settings, on_step: OnStep | None) -> Drawn:
    first = requests[0]
    device = parts.bring(parts.backbone)
    generators = [rng_for(request.seed, 0, "drawing") for request in requests]
    shape = state_shape(parts, first.width, first.height)

    def fresh() -> Tensor:
        return torch.stack([torch.randn(shape, generator=generator) for generator in generators]).to(device)

    asked, clean = 0, torch.empty(0)
    estimate_of = _denoiser(family, parts, requests, settings)

    def denoise(x: Tensor, level: Level) -> Tensor:
        nonlocal asked, clean
        asked, clean = asked + 1, estimate_of(x, level)
        return clean

    def told(step: int, total: int, state: Tensor) -> None:
        if on_step is not None:
            on_step(step, total, clean)

    levels = levels_of(_path(parts), first.steps, settings.spacing)
    state = solve(stepper(sampler_of(first), denoise, fresh, settings.eta), fresh(), levels, told)
    return Drawn(family.decode(parts, state), asked)


def sampler_of(request: Preview) -> DdpmSampler:
    """The sampler of a request; auto is ddim."""
    return cast(DdpmSampler, "ddim" if request.sampler == "auto" else request.sampler)


def in_pixels(parts: Parts) -> bool:
    """Whether the model works on pixels, without a VAE."""
    return isinstance(parts.vae, PixelSpace)


def _path(parts: Parts) -> NoiseSchedulePath:
    assert isinstance(parts.path, NoiseSchedulePath), f"a model of noise schedules, not of {type(parts.path).__name__}"
    return parts.path


def _denoiser(family: Ddpm, parts: Parts, requests: Sequence[Preview], settings: Settings) -> Denoise:
    """The guided and clamped estimate of the images, one forward of B rows, or of 2B with guidance.

    Guidance is n + cfg (p - n) of the predictions p for the prompt and n for the negative prompt (Ho and Salimans 2022, arXiv 2207.12598).
    With self-conditioning each row is given its own last estimate, as in training: without guidance, not clamped, zeros at first.
    """
    scale = requests[0].cfg_scale
    is_guided = scale != 1
    texts = [request.prompt for request in requests] + ([request.negative_prompt for request in requests] if is_guided else [])
    conditions = family.encode_prompts(parts, texts)
    clock = clock_of(_path(parts))
    clamp = ("clamp" if in_pixels(parts) else "none") if settings.clamp == "auto" else settings.clamp
    self_conditioned = family.is_self_conditioned(parts)
    last: Tensor | None = None

    def denoise(x: Tensor, level: Level) -> Tensor:
        nonlocal last
        rows = torch.cat([x, x]) if is_guided else x
        told = conditions if last is None else [{**condition, ESTIMATE: own} for condition, own in zip(conditions, last, strict=True)]
        prediction = family.predict(parts, rows, torch.full((len(rows),), clock(level), device=x.device), told)
        if self_conditioned:
            last = _estimate(parts, rows, prediction, level)
        if is_guided:
            positive, negative = prediction.chunk(2)
            prediction = rescaled(negative + scale * (positive - negative), positive, settings.guidance_rescale)
        return clamped(_estimate(parts, x, prediction, level), clamp)

    return denoise


def _estimate(parts: Parts, x: Tensor, prediction: Tensor, level: Level) -> Tensor:
    """x0 that a prediction implies at a level."""
    return diffusion.to_x0(parts.kind, _At(level), x, prediction, torch.zeros(len(x), device=x.device))


def rescaled(guided: Tensor, positive: Tensor, share: float) -> Tensor:
    """A guided prediction (B, ...), its deviation brought back to that of the unguided one by this share (Lin et al. 2023, section 3.4)."""
    if not share:
        return guided
    dims = tuple(range(1, guided.ndim))
    factor = positive.std(dim=dims, keepdim=True) / guided.std(dim=dims, keepdim=True)
    return guided * (share * factor + 1 - share)


def clamped(estimate: Tensor, clamp: Clamp) -> Tensor:
    """Estimates (B, ...) of the image, kept to its range.

    dynamic divides by the 99.5 % quantile of each image's absolute values where that is above 1 (Saharia et al. 2022, arXiv 2205.11487).
    """
    if clamp == "clamp":
        return estimate.clamp(-1, 1)
    if clamp == "dynamic":
        # torch.quantile takes no more than 2**24 values.
        values = estimate.abs().flatten(1)
        rank = max(1, round(DYNAMIC_QUANTILE * values.shape[1]))
        limit = values.kthvalue(rank, dim=1).values.clamp(min=1).view(-1, *[1] * (estimate.ndim - 1))
        return estimate.clamp(-limit, limit) / limit
    return estimate
