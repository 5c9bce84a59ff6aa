"""Bases whose text encoder is taught to read first, so that its rows tell what a text names; then comes the transformer, by flow matching.

A real text encoder knows language before any image model reads it. Taught beside the transformer, as Z-Image's toy is, it takes most of the
training; taught first and then left alone, it takes a minute or two, and what it makes of a caption is computed once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from . import pretraining, worlds
from .pretraining import BaseSettings, Conditions, ToyBatch
from .worlds import Scene

# Shapes: B texts, R rows that know, D their width, L tokens of a text.

NAMES = (
    tuple(dict.fromkeys((*worlds.SHAPES, *pretraining.OTHER_WORDS))),
    tuple(dict.fromkeys((*worlds.COLORS, *pretraining.OTHER_COLOR_WORDS))),
    tuple(worlds.PLACES),
)
"""Shapes, colours and places that are told apart, those among them that no base has an image of."""


@dataclass(frozen=True)
class ReadingSettings(BaseSettings):
    """How a text encoder is taught to read."""

    num_steps: int = 500
    batch_size: int = 32
    learning_rate: float = 3e-3
    num_warmup_steps: int = 50
    ema_decay: float = 0.98
    dropout_fraction: float = 0.05
    short_caption_fraction: float = 0.2
    capital_fraction: float = 0.15


def captions(settings: ReadingSettings, seed: int) -> Iterator[list[str]]:
    """The captions of every step, of all names in any combination: a pure function of seed and step."""
    for step in range(settings.num_steps):
        numbers = range(step * settings.batch_size, (step + 1) * settings.batch_size)
        yield [_caption(settings, worlds.rng_for(seed, 6, number)) for number in numbers]


def _caption(settings: ReadingSettings, rng: np.random.Generator) -> str:
    text = pretraining.caption(Scene(*(names[int(rng.integers(len(names)))] for names in NAMES)), settings, rng)
    return pretraining.with_capitals([text], [float(rng.random() < settings.capital_fraction)])[0]


def named(text: str) -> list[int]:
    """Which shape, colour and place of NAMES a caption names, counted from 1; 0 where it names none."""
    words = re.findall(r"[a-z]+", text.lower())
    place = " ".join([word for side in (("top", "bottom"), ("left", "right", "center")) for word in words if word in side])
    found = [next((word for word in words if word in names), "") for names in NAMES[:2]]
    return [names.index(word) + 1 if word in names else 0 for names, word in zip(NAMES, [*found, place], strict=True)]


RowsOf = Callable[[list[str]], Tensor]
"""Captions -> rows (B, R, D) of which each is to know what its caption names."""


def teach(
    encoder: nn.Module,
    rows_of: RowsOf,
    settings: ReadingSettings,
    seed: int,
    name: str,
    saved: Path | None = None,
    texts: Callable[[ReadingSettings, int], Iterator[list[str]]] = captions,
) -> nn.ModuleList:
    """Trains an encoder in place so that each of these rows says shape, colour and place; then it is frozen. saved: see pretraining.train.

    What reads the rows is returned; nobody needs it afterwards.
    """
    with torch.no_grad():
        width = rows_of(["a"]).shape[-1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = nn.ModuleList([nn.Linear(width, 1 + len(names)) for names in NAMES])

    def loss_of(shown: list[str]) -> Tensor:
        return naming_loss(heads, rows_of(shown), shown)

    pretraining.train(nn.ModuleList([encoder, heads]), loss_of, texts(settings, seed), settings, f"{name}, reading", saved)
    return heads


def naming_loss(heads: nn.ModuleList, rows: Tensor, texts: Sequence[str]) -> Tensor:
    """Mean cross-entropy of what rows (B, R, D) say that their texts name."""
    known = nn.functional.rms_norm(rows, rows.shape[-1:])
    wanted = torch.tensor([named(text) for text in texts])
    return torch.stack(
        [
            nn.functional.cross_entropy(head(known).transpose(1, 2), numbers[:, None].expand(known.shape[:2]))
            for head, numbers in zip(heads, wanted.T, strict=True)
        ]
    ).sum()


Read = Callable[[list[str]], Tensor]
"""Captions -> what a transformer gets of them, one (L, D) for each."""


def remembered(read: Read) -> Read:
    """The same, without gradient; what was read once is not read again."""
    known: dict[str, Tensor] = {}

    @torch.no_grad()
    def of(captions: list[str]) -> Tensor:
        if new := [caption for caption in dict.fromkeys(captions) if caption not in known]:
            known.update(zip(new, read(new), strict=True))
        return torch.stack([known[caption] for caption in captions])

    return of


@dataclass(frozen=True)
class FlowSettings(BaseSettings):
    """How a transformer is trained by flow matching to draw what a frozen text encoder reads, in two rounds."""

    num_steps: int = 10000
    learning_rate: float = 2e-3
    num_warmup_steps: int = 100
    num_full_steps: int = 1200
    ema_decay: float = 0.999
    num_images: int = 2400
    # Captions that say less than all are rarer than elsewhere: the encoder knows them already.
    dropout_fraction: float = 0.05
    other_word_fraction: float = 0.1
    other_color_fraction: float = 0.05
    short_caption_fraction: float = 0.05
    capital_fraction: float = 0.1
    """Fraction of captions that begin with a capital, which makes other tokens."""
    time_mean: float = 2.0
    time_deviation: float = 1.4
    """Times are sigmoid(mean + deviation * normal), logit-normal, Esser et al. 2024 (arXiv 2403.03206). Of the twelve steps of Klein's
    pipeline half are above 0.87, none is below 0.38."""
    num_late_steps: int = 1500
    """Steps of a second round on other images, from the first one's average, in which the rate falls to 0 by half a cosine."""
    late_learning_rate: float = 1.5e-3
    late_time_mean: float = 2.0
    """Images of 128 pixels show their outlines through much noise, so shapes are settled near to it. After the first round of Krea 2 a
    wrong shape in the caption cost 0.08 of 0.42 at time 0.98 and 0.0002 of 0.11 at 0.6, and 23 % of the shapes were right; after 1250 steps
    of the second 54 %: triangles, while circles and squares are told apart no more after 2500."""


