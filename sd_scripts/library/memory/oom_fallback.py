"""Going on when a step has no memory: memory options that leave the result as it is, turned on one by one, and the same step again.

Those that cost least speed come first. One that was turned on stays so for the rest of this start. Draws follow from sample numbers, so
a step that is done again sees the same images, times, noise and masks of dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from sd_scripts.library.core.protocols import Batch, Parts
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.memory import MemoryOptions
from sd_scripts.schema.runs import RunOptions

from . import recomputing
from .arranging import Arranged
from .swapping import BlockSwap

FallbackStep = Callable[[], str]
"""Turns one memory option on, or up a notch; says in a sentence what was done and what it costs, "" where nothing is left."""


class OomFallback:
    """The memory options of one start, in the order in which they are turned on."""

    def __init__(self, steps: Sequence[FallbackStep], say: Callable[[str], None]) -> None:
        """say gets the sentence of each memory option that was turned on."""
        self._steps, self._say = list(steps), say

    def turn_on_next(self, where: str) -> bool:
        """Turns on the next memory option; False when all are on. where: what had no memory, for the sentence."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        while self._steps:
            done = self._steps[0]()
            if done:
                self._say(f"{where}: the device had no memory left; {done}")
                return True
            self._steps.pop(0)
        return False


class Splits(Protocol):
    """What does a step in pieces; see Trainer.pieces."""

    pieces: int


def check_alone(memory: MemoryOptions, processes: int) -> None:
    """Raises OptionError for an OOM fallback in several processes, of which one alone would turn a memory option on."""
    if memory.oom_fallback and processes > 1:
        text = f"oom_fallback: {processes} processes train together, and each would turn on memory options of its own; turn it off"
        raise OptionError(Problem("oom_fallback", text))


def fallback_of(options: RunOptions, arranged: Arranged, trainer: Splits, say: Callable[[str], None]) -> OomFallback:
    """The memory options that a run with these options has left."""
    steps: list[FallbackStep] = []
    if not options.objective.compares_samples:
        steps.append(smaller_batches(trainer, options.dataset.train_batch_size))
    steps += recomputing_more(options, arranged.parts)
    made = arranged.compilation
    # Weights that are trained are the optimizer's by now, a code of the whole network has no moment between blocks, and graphs of the
    # device replay the places that weights had.
    fixed = arranged.swap.trains_blocks or (made is not None and (made.scope == "network" or options.compile.records_addresses))
    if not fixed:
        steps.append(swapping_more(arranged.swap))
    return OomFallback(steps, say)


# Memory options.


def smaller_batches(trainer: Splits, batch_size: int) -> FallbackStep:
    """Halves what goes through the network at once, down to single samples."""

    def fallback_step() -> str:
        if trainer.pieces >= batch_size:
            return ""
        trainer.pieces = min(2 * trainer.pieces, batch_size)
        at_once = -(-batch_size // trainer.pieces)
        return (
            f"from here on batches of {batch_size} go through the network {at_once} at a time, which is a little slower and the same up to "
            f"rounding (train_batch_size = {at_once} with more gradient_accumulation_steps does it from the start)"
        )

    return fallback_step


def recomputing_more(options: RunOptions, parts: Parts) -> list[FallbackStep]:
    """Gradient checkpointing of all blocks, then with what they begin with in host RAM; as far as the options do not have it."""
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
            "from here on what a recomputed block begins with waits in host RAM, a little slower, same result "
            "(gradient_checkpointing_cpu_offload)"
        )

    return [all_blocks, offload]


def swapping_more(swap: BlockSwap) -> FallbackStep:
    """Keeps more blocks in host RAM: a quarter of all each time."""

    def fallback_step() -> str:
        number = min(swap.count, swap.swapped + max(1, -(-swap.count // 4)))
        if number == swap.swapped:
            return ""
        swap.set(number)
        return f"from here on {number} of {swap.count} blocks wait in host RAM until they are due, slower, same result (blocks_to_swap)"

    return fallback_step


# Pieces of a batch.


def pieces_of(batch: Batch, count: int) -> list[Batch]:
    """A batch in at most so many parts of nearly equal size, in order."""
    size = len(batch.numbers)
    if count == 1 or size == 1:
        return [batch]
    most = -(-size // count)
    return [batch[start : start + most] for start in range(0, size, most)]
