"""The energy of transferred latents: how far they are from the look of the wanted style, and from what stood where before.

A sample is led up to a noise level t0, by the velocity of its own style or by mixing it with noise, and brought back to the image by the
velocity towards its wanted style. The gradient goes through the way back. The loss is

    w_flow flow + w_style s SWD + w_content SSM + w_edges edges + w_low low + w_velocity |v|^2 + w_velocity_tv TV(v),

s the weight of the wanted style, SWD and SSM of where it arrives (`transport`, `similarity`), edges and low the difference of maps of
edges (`edges`) and the blurred difference there, v the velocity on the way, and flow conditional flow matching of its own style
(Lipman et al. 2023, arXiv 2210.02747).

Shapes: B samples, C latent channels, h w latent sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from sd_scripts.library.core import diffusion
from sd_scripts.library.core.integrators import ORDERS, integrate
from sd_scripts.library.core.protocols import EDGES, Batch, Denoiser, Losses, Path
from sd_scripts.library.core.rng import rng_for
from sd_scripts.library.objectives.regression import chosen_rows
from sd_scripts.schema.errors import refuse

from .edges import edge_difference
from .options import LgtObjectiveOptions
from .similarity import chosen_positions, self_similarity
from .transport import directions, sliced_wasserstein


@dataclass(frozen=True)
class Energy:
    """The objective of style transfer, for networks that predict a velocity."""

    path: Path
    options: LgtObjectiveOptions

    @cached_property
    def weights(self) -> dict[str, float]:
        """Weight of each part of the loss that has one above 0. The network is asked for nothing that only the others need."""
        options = self.options
        weights = {
            "flow": options.w_flow,
            "swd": options.w_style,
            "ssm": options.w_content,
            "edges": options.w_edges,
            "low": options.w_low,
            "velocity": options.w_velocity,
            "velocity_tv": options.w_velocity_tv,
        }
        return {name: weight for name, weight in weights.items() if weight}

    @cached_property
    def scales(self) -> dict[int, float]:
        """Weight of each side of patches of the style term."""
        weights = self.options.swd_scale_weights or [1.0] * len(self.options.swd_scales)
        return {size: weight for size, weight in zip(self.options.swd_scales, weights, strict=True) if weight}

    def __call__(self, model: Denoiser, batch: Batch, seed: int) -> Losses:
        """Loss of each sample (B,), times its weight; the log gets each part of it before the part's weight, under its name in `weights`.

        Raises OptionError for latents that are too small for what is compared in them.
        """
        parts = self._flow(model, batch, seed) if "flow" in self.weights else {}
        # Held-out images are of no step, and see everything.
        if self.weights.keys() - {"flow"} and not 0 <= batch.step < self.options.energy_from_step:
            parts |= self._transfer(model, batch, seed)
        weights: dict[str, float | Tensor] = {**self.weights}
        if "swd" in weights:
            of_style = self.options.weight_of_style
            weights["swd"] = self.options.w_style * torch.tensor([of_style.get(goal, 1.0) for goal in batch.goals]).to(batch.x0.device)
        loss = torch.stack([weights[name] * value for name, value in parts.items()]).sum(dim=0)
        return Losses(loss * batch.weights, {name: value.detach() for name, value in parts.items()})

    def _flow(self, model: Denoiser, batch: Batch, seed: int) -> dict[str, Tensor]:
        """The mean squared error of the velocity, at a time and with noise of the sample's own."""
        t = drawn_times(batch, seed, "time")
        noise = drawn_noise(batch, seed, "noise")
        velocity = self._told_edges(model, batch, seed)(diffusion.add_noise(self.path, batch.x0, noise, t), t)
        wanted = diffusion.target(model.kind, self.path, batch.x0, noise, t)
        return {"flow": (velocity - wanted).square().mean(dim=(1, 2, 3))}

    def _told_edges(self, model: Denoiser, batch: Batch, seed: int) -> Denoiser:
        """The denoiser told where the edges of each sample are, with some noise, or for a share of the samples nothing."""
        if not model.takes_edges:
            return model
        levels, chances = (drawn_times(batch, seed, stream) for stream in ("edge noise level", "edge dropout"))
        maps = self._back_translated(model, batch, model.edges(batch.x0), seed)
        noise = drawn_noise(batch, seed, "edge noise", maps.shape[1])
        maps = maps + (self.options.edge_noise * levels).view(-1, 1, 1, 1) * noise
        kept = (chances >= self.options.edge_dropout_rate).view(-1, 1, 1, 1)
        return model.told([{EDGES: one} for one in maps * kept])

    def _back_translated(self, model: Denoiser, batch: Batch, maps: Tensor, seed: int) -> Tensor:
        """The maps of edges (B, 3, h, w), of a share of the samples those of what the model draws from noise with them in the wanted style.

        Training on real samples told of made ones is back-translation (Sennrich et al. 2016, arXiv 1511.06709).
        """
        options = self.options
        if not options.back_translation_rate or 0 <= batch.step < options.energy_from_step:
            return maps
        rows, count = chosen_rows(drawn_times(batch, seed, "back-translation") < options.back_translation_rate, model)
        if not rows:
            return maps
        noise = drawn_noise(batch, seed, "back-translation noise")[rows]
        towards = model.only(rows).told([{**batch.towards[row], EDGES: maps[row]} for row in rows])
        ones = torch.ones(len(rows), device=noise.device)
        with torch.no_grad():
            made = integrate(towards, noise, ones, torch.zeros_like(ones), options.ode_integration_steps, options.integrator)
        return maps.index_copy(0, torch.tensor(rows, device=maps.device), model.edges(made)) if count else maps

    def _transfer(self, model: Denoiser, batch: Batch, seed: int) -> dict[str, Tensor]:
        """What the parts other than flow are, of latents on their way from a noise level of their own to the image, and there."""
        options = self.options
        problems = options.size_problems({(latents.shape[-2], latents.shape[-1]) for latents in (batch.x0, *batch.references)})
        refuse(problems)
        if model.takes_edges:
            model = model.told([{EDGES: one} for one in model.edges(batch.x0)])
        start = options.min_start + (options.max_start - options.min_start) * drawn_times(batch, seed, "start")
        x = self._begun(model, batch, start, seed)
        towards = model.told(batch.towards)
        met: list[Tensor] = []
        num_calls = options.ode_integration_steps * ORDERS[options.integrator]

        def field(x: Tensor, t: Tensor) -> Tensor:
            velocity = towards(x, t)
            sizes = self._sizes(velocity)
            # Calls beyond these compute again what the backward pass needs, and would keep all of it alive here.
            if len(met) < num_calls:
                met.append(sizes)
            return velocity

        x = integrate(
            field, x, start, torch.zeros_like(start), options.ode_integration_steps, options.integrator, recompute=options.checkpoint_steps
        )
        parts: dict[str, Tensor] = {}
        if "swd" in self.weights:
            parts["swd"] = self._style(x, batch, seed)
        if "ssm" in self.weights:
            parts["ssm"] = self_similarity(x, batch.x0, options.descriptor_size, self._positions(batch, seed))
        if "edges" in self.weights:
            parts["edges"] = edge_difference(x, batch.x0)
        if "low" in self.weights:
            parts["low"] = blurred(x - batch.x0, options.low_pass_size).square().mean(dim=(1, 2, 3))
        names = [name for name in ("velocity", "velocity_tv") if name in self.weights]
        return parts | dict(zip(names, torch.stack(met).mean(dim=0)))

    def _begun(self, model: Denoiser, batch: Batch, start: Tensor, seed: int) -> Tensor:
        """The samples (B, C, h, w) at the noise levels `start` (B,), without gradient."""
        options = self.options
        if options.energy_start == "noise":
            return diffusion.add_noise(self.path, batch.x0, drawn_noise(batch, seed, "start noise"), start)
        with torch.no_grad():
            return integrate(model, batch.x0, torch.zeros_like(start), start, options.ode_integration_steps, options.integrator)

    def _sizes(self, velocity: Tensor) -> Tensor:
        """What the velocity terms are at one moment, as far as they have weights: (0 to 2, B)."""
        sizes = [velocity.new_zeros(0, len(velocity))]
        if "velocity" in self.weights:
            sizes.append(velocity.square().mean(dim=(1, 2, 3))[None])
        if "velocity_tv" in self.weights:
            sizes.append(sum(velocity.diff(dim=along).abs().mean(dim=(1, 2, 3)) for along in (2, 3))[None])
        return torch.cat(sizes)

    def _positions(self, batch: Batch, seed: int) -> Tensor | None:
        """The places that the content term compares in each sample (B, M); None where all are."""
        count, most = batch.x0.shape[-2] * batch.x0.shape[-1], self.options.content_positions
        if count <= most:
            return None
        return torch.stack([chosen_positions(count, most, rng_for(seed, number, "content positions")) for number in batch.numbers.tolist()])

    def _style(self, x: Tensor, batch: Batch, seed: int) -> Tensor:
        """The distance of each sample, or of all with its goal together, to the references: (B,)."""
        groups = self._compared_together(batch.goals)
        numbers = batch.numbers.tolist()
        found = [x[rows] for rows in groups]
        wanted = [of_equal_sizes([batch.references[row] for row in rows]) for rows in groups]
        firsts = [min(numbers[row] for row in rows) if self.options.projections == "fresh" else 0 for rows in groups]
        total = torch.zeros(len(groups), device=x.device)
        for size, weight in self.scales.items():
            dimension = x.shape[1] * size * size
            drawn = {
                first: directions(dimension, self.options.num_projections, rng_for(seed, first, f"directions/{size}")).to(x.device)
                for first in set(firsts)
            }
            total = total + weight * sliced_wasserstein(found, wanted, [drawn[first] for first in firsts], size)
        group_of = {row: place for place, rows in enumerate(groups) for row in rows}
        return total[[group_of[row] for row in range(len(numbers))]]

    def _compared_together(self, goals: Sequence[str]) -> list[list[int]]:
        """The rows of a batch in sets whose patches are compared with the references together: never of different goals."""
        if self.options.swd_pooling == "sample":
            return [[row] for row in range(len(goals))]
        groups: dict[str, list[int]] = {}
        for row, goal in enumerate(goals):
            groups.setdefault(goal, []).append(row)
        return list(groups.values())


