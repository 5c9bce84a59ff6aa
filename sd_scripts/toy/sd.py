"""Train the toy Stable Diffusion base: real pipeline classes, small configs, scenes of the toy world without teal.

Knows how SD 1.x and 2.x are conditioned. Shared with other families: the VAE (autoencoder.py), the loop (pretraining.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

from . import autoencoder, pretraining, worlds
from .parts import clip_text_config, zero_snr_scheduler
from .pretraining import BaseSettings, ToyBatch
from .tokens import clip_tokenizer

_TEXT_WIDTH = 64


@dataclass(frozen=True)
class SdSettings(BaseSettings):
    """How a toy SD base is trained."""

    num_steps: int = 6000
    other_color_fraction: float = 0.15
    short_caption_fraction: float = 0.15


# Shapes: B samples, C = 16 latent channels, h w latent sides, L = 24 tokens, D = 64 text width.


@dataclass(frozen=True)
class SdParts:
    """The trainable parts of a base and what they need."""

    unet: UNet2DConditionModel
    text_encoder: CLIPTextModel
    tokenizer: CLIPTokenizer
    scheduler: DDIMScheduler

    def modules(self) -> nn.ModuleList:
        """The parts with weights, in a fixed order."""
        return nn.ModuleList([self.unet, self.text_encoder])


def new_parts(seed: int) -> SdParts:
    """Untrained parts; the same seed gives the same weights."""
    tokenizer = clip_tokenizer()
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
            attention_head_dim=(2, 3),
            cross_attention_dim=_TEXT_WIDTH,
            use_linear_projection=True,
        )
        text_encoder = CLIPTextModel(clip_text_config(_TEXT_WIDTH, tokenizer, _TEXT_WIDTH))
    return SdParts(unet, text_encoder, tokenizer, zero_snr_scheduler(steps_offset=1))


def encode_captions(parts: SdParts, captions: list[str]) -> Tensor:
    """Captions -> text (B, L, D), as StableDiffusionPipeline.encode_prompt has it."""
    ids = parts.tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids
    return parts.text_encoder(ids).last_hidden_state


def loss_of(parts: SdParts, batch: ToyBatch) -> Tensor:
    """Mean squared error of the predicted v, a scalar."""
    t = (batch.u * 1000).long()
    x_t = parts.scheduler.add_noise(batch.latents, batch.noise, t)
    v = parts.scheduler.get_velocity(batch.latents, batch.noise, t)
    return (parts.unet(x_t, t, encode_captions(parts, batch.captions)).sample - v).square().mean()


def train_sd(vae: AutoencoderKL, settings: SdSettings, seed: int, saved: Path | None = None) -> StableDiffusionPipeline:
    """A pipeline trained from nothing but the VAE, on images of the known colours."""
    parts = new_parts(seed)
    batches = pretraining.encoded_batches(pretraining.moments_of(vae), settings, seed, worlds.trained(worlds.KNOWN_COLORS))
    pretraining.train(parts.modules(), lambda batch: loss_of(parts, batch), batches, settings, "sd", saved)
    return as_pipeline(parts, vae)


def as_pipeline(parts: SdParts, vae: AutoencoderKL) -> StableDiffusionPipeline:
    """The parts as the pipeline that users load."""
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer,
        unet=parts.unet,
        scheduler=parts.scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
