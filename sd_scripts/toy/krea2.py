"""Train the toy Krea 2 base (Raw): a real pipeline, small, with the toy Qwen-Image VAE and a Qwen3-VL of its own; scenes without teal.

Knows how Krea 2 is conditioned. Its text encoder is taught to read first (reading.py) and then frozen. Shared with other families: the VAE
(qwen_vae.py), the loop (pretraining.py). Files: build.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLModel

from sd_scripts.families.common.double_stream import positions
from sd_scripts.families.common.packing import packed
from sd_scripts.families.common.qwen3vl import tiny_qwen3vl
from sd_scripts.families.krea2.loading import TAPS
from sd_scripts.families.krea2.model import AFTER, BEFORE
from sd_scripts.families.krea2.network import made

from . import pretraining, qwen_vae, reading
from .pretraining import ToyBatch
from .reading import FlowSettings, ReadingSettings
from .tokens import qwen_tokenizer

_TEXT_WIDTH = 32


# Shapes: B samples, C = 16 latent channels, h w latent sides, L text tokens, T = 12 states of D = 32 numbers of each.


@dataclass
class CaptionReader:
    """The text encoder and what it has made of captions so far."""

    encoder: Qwen3VLModel
    tokenizer: Qwen2Tokenizer
    read: dict[str, Tensor] = field(default_factory=dict)

    def states(self, captions: list[str]) -> list[Tensor]:
        """Rows (L, T, D) of each caption, as Krea2Pipeline has them without its padding. It looks back only, so padding is free."""
        lead, closing = len(self.tokenizer(BEFORE).input_ids), len(self.tokenizer(AFTER).input_ids)
        ids = [torch.tensor(self.tokenizer(BEFORE + caption + AFTER).input_ids) for caption in captions]
        assert all(len(row) >= lead + closing for row in ids)
        found = self.encoder.language_model(
            input_ids=pad_sequence(ids, batch_first=True), use_cache=False, output_hidden_states=True
        ).hidden_states
        together = torch.stack([found[layer] for layer in TAPS], dim=2)
        return [rows[lead : len(row)] for rows, row in zip(together, ids, strict=True)]

    def known(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """Text (B, L, T, D) with padding, and which tokens are none (B, L); what was read before is not read again."""
        if new := [caption for caption in dict.fromkeys(captions) if caption not in self.read]:
            with torch.no_grad():
                self.read.update(zip(new, self.states(new), strict=True))
        rows = [self.read[caption] for caption in captions]
        return pad_sequence(rows, batch_first=True), pad_sequence(
            [torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True
        )


def new_reader(seed: int) -> CaptionReader:
    """An untaught text encoder; the same seed gives the same weights."""
    tokenizer = qwen_tokenizer((BEFORE, AFTER))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CaptionReader(Qwen3VLModel(_text_config(tokenizer)), tokenizer)


def _text_config(tokenizer: Qwen2Tokenizer) -> Qwen3VLConfig:
    # The family's tiny one with less in each of its many layers, and hardly any eyes, which nobody looks through.
    config = tiny_qwen3vl(tokenizer, _TEXT_WIDTH, num_layers=TAPS[-1] + 1).config
    config.text_config.update({"intermediate_size": _TEXT_WIDTH})
    config.vision_config.update({"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1})
    return Qwen3VLConfig.from_dict(config.to_dict())


def new_transformer(seed: int) -> Krea2Transformer2DModel:
    """An untrained transformer; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return made(
            {
                "num_layers": 4,
                "attention_head_dim": 32,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 288,
                "timestep_embed_dim": 64,
                "text_hidden_dim": _TEXT_WIDTH,
                "text_num_attention_heads": 2,
                "text_num_key_value_heads": 2,
                "text_intermediate_size": 64,
                "axes_dims_rope": (8, 12, 12),
            }
        )


def loss_of(transformer: Krea2Transformer2DModel, reader: CaptionReader, batch: ToyBatch, settings: FlowSettings) -> Tensor:
    """Mean squared error of the predicted velocity noise - latents, a scalar. The batch's conditions are whether captions get a capital."""
    text, seen = reader.known(pretraining.with_capitals(batch.captions, batch.conditions[:, 0].tolist()))
    t = pretraining.logit_normal(batch.u, settings.time_mean, settings.time_deviation)
    x_t = torch.lerp(batch.latents, batch.noise, t[:, None, None, None])
    v = transformer(
        hidden_states=packed(x_t),
        encoder_hidden_states=text,
        timestep=t,
        position_ids=torch.cat([torch.zeros(text.shape[1], 3), positions(*x_t.shape[-2:])]),
        encoder_attention_mask=seen,
    ).sample
    return (v - packed(batch.expected_velocity(x_t, t))).square().mean()


def train_krea2(vae: AutoencoderKLQwenImage, settings: FlowSettings, seed: int, saved: Path | None = None) -> Krea2Pipeline:
    """A pipeline trained from nothing but the VAE, on images of the known colours; see pretraining.train."""
    reader, transformer = new_reader(seed), new_transformer(seed)

    def rows_of(captions: list[str]) -> Tensor:
        # The rows behind a caption, state by state.
        closing = len(reader.tokenizer(AFTER).input_ids)
        return torch.stack([rows[-closing:].flatten(0, 1) for rows in reader.states(captions)])

    reading.teach(
        reader.encoder.language_model, rows_of, ReadingSettings(), seed, "krea2", saved and saved.with_name(f"{saved.name}.reading")
    )
    reading.train_rounds(
        transformer,
        functools.partial(loss_of, transformer, reader),
        pretraining.exactly(functools.partial(qwen_vae.latents_of, vae)),
        settings,
        seed,
        "krea2",
        saved,
    )
    return Krea2Pipeline(
        vae=vae,
        text_encoder=reader.encoder,
        tokenizer=reader.tokenizer,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            time_shift_type="exponential",
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=6400,
        ),
        text_encoder_select_layers=TAPS,
    )
