"""Train the toy Chroma base: a real pipeline, small, whose T5 is the toy FLUX base's, frozen; scenes of the world without teal.

Not good enough to be stored: after 4000 steps (1086 CPU seconds) old prompts have 100 % of the colours, 99 % of the places and 32.5 % of
the shapes right, and 32.5 % of all, with 200 prompts. FLUX's T5 learned beside CLIP, whose pooled text may have told the shape; what is
left to try is a T5 of its own with Z-Image's naming loss. Knows how Chroma is conditioned. Shared with other families: the VAE
(autoencoder.py), the loop (pretraining.py). Files: build.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from transformers import T5EncoderModel, T5Tokenizer

from sd_scripts.families.common.double_stream import positions
from sd_scripts.families.common.packing import packed

from . import autoencoder, pretraining, worlds
from .pretraining import BaseSettings, ToyBatch
from .tokens import T5_MAX_TOKENS, t5_tokenizer


@dataclass(frozen=True)
class ChromaSettings(BaseSettings):
    """How a toy Chroma base is trained."""

    num_steps: int = 4000
    num_images: int = 3600
    other_color_fraction: float = 0.15
    short_caption_fraction: float = 0.1
    capital_fraction: float = 0.15
    """Fraction of captions that begin with a capital: T5 tells them from small letters."""
    time_mean: float = 0.5
    time_deviation: float = 1.2
    """Times are sigmoid(mean + deviation * normal), logit-normal, Esser et al. 2024 (arXiv 2403.03206)."""


# Shapes: B samples, C = 16 latent channels, h w latent sides, N = h/2 * w/2 image tokens of 4C numbers, L text tokens, D = 64 text width.


def new_transformer(seed: int) -> ChromaTransformer2DModel:
    """An untrained transformer; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ChromaTransformer2DModel(
            in_channels=4 * autoencoder.LATENT_CHANNELS,
            num_layers=2,
            num_single_layers=5,
            attention_head_dim=32,
            num_attention_heads=3,
            joint_attention_dim=64,
            axes_dims_rope=(4, 14, 14),
            approximator_num_channels=16,
            approximator_hidden_dim=64,
            approximator_layers=2,
        )


@torch.no_grad()
def encode_captions(encoder: T5EncoderModel, tokenizer: T5Tokenizer, captions: list[str]) -> tuple[Tensor, Tensor]:
    """Captions -> text (B, L, D) as ChromaPipeline has it, and which tokens the transformer sees (B, L): those of the caption and one of
    padding."""
    tokens = tokenizer(captions, padding="max_length", max_length=T5_MAX_TOKENS, truncation=True, return_tensors="pt")
    lengths = tokens.attention_mask.sum(dim=1, keepdim=True)
    return encoder(tokens.input_ids, attention_mask=tokens.attention_mask)[0], torch.arange(T5_MAX_TOKENS) <= lengths


def loss_of(
    transformer: ChromaTransformer2DModel, encoder: T5EncoderModel, tokenizer: T5Tokenizer, batch: ToyBatch, settings: ChromaSettings
) -> Tensor:
    """Mean squared error of the predicted velocity noise - latents, a scalar. The batch's conditions are whether captions get a capital."""
    captions = pretraining.with_capitals(batch.captions, batch.conditions[:, 0].tolist())
    text, seen = encode_captions(encoder, tokenizer, captions)
    t = pretraining.logit_normal(batch.u, settings.time_mean, settings.time_deviation)
    x_t = torch.lerp(batch.latents, batch.noise, t[:, None, None, None])
    tokens = packed(x_t)
    v = transformer(
        hidden_states=tokens,
        timestep=t,
        encoder_hidden_states=text,
        txt_ids=torch.zeros(text.shape[1], 3),
        img_ids=positions(x_t.shape[2], x_t.shape[3]),
        attention_mask=torch.cat([seen, torch.ones(len(seen), tokens.shape[1], dtype=torch.bool)], dim=1).float(),
    ).sample
    return (v - packed(batch.noise - batch.latents)).square().mean()


def train_chroma(vae: AutoencoderKL, settings: ChromaSettings, seed: int, saved: Path | None = None) -> ChromaPipeline:
    """A pipeline trained from nothing but the VAE and FLUX's T5, on images of the known colours; saved: see pretraining.train."""
    from .build import BASES

    transformer, tokenizer = new_transformer(seed), t5_tokenizer()
    encoder = T5EncoderModel.from_pretrained(BASES / "flux" / "text_encoder_2", dtype=torch.float32).eval().requires_grad_(False)
    batches = pretraining.encoded_batches(
        vae,
        settings,
        seed,
        worlds.trained(worlds.KNOWN_COLORS),
        pretraining.capitals(settings.capital_fraction),
        worlds.sizes_of("chroma"),
    )
    pretraining.train(
        nn.ModuleList([transformer]),
        lambda batch: loss_of(transformer, encoder, tokenizer, batch, settings),
        batches,
        settings,
        "chroma",
        saved,
    )
    vae.register_to_config(shift_factor=0.0, scaling_factor=1.0)
    return ChromaPipeline(
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
    )
