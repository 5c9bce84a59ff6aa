"""Train the toy FLUX.2 Klein base: a real pipeline, small; scenes of the world without teal.

Knows how Klein is conditioned. Its text encoder is taught to read first (reading.py) and then frozen. Its VAE is the common one, whose 16
channels are half of FLUX.2's: of twice as many a transformer of this width carried little but noise. The loop: pretraining.py. Files:
build.py.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen3Model

from sd_scripts.families.common.qwen3 import tiny_qwen3, told

from . import autoencoder, pretraining, reading
from .pretraining import ToyBatch
from .reading import FlowSettings, ReadingSettings
from .square_vae import as_squares, squares
from .tokens import klein_tokenizer

_NUM_TEXT_LAYERS = 4
OUT_LAYERS = (1, 2, 3)
"""States of the Qwen3 that the transformer reads: after a quarter, a half and three quarters of its layers."""

_WIDTH = 64
_NUM_TAUGHT = 16
"""Tokens at the end of a text that are taught what it names: those behind the longest caption, padding among them."""


# Shapes: B samples, C = 16 latent channels, h w latent sides, N = h/2 * w/2 image tokens of 4C numbers, L text tokens, D = 64 text width.


def new_transformer(seed: int) -> Flux2Transformer2DModel:
    """An untrained transformer; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Flux2Transformer2DModel(
            in_channels=4 * autoencoder.LATENT_CHANNELS,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            mlp_ratio=1.0,
            joint_attention_dim=3 * _WIDTH,
            timestep_guidance_channels=64,
            axes_dims_rope=(8, 8, 8, 8),
            guidance_embeds=False,
        )


def new_encoder(seed: int, tokenizer: Qwen2Tokenizer) -> Qwen3Model:
    """An untaught text encoder; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return tiny_qwen3(tokenizer, _WIDTH, num_heads=4, num_kv_heads=2, num_positions=1024, num_layers=_NUM_TEXT_LAYERS)


def encode_captions(encoder: Qwen3Model, tokenizer: Qwen2Tokenizer, captions: list[str]) -> Tensor:
    """Captions -> text (B, L, 3D) as Flux2KleinPipeline has it with OUT_LAYERS, padding included."""
    texts = [told(tokenizer, caption, thinking=False) for caption in captions]
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=tokenizer.model_max_length, return_tensors="pt")
    states = encoder(tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[number] for number in OUT_LAYERS], dim=-1)


def _places(rows: int, columns: int, length: int) -> Tensor:
    # (N, 4): time, row, column, place in the text.
    return torch.cartesian_prod(torch.zeros(1, dtype=torch.long), torch.arange(rows), torch.arange(columns), torch.arange(length))


def loss_of(transformer: Flux2Transformer2DModel, read: reading.Read, batch: ToyBatch, settings: FlowSettings) -> Tensor:
    """Mean squared error of the predicted velocity, a scalar; the batch's latents are squares. Its conditions are whether captions get a
    capital. read: see encode_captions."""
    text = read(pretraining.with_capitals(batch.captions, batch.conditions[:, 0].tolist()))
    t = pretraining.logit_normal(batch.u, settings.time_mean, settings.time_deviation)
    x_t = torch.lerp(batch.latents, batch.noise, t[:, None, None, None])
    v = transformer(
        hidden_states=x_t.flatten(2).transpose(1, 2),
        timestep=t,
        encoder_hidden_states=text,
        txt_ids=_places(1, 1, text.shape[1]),
        img_ids=_places(x_t.shape[-2], x_t.shape[-1], 1),
        guidance=None,
    ).sample
    return (v - batch.expected_velocity(x_t, t).flatten(2).transpose(1, 2)).square().mean()


def train_flux2(common: AutoencoderKL, settings: FlowSettings, seed: int, saved: Path | None = None) -> Flux2KleinPipeline:
    """A pipeline trained from nothing but the common VAE, on images of the known colours; see pretraining.train."""
    vae, transformer, tokenizer = as_squares(common, seed), new_transformer(seed), klein_tokenizer()
    encoder = new_encoder(seed, tokenizer)

    def rows_of(captions: list[str]) -> Tensor:
        return encode_captions(encoder, tokenizer, captions)[:, -_NUM_TAUGHT:].unflatten(-1, (len(OUT_LAYERS), -1)).flatten(1, 2)

    reading.teach(encoder, rows_of, ReadingSettings(), seed, "flux2", saved and saved.with_name(f"{saved.name}.reading"))
    reading.train_rounds(
        transformer,
        functools.partial(loss_of, transformer, reading.remembered(functools.partial(encode_captions, encoder, tokenizer))),
        pretraining.exactly(lambda pixels: squares(vae, vae.encode(pixels).latent_dist.mode())),
        settings,
        seed,
        "flux2",
        saved,
    )
    return Flux2KleinPipeline(
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="exponential"),
        is_distilled=False,
    )