FlowSettingsT = TypeVar("FlowSettingsT", bound=FlowSettings)


def rounds(settings: FlowSettingsT, num_late: int = 1) -> tuple[FlowSettingsT, ...]:
    """The settings of the first round and of the late ones."""
    late = replace(
        settings,
        num_steps=settings.num_late_steps,
        num_full_steps=0,
        learning_rate=settings.late_learning_rate,
        time_mean=settings.late_time_mean,
        ema_decay=0.998,
    )
    return (settings, *[late] * num_late)


def train_rounds(
    transformer: nn.Module,
    loss_of: Callable[[ToyBatch, FlowSettings], Tensor],
    encode: pretraining.Encode,
    settings: FlowSettings,
    seed: int,
    name: str,
    saved: Path | None = None,
    conditions: Conditions | None = None,
    num_late_rounds: int = 1,
) -> None:
    """Trains a transformer in place, on images of the known colours at the family's sizes; conditions of None are pretraining.capitals.

    saved: see pretraining.train; each late round has a state of its own.
    """
    for number, of_round in enumerate(rounds(settings, num_late_rounds)):
        batches = pretraining.encoded_batches(
            encode,
            of_round,
            seed + 1000 * number,
            worlds.trained(worlds.KNOWN_COLORS),
            conditions or pretraining.capitals(settings.capital_fraction),
            worlds.sizes_of(name),
            alike=True,
        )
        state = saved and saved.with_name(f"{saved.name}{'.late' * number}")
        transformer.requires_grad_(True)

        def loss_now(batch: ToyBatch, now: FlowSettings = of_round) -> Tensor:
            return loss_of(batch, now)

        pretraining.train(nn.ModuleList([transformer]), loss_now, batches, of_round, name, state)
