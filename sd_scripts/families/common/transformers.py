"""Families whose model is one transformer with its companions: what follows from their loader, and how they draw.

Shapes: B samples, C latent channels, h w latent sides, H W the image's in pixels.
"""

from __future__ import annotations

import itertools
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sd_scripts.library.core.devices import META
from sd_scripts.library.core.protocols import Condition, DeviceMap, Dtypes, Geometry, OnStep, Parts, Preview, Version
from sd_scripts.library.parallel.sharding import is_sharded
from sd_scripts.runs.model_headers import Header

from . import structures, training_adapter
from .images import evaluating, first_of, told_guidance
from .samplers import schedule, watched
from .scheduled import DISTILLED, ScheduledFamily
from .transformer_loading import Loader

TOKEN = 16
"""Pixels of a token's sides, in all of these families."""
Denoise = Callable[[Tensor, Tensor, Sequence[Condition]], Tensor]
"""From latents (B, C, h, w), times (B,) and conditions to velocities."""


class TransformerFamily(ScheduledFamily):
    """See protocols.ModelFamily and PublishedFamily."""

    loader: ClassVar[Loader]
    separate_texts: ClassVar[bool] = False
    adapted: ClassVar[Mapping[str, str]]
    """Regular expressions for names of linear layers that get an adapter by default, by the name of the network."""

    def load(self, options: Any, device: DeviceMap, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
        """See Loader.load."""
        parts = self.loader.load(options, device, dtype, without, training_adapter.checks(options))
        return parts if parts.device == META else self.equipped(parts, options, parts.device)

    def equipped(self, parts: Parts, options: Any, device: torch.device) -> Parts:
        """See training_adapter.equipped."""
        return training_adapter.equipped(parts, options)

    def version(self, parts: Parts) -> Version:
        """See ModelFamily."""
        return self.loader.version

    def published(self, options: Any, header: Header | None) -> tuple[Parts, str]:
        """The version that the name says; see PublishedFamily."""
        spec = self.loader.named(options.pretrained_model_name_or_path)
        found = structures.published(spec, self.tiny(), options, header, self.loader.settings(options, None))
        self.loader.finish(found[0])
        return found

    @abstractmethod
    def tiny(self) -> Parts:
        """See ModelFamily."""

    def size_condition(self, geometry: Geometry) -> Condition:
        """Nothing: the model is not told how an image was cut."""
        return {}

    def save(self, parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
        """Writes the model: safetensors is the transformer alone in the published layout, diffusers a folder with everything."""
        self.loader.save(parts, path, save_model_as, dtype, metadata)

    def adapter_targets(self, parts: Parts, conv: bool) -> dict[str, list[str]]:
        """Names of the layers that get an adapter by default, by module name: those of `adapted`, in the order of the modules; conv changes
        nothing, there are no convolutions."""
        modules = parts.modules()
        return {
            name: [path for path, layer in modules[name].named_modules() if isinstance(layer, nn.Linear) and re.search(inside, path)]
            for name, inside in self.adapted.items()
        }

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The network's velocity noise - x0 at canonical times t (B,); same shape as x_t, float32.

        Samples whose texts have one length and whose reference images have the same sizes go together, so that nothing is padded or masked.
        Times reach their embedding in float32, whatever the precision of the network.
        """
        parts.bring(parts.backbone)

        def key(condition: Condition) -> Hashable:
            return frozenset((name, value.shape) for name, value in condition.items())

        return in_groups(parts.backbone, x_t, t, conditions, key, lambda *samples: self.alike(parts, *samples))

    def alike(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """`denoise` of samples whose conditions have the same shapes."""
        raise NotImplementedError

    @torch.no_grad()
    def render(self, parts: Parts, requests: Sequence[Preview], on_step: OnStep | None = None) -> Tensor:
        """The images of `preview` before rounding: (B, 3, H, W) in [-1, 1], float32; without a training adapter, and without guidance where
        the model is distilled."""
        if not requests:
            return torch.empty(0, 3, 0, 0)
        with evaluating(parts), parts.without_training_adapter():
            if parts.denoising.get(DISTILLED):
                requests = [replace(request, cfg_scale=1.0) for request in requests]
            positive, negative = self.conditions_of(parts, requests)
            return self.decode(parts, self.draw(parts, requests, positive, negative, on_step))

    @torch.no_grad()
    def draw(
        self,
        parts: Parts,
        requests: Sequence[Preview],
        positive: Sequence[Condition],
        negative: Sequence[Condition] | None,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """Scaled latents (B, C, h, w), float32, of requests with these conditions, each from noise of its own seed."""
        first = first_of(requests, self.grid)
        parts, device = told_guidance(parts, first.guidance), parts.bring(parts.backbone)
        num_tokens = first.height * first.width // TOKEN**2
        mu = self.mu(parts, num_tokens, first.steps)
        scheduler = watched(schedule(first.sampler, parts.scheduler_config, first.steps, num_tokens, device, mu), on_step)
        latents = self._noise(parts, requests).to(device)
        for clock in scheduler.timesteps:
            t = clock.expand(len(latents)) / 1000
            velocity = self.denoise(parts, latents, t, positive)
            if negative is not None:
                away = self.denoise(parts, latents, t, negative)
                velocity = away + first.cfg_scale * (velocity - away)
            latents = scheduler.step(velocity, clock, latents, return_dict=False)[0]
        return latents

    def _noise(self, parts: Parts, requests: Sequence[Preview]) -> Tensor:
        """Noise (B, C, h, w) of requests of one size, each of its seed: the numbers that diffusers' pipelines draw for one image."""
        channels, factor = self.latent_in(parts)
        shape = (1, channels, requests[0].height // factor, requests[0].width // factor)
        return torch.cat([torch.randn(shape, generator=torch.Generator().manual_seed(request.seed)) for request in requests])


def in_groups(
    network: nn.Module, x_t: Tensor, t: Tensor, conditions: Sequence[Condition], key: Callable[[Condition], Hashable], denoise: Denoise
) -> Tensor:
    """`denoise` of a batch of which only samples with one key can go through the network together; in the batch's order.

    A sharded network takes them one by one, because all processes must call it equally often.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, condition in enumerate(conditions):
        groups.setdefault(index if is_sharded(network) else key(condition), []).append(index)
    if len(groups) == 1:
        return denoise(x_t, t, conditions)
    found = [denoise(x_t[group], t[group], [conditions[index] for index in group]) for group in groups.values()]
    order = [index for group in groups.values() for index in group]
    return torch.cat(found)[torch.tensor(order, device=x_t.device).argsort()]


@contextmanager
def given_first(module: nn.Module, *values: Tensor) -> Iterator[None]:
    """Within the block the module gets these values in place of its first argument, one in each call, again from the first after the last.

    For times: diffusers rounds them to the precision of the network before it embeds them, to three digits in bfloat16.
    """

    following = itertools.cycle(values)

    def given(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (next(following), *arguments[1:])

    handle = module.register_forward_pre_hook(given)
    try:
        yield
    finally:
        handle.remove()
