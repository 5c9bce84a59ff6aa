"""Images in another style: along the velocity of their own style towards noise, and back along that of the wanted one.

The two ways are one ordinary differential equation, dx = v(x, t) dt, so the same style gives the same image back, up to the error of the
solver. On a CPU the network sees one image at a time (two rows with guidance): matrix products of other sizes are rounded differently,
and an image shall have the same bytes whatever it is transferred with. On a GPU images are transferred together, and the company changes
the last digits.

Canonical time: t = 0 is the image, t = 1 noise, v is noise - image. Shapes: B images, C latent channels, h w latent sides; t (B,).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from sd_scripts.families.common.images import evaluating, first_of
from sd_scripts.families.common.made import check_size, state_shape
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.integrators import ORDERS, STEPS, Field, Method
from sd_scripts.library.core.protocols import EDGES, Condition, OnStep, Parts, Preview
from sd_scripts.library.core.rng import rng_for
from sd_scripts.schema.errors import OptionError, Problem

from .options import INTEGRATORS, TransferStart

if TYPE_CHECKING:
    from .model import Lgt

GUESS_TIMES = (0.2, 0.35, 0.5, 0.65, 0.8)
"""Noise levels at which guess_source compares styles."""
Sigma = Callable[[Tensor], Tensor]
"""Times (B,) -> strength of the noise (B,) that is added and taken away there."""


@dataclass(frozen=True)
class Settings:
    """How images are transferred; see schema.transfer."""

    steps: int = 15
    sampler: Method = "midpoint"
    strength: float = 1.0
    start: TransferStart = "inversion"
    cfg_scale: float = 1.0
    temperature: float = 0.0
    start_noise: float = 0.0


def num_calls(settings: Settings) -> int:
    """How often the network is asked for one image, guidance as one."""
    return ORDERS[settings.sampler] * settings.steps * (2 if settings.start == "inversion" else 1)


def transfer(
    family: Lgt,
    parts: Parts,
    latents: Tensor,
    sources: Sequence[str],
    targets: Sequence[str],
    seeds: Sequence[int],
    settings: Settings,
    on_step: OnStep | None = None,
) -> Tensor:
    """Latents (B, C, h, w), float32, of images of the source styles in the target styles, as `begin` and `generate` make them."""
    state = begin(family, parts, latents, sources, seeds, settings, on_step)
    return generate(family, parts, state, targets, seeds, settings, on_step, edges=edges_of(family, parts, latents))


def edges_of(family: Lgt, parts: Parts, latents: Tensor) -> Tensor | None:
    """Maps of edges (B, 3, h, w) of images; None for a model that is not told of them."""
    return family.edge_map(parts, latents.to(parts.device)) if family.takes_edges(parts) else None


def _conditions(family: Lgt, parts: Parts, styles: Sequence[str], edges: Tensor | None) -> list[Condition]:
    """Of styles, with what is known of edges."""
    told = family.encode_prompts(parts, styles)
    return told if edges is None else [{**condition, EDGES: one} for condition, one in zip(told, edges, strict=True)]


def begin(
    family: Lgt,
    parts: Parts,
    latents: Tensor,
    sources: Sequence[str],
    seeds: Sequence[int],
    settings: Settings,
    on_step: OnStep | None = None,
) -> Tensor:
    """The state (B, C, h, w) at noise level `strength` from which images are generated: inverted, or mixed with noise of their seeds."""
    if settings.start == "inversion":
        return invert(family, parts, latents, sources, settings, on_step, seeds)
    return mixed(latents.to(parts.device), seeds, settings.strength)


def mixed(latents: Tensor, seeds: Sequence[int], strength: float) -> Tensor:
    """(1 - strength) latents + strength noise, float32, the noise of each image (B,) that of its seed."""
    noise = torch.empty(latents.shape)
    for one, seed in zip(noise, seeds, strict=True):
        one.normal_(generator=rng_for(seed, 0, "transfer"))
    level = torch.full((len(latents),), strength, device=latents.device)
    return diffusion.add_noise(diffusion.FlowPath(), latents, noise.to(latents.device), level)


def invert(
    family: Lgt,
    parts: Parts,
    latents: Tensor,
    sources: Sequence[str],
    settings: Settings,
    on_step: OnStep | None = None,
    seeds: Sequence[int] = (),
) -> Tensor:
    """The state (B, C, h, w) at noise level `strength` that the velocity of the source style leads latents to, without guidance.

    It begins at noise level `start_noise`, to which they are mixed with the noise of the seeds; at 0 there are none. The network knows
    images with noise in them: of a clean one it says that its noise is nearly nothing, so that areas without detail come out with less
    than half the variance of noise, and are no noise that it has learned to draw from. on_step is told the steps of each group of images
    that is inverted together.
    """
    assert len(latents) == len(sources), f"{len(sources)} styles for {len(latents)} images"
    assert len(seeds) == len(latents) or not settings.start_noise, f"{len(seeds)} seeds for {len(latents)} images"
    with torch.no_grad(), evaluating(parts):
        done = []
        for rows in _groups(parts, len(latents)):
            x = latents[rows].to(parts.device).float()
            field = _field(family, parts, _conditions(family, parts, sources[rows], edges_of(family, parts, x)))
            if settings.start_noise:
                x = mixed(x, seeds[rows], settings.start_noise)
            begun = torch.full((len(x),), settings.start_noise, device=x.device)
            length = torch.full_like(begun, (settings.strength - settings.start_noise) / settings.steps)
            for number in range(settings.steps):
                x = STEPS[settings.sampler](field, x, begun + number * length, length)
                _tell(on_step, number, settings, latents[rows])
            done.append(x)
    return torch.cat(done) if done else latents


def generate(
    family: Lgt,
    parts: Parts,
    state: Tensor,
    targets: Sequence[str],
    seeds: Sequence[int],
    settings: Settings,
    on_step: OnStep | None = None,
    away: Sequence[str] | None = None,
    edges: Tensor | None = None,
) -> Tensor:
    """Latents (B, C, h, w) in the target styles from a state at noise level `strength`; fresh noise is of the seeds.

    Guidance leads away from the styles `away`, by default the average. edges: maps (B, 3, h, w) of what is transferred,
    for a model that is told of them. on_step is told the steps of each group of images that is
    generated together.
    """
    assert len(state) == len(targets) == len(seeds), f"{len(targets)} styles and {len(seeds)} seeds for {len(state)} images"
    with torch.no_grad(), evaluating(parts):
        done = []
        for rows in _groups(parts, len(state)):
            x = state[rows].to(parts.device).float()
            known = None if edges is None else edges[rows]
            goals = _conditions(family, parts, targets[rows], known)
            others = None
            if settings.cfg_scale != 1:
                others = _conditions(family, parts, [""] * len(x) if away is None else away[rows], known)
            field = _field(family, parts, goals, others, settings.cfg_scale)
            done.append(_generated(field, x, [rng_for(seed, 0, "temperature") for seed in seeds[rows]], settings, on_step))
    return torch.cat(done) if done else state


def _generated(field: Field, x: Tensor, generators: Sequence[torch.Generator], settings: Settings, on_step: OnStep | None) -> Tensor:
    level = torch.full((len(x),), settings.strength, device=x.device)
    length = -level / settings.steps
    for number in range(settings.steps):
        t, before = level + number * length, x
        # The last step adds nothing: what it added would stay in the image.
        if settings.temperature and number < settings.steps - 1:
            fresh = torch.stack([torch.randn(x.shape[1:], generator=generator) for generator in generators]).to(x)
            x = langevin_step(field, x, t, length, settings.sampler, sigma_of(settings.temperature), fresh)
        else:
            x = STEPS[settings.sampler](field, x, t, length)
        # Where the way of this step leads to when it goes on to the image.
        _tell(on_step, number, settings, x - ((t / length + 1).view(-1, *[1] * (x.ndim - 1))) * (x - before))
    return x


def sigma_of(temperature: float) -> Sigma:
    """2 temperature sqrt(t (1 - t)): the temperature half way, 0 at the image and at pure noise, so that the score term is finite."""
    return lambda t: 2 * temperature * (t * (1 - t)).sqrt()


def langevin_step(field: Field, x: Tensor, t: Tensor, step: Tensor, method: Method, sigma: Sigma, noise: Tensor) -> Tensor:
    """x at t + step (step below 0) with noise added and, by the score, as much of it taken away, so that the distribution stays.

    Backwards in time dx = (v - sigma^2 / 2 score) dt + sigma dW has the distributions of dx = v dt. On this path the mean of the noise
    given x is x + (1 - t) v, hence score = -(x + (1 - t) v) / t.
    """

    def drift(x: Tensor, t: Tensor) -> Tensor:
        velocity, at = field(x, t), t.view(-1, *[1] * (x.ndim - 1))
        return velocity + sigma(at) ** 2 / (2 * at) * (x + (1 - at) * velocity)

    spread = sigma(t) * step.abs().sqrt()
    return STEPS[method](drift, x, t, step) + spread.view(-1, *[1] * (x.ndim - 1)) * noise


def _field(
    family: Lgt, parts: Parts, conditions: Sequence[Condition], away: Sequence[Condition] | None = None, scale: float = 1.0
) -> Field:
    """The velocity with these conditions; with others to lead away from, v_away + scale (v - v_away) of one forward of 2B rows (Ho and
    Salimans 2022, arXiv 2207.12598)."""
    if away is None:
        return lambda x, t: family.denoise(parts, x, t, conditions)
    both = [*conditions, *away]

    def guided(x: Tensor, t: Tensor) -> Tensor:
        wanted, other = family.denoise(parts, torch.cat([x, x]), torch.cat([t, t]), both).chunk(2)
        return other + scale * (wanted - other)

    return guided


def guess_source(family: Lgt, parts: Parts, latents: Tensor) -> list[str]:
    """The style of each image (B, C, h, w): the one under which the velocity is predicted best, on the same noise for all.

    A diffusion classifier (Li et al. 2023, arXiv 2303.16203).
    """
    styles: tuple[str, ...] = parts.settings["styles"]
    device = parts.device
    times = torch.tensor(GUESS_TIMES, device=device)
    noise = torch.stack([torch.randn(latents.shape[1:], generator=rng_for(0, number, "guess")) for number in range(len(times))]).to(device)
    found = []
    with torch.no_grad(), evaluating(parts):
        for x0 in latents.to(device).float():
            edges = edges_of(family, parts, x0[None])
            conditions = _conditions(family, parts, styles, None if edges is None else edges.expand(len(styles), -1, -1, -1))
            clean = x0.expand_as(noise)
            x_t, velocity = (
                diffusion.add_noise(parts.path, clean, noise, times),
                diffusion.target(parts.kind, parts.path, clean, noise, times),
            )
            errors = [
                (family.denoise(parts, x_t, times, [condition] * len(times)) - velocity).square().mean().item() for condition in conditions
            ]
            found.append(styles[errors.index(min(errors))])
    return found


def render(family: Lgt, parts: Parts, requests: Sequence[Preview], on_step: OnStep | None = None) -> Tensor:
    """Images (B, 3, H, W) in [-1, 1], float32, from pure noise; the sampler auto is midpoint.

    Raises OptionError for a sampler that is none, a style that is unknown and sides that the network cannot halve.
    """
    if not requests:
        return torch.empty(0, 3, 0, 0)
    first = first_of(requests, family.grid)
    check_size(family, parts, (first.width, first.height))
    if first.sampler not in ("auto", *INTEGRATORS):
        raise OptionError(Problem("sampler", f"sampler: {first.sampler} cannot draw with this model; take {', '.join(INTEGRATORS)}"))
    sampler = cast(Method, "midpoint" if first.sampler == "auto" else first.sampler)
    settings = Settings(first.steps, sampler, start="noise", cfg_scale=first.cfg_scale)
    seeds = [request.seed for request in requests]
    nothing = torch.zeros(len(requests), *state_shape(parts, first.width, first.height))
    prompts, away = ([getattr(request, name) for request in requests] for name in ("prompt", "negative_prompt"))
    state = generate(family, parts, mixed(nothing, seeds, 1.0), prompts, seeds, settings, on_step, away)
    return torch.cat([family.decode(parts, state[rows]) for rows in _groups(parts, len(state))])


def _groups(parts: Parts, count: int) -> Iterator[slice]:
    """Rows of the images that go through the network together."""
    together = 1 if parts.device.type == "cpu" else max(1, count)
    return (slice(start, start + together) for start in range(0, count, together))


def _tell(on_step: OnStep | None, number: int, settings: Settings, clean: Tensor) -> None:
    if on_step is not None:
        on_step(number + 1, settings.steps, clean)
