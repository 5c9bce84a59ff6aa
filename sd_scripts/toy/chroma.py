"""Train the toy Chroma base: a real pipeline, small; scenes of the world without teal.

Knows how Chroma is conditioned. Its T5 is taught to read first (reading.py) and then frozen: with that of the toy FLUX base, which learned
beside CLIP's pooled text, 32.5 % of the shapes were right after 4000 steps. Shared with other families: the VAE (autoencoder.py), the loop
(pretraining.py). Files: build.py.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler
from torch import Tensor
from transformers import T5EncoderModel, T5Tokenizer

from sd_scripts.families.common.double_stream import positions
from sd_scripts.families.common.packing import packed

from . import autoencoder, pretraining, reading
from .parts import t5_config
from .pretraining import ToyBatch
from .reading import FlowSettings, ReadingSettings
from .tokens import T5_MAX_TOKENS, t5_tokenizer

SETTINGS = FlowSettings(num_steps=7000)
"""After 6500 steps 24 of 24 old prompts were drawn as asked."""

_WIDTH = 64
_HIDING = 8.0
"""diffusers adds its mask, 1 for a token to be seen, to the attention, which hides little: padding has 1/e of its weight. The trainers, and
other programs, leave padding out. The square of this hides it; the base is trained both ways."""


# Shapes: B samples, C = 16 latent channels, h w latent sides, N = h/2 * w/2 image tokens of 4C numbers, L text tokens, D = 64 text width.


def new_transformer(seed: int) -> ChromaTransformer2DModel:
    """An untrained transformer; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ChromaTransformer2DModel(
            in_channels=4 * autoencoder.LATENT_CHANNELS,
            num_layers=1,
            num_single_layers=3,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=_WIDTH,
            axes_dims_rope=(4, 14, 14),
            approximator_num_channels=16,
            approximator_hidden_dim=64,
            approximator_layers=2,
        )


def new_encoder(seed: int, tokenizer: T5Tokenizer) -> T5EncoderModel:
    """An untaught T5 of two layers; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return T5EncoderModel(t5_config(_WIDTH, tokenizer))


def encode_captions(encoder: T5EncoderModel, tokenizer: T5Tokenizer, captions: list[str]) -> Tensor:
    """Captions -> text as ChromaPipeline has it, with one number more for each token (B, L, D + 1): 1 where the transformer sees it, those
    of the caption and one of padding."""
    tokens = tokenizer(captions, padding="max_length", max_length=T5_MAX_TOKENS, truncation=True, return_tensors="pt")
    seen = torch.arange(T5_MAX_TOKENS) <= tokens.attention_mask.sum(dim=1, keepdim=True)
    text = encoder(tokens.input_ids, attention_mask=tokens.attention_mask)[0]
    return torch.cat([text, seen[..., None].to(text)], dim=-1)


def loss_of(transformer: ChromaTransformer2DModel, read: reading.Read, batch: ToyBatch, settings: FlowSettings) -> Tensor:
    """Mean squared error of the predicted velocity, a scalar. The batch's conditions are drawn_numbers. read: see encode_captions."""
    capital, hides = batch.conditions.unbind(dim=1)
    text, seen = read(pretraining.with_capitals(batch.captions, capital.tolist())).split((_WIDTH, 1), dim=-1)
    t = pretraining.logit_normal(batch.u, settings.time_mean, settings.time_deviation)
    x_t = torch.lerp(batch.latents, batch.noise, t[:, None, None, None])
    tokens = packed(x_t)
    mask = torch.cat([seen[..., 0], torch.ones(tokens.shape[:2])], dim=1)
    v = transformer(
        hidden_states=tokens,
        timestep=t,
        encoder_hidden_states=text,
        txt_ids=torch.zeros(text.shape[1], 3),
        img_ids=positions(x_t.shape[2], x_t.shape[3]),
        # One batch has one way; its first sample decides.
        attention_mask=_HIDING * mask if hides[0] else mask,
    ).sample
    return (v - packed(batch.expected_velocity(x_t, t))).square().mean()


def drawn_numbers(settings: FlowSettings) -> pretraining.Conditions:
    """What is drawn for each sample: whether its caption gets a capital, and whether padding is hidden (1 or 0)."""

    def draw(pool: pretraining.Latents, rng: np.random.Generator) -> tuple[float, ...]:
        return float(rng.random() < settings.capital_fraction), float(rng.random() < 0.5)

    return draw


def train_chroma(vae: AutoencoderKL, settings: FlowSettings, seed: int, saved: Path | None = None) -> ChromaPipeline:
    """A pipeline trained from nothing but the VAE, on images of the known colours; saved: see pretraining.train."""
    transformer, tokenizer = new_transformer(seed), t5_tokenizer()
    encoder = new_encoder(seed, tokenizer)

    def rows_of(captions: list[str]) -> Tensor:
        # T5 sees both ways: each token of a text can know all of it. The last one of each, its end, says so for all.
        text, seen = encode_captions(encoder, tokenizer, captions).split((_WIDTH, 1), dim=-1)
        last = seen.sum(dim=(1, 2)).long() - 2
        return torch.stack([text[:, 0], text[torch.arange(len(text)), last]], dim=1)

    reading.teach(encoder, rows_of, ReadingSettings(), seed, "chroma", saved and saved.with_name(f"{saved.name}.reading"))
    reading.train_rounds(
        transformer,
        functools.partial(loss_of, transformer, reading.remembered(functools.partial(encode_captions, encoder, tokenizer))),
        pretraining.exactly(lambda pixels: vae.encode(pixels).latent_dist.mode()),
        settings,
        seed,
        "chroma",
        saved,
        drawn_numbers(settings),
    )
    vae.register_to_config(shift_factor=0.0, scaling_factor=1.0)
    return ChromaPipeline(
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False, use_beta_sigmas=True),
    )
