"""What the training of bases that edit shares: pairs encoded once, instructions, batches.

Knows no family; the world of edits is edits.py's, the loop pretraining.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from . import edits, worlds
from .edits import Edit
from .pretraining import BaseSettings

# Shapes: N pairs, B samples, C latent channels, h w latent sides, V K what a text encoder sees of a source, n numbers of conditioning.


@dataclass(frozen=True)
class EditSettings(BaseSettings):
    """How a toy base is trained to edit, whatever its family."""

    recolour_fraction: float = 0.15
    """Fraction of the instructions with a meaning that ask for another colour, which is learned first."""
    move_fraction: float = 0.5
    """Fraction that asks for another place: a circle moved in a wide image is a square for long. The others ask to remove something."""
    other_word_fraction: float = 0.12
    """Fraction of pairs whose instruction has no meaning, and whose target is the source."""
    capital_fraction: float = 0.15
    """Fraction of instructions that begin with a capital."""
    unnamed_fraction: float = 0.0
    """Fraction of the instructions that do not name a lone shape in any case, so that what it is must be seen."""
    blank_fraction: float = 0.5
    """Fraction of the instructions left out that are a space instead of "": pipelines are given either for "nothing is asked"."""


@dataclass(frozen=True)
class Pairs:
    """Encoded pairs of one size, (width, height) in pixels: sources, targets (N, C, h, w); seen (N, V, K), of the sources."""

    size: tuple[int, int]
    sources: Tensor
    targets: Tensor
    seen: Tensor
    edits: tuple[Edit, ...]


_AT_ONCE = 10
"""Images that are encoded together: 10 ms each at 128 pixels, 23 with 50 of them, which no cache holds."""


def encode_pairs(
    encode: Callable[[list[Image.Image]], Tensor],
    settings: EditSettings,
    seed: int,
    sizes: tuple[tuple[int, int], ...] = worlds.SIZES,
    look: Callable[[list[Image.Image]], Tensor] = lambda images: torch.empty(len(images), 0, 0),
) -> tuple[Pairs, ...]:
    """Pairs of edits that bases are trained on, encoded once, as many of each size: shapes of images that are not square come late.

    look: images -> what a text encoder that sees the sources gets of them.
    """
    pools = []
    for index, size in enumerate(sizes):
        num = settings.num_images // len(sizes)
        chosen: list[Edit] = []
        sources, targets, seen = [], [], []
        for start in range(0, num, _AT_ONCE):
            drawn = [_drawn(settings, *size, worlds.rng_for(seed, 1, index, n)) for n in range(start, min(start + _AT_ONCE, num))]
            of_edits, before, after = zip(*drawn, strict=True)
            chosen += of_edits
            sources.append(encode(list(before)))
            targets.append(encode(list(after)))
            seen.append(look(list(before)).half())
        pools.append(Pairs(size, torch.cat(sources), torch.cat(targets), torch.cat(seen), tuple(chosen)))
    return tuple(pools)


def _drawn(settings: EditSettings, width: int, height: int, rng: np.random.Generator) -> tuple[Edit, Image.Image, Image.Image]:
    shares = (settings.recolour_fraction, settings.move_fraction, 1 - settings.recolour_fraction - settings.move_fraction)
    kind = "keep" if rng.random() < settings.other_word_fraction else edits.OLD_KINDS[int(rng.choice(len(edits.OLD_KINDS), p=shares))]
    edit = edits.edit_of(kind, rng)
    return edit, *edits.draw(edit, width, height, rng)


@dataclass(frozen=True)
class EditBatch:
    """targets, sources, noise (B, C, h, w); u (B,) uniform in [0, 1), stratified; seen (B, V, K); conditions (B, n); see Pairs.

    meant: of each instruction what it means, in words.
    """

    size: tuple[int, int]
    targets: Tensor
    sources: Tensor
    noise: Tensor
    u: Tensor
    instructions: list[str]
    seen: Tensor
    conditions: Tensor
    meant: list[str] = field(default_factory=list)


def spoken_of(edit: Edit) -> str:
    """What an instruction speaks of: "a red circle"."""
    thing = edits.change(edit)[0]
    return f"a {thing.color} {thing.shape}"


def batches(
    pools: tuple[Pairs, ...],
    settings: EditSettings,
    seed: int,
    conditions: Callable[[np.random.Generator], tuple[float, ...]] = lambda rng: (),
    meaning: Callable[[Edit], str] = spoken_of,
) -> Iterator[EditBatch]:
    """The batches of a training: a pure function of seed and step, every sample drawing from generators of its own."""
    shares = np.array([len(pool.edits) for pool in pools], dtype=float)
    for step in range(settings.num_steps):
        pool = pools[int(worlds.rng_for(seed, 2, step).choice(len(pools), p=shares / shares.sum()))]
        indices, noise, u, texts, numbers, meant = [], [], [], [], [], []
        for number in range(step * settings.batch_size, (step + 1) * settings.batch_size):
            rng = worlds.rng_for(seed, 3, number)
            indices.append(int(rng.integers(len(pool.edits))))
            texts.append(instruction(pool.edits[indices[-1]], settings, rng))
            meant.append(meaning(pool.edits[indices[-1]]))
            numbers.append(conditions(rng))
            torch_rng = torch.Generator().manual_seed(int(rng.integers(2**63)))
            noise.append(torch.randn(pool.targets.shape[1:], generator=torch_rng))
            u.append(torch.rand((), generator=torch_rng))
        # Stratified over the batch: the same uniform distribution with less variance.
        strata = (torch.arange(len(u)) + torch.stack(u)) / len(u)
        shown, seen = (pool.targets[indices], pool.sources[indices]), pool.seen[indices].float()
        yield EditBatch(pool.size, *shown, torch.stack(noise), strata, texts, seen, torch.tensor(numbers), meant)


def instruction(edit: Edit, settings: EditSettings, rng: np.random.Generator) -> str:
    """The edit in words, now and then with a capital, or not at all, as the settings say."""
    # What never happens draws nothing.
    named = not settings.unnamed_fraction or rng.random() >= settings.unnamed_fraction
    text = edits.instruction(edit, rng, named)
    if rng.random() < settings.dropout_fraction:
        return " " if rng.random() < settings.blank_fraction else ""
    return text[:1].upper() + text[1:] if rng.random() < settings.capital_fraction else text
