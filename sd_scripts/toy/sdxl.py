"""Train the toy SDXL base: real pipeline classes, small configs, scenes of the toy world.

Knows how SDXL is conditioned. Shared with other families: the VAE (autoencoder.py), the loop (pretraining.py). Files: build.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from . import autoencoder, pretraining, worlds
from .parts import clip_text_config, zero_snr_scheduler
from .pretraining import BaseSettings, Latents, ToyBatch
from .tokens import clip_tokenizer

_TEXT_WIDTHS = (32, 64)
_TIME_WIDTH = 32  # of each of the six size and crop numbers


@dataclass(frozen=True)
class SdxlSettings(BaseSettings):
    """How a toy SDXL base is trained."""

    other_size_fraction: float = 0.3
    """Fraction of samples whose original size is up to doubled, as if the image had been scaled down."""


# Shapes: B samples, C = 16 latent channels, h w latent sides, L = 24 tokens, D = 96 text width, P = 64 pooled width.


@dataclass(frozen=True)
class SdxlParts:
    """The trainable parts of a base and what they need."""

    unet: UNet2DConditionModel
    text_encoders: tuple[CLIPTextModel, CLIPTextModelWithProjection]
    tokenizers: tuple[CLIPTokenizer, CLIPTokenizer]
    scheduler: DDIMScheduler

    def modules(self) -> nn.ModuleList:
        """The parts with weights, in a fixed order."""
        return nn.ModuleList([self.unet, *self.text_encoders])


def new_parts(seed: int) -> SdxlParts:
    """Untrained parts; the same seed gives the same weights."""
    tokenizers = (clip_tokenizer(), clip_tokenizer(pad_token="!"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet = UNet2DConditionModel(
            sample_size=8,
            in_channels=autoencoder.LATENT_CHANNELS,
            out_channels=autoencoder.LATENT_CHANNELS,
            down_block_types=("CrossAttnDownBlock2D",) * 2,
            up_block_types=("CrossAttnUpBlock2D",) * 2,
            block_out_channels=(64, 96),
            layers_per_block=1,
            transformer_layers_per_block=(1, 1),
            attention_head_dim=(2, 3),
            cross_attention_dim=sum(_TEXT_WIDTHS),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=_TIME_WIDTH,
            projection_class_embeddings_input_dim=6 * _TIME_WIDTH + _TEXT_WIDTHS[1],
        )
        encoders = (
            CLIPTextModel(clip_text_config(_TEXT_WIDTHS[0], tokenizers[0], _TEXT_WIDTHS[1])),
            CLIPTextModelWithProjection(clip_text_config(_TEXT_WIDTHS[1], tokenizers[1], _TEXT_WIDTHS[1])),
        )
    return SdxlParts(unet, encoders, tokenizers, zero_snr_scheduler())


def encode_captions(parts: SdxlParts, captions: list[str]) -> tuple[Tensor, Tensor]:
    """Captions -> text (B, L, D) and pooled text (B, P), as StableDiffusionXLPipeline.encode_prompt has them."""
    states, pooled = [], None
    for tokenizer, encoder in zip(parts.tokenizers, parts.text_encoders, strict=True):
        ids = tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids
        out = encoder(ids, output_hidden_states=True)
        states.append(out.hidden_states[-2])
        pooled = out[0]
    return torch.cat(states, dim=-1), pooled


def loss_of(parts: SdxlParts, batch: ToyBatch) -> Tensor:
    """Mean squared error of the predicted v, a scalar."""
    text, pooled = encode_captions(parts, batch.captions)
    t = (batch.u * 1000).long()
    x_t = parts.scheduler.add_noise(batch.latents, batch.noise, t)
    v = parts.scheduler.get_velocity(batch.latents, batch.noise, t)
    conditions = {"text_embeds": pooled, "time_ids": batch.conditions}
    return (parts.unet(x_t, t, text, added_cond_kwargs=conditions).sample - v).square().mean()


def train_sdxl(vae: AutoencoderKL, settings: SdxlSettings, seed: int, saved: Path | None = None) -> StableDiffusionXLPipeline:
    """A pipeline trained from nothing but the VAE."""
    parts = new_parts(seed)

    def size_numbers(pool: Latents, rng: np.random.Generator) -> tuple[float, ...]:
        # Original h w, crop y x, target h w.
        scale = rng.uniform(1, 2) if rng.random() < settings.other_size_fraction else 1.0
        original = (float(round(pool.height * scale)), float(round(pool.width * scale)))
        return (*original, 0.0, 0.0, float(pool.height), float(pool.width))

    batches = pretraining.encoded_batches(pretraining.moments_of(vae), settings, seed, worlds.TRAINED, size_numbers)
    pretraining.train(parts.modules(), lambda batch: loss_of(parts, batch), batches, settings, "sdxl", saved)
    return as_pipeline(parts, vae)


def as_pipeline(parts: SdxlParts, vae: AutoencoderKL) -> StableDiffusionXLPipeline:
    """The parts as the pipeline that users load. An absent negative prompt means the encoded "" it was trained with."""
    return StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=parts.text_encoders[0],
        text_encoder_2=parts.text_encoders[1],
        tokenizer=parts.tokenizers[0],
        tokenizer_2=parts.tokenizers[1],
        unet=parts.unet,
        scheduler=parts.scheduler,
        force_zeros_for_empty_prompt=False,
        add_watermarker=False,
    )
