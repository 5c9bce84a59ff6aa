"""Train the toy Qwen-Image-2.1 base: its own networks, small, which draw from captions and edit; scenes of the world without teal.

Knows how the family is conditioned. The text encoder is taught to read first (reading.py) and then frozen; its vision tower tells nothing,
so that rows depend on an image's size alone. The VAE is qwen21_vae.py's, the pairs editing.py's, the loop pretraining.py's. diffusers'
pipeline reads a processor that nothing here needs, so the model is stored and drawn by its family (by_family.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import AutoencoderKLQwenImage21
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from sd_scripts.families.common.qwen3vl import tiny_qwen3vl
from sd_scripts.families.common.reading import expanded
from sd_scripts.families.qwen_image21.model import AFTER, BEFORE, END, START, SYSTEM
from sd_scripts.families.qwen_image21.network import QwenImage21Network
from sd_scripts.families.qwen_image21.reading import PAD

from . import autoencoder, editing, edits, pretraining, qwen21_vae, reading, worlds
from .by_family import FamilyModel
from .editing import EditBatch, EditSettings, Pairs
from .pretraining import Latents, ToyBatch
from .reading import FlowSettings, ReadingSettings
from .tokens import qwen_tokenizer

_TEXT_WIDTH = 64
_SHIFT = 1.6
"""Of times at all sizes: what a shape is, is settled close to noise."""
_TOKEN = 32
"""Sides in pixels of what is one token to the text encoder."""
_LOOKED_AT = 4
"""Block behind which the text's rows are to know what an instruction means."""

# Shapes: B samples, C = 64 latent channels, h w latent sides, L text tokens, D = 64 text width.


@dataclass(frozen=True)
class QwenImage21Settings(FlowSettings, EditSettings):
    """How the toy Qwen-Image-2.1 base is trained: to draw, then to edit as well."""

    num_steps: int = 2500
    """Steps of the first round, of drawings."""
    num_full_steps: int = 800
    num_edit_steps: int = 4000
    """Steps of the second round, mostly of edits."""
    edit_learning_rate: float = 1.5e-3
    num_pairs: int = 3600
    """Pairs of source and target that are encoded once."""
    drawing_fraction: float = 0.2
    """Fraction of drawings among the edits."""
    recolour_fraction: float = 0.2
    move_fraction: float = 0.45
    unnamed_fraction: float = 0.4
    num_late_steps: int = 1500
    late_time_mean: float = 1.6
    late_drawing_fraction: float = 0.35
    """The same in the last round: shapes from captions come latest."""
    seeing_weight: float = 0.03
    """Weight of what the text's rows are to know before the last block: shape, colour and place of what is to be drawn, or to go away."""


@dataclass
class TextReader:
    """The text encoder and what it has made of texts so far."""

    encoder: Qwen3VLForConditionalGeneration
    tokenizer: Qwen2Tokenizer
    read: dict[tuple[str, tuple[int, int] | None], Tensor] = field(default_factory=dict)

    def states(self, texts: list[str], size: tuple[int, int] | None = None) -> list[Tensor]:
        """Rows (L, D) of each text as the family has them, with a reference image of this size in pixels or without one. It looks back
        only, so padding is free."""
        shown = "" if size is None else _SHOWN
        count = 0 if size is None else size[0] // _TOKEN * (size[1] // _TOKEN)
        start, mark = len(self.tokenizer(SYSTEM).input_ids), self.encoder.config.image_token_id
        given = [self.tokenizer(SYSTEM + BEFORE + shown + (text or " ")).input_ids + self.tokenizer(AFTER).input_ids for text in texts]
        rows = [torch.tensor(expanded(ids, mark, [count])) for ids in given]
        tokens = pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        seen = {} if size is None else _black(self.encoder, size, tokens)
        found: list[Tensor] = []
        handle = self.encoder.model.language_model.norm.register_forward_pre_hook(lambda module, given: found.append(given[0]))
        try:
            (self.encoder.model if seen else self.encoder.model.language_model)(input_ids=tokens, use_cache=False, **seen)
        finally:
            handle.remove()
        return [states[: len(ids)][ids != mark][start:] for states, ids in zip(found[0], rows, strict=True)]

    def known(self, texts: list[str], size: tuple[int, int] | None) -> list[Tensor]:
        """The same, without gradient; what was read before is not read again."""
        if new := [text for text in dict.fromkeys(texts) if (text, size) not in self.read]:
            with torch.no_grad():
                self.read.update({(text, size): rows for text, rows in zip(new, self.states(new, size), strict=True)})
        return [self.read[text, size] for text in texts]

    @functools.cached_property
    def before(self) -> int:
        """How many rows stand before a reference image."""
        return len(self.tokenizer(BEFORE + _SHOWN[: -len(PAD + END)]).input_ids)

    @functools.cached_property
    def closing(self) -> int:
        """How many rows stand behind a text."""
        return len(self.tokenizer(AFTER).input_ids)


