"""How many versions of compiled code a run will need, told before its first step. Knows options, not networks."""

from __future__ import annotations

from collections.abc import Sequence

from sd_scripts.families import FACTS
from sd_scripts.schema.runs import RunOptions


def recompile_count(options: RunOptions, sizes: Sequence[tuple[int, int]]) -> int | None:
    """Most versions of each piece of code; None where their number follows from what is in the captions.

    sizes: (width, height) of all buckets, in pixels. Code for any size is made for each measure that turns out to vary, one after the
    other, and once more where two of them were equal by chance.
    """
    dynamic = options.compile.compile_dynamic
    calls, some_rows = options.objective.network_calls
    estimates = options.model.takes_estimate
    texts_vary = FACTS[options.family].network.text_lengths_vary(options.model)
    # A batch of texts of one length has no mask.
    calls, others = (calls + estimates) * (1 + texts_vary), (texts_vary, some_rows or estimates)
    if dynamic == "false":
        return None if any(others) else calls * _shapes(options, sizes)
    varying = sum(others) + _varying(options, sizes)
    if dynamic == "true":
        return calls * (2 if varying else 1)
    return calls * (1 + varying + (varying > 0))


def _varying(options: RunOptions, sizes: Sequence[tuple[int, int]]) -> int:
    """How many measures of images vary: the sides for a U-Net, their product for a transformer."""
    if options.memory.of_convolutions:
        return sum(len(set(sides)) > 1 for sides in zip(*sizes, strict=True))
    return int(_shapes(options, sizes) > 1)


def _shapes(options: RunOptions, sizes: Sequence[tuple[int, int]]) -> int:
    if options.memory.of_convolutions:
        return len(set(sizes))
    return len({width * height for width, height in sizes})
