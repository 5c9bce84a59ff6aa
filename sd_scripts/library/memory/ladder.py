"""Going on when a step has no memory: levers that leave the result as it is, pulled one by one, and the same step again.

Those that cost least speed come first. A lever that was pulled stays so for the rest of this start. Draws follow from sample numbers, so a
step that is done again sees the same pictures, times, noise and masks of dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from sd_scripts.families.lgt.options import LgtObjectiveOptions
from sd_scripts.library.core.protocols import Batch, Parts
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.memory import MemoryOptions
from sd_scripts.schema.runs import RunOptions

from . import recomputing
from .arranging import Arranged
from .swapping import BlockSwap

Rung = Callable[[], str]
"""Pulls one lever by one more notch, and says in a sentence what was done and what it costs; an empty text where nothing is left."""


class Ladder:
    """The levers of one start, in the order in which they are pulled."""

    def __init__(self, rungs: Sequence[Rung], say: Callable[[str], None]) -> None:
        """say gets the sentence of each lever that was pulled."""
        self._rungs, self._say = list(rungs), say

    def pull(self, where: str) -> bool:
        """Pulls the next lever; False when all are pulled. where: what had no memory, for the sentence."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        while self._rungs:
            done = self._rungs[0]()
            if done:
                self._say(f"{where}: the device had no memory left; {done}")
                return True
            self._rungs.pop(0)
        return False


class Splits(Protocol):
    """What does a step in pieces; see Trainer.pieces."""

    pieces: int


def check_alone(memory: MemoryOptions, processes: int) -> None:
    """Raises OptionError for a ladder in several processes, of which one alone would pull a lever."""
    if memory.oom_ladder and processes > 1:
        text = f"oom_ladder: {processes} processes train together, and each would pull levers of its own; turn it off"
        raise OptionError(Problem("oom_ladder", text))


def ladder_of(options: RunOptions, arranged: Arranged, trainer: Splits, say: Callable[[str], None]) -> Ladder:
    """The levers that a run with these options has left."""
    rungs: list[Rung] = []
    if not _compares_samples(options):
        rungs.append(smaller_batches(trainer, options.dataset.train_batch_size))
    rungs += recomputing_more(options, arranged.parts)
    made = arranged.compilation
    # Weights that are trained are the optimizer's by now, a code of the whole network has no moment between blocks, and graphs of the
    # device replay the places that weights had.
    fixed = arranged.swap.trains_blocks or (made is not None and (made.scope == "network" or options.compile.records_addresses))
    if not fixed:
        rungs.append(swapping_more(arranged.swap))
    return Ladder(rungs, say)


def _compares_samples(options: RunOptions) -> bool:
    """Whether a sample's loss depends on the others of its batch."""
    return isinstance(options.objective, LgtObjectiveOptions) and options.objective.swd_pooling != "sample"


# Levers.


def smaller_batches(trainer: Splits, batch_size: int) -> Rung:
    """Halves what goes through the network at once, down to single samples."""

    def rung() -> str:
        if trainer.pieces >= batch_size:
            return ""
        trainer.pieces = min(2 * trainer.pieces, batch_size)
        at_once = -(-batch_size // trainer.pieces)
        return (
            f"from here on batches of {batch_size} go through the network {at_once} at a time, which is a little slower and the same up to "
            f"rounding (train_batch_size = {at_once} with more gradient_accumulation_steps does it from the start)"
        )

    return rung


def recomputing_more(options: RunOptions, parts: Parts) -> list[Rung]:
    """Gradient checkpointing of all blocks, then with what they begin with in main memory; as far as the options do not have it."""
    state = options.memory

    def switch(**values: object) -> None:
        nonlocal state
        state = state.model_copy(update=values)
        recomputing.switch(parts, state, options.network.train_text_encoder)

    def all_blocks() -> str:
        if state.gradient_checkpointing and state.gradient_checkpointing_share == 1.0:
            return ""
        switch(gradient_checkpointing=True, gradient_checkpointing_share=1.0)
        return (
            "from here on activations are computed again in the backward pass, about a third slower, same result (gradient_checkpointing)"
        )

    def offload() -> str:
        if state.gradient_checkpointing_cpu_offload:
            return ""
        switch(gradient_checkpointing_cpu_offload=True)
        return (
            "from here on what a recomputed block begins with waits in main memory, a little slower, same result "
            "(gradient_checkpointing_cpu_offload)"
        )

    return [all_blocks, offload]


def swapping_more(swap: BlockSwap) -> Rung:
    """Keeps more blocks in main memory: a quarter of all each time."""

    def rung() -> str:
        number = min(swap.count, swap.swapped + max(1, -(-swap.count // 4)))
        if number == swap.swapped:
            return ""
        swap.set(number)
        return f"from here on {number} of {swap.count} blocks wait in main memory until they are due, slower, same result (blocks_to_swap)"

    return rung


# Pieces of a batch.


def pieces_of(batch: Batch, count: int) -> list[Batch]:
    """A batch in at most so many parts of nearly equal size, in order."""
    size = len(batch.numbers)
    if count == 1 or size == 1:
        return [batch]
    most = -(-size // count)
    return [_part(batch, slice(start, start + most)) for start in range(0, size, most)]


def _part(batch: Batch, rows: slice) -> Batch:
    return replace(
        batch,
        x0=batch.x0[rows],
        conditions=batch.conditions[rows],
        numbers=batch.numbers[rows],
        weights=batch.weights[rows],
        names=batch.names[rows],
        masks=None if batch.masks is None else batch.masks[rows],
        towards=batch.towards[rows],
        goals=batch.goals[rows],
        references=batch.references[rows],
        captions=batch.captions[rows],
        regularisation=None if batch.regularisation is None else batch.regularisation[rows],
        terms={name: weights[rows] for name, weights in batch.terms.items()},
    )
