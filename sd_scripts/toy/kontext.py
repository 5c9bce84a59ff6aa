"""Train the toy FLUX.1 Kontext base: the toy FLUX base (flux.py), continued on pairs of the world of edits.

Like the real one it is FLUX's network, which sees a reference image behind the one that it draws. What is left as FLUX has it is stored
once (sharing.py): the VAE, the text encoders, of the transformer what tells times. Pairs are editing.py's, the loop pretraining.py's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from diffusers import AutoencoderKL, FluxKontextPipeline, FluxTransformer2DModel
from PIL import Image
from torch import Tensor, nn

from sd_scripts.families.common.packing import packed

from . import autoencoder, editing, pretraining, reading, sharing, worlds
from .editing import EditBatch, EditSettings, Pairs
from .measure import EditRender
from .pretraining import Latents, ToyBatch
from .reading import FlowSettings
from .tokens import T5_MAX_TOKENS

if TYPE_CHECKING:
    # Brought where it is used: the rest goes without FLUX.
    from .flux import FluxReader

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
    num_move_steps: int = 1750
    """Steps of a third round on other pairs, with more moves, of a rate as for move_schedule_steps."""
    move_schedule_steps: int = 5000
    num_move_images: int = 6000
    late_recolour_fraction: float = 0.1
    late_move_fraction: float = 0.65
    move_time_mean: float = 2.5
    num_seeing_steps: int = 3000
    """Steps of a fourth round like the third, which teaches what "it" is. In the third 46 of 49 moves that name the shape were as asked, of
    those that say "it" 2 of 11: the shape was guessed."""
    num_seeing_images: int = 3000
    seeing_unnamed_fraction: float = 0.6
    seeing_weight: float = 0.03
    """Weight of what the text's rows are to know after the double blocks, shape and colour of what is meant: see loss_of."""


def rounds(settings: KontextSettings) -> tuple[KontextSettings, ...]:
    """The settings of the four rounds."""
    first, late = reading.rounds(replace(settings, seeing_weight=0.0))
    move = replace(
        late,
        num_steps=settings.move_schedule_steps,
        num_images=settings.num_move_images,
        recolour_fraction=settings.late_recolour_fraction,
        move_fraction=settings.late_move_fraction,
        time_mean=settings.move_time_mean,
    )
    seeing = replace(
        move,
        num_steps=settings.num_seeing_steps,
        num_images=settings.num_seeing_images,
        unnamed_fraction=settings.seeing_unnamed_fraction,
        seeing_weight=settings.seeing_weight,
    )
    return first, late, move, seeing


def loss_of(
    transformer: FluxTransformer2DModel,
    reader: FluxReader,
    batch: EditBatch | ToyBatch,
    settings: KontextSettings,
    heads: nn.ModuleList | None = None,
) -> Tensor:
    """Mean squared error of the predicted velocity, a scalar; with heads also what these read wrongly in the text's rows of edits.

    Rows that know what "it" is are drawn from as those of a text that names it.
    """
    from . import flux

    if isinstance(batch, ToyBatch):
        return flux.loss_of(transformer, reader, batch, settings)
    guidance, num_tokens = batch.conditions.unbind(dim=1)
    text = reader.remembered(int(num_tokens[0]))(batch.instructions)
    t = pretraining.logit_normal(batch.u, settings.time_mean, settings.time_deviation)
    x_t = torch.lerp(batch.targets, batch.noise, t[:, None, None, None])
    rows: list[Tensor] = []
    hook = transformer.transformer_blocks[-1].register_forward_hook(lambda _block, _given, found: rows.append(found[0]))
    try:
        v = flux.velocity(transformer, x_t, t, guidance, text, batch.sources)
    finally:
        hook.remove()
    loss = (v - packed(batch.noise - batch.targets)).square().mean()
    if heads is None:
        return loss
    return loss + settings.seeing_weight * reading.naming_loss(heads, rows[0][:, :T5_MAX_TOKENS], batch.meant)


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
    from . import flux

    edits = editing.batches(pairs, settings, seed, lambda rng: (flux.drawn_guidance(rng), flux.drawn_num_tokens(rng)))
    drawn = pretraining.batches(drawings, settings, seed + 1, flux.drawn_numbers(settings), alike=True)
    for step in range(settings.num_steps):
        if worlds.rng_for(seed, 4, step).random() < settings.drawing_fraction:
            yield next(drawn)
        else:
            yield next(edits)


def train_kontext(vae: AutoencoderKL, settings: KontextSettings, seed: int, saved: Path | None = None) -> FluxKontextPipeline:
    """A pipeline trained from the stored FLUX on the VAE that it has; saved: see pretraining.train."""
    from . import flux

    base = sharing.load_pipeline(STARTS_FROM)
    transformer, reader = base.transformer, flux.FluxReader(seed)
    reader.clip, reader.t5 = base.text_encoder, base.text_encoder_2
    layers = ((name, layer) for name, layer in transformer.named_modules() if not list(layer.children()))
    own = nn.ModuleList([layer for name, layer in layers if not any(f".{kept}." in f".{name}." for kept in KEPT)])
    first, late, move, seeing = rounds(settings)

    @functools.cache
    def encoded(of_round: KontextSettings, seed: int) -> tuple[tuple[Pairs, ...], tuple[Latents, ...]]:
        return encode_worlds(vae, of_round, seed)

    def shown(of_round: KontextSettings, number: int) -> Iterator[EditBatch | ToyBatch]:
        # Encoded with the first batch: a training that is done needs none. The first two rounds have the same pairs.
        worlds_of = encoded(first, seed) if number < 2 else encoded(of_round, seed + 1000 * number)
        yield from batches(*worlds_of, of_round, seed + 1000 * number)

    def train(of_round: KontextSettings, number: int, ending: str, heads: nn.ModuleList | None = None) -> None:
        transformer.requires_grad_(False)
        own.requires_grad_(True)
        state, name = saved and saved.with_name(f"{saved.name}{ending}"), "kontext" if heads is None else "kontext, seeing"
        loss = functools.partial(loss_of, transformer, reader, settings=of_round, heads=heads)
        model = own if heads is None else nn.ModuleList([own, heads])
        pretraining.train(
            model, loss, shown(of_round, number), of_round, name, state, settings.num_move_steps if of_round is move else None
        )

    train(first, 0, "")
    train(late, 1, ".late")
    train(move, 2, ".move")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = nn.ModuleList([nn.Linear(transformer.inner_dim, 1 + len(names)) for names in reading.NAMES])
    train(seeing, 3, ".seeing", heads)
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