_SHOWN = f"<image1>{START}{PAD}{END}"


def _black(encoder: Any, size: tuple[int, int], tokens: Tensor) -> dict[str, Tensor]:
    # Black images of this size in pixels, as Qwen3-VL takes them, one for each text.
    vision = encoder.config.vision_config
    grid = torch.tensor([1, size[1] // vision.patch_size, size[0] // vision.patch_size]).expand(len(tokens), 3)
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.zeros(int(grid.prod(dim=1).sum()), width)
    return {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (tokens == encoder.config.image_token_id).int()}


def new_reader(seed: int) -> TextReader:
    """An untaught text encoder, whose vision tower gives zeros; the same seed gives the same weights."""
    tokenizer = qwen_tokenizer((SYSTEM, BEFORE, AFTER, "<image1> <image2> <image3>"))
    config = tiny_qwen3vl(tokenizer, _TEXT_WIDTH, num_layers=3).config
    config.text_config.update({"intermediate_size": _TEXT_WIDTH, "tie_word_embeddings": True})
    config.vision_config.update({"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1})
    config.update({"tie_word_embeddings": True})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_dict(config.to_dict()))
    visual = encoder.model.visual
    for merger in (visual.merger, *visual.deepstack_merger_list):
        nn.init.zeros_(merger.linear_fc2.weight)
        nn.init.zeros_(merger.linear_fc2.bias)
    return TextReader(encoder, tokenizer)


def texts_to_read(settings: ReadingSettings, seed: int) -> Iterator[list[str]]:
    """What the text encoder is taught on: captions, and as many instructions."""
    for step, captions in enumerate(reading.captions(settings, seed)):
        rngs = [worlds.rng_for(seed, 7, step, number) for number in range(len(captions) // 2)]
        kinds = (*edits.OLD_KINDS, "keep")
        asked = [edits.edit_of(kinds[int(rng.integers(len(kinds)))], rng).instruction for rng in rngs]
        yield [*asked, *captions[len(asked) :]]


def new_transformer(seed: int) -> QwenImage21Network:
    """An untrained transformer; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return QwenImage21Network(
            num_layers=5,
            attention_head_dim=24,
            num_attention_heads=5,
            context_in_dim=_TEXT_WIDTH,
            mlp_ratio=1,
            axes_dims_rope=(8, 8, 8),
        )


def loss_of(
    transformer: QwenImage21Network,
    reader: TextReader,
    batch: EditBatch | ToyBatch,
    settings: QwenImage21Settings,
    heads: nn.ModuleList | None = None,
) -> Tensor:
    """Mean squared error of the predicted velocity, a scalar; with heads also what these read wrongly in the text's rows of edits.

    A drawing's conditions are whether its caption gets a capital. Samples whose texts have one length go together, as the trainers have it.
    """
    t = pretraining.logit_normal(batch.u, settings.time_mean, settings.time_deviation)
    if isinstance(batch, ToyBatch):
        x_t = torch.lerp(batch.latents, batch.noise, t[:, None, None, None])
        wanted = batch.expected_velocity(x_t, t)
        rows = reader.known(pretraining.with_capitals(batch.captions, batch.conditions[:, 0].tolist()), None)
    else:
        x_t = torch.lerp(batch.targets, batch.noise, t[:, None, None, None])
        wanted = batch.noise - batch.targets
        rows = reader.known(batch.instructions, batch.size)
    errors, misread = [], []
    for indices in _alike(rows):
        text = torch.stack([rows[index] for index in indices])
        if isinstance(batch, ToyBatch):
            v = transformer([x_t[indices]], text, t[indices], [])
        else:
            given = ([batch.sources[indices], x_t[indices]], text, t[indices], [reader.before])
            if heads is None:
                v = transformer(*given)
            else:
                v, closing = _with_closing(transformer, reader.closing, *given)
                misread.append(len(indices) * reading.naming_loss(heads, closing, [batch.meant[index] for index in indices]))
        errors.append((v - wanted[indices]).square().mean(dim=(1, 2, 3)))
    loss = torch.cat(errors).mean()
    return loss if not misread else loss + settings.seeing_weight * torch.stack(misread).sum() / len(rows)


def _alike(rows: list[Tensor]) -> list[list[int]]:
    # Numbers of the texts of each length.
    found: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault(len(row), []).append(number)
    return list(found.values())


def _with_closing(
    transformer: QwenImage21Network, num: int, images: list[Tensor], text: Tensor, t: Tensor, before: list[int]
) -> tuple[Tensor, Tensor]:
    # The prediction, and the rows (B, num, width) of the closing words before the last block.
    found: list[Tensor] = []
    hook = transformer.transformer_blocks[_LOOKED_AT - 1].register_forward_hook(lambda _block, _given, tokens: found.append(tokens))
    try:
        v = transformer(images, text, t, before)
    finally:
        hook.remove()
    end = found[0].shape[1] - images[-1].shape[-2] * images[-1].shape[-1]
    return v, found[0][:, end - num : end]


BatchT = TypeVar("BatchT", EditBatch, ToyBatch)


def by_length(shown: Iterator[Any], length_of: Callable[[str], int], seed: int, at_once: int = 36) -> Iterator[Any]:
    """The batches, their samples exchanged among so many of one kind and size so that texts of one length come together."""
    for number in itertools.count():
        window = list(itertools.islice(shown, at_once))
        if not window:
            return
        alike: dict[Any, list[Any]] = {}
        for batch in window:
            alike.setdefault((type(batch), batch.noise.shape), []).append(batch)
        mixed = []
        for batches in alike.values():
            joined, size = _joined(batches), len(batches[0].u)
            texts = joined.captions if isinstance(joined, ToyBatch) else joined.instructions
            order = sorted(range(len(texts)), key=lambda index: length_of(texts[index]))
            mixed += [_chosen(joined, order[start : start + size]) for start in range(0, len(order), size)]
        for index in worlds.rng_for(seed, 5, number).permutation(len(mixed)):
            yield mixed[index]


def _joined(batches: list[BatchT]) -> BatchT:
    found = {}
    for name in (entry.name for entry in fields(batches[0])):
        values = [getattr(batch, name) for batch in batches]
        if isinstance(values[0], Tensor):
            found[name] = torch.cat(values)
        else:
            found[name] = list(itertools.chain(*values)) if isinstance(values[0], list) else values[0]
    return type(batches[0])(**found)


def _chosen(batch: BatchT, indices: list[int]) -> BatchT:
    found = {}
    for name, value in ((entry.name, getattr(batch, entry.name)) for entry in fields(batch)):
        if isinstance(value, Tensor):
            found[name] = value[indices]
        else:
            found[name] = [value[index] for index in indices] if isinstance(value, list) and value else value
    return type(batch)(**found)


def meaning(edit: edits.Edit) -> str:
    """What an instruction leads to, as a caption: the thing as it becomes, or the one that goes away."""
    before, after = edits.change(edit)
    thing = after or before
    return f"a {thing.color} {thing.shape} at the {thing.place}"


def encode_worlds(vae: AutoencoderKLQwenImage21, settings: QwenImage21Settings, seed: int) -> tuple[tuple[Pairs, ...], tuple[Latents, ...]]:
    """Pairs of edits, and drawings."""
    sizes, scenes = worlds.sizes_of("qwen_image21"), worlds.trained(worlds.KNOWN_COLORS)
    encode = functools.partial(qwen21_vae.latents_of, vae)
    pairs = editing.encode_pairs(
        lambda images: encode(autoencoder.to_pixels(images)), replace(settings, num_images=settings.num_pairs), seed, sizes
    )
    return pairs, pretraining.encode_world(pretraining.exactly(encode), settings.num_images, seed, scenes, sizes)


def batches(
    pairs: tuple[Pairs, ...], drawings: tuple[Latents, ...], settings: QwenImage21Settings, seed: int, drawing_fraction: float
) -> Iterator[EditBatch | ToyBatch]:
    """Of edits, and of drawings as often as said; a pure function of seed and step."""
    asked = editing.batches(pairs, settings, seed, meaning=meaning)
    drawn = pretraining.batches(drawings, settings, seed + 1, pretraining.capitals(settings.capital_fraction), alike=True)
    for step in range(settings.num_steps):
        yield next(drawn) if worlds.rng_for(seed, 4, step).random() < drawing_fraction else next(asked)


def rounds(settings: QwenImage21Settings) -> tuple[QwenImage21Settings, ...]:
    """The settings of the three rounds: drawings, edits and drawings, the same as the rate falls to 0."""
    second = replace(settings, num_steps=settings.num_edit_steps, learning_rate=settings.edit_learning_rate)
    return settings, *reading.rounds(second)


def train_qwen_image21(vae: AutoencoderKLQwenImage21, settings: QwenImage21Settings, seed: int, saved: Path | None = None) -> FamilyModel:
    """A model trained from nothing but the VAE; saved: see pretraining.train, each round has a state of its own."""
    reader, transformer = new_reader(seed), new_transformer(seed)
    size = worlds.sizes_of("qwen_image21")[0]

    def rows_of(texts: list[str]) -> Tensor:
        # The rows behind a text, with an image and without one.
        both = (reader.states(texts, size), reader.states(texts))
        return torch.cat([torch.stack([rows[-reader.closing :] for rows in some]) for some in both], dim=1)

    def state(ending: str) -> Path | None:
        return saved and saved.with_name(f"{saved.name}{ending}")

    reader.encoder.requires_grad_(False)
    language = reader.encoder.model.language_model.requires_grad_(True)
    reading.teach(language, rows_of, ReadingSettings(), seed, "qwen_image21", state(".reading"), texts_to_read)
    reader.encoder.eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = nn.ModuleList([nn.Linear(transformer.inner_dim, 1 + len(names)) for names in reading.NAMES])
    encoded = functools.cache(functools.partial(encode_worlds, vae, settings, seed))
    lengths = functools.cache(lambda text: len(reader.tokenizer(text).input_ids))
    for number, of_round in enumerate(rounds(settings)):
        first = number == 0

        def shown(now: QwenImage21Settings = of_round, number: int = number) -> Iterator[EditBatch | ToyBatch]:
            # Encoded with the first batch: a training that is done needs none.
            fractions = 1.0, settings.drawing_fraction, settings.late_drawing_fraction
            yield from by_length(batches(*encoded(), now, seed + 1000 * number, fractions[number]), lengths, seed + 1000 * number)

        model = nn.ModuleList([transformer] if first else [transformer, heads]).requires_grad_(True)
        loss = functools.partial(loss_of, transformer, reader, settings=of_round, heads=None if first else heads)
        name = ("qwen_image21", "qwen_image21, edits", "qwen_image21, late")[number]
        pretraining.train(model, loss, shown(), of_round, name, state(("", ".edits", ".late")[number]))
    return as_model(transformer, reader, vae)


def as_model(transformer: QwenImage21Network, reader: TextReader, vae: AutoencoderKLQwenImage21) -> FamilyModel:
    """The parts as the model that is stored."""
    networks = {"backbone": transformer, "vae": vae, "te1": reader.encoder}
    return FamilyModel.made("qwen_image21", networks, {"te1": reader.tokenizer}, {}, {"base_shift": _SHIFT, "max_shift": _SHIFT})
