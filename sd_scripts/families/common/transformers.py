"""Families whose model is one transformer with its companions: what follows from their loader, and how they draw.

Shapes: B samples, C latent channels, h w latent sides, H W the image's in pixels.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sd_scripts.library.adapters.layer_names import adaptable_layers
from sd_scripts.library.core.devices import META
from sd_scripts.library.core.protocols import Condition, DeviceMap, Dtypes, Geometry, OnStep, Parts, Preview, Version, dtype_of
from sd_scripts.library.parallel.sharding import is_sharded
from sd_scripts.runs.model_headers import Header

from . import structures, training_adapter
from .images import evaluating, first_of, told_guidance
from .samplers import schedule, watched
from .scheduled import DISTILLED, ScheduledFamily
from .tiny import made_once, tiny_parts
from .transformer_loading import Loader, scheduler_in

TOKEN = 16
"""Pixels of a token's sides, in all of these families."""
Denoise = Callable[[Tensor, Tensor, Sequence[Condition]], Tensor]
"""From latents (B, C, h, w), times (B,) and conditions to velocities."""


@dataclass(frozen=True)
class TextShape:
    """How large a text is, as far as that can be told without its tokenizer."""

    rows: int
    """Those that the transformer is given."""
    width: int
    """Numbers of a row."""
    tokens: int
    """Those that the text encoder reads, with its template and padding."""


class TransformerFamily(ScheduledFamily):
    """See protocols.ModelFamily and PublishedFamily."""

    name: ClassVar[str]
    loader: ClassVar[Loader]
    separate_texts: ClassVar[bool] = False
    adapted: ClassVar[Mapping[str, str]]
    """Regular expressions for names of linear layers that get an adapter by default, by the name of the network."""
    text: ClassVar[str] = "text"
    """The entry of conditions that `alike` is given as text."""
    tiny_settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        """Name and grid are those of the files and options that are loaded."""
        if "loader" in vars(cls):
            cls.name, cls.grid = cls.loader.spec.name, cls.loader.options.grid

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
        found = structures.published(spec, self.tiny(), options, header, self.loader.settings_of(options))
        self.loader.finish(found[0])
        return found

    @made_once
    def tiny(self) -> Parts:
        """The same classes with few layers and seeded weights, told what default options say but for tiny_settings; see ModelFamily."""
        loader = self.loader
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            networks, tokenizers = self.tiny_networks()
        options = loader.options(pretrained_model_name_or_path="tiny")
        settings = {**loader.settings_of(options), **self.tiny_settings}
        return tiny_parts(networks, tokenizers, scheduler_in(loader.spec.configs), settings, loader.denoising_of(options, {}))

    def tiny_networks(self) -> tuple[dict[str, nn.Module], dict[str, Any]]:
        """Small networks, whose weights come from torch's generator as it is, and tokenizers, by their names in Parts."""
        raise NotImplementedError

    def text_shape(self, parts: Parts, num_tokens: int, num_controls: int) -> TextShape:
        """The text of a caption of so many tokens with so many control images; by it texts_like and read_like know theirs."""
        raise NotImplementedError

    def texts_like(self, parts: Parts, caption: str, batch: int, num_controls: int) -> list[Condition]:
        """Rows alone; see ModelFamily."""
        shape = self.text_shape(parts, structures.num_tokens(caption), num_controls)
        return structures.texts_of(parts, batch, {self.text: (shape.rows, shape.width)})

    def read_like(self, parts: Parts, name: str, caption: str, batch: int) -> Tensor:
        """What it makes of captions in their template; see ModelFamily."""
        return structures.read(parts.text_encoders[name], batch, self.text_shape(parts, structures.num_tokens(caption), 0).tokens)

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """The text part of each caption's condition, its `rows`. Each caption is encoded alone, so its rows do not depend on the others.
        Runs with gradient when grad mode is on."""
        return [{self.text: self.rows(parts, caption)} for caption in captions]

    def rows(self, parts: Parts, caption: str) -> Tensor:
        """What the transformer is given of a caption, (L, D), in the encoder's precision."""
        raise NotImplementedError

    def size_condition(self, geometry: Geometry) -> Condition:
        """Nothing: the model is not told how an image was cut."""
        return {}

    def save(self, parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
        """Writes the model: safetensors is the transformer alone in the published layout, diffusers a folder with everything."""
        self.loader.save(parts, path, save_model_as, dtype, metadata)

    def adapter_targets(self, parts: Parts, conv: bool) -> dict[str, list[str]]:
        """Names of the layers that get an adapter by default, by module name: those of `adapted`, in the order of the modules, also under a
        training adapter; conv changes nothing, there are no convolutions."""
        layers = {name: adaptable_layers(parts.modules()[name]) for name in self.adapted}
        return {
            name: [path for path, layer in layers[name].items() if isinstance(layer, nn.Linear) and re.search(inside, path)]
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

        def velocity(x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
            device = x_t.device
            text = torch.stack([condition[self.text] for condition in conditions]).to(device, dtype_of(parts.backbone))
            images = [torch.stack(same).to(device) for same in zip(*map(controls_of, conditions), strict=True)]
            return self.alike(parts, x_t, t.to(device, torch.float32), text, images)

        return in_groups(parts.backbone, x_t, t, conditions, key, velocity)

    def alike(self, parts: Parts, x_t: Tensor, t: Tensor, text: Tensor, images: Sequence[Tensor]) -> Tensor:
        """`denoise` of samples whose texts, and reference images, have one shape.

        t (B,) float32; text (B, L, D) in the network's precision; images (B, C, h_i, w_i), those of all samples at one place together.
        """
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
        channels, factor = self.latent_in(parts)
        latents = noise([request.seed for request in requests], channels, first.height // factor, first.width // factor).to(device)
        for clock in scheduler.timesteps:
            t = clock.expand(len(latents)) / 1000
            velocity = self.denoise(parts, latents, t, positive)
            if negative is not None:
                velocity = self.guided(velocity, self.denoise(parts, latents, t, negative), first.cfg_scale)
            latents = scheduler.step(velocity, clock, latents, return_dict=False)[0]
        return latents

    def guided(self, positive: Tensor, negative: Tensor, scale: float) -> Tensor:
        """Velocities (B, C, h, w) led away from those of the negative prompts."""
        return negative + scale * (positive - negative)


def noise(seeds: Sequence[int], channels: int, height: int, width: int) -> Tensor:
    """Noise (B, C, h, w), float32, of each seed alone: the numbers that diffusers' pipelines draw for one image."""
    return torch.cat([torch.randn((1, channels, height, width), generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def controls_of(condition: Condition) -> list[Tensor]:
    """The encoded control images of a sample, (C, h, w) each, in their order."""
    found: list[Tensor] = []
    while (control := condition.get(f"control_{len(found)}")) is not None:
        found.append(control)
    return found


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
