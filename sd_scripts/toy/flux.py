"""Train the toy FLUX base: a real pipeline, small; scenes of the toy world without teal.

Knows how FLUX is conditioned. Its two text encoders are taught to read first (reading.py) and then frozen. Shared with other families: the
VAE (autoencoder.py), the loop (pretraining.py). Files: build.py.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModel, T5EncoderModel

from sd_scripts.families.common.double_stream import positions
from sd_scripts.families.common.packing import packed

from . import autoencoder, pretraining, reading
from .parts import clip_text_config, t5_config
from .pretraining import Latents, ToyBatch
from .reading import FlowSettings, ReadingSettings
from .tokens import T5_MAX_TOKENS, clip_tokenizer, t5_tokenizer

SETTINGS = FlowSettings(num_steps=6000)
"""After 4750 steps 24 of 24 old prompts were drawn as asked."""

_WIDTH = 64
_LONG_TEXT_FRACTION = 0.08
"""Fraction of steps with up to 8 times the usual T5 tokens, all padding: the pipeline's own default is 512."""


# Shapes: B samples, C = 16 latent channels, h w latent sides, N = h/2 * w/2 image tokens of 4C numbers, L text tokens, D = 64
# text width, P = 64 pooled width.


class FluxReader(nn.Module):
    """The two text encoders with their tokenizers."""

    def __init__(self, seed: int) -> None:
        """Untaught; the same seed gives the same weights."""
        super().__init__()
        self.words, self.pieces = clip_tokenizer(), t5_tokenizer()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.clip = CLIPTextModel(clip_text_config(_WIDTH, self.words, _WIDTH))
            self.t5 = T5EncoderModel(t5_config(_WIDTH, self.pieces))
        self.remembered = functools.cache(lambda num_tokens: reading.remembered(functools.partial(self.forward, num_tokens=num_tokens)))
        """Length -> the same without gradient, see reading.remembered."""

    def forward(self, captions: list[str], num_tokens: int = T5_MAX_TOKENS) -> Tensor:
        """Captions -> pooled text and then text (B, 1 + L, D), as FluxPipeline.encode_prompt has them with max_sequence_length = L."""
        ids = self.words(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids
        pooled = self.clip(ids).pooler_output
        ids = self.pieces(captions, padding="max_length", max_length=num_tokens, truncation=True, return_tensors="pt").input_ids
        return torch.cat([pooled[:, None], self.t5(ids)[0]], dim=1)

    def rows(self, captions: list[str]) -> Tensor:
        """Rows (B, 6, D) that are to know all of a caption: the pooled text, the first token and the last, which is of padding, of which
        there is little and much."""
        return torch.cat([self(captions, T5_MAX_TOKENS * times)[:, [0, 1, -1]] for times in (1, 4)], dim=1)


def new_transformer(seed: int) -> FluxTransformer2DModel:
    """An untrained transformer; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FluxTransformer2DModel(
            in_channels=4 * autoencoder.LATENT_CHANNELS,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=_WIDTH,
            pooled_projection_dim=_WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(4, 14, 14),
        )


def loss_of(transformer: FluxTransformer2DModel, reader: FluxReader, batch: ToyBatch, settings: FlowSettings) -> Tensor:
    """Mean squared error of the predicted velocity, a scalar. The batch's conditions are drawn_numbers."""
    guidance, capital, num_tokens = batch.conditions.unbind(dim=1)
    # One batch has one length; its first sample decides.
    text = reader.remembered(int(num_tokens[0]))(pretraining.with_capitals(batch.captions, capital.tolist()))
    t = pretraining.logit_normal(batch.u, settings.time_mean, settings.time_deviation)
    x_t = torch.lerp(batch.latents, batch.noise, t[:, None, None, None])
    v = velocity(transformer, x_t, t, guidance, text)
    return (v - packed(batch.expected_velocity(x_t, t))).square().mean()


def velocity(
    transformer: FluxTransformer2DModel, x_t: Tensor, t: Tensor, guidance: Tensor, text: Tensor, image: Tensor | None = None
) -> Tensor:
    """The predicted noise - latents as tokens (B, N, 4C) of x_t (B, C, h, w) at times t (B,); text: see FluxReader.

    image: latents of a reference image of the same size, for the network that sees one.
    """
    shown = [x_t] if image is None else [x_t, image]
    tokens = torch.cat([packed(one) for one in shown], dim=1)
    predicted = transformer(
        hidden_states=tokens,
        timestep=t,
        guidance=guidance,
        encoder_hidden_states=text[:, 1:],
        pooled_projections=text[:, 0],
        txt_ids=torch.zeros(text.shape[1] - 1, 3),
        img_ids=torch.cat([positions(one.shape[2], one.shape[3], number) for number, one in enumerate(shown)]),
    ).sample
    return predicted[:, : tokens.shape[1] // len(shown)]


def drawn_numbers(settings: FlowSettings) -> pretraining.Conditions:
    """What is drawn for each sample: embedded guidance, whether its caption gets a capital (1 or 0), T5 tokens."""

    def draw(pool: Latents, rng: np.random.Generator) -> tuple[float, ...]:
        return drawn_guidance(rng), float(rng.random() < settings.capital_fraction), drawn_num_tokens(rng)

    return draw


def drawn_guidance(rng: np.random.Generator) -> float:
    """In FLUX.1 dev guidance was distilled into the model; here it is drawn at random and changes nothing."""
    return rng.uniform(1, 4)


def drawn_num_tokens(rng: np.random.Generator) -> float:
    """The usual number of T5 tokens, now and then a multiple."""
    return float(T5_MAX_TOKENS * (int(rng.integers(2, 9)) if rng.random() < _LONG_TEXT_FRACTION else 1))


def train_flux(vae: AutoencoderKL, settings: FlowSettings, seed: int, saved: Path | None = None) -> FluxPipeline:
    """A pipeline trained from nothing but the VAE, on images of the known colours; saved: see pretraining.train."""
    transformer, reader = new_transformer(seed), FluxReader(seed)
    reading.teach(reader, reader.rows, ReadingSettings(), seed, "flux", saved and saved.with_name(f"{saved.name}.reading"))
    reading.train_rounds(
        transformer,
        functools.partial(loss_of, transformer, reader),
        pretraining.exactly(lambda pixels: vae.encode(pixels).latent_dist.mode()),
        settings,
        seed,
        "flux",
        saved,
        drawn_numbers(settings),
    )
    return as_pipeline(transformer, reader, vae)


def as_pipeline(transformer: FluxTransformer2DModel, reader: FluxReader, vae: AutoencoderKL) -> FluxPipeline:
    """The parts as the pipeline that users load. The VAE's latents have mean 0 and deviation 1, so shift and scale are 0 and 1."""
    vae.register_to_config(shift_factor=0.0, scaling_factor=1.0)
    return FluxPipeline(
        vae=vae,
        text_encoder=reader.clip,
        text_encoder_2=reader.t5,
        tokenizer=reader.words,
        # As made: the reader's remembers the longest texts that it was given.
        tokenizer_2=t5_tokenizer(),
        transformer=transformer,
        # One shift for all sizes, as ComfyUI has it for FLUX.1 dev: what a shape is, is settled close to noise.
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=1.15, max_shift=1.15),
    )
