"""Train the toy FLUX base: real pipeline classes, small configs, scenes of the toy world without teal.

Knows how FLUX is conditioned. Shared with other families: the VAE (autoencoder.py), the loop (pretraining.py). Files: build.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from sd_scripts.families.common.packing import packed

from . import autoencoder, pretraining, worlds
from .parts import clip_text_config, t5_config
from .pretraining import BaseSettings, Latents, ToyBatch
from .tokens import T5_MAX_TOKENS, clip_tokenizer, t5_tokenizer

LATENT_GRID = 16
"""Sides in pixels must be multiples of this: f8 latents, packed 2x2 into tokens."""

_CLIP_WIDTH = 64
_T5_WIDTH = 64


@dataclass(frozen=True)
class FluxSettings(BaseSettings):
    """How a toy FLUX base is trained."""

    num_steps: int = 6500
    other_color_fraction: float = 0.15
    short_caption_fraction: float = 0.1
    capital_fraction: float = 0.15
    """Fraction of captions that begin with a capital: T5 tells them from small letters, CLIP does not."""
    time_mean: float = 0.2
    time_deviation: float = 1.2
    """Times are sigmoid(mean + deviation * normal): logit-normal, Esser et al. 2024 (arXiv 2403.03206). Wider than there:
    colour and place are settled close to pure noise. With mean 0, deviation 1, learning rate 2.5e-3 and 16 text tokens they
    were wrong in 3 and 5 % of images without true guidance, and shapes in 23 % instead of 15 %, after 8000 steps."""
    long_text_fraction: float = 0.08
    """Fraction of steps with up to 8 times the usual T5 tokens, all padding: the pipeline's own default is 512."""


# Shapes: B samples, C = 16 latent channels, h w latent sides, N = h/2 * w/2 image tokens of 4C numbers, L text tokens, D = 64
# text width, P = 64 pooled width.


@dataclass(frozen=True)
class FluxParts:
    """The trainable parts of a base and what they need."""

    transformer: FluxTransformer2DModel
    clip: CLIPTextModel
    t5: T5EncoderModel
    clip_tokenizer: CLIPTokenizer
    t5_tokenizer: T5Tokenizer

    def modules(self) -> nn.ModuleList:
        """The parts with weights, in a fixed order."""
        return nn.ModuleList([self.transformer, self.clip, self.t5])


def new_parts(seed: int) -> FluxParts:
    """Untrained parts; the same seed gives the same weights."""
    words, pieces = clip_tokenizer(), t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = FluxTransformer2DModel(
            in_channels=4 * autoencoder.LATENT_CHANNELS,
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=_T5_WIDTH,
            pooled_projection_dim=_CLIP_WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(4, 14, 14),
        )
        clip = CLIPTextModel(clip_text_config(_CLIP_WIDTH, words, _CLIP_WIDTH))
        t5 = T5EncoderModel(t5_config(_T5_WIDTH, pieces))
    return FluxParts(transformer, clip, t5, words, pieces)


def encode_captions(parts: FluxParts, captions: list[str], num_tokens: int = T5_MAX_TOKENS) -> tuple[Tensor, Tensor]:
    """Captions -> text (B, L, D) and pooled text (B, P), as FluxPipeline.encode_prompt has them with max_sequence_length = L."""
    ids = parts.clip_tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids
    pooled = parts.clip(ids).pooler_output
    ids = parts.t5_tokenizer(captions, padding="max_length", max_length=num_tokens, truncation=True, return_tensors="pt").input_ids
    return parts.t5(ids)[0], pooled


def positions(height: int, width: int) -> Tensor:
    """Row and column (N, 3) of each image token of a grid; the first number is 0, as for text."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).float()


def loss_of(parts: FluxParts, batch: ToyBatch, settings: FluxSettings) -> Tensor:
    """Mean squared error of the predicted velocity noise - latents, a scalar. The batch's conditions are drawn_numbers."""
    guidance, capital, num_tokens = batch.conditions.unbind(dim=1)
    captions = pretraining.with_capitals(batch.captions, capital.tolist())
    # One batch has one length; its first sample decides.
    text, pooled = encode_captions(parts, captions, int(num_tokens[0]))
    t = pretraining.logit_normal(batch.u, settings.time_mean, settings.time_deviation)
    x_t = torch.lerp(batch.latents, batch.noise, t[:, None, None, None])
    v = parts.transformer(
        hidden_states=packed(x_t),
        timestep=t,
        guidance=guidance,
        encoder_hidden_states=text,
        pooled_projections=pooled,
        txt_ids=torch.zeros(text.shape[1], 3),
        img_ids=positions(x_t.shape[2] // 2, x_t.shape[3] // 2),
    ).sample
    return (v - packed(batch.noise - batch.latents)).square().mean()


def drawn_numbers(settings: FluxSettings) -> pretraining.Conditions:
    """What is drawn for each sample: embedded guidance, whether its caption gets a capital (1 or 0), T5 tokens."""

    def draw(pool: Latents, rng: np.random.Generator) -> tuple[float, ...]:
        # In FLUX.1 dev guidance was distilled into the model; here it is drawn at random and changes nothing.
        guidance = rng.uniform(1, 4)
        capital = float(rng.random() < settings.capital_fraction)
        times = 8 ** rng.random() if rng.random() < settings.long_text_fraction else 1.0
        return guidance, capital, float(round(T5_MAX_TOKENS * times))

    return draw


def train_flux(vae: AutoencoderKL, settings: FluxSettings, seed: int, saved: Path | None = None) -> FluxPipeline:
    """A pipeline trained from nothing but the VAE, on images of the known colours."""
    parts = new_parts(seed)
    batches = pretraining.encoded_batches(
        pretraining.moments_of(vae), settings, seed, worlds.trained(worlds.KNOWN_COLORS), drawn_numbers(settings)
    )
    pretraining.train(parts.modules(), lambda batch: loss_of(parts, batch, settings), batches, settings, "flux", saved)
    return as_pipeline(parts, vae)


def as_pipeline(parts: FluxParts, vae: AutoencoderKL) -> FluxPipeline:
    """The parts as the pipeline that users load. The VAE's latents have mean 0 and deviation 1, so shift and scale are 0 and 1."""
    vae.register_to_config(shift_factor=0.0, scaling_factor=1.0)
    return FluxPipeline(
        vae=vae,
        text_encoder=parts.clip,
        text_encoder_2=parts.t5,
        tokenizer=parts.clip_tokenizer,
        tokenizer_2=parts.t5_tokenizer,
        transformer=parts.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
    )