def drawn_times(batch: Batch, seed: int, stream: str) -> Tensor:
    """A uniform number of each sample (B,), float32, on the batch's device."""
    uniform = [torch.rand((), generator=rng_for(seed, number, stream), dtype=torch.float64) for number in batch.numbers.tolist()]
    return torch.stack(uniform).float().to(batch.x0.device, non_blocking=True)


def drawn_noise(batch: Batch, seed: int, stream: str, channels: int | None = None) -> Tensor:
    """Normal noise of each sample (B, C, h, w), float32, on the batch's device; with as many channels as x0 unless it is said."""
    shape = (channels or batch.x0.shape[1], *batch.x0.shape[-2:])
    noise = [torch.randn(shape, generator=rng_for(seed, number, stream)) for number in batch.numbers.tolist()]
    return torch.stack(noise).to(batch.x0.device, non_blocking=True)


def blurred(latents: Tensor, size: int) -> Tensor:
    """Means over squares of size x size around each position, of what lies inside the image."""
    return F.avg_pool2d(latents, size, stride=1, padding=size // 2, count_include_pad=False)


def of_equal_sizes(latents: Sequence[Tensor]) -> list[Tensor]:
    """Latents (R, C, h, w), those of equal sides in one tensor."""
    by_sides: dict[torch.Size, list[Tensor]] = {}
    for one in latents:
        by_sides.setdefault(one.shape[-2:], []).append(one)
    return [torch.cat(some) for some in by_sides.values()]
