"""Z-Image: what it is made of, how it reads captions, how it denoises and renders. Its own clock and sign stand in `denoise` alone.

Shapes: B samples, h w latent sides (an eighth of H W, the image's), L text tokens, D text width. Latents have 16 channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sd_scripts.families.common.comfyui_levels import FlowLevels, Graph
from sd_scripts.families.common.images import evaluating, first_of, pipeline_class
from sd_scripts.families.common.qwen3 import tiny_qwen3, tiny_qwen3_tokenizer, told
from sd_scripts.families.common.reading import states_of_layers, tokens_of
from sd_scripts.families.common.samplers import scheduler_for, watched
from sd_scripts.families.common.tiny import tiny_vae
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.families.common.transformers import TextShape, TransformerFamily
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import Condition, OnStep, Parts, Preview, dtype_of

from .loading import LOADER
from .tiny import tiny_zimage_transformer

BLOCKS = r"^(layers|noise_refiner|context_refiner)\."


class ZImage(TransformerFamily):
    """The Z-Image family; see protocols.ModelFamily."""

    latent: ClassVar[tuple[int, int]] = (16, 8)
    loader: ClassVar[Loader] = LOADER
    adapted: ClassVar[Mapping[str, str]] = {"backbone": BLOCKS, "te1": r"^layers\."}
    graph: ClassVar[Graph] = Graph("simple", FlowLevels(3.0))

    def tiny_networks(self) -> tuple[dict[str, nn.Module], dict[str, Any]]:
        """See TransformerFamily."""
        tokenizer = tiny_qwen3_tokenizer()
        encoder = tiny_qwen3(tokenizer)
        networks = {"backbone": tiny_zimage_transformer(), "vae": tiny_vae(16, 0.3611, 0.1159), "te1": encoder}
        return networks, {"te1": tokenizer}

    def text_shape(self, parts: Parts, num_tokens: int, num_controls: int) -> TextShape:
        """See TransformerFamily."""
        limit = parts.settings["max_token_length"]
        return TextShape(min(limit, num_tokens + 12), parts.backbone.config.cap_feat_dim, min(limit, num_tokens + 64))

    def rows(self, parts: Parts, caption: str) -> Tensor:
        """Text (L, D): the last but one hidden states, without padding; see TransformerFamily.

        The caption is what a user says in the tokenizer's chat template, thinking enabled; what is longer than max_token_length is cut, as
        in diffusers' pipeline.
        """
        encoder, tokenizer = parts.text_encoders["te1"], parts.tokenizers["te1"]
        ids = tokens_of(tokenizer, told(tokenizer, caption, thinking=True), parts.settings["max_token_length"])
        return states_of_layers(encoder, [-2], torch.tensor([ids], device=parts.bring(encoder)))

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The velocity noise - x0 at canonical times t (B,); same shape as x_t (B, 16, h, w), float32.

        Z-Image's clock runs the other way, 0 at noise and 1 at the clean image, and its output is x0 - noise. Its time reaches the
        embedding in float32, whatever the precision of the network. Texts may have different lengths.
        """
        parts.bring(parts.backbone)
        dtype = dtype_of(parts.backbone)
        clock = 1 - t.to(x_t.device, torch.float32)
        output = parts.backbone(
            list(x_t.to(dtype).unsqueeze(2)),
            clock,
            [condition["text"].to(x_t.device, dtype) for condition in conditions],
            return_dict=False,
        )[0]
        return -torch.stack(output).squeeze(2).float()

    @torch.no_grad()
    def render(self, parts: Parts, requests: Sequence[Preview], on_step: OnStep | None = None) -> Tensor:
        """The images of `preview` before rounding: (B, 3, H, W) in [-1, 1], float32; without the training adapter.

        The sampler asks the network at the noise levels of diffusion.anchor_sigmas. Guidance is on with cfg_scale above 1.
        """
        if not requests:
            return torch.empty(0, 3, 0, 0)
        first = first_of(requests, self.grid)
        # Without VAE and text encoder the pipeline runs on the device of its transformer, wherever the others are.
        pipeline = pipeline_class("ZImagePipeline")(
            vae=None,
            text_encoder=None,
            tokenizer=None,
            transformer=parts.backbone,
            scheduler=watched(scheduler_for(first.sampler, parts.scheduler_config), on_step),
        )
        pipeline.set_progress_bar_config(disable=True)
        guided = first.cfg_scale > 1
        with evaluating(parts), parts.without_training_adapter():
            latents = pipeline(
                prompt_embeds=self._texts(parts, [request.prompt for request in requests]),
                negative_prompt_embeds=self._texts(parts, [request.negative_prompt for request in requests]) if guided else None,
                # diffusers counts from no guidance: p + scale (p - n).
                guidance_scale=first.cfg_scale - 1 if guided else 0.0,
                width=first.width,
                height=first.height,
                num_inference_steps=first.steps,
                # Given, because versions of the pipeline differ in their own; the scheduler shifts them.
                sigmas=diffusion.even_sigmas(first.steps),
                generator=[torch.Generator().manual_seed(request.seed) for request in requests],
                output_type="latent",
            ).images
            return self.decode(parts, latents)

    def _texts(self, parts: Parts, captions: Sequence[str]) -> list[Tensor]:
        """The rows of captions, as the transformer takes them."""
        conditions = self.encode_prompts(parts, captions)
        device, dtype = parts.bring(parts.backbone), dtype_of(parts.backbone)
        return [condition["text"].to(device, dtype) for condition in conditions]


FAMILY = ZImage()
