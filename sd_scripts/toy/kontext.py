"""Train the toy FLUX.1 Kontext base: the toy FLUX base (flux.py), continued on pairs of the world of edits.

Like the real one it is FLUX's network, which sees a reference image behind the one that it draws. What is left as FLUX has it is stored
once (sharing.py): the VAE, the text encoders, of the transformer what tells times. Pairs are editing.py's, the loop pretraining.py's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxKontextPipeline, FluxTransformer2DModel
from PIL import Image
from torch import Tensor, nn

from sd_scripts.families.common.packing import packed

from . import autoencoder, editing, flux, pretraining, reading, sharing, worlds
from .editing import EditBatch, EditSettings, Pairs
from .flux import FluxReader
from .measure import EditRender
from .pretraining import Latents, ToyBatch
from .reading import FlowSettings
from .tokens import T5_MAX_TOKENS

STARTS_FROM = Path(__file__).parent / "bases" / "flux"
"""The stored base that it continues."""

KEPT = ("time_text_embed", "norm1.linear", "norm1_context.linear", "norm.linear", "norm_out.linear")
"""Layers of the transformer that stay FLUX's: what they know, times and how they scale the rest, is the same here."""

NUM_STEPS = 12


@dataclass(frozen=True)
class KontextSettings(FlowSettings, EditSettings):
    """How the toy Kontext base is trained."""

    num_steps: int = 4000
    num_full_steps: int = 1200
    learning_rate: float = 1.5e-3
    num_images: int = 3999
    """Pairs of source and target that are encoded once."""
    drawing_fraction: float = 0.1
    """Fraction of steps on images with captions and no reference image, which keep what FLUX can."""
    num_drawings: int = 1200
    """Images that those steps show."""


def loss_of(transformer: FluxTransformer2DModel, reader: FluxReader, batch: EditBatch | ToyBatch, settings: KontextSettings) -> Tensor:
    """Mean squared error of the predicted velocity, a scalar."""
    if isinstance(batch, ToyBatch):
        return flux.loss_of(transformer, reader, batch, settings)
    guidance, num_tokens = batch.conditions.unbind(dim=1)
    text = reader.remembered(int(num_tokens[0]))(batch.instructions)
    t = pretraining.logit_normal(batch.u, settings.time_mean, settings.time_deviation)
    x_t = torch.lerp(batch.targets, batch.noise, t[:, None, None, None])
    v = flux.velocity(transformer, x_t, t, guidance, text, batch.sources)
    return (v - packed(batch.noise - batch.targets)).square().mean()


@torch.no_grad()
def encode_worlds(vae: AutoencoderKL, settings: KontextSettings, seed: int) -> tuple[tuple[Pairs, ...], tuple[Latents, ...]]:
    """Pairs of edits, and drawings."""
    sizes, scenes = worlds.sizes_of("kontext"), worlds.trained(worlds.KNOWN_COLORS)

    def encode(pixels: Tensor) -> Tensor:
        return vae.encode(pixels).latent_dist.mode()

    pairs = editing.encode_pairs(lambda images: encode(autoencoder.to_pixels(images)), settings, seed, sizes)
    return pairs, pretraining.encode_world(pretraining.exactly(encode), settings.num_drawings, seed, scenes, sizes)


def batches(
    pairs: tuple[Pairs, ...], drawings: tuple[Latents, ...], settings: KontextSettings, seed: int
) -> Iterator[EditBatch | ToyBatch]:
    """Of edits, and now and then of drawings; a pure function of seed and step."""
    edits = editing.batches(pairs, settings, seed, lambda rng: (flux.drawn_guidance(rng), flux.drawn_num_tokens(rng)))
    drawn = pretraining.batches(drawings, settings, seed + 1, flux.drawn_numbers(settings), alike=True)
    for step in range(settings.num_steps):
        if worlds.rng_for(seed, 4, step).random() < settings.drawing_fraction:
            yield next(drawn)
        else:
            yield next(edits)


def train_kontext(vae: AutoencoderKL, settings: KontextSettings, seed: int, saved: Path | None = None) -> FluxKontextPipeline:
    """A pipeline trained from the stored FLUX on the VAE that it has; saved: see pretraining.train."""
    base = sharing.load_pipeline(STARTS_FROM)
    transformer, reader = base.transformer, FluxReader(seed)
    reader.clip, reader.t5 = base.text_encoder, base.text_encoder_2
    layers = ((name, layer) for name, layer in transformer.named_modules() if not list(layer.children()))
    own = nn.ModuleList([layer for name, layer in layers if not any(f".{kept}." in f".{name}." for kept in KEPT)])
    encoded = functools.cache(lambda: encode_worlds(vae, settings, seed))

    def shown(of_round: KontextSettings, seed: int) -> Iterator[EditBatch | ToyBatch]:
        # Encoded with the first batch: a training that is done needs none.
        pairs, drawings = encoded()
        yield from batches(pairs, drawings, of_round, seed)

    for number, of_round in enumerate(reading.rounds(settings)):
        state = saved and saved.with_name(f"{saved.name}{'.late' if number else ''}")
        transformer.requires_grad_(False)
        own.requires_grad_(True)
        loss = functools.partial(loss_of, transformer, reader, settings=of_round)
        pretraining.train(own, loss, shown(of_round, seed + 1000 * number), of_round, "kontext", state)
    return FluxKontextPipeline(**flux.as_pipeline(transformer, reader, vae).components)


def render_with(pipeline: FluxKontextPipeline, num_steps: int = NUM_STEPS, batch_size: int = 32) -> EditRender:
    """A render callable in the form that measure.py takes; each image's noise comes from its own seed."""
    pipeline.set_progress_bar_config(disable=True)

    def render(instructions: list[str], sources: list[Image.Image], seeds: list[int]) -> list[Image.Image]:
        images: list[Image.Image] = []
        for start in range(0, len(seeds), batch_size):
            chosen = slice(start, start + batch_size)
            width, height = sources[start].size
            images += pipeline(
                image=sources[chosen],
                prompt=instructions[chosen],
                width=width,
                height=height,
                max_area=width * height,
                num_inference_steps=num_steps,
                max_sequence_length=T5_MAX_TOKENS,
                generator=[torch.Generator().manual_seed(seed) for seed in seeds[chosen]],
                _auto_resize=False,
            ).images
        return images

    return render
