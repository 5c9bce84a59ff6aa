"""What the SD and SDXL families share: reading prompts with CLIP, asking the UNet, its layers, rendering, small networks.

Shapes: B samples, C latent channels, h w latent sides, L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from sd_scripts.library.core.protocols import Condition, OnStep, Parts, Preview, dtype_of
from sd_scripts.library.loading.common import FamilySpec, read_json

from . import structures, tiny
from .clip_prompts import tokenize
from .comfyui_levels import Graph
from .images import decode, evaluating, first_of
from .samplers import scheduler_for, watched
from .scheduled import ScheduledFamily

CHUNK_TOKENS = 75
"""Tokens of a chunk as max_token_length counts them, without start and end."""


@dataclass(frozen=True)
class Encoded:
    """Captions through one text encoder."""

    states: Tensor
    """(B, L, D), the chunks of a caption one after the other."""
    output: Any
    """What the encoder gave for all chunks, (B * chunks, ...)."""
    num_chunks: int

    def first_chunks(self, values: Tensor) -> Tensor:
        """Of values (B * chunks, ...) those of each caption's first chunk."""
        return values.unflatten(0, (-1, self.num_chunks))[:, 0]


def encode_captions(parts: Parts, name: str, captions: Sequence[str], states_of: Callable[[nn.Module, Any], Tensor]) -> Encoded:
    """Captions through text encoder `name`; states_of takes the wanted hidden states (.., D) from the encoder's output.

    Longer captions than one chunk are encoded chunk by chunk, chunks joined along L. Runs with gradient when grad mode is on.
    """
    num_chunks = parts.settings["max_token_length"] // CHUNK_TOKENS
    encoder = parts.text_encoders[name]
    tokens = tokenize(parts.tokenizers[name], captions, num_chunks, parts.settings["weighted_captions"])
    device = parts.bring(encoder)
    output = encoder(tokens.ids.flatten(0, 1).to(device), output_hidden_states=True)
    states = states_of(encoder, output)
    if parts.settings["weighted_captions"]:
        states = states * tokens.weights.flatten(0, 1).to(device)[..., None].to(states.dtype)
    return Encoded(states.unflatten(0, tokens.ids.shape[:2]).flatten(1, 2), output, num_chunks)


def adapter_targets(parts: Parts, conv: bool) -> dict[str, list[str]]:
    """Names of the layers that get an adapter by default, by module name.

    backbone: linear layers and 1x1 convolutions inside the transformers; conv adds every layer of the ResNet, down- and upsampling
    blocks. Text encoders: attention and MLP.
    """
    blocks = (Transformer2DModel, *((ResnetBlock2D, Downsample2D, Upsample2D) if conv else ()))
    targets = {"backbone": _layers_within(parts.backbone, blocks)}
    for name, encoder in parts.text_encoders.items():
        targets[name] = [path for path, layer in encoder.named_modules() if isinstance(layer, nn.Linear) and ".layers." in f".{path}"]
    return targets


def _layers_within(module: nn.Module, blocks: tuple[type[nn.Module], ...]) -> list[str]:
    """Names of the linear and convolution layers inside blocks of these classes, in the order of the module."""
    roots = [path for path, block in module.named_modules() if isinstance(block, blocks)]
    inside = tuple(f"{root}." for root in roots)
    return [path for path, layer in module.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d) and path.startswith(inside)]


class UNetFamily(ScheduledFamily):
    """Families whose pipelines read prompts with CLIP and ask a UNet; see protocols.ModelFamily."""

    latent: ClassVar[tuple[int, int]] = (4, 8)
    graph: ClassVar[Graph] = Graph()
    separate_texts: ClassVar[bool] = False
    texts: ClassVar[Mapping[str, str]] = {"prompt_embeds": "prompt_embeds"}
    """The pipeline's name of each entry of a text's condition, by ours."""
    added: ClassVar[Mapping[str, str]] = {}
    """The UNet's name of each further entry of a condition, by ours."""

    def pipeline(self, parts: Parts, scheduler: Any) -> Any:
        """diffusers' pipeline with this scheduler, without VAE and text encoders, so that it runs on the device of its UNet wherever the
        others are; see images.pipeline_class."""
        raise NotImplementedError

    def read_like(self, parts: Parts, name: str, caption: str, batch: int) -> Tensor:
        """What CLIP makes of a chunk; see ModelFamily."""
        return structures.read_clip(parts.text_encoders[name], batch)

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The network's prediction, of kind parts.kind, at canonical times t (B,); same shape as x_t, float32."""
        parts.bring(parts.backbone)
        dtype = dtype_of(parts.backbone)

        def stack(name: str) -> Tensor:
            return torch.stack([condition[name] for condition in conditions]).to(x_t.device, dtype)

        prediction = parts.backbone(
            x_t.to(dtype),
            parts.path.model_times(t).to(x_t.device),
            encoder_hidden_states=stack("prompt_embeds"),
            added_cond_kwargs={theirs: stack(ours) for ours, theirs in self.added.items()} or None,
            return_dict=False,
        )[0]
        return prediction.float()

    def adapter_targets(self, parts: Parts, conv: bool) -> dict[str, list[str]]:
        """See the function of this name."""
        return adapter_targets(parts, conv)

    @torch.no_grad()
    def render(self, parts: Parts, requests: Sequence[Preview], on_step: OnStep | None = None) -> Tensor:
        """The images of `preview` before rounding: (B, 3, H, W) in [-1, 1], float32."""
        if not requests:
            return torch.empty(0, 3, 0, 0)
        first = first_of(requests, self.grid)
        pipeline = self.pipeline(parts, watched(scheduler_for(first.sampler, parts.scheduler_config), on_step))
        pipeline.set_progress_bar_config(disable=True)
        with evaluating(parts):
            embeddings = self.embeddings(parts, [request.prompt for request in requests])
            if first.cfg_scale > 1:
                embeddings |= {f"negative_{name}": rows for name, rows in self.negative(parts, requests).items()}
            latents = pipeline(
                **embeddings,
                width=first.width,
                height=first.height,
                num_inference_steps=first.steps,
                guidance_scale=first.cfg_scale,
                generator=[torch.Generator().manual_seed(request.seed) for request in requests],
                output_type="latent",
            ).images
            return decode(parts, latents)

    def embeddings(self, parts: Parts, captions: Sequence[str]) -> dict[str, Tensor]:
        """What the pipeline is given of captions, (B, ...) on the UNet's device, by its names."""
        conditions = self.encode_prompts(parts, captions)
        device, dtype = parts.bring(parts.backbone), dtype_of(parts.backbone)
        return {theirs: torch.stack([one[ours] for one in conditions]).to(device, dtype) for ours, theirs in self.texts.items()}

    def negative(self, parts: Parts, requests: Sequence[Preview]) -> dict[str, Tensor]:
        """The same of what guidance leads away from."""
        return self.embeddings(parts, [request.negative_prompt for request in requests])


def tiny_parts(spec: FamilySpec, networks: dict[str, nn.Module], tokenizers: dict[str, Any], settings: dict[str, Any]) -> Parts:
    """Parts of these networks with the published schedule, frozen and in eval mode."""
    scheduler = read_json(spec.configs / "scheduler" / "scheduler_config.json", "tiny")
    return tiny.tiny_parts(networks, tokenizers, scheduler, settings)
