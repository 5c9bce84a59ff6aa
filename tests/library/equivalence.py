"""Each memory option beside the plain run, on every kind of run: what it changes in losses and gradients.

`python -m tests.library.equivalence` measures all and writes the tables of docs/equivalence.md; test_equivalence holds every cell to its
promise, on fresh random data.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.schema import flat
from tests.library.small_trainers import make, trained, weights_of

Kind = tuple[str, str]
PAGE = Path(__file__).parents[2] / "docs" / "equivalence.md"
BITS = 0.0
"""The promise of a memory option that changes nothing at all."""
ROUNDING = 1e-5
"""The promise of one that computes the same in another order, in float32: relative difference of losses and of gradients."""

IN_FLOAT64 = ("lgt",)
"""Families that are compared in float64 where another order of computing is allowed: where two values that a distance sorts change
places, its gradient jumps, so that in float32 a rounding error in the wrong place is seen in it as 1e-4 or more."""

_DROPS_OUT = ("ddpm",)
"""Families whose tiny model has dropout."""


@dataclass(frozen=True)
class MemoryOption:
    """options: what is pulled, by kind of run; promise: the most it changes, None where the change is only reported."""

    name: str
    options: Callable[[Kind], Mapping[str, Any]]
    promise: float | None
    slow: bool = False


@cache
def num_blocks(family: str) -> int:
    return len(blocks_of(families.family(family).tiny().backbone))


def _same(**options: Any) -> Callable[[Kind], Mapping[str, Any]]:
    return lambda kind: options


def _compiled(scope: str) -> Callable[[Kind], Mapping[str, Any]]:
    return _same(compile=True, compile_backend="aot_eager", compile_scope=scope)


OPTIONS = (
    MemoryOption("`gradient_checkpointing`", _same(gradient_checkpointing=True), BITS),
    MemoryOption("… with `gradient_checkpointing_share = 0.5`", _same(gradient_checkpointing=True, gradient_checkpointing_share=0.5), BITS),
    MemoryOption(
        "… with `gradient_checkpointing_cpu_offload`", _same(gradient_checkpointing=True, gradient_checkpointing_cpu_offload=True), BITS
    ),
    MemoryOption("`blocks_to_swap = 1`", _same(blocks_to_swap=1), BITS),
    MemoryOption("`blocks_to_swap`, all blocks", lambda kind: {"blocks_to_swap": num_blocks(kind[0])}, BITS),
    MemoryOption("`fused_backward_pass`", _same(fused_backward_pass=True), BITS),
    MemoryOption(
        "`train_batch_size = 1`, `gradient_accumulation_steps = 2` for 2 and 1",
        _same(train_batch_size=1, gradient_accumulation_steps=2),
        ROUNDING,
    ),
    MemoryOption("`attention_backend = flash`", _same(attention_backend="flash"), ROUNDING),
    MemoryOption("`attention_backend = math`", _same(attention_backend="math"), ROUNDING),
    MemoryOption("`channels_last`", _same(channels_last=True), ROUNDING),
    MemoryOption("`compile_scope = blocks` (`aot_eager`)", _compiled("blocks"), ROUNDING, slow=True),
    MemoryOption("`compile_scope = network` (`aot_eager`)", _compiled("network"), ROUNDING, slow=True),
)
"""Memory options that leave the training as it is."""
APPROXIMATE = tuple(
    MemoryOption(f"`transformer_quantization = {kind}`", _same(transformer_quantization=kind), None)
    for kind in ("qint8", "qfloat8", "fp8", "nf4")
)
"""Memory options that trade exactness for memory."""


@dataclass(frozen=True)
class Change:
    """Largest relative difference of a loss, that of the weights' movement (|a - b| / |b|), and whether all bits are equal."""

    loss: float
    gradient: float
    same: bool

    def holds(self, promise: float) -> bool:
        return self.same if promise == BITS else max(self.loss, self.gradient) <= promise

    def __str__(self) -> str:
        return "same bits" if self.same else f"{self.gradient:.0e}"


def applies(memory_option: MemoryOption, kind: Kind) -> bool:
    """Whether a kind of run has all options of the memory option, and may use them."""
    chosen = memory_option.options(kind)
    if not all(name in flat.fields(RUNS[kind]) for name in chosen) or (kind[0] in _DROPS_OUT and "gradient_accumulation_steps" in chosen):
        return False
    return kind[1] == "network" or "transformer_quantization" not in chosen


def dtype_of(kind: Kind, promise: float | None) -> torch.dtype:
    """The precision in which a memory option with this promise is compared."""
    return torch.float64 if promise == ROUNDING and kind[0] in IN_FLOAT64 else torch.float32


def movement(
    kind: Kind, folder: Path, seed: int, steps: int = 2, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[list[float], Tensor]:
    """Losses of the first steps, and how far the trained weights moved in them, float64."""
    trainer = make(kind, folder, seed, dtype, **options)
    before = weights_of(trainer)
    losses, after = trained(trainer, steps)
    return losses, after - before


def compare(ours: tuple[list[float], Tensor], plain: tuple[list[float], Tensor]) -> Change:
    """What differs between two movements."""
    losses = max(abs(a - b) / abs(b) for a, b in zip(ours[0], plain[0], strict=True))
    difference = float((ours[1] - plain[1]).norm() / plain[1].norm())
    return Change(losses, difference, ours[0] == plain[0] and torch.equal(ours[1], plain[1]))


@cache
def plain_movement(kind: Kind, seed: int, steps: int, dtype: torch.dtype) -> tuple[list[float], Tensor]:
    """That of the run without memory options, which many are compared with."""
    with tempfile.TemporaryDirectory() as folder:
        found = movement(kind, Path(folder), seed, steps, dtype)
    assert found[1].norm() > 0
    return found


def change(memory_option: MemoryOption, kind: Kind, folder: Path, seed: int) -> Change:
    """What the memory option changes; what is approximate is compared with the plain run in float64."""
    dtype = dtype_of(kind, memory_option.promise)
    steps, plain_dtype = (2, dtype) if memory_option.promise is not None else (1, torch.float64)
    plain = plain_movement(kind, seed, steps, plain_dtype)
    return compare(movement(kind, folder, seed, steps, dtype, **memory_option.options(kind)), plain)


# In combination.


def choices(kind: Kind, compiling: bool = True) -> dict[str, list[Mapping[str, Any]]]:
    """The positions of each memory option that leaves the training as it is, of which any combination is allowed."""
    all_blocks = num_blocks(kind[0])
    found: dict[str, list[Mapping[str, Any]]] = {
        "recomputing": [
            {},
            {"gradient_checkpointing": True},
            {"gradient_checkpointing": True, "gradient_checkpointing_share": 0.5},
            {"gradient_checkpointing": True, "gradient_checkpointing_cpu_offload": True},
        ],
        "swapping": [{}, {"blocks_to_swap": 1}, {"blocks_to_swap": all_blocks // 2 + 1}, {"blocks_to_swap": all_blocks}],
        "compiling": [{}, *([dict(_compiled("blocks")(kind))] if compiling else [])],
        "attention": [{}, {"attention_backend": "math"}],
        "layout": [{}, {"channels_last": True}],
        "batches": [{}] if kind[0] in _DROPS_OUT else [{}, {"train_batch_size": 1, "gradient_accumulation_steps": 2}],
        "moving": [{}, {"fused_backward_pass": True}],
    }
    known = flat.fields(RUNS[kind])
    return {memory_option: [one for one in positions if all(name in known for name in one)] for memory_option, positions in found.items()}


def allowed(combination: Mapping[str, Mapping[str, Any]]) -> bool:
    return not (combination["moving"] and combination["batches"])


def pairwise(kind: Kind, seed: int, compiling: bool = True) -> Iterator[dict[str, Any]]:
    """Options of combinations in which every allowed pair of positions of two memory options occurs."""
    draw, table = random.Random(seed), choices(kind, compiling)
    names = list(table)
    numbers = [range(len(table[name])) for name in names]
    combinations = [row for row in itertools.product(*numbers) if allowed({name: table[name][at] for name, at in zip(names, row)})]
    left = {pair for row in combinations for pair in itertools.combinations(enumerate(row), 2)}
    while left:
        tried = draw.sample(combinations, min(200, len(combinations)))
        best = max(tried, key=lambda row: len(left.intersection(itertools.combinations(enumerate(row), 2))))
        covered = left.intersection(itertools.combinations(enumerate(best), 2))
        if covered:
            left -= covered
            yield {option: value for name, at in zip(names, best) for option, value in table[name][at].items()}


def keeps_bits(options: Mapping[str, Any]) -> bool:
    """Whether a combination has only memory options that change nothing at all."""
    return not options.keys() & {"compile", "attention_backend", "channels_last", "gradient_accumulation_steps"}


def resumed(
    kind: Kind, folder: Path, seed: int, first: Mapping[str, Any], second: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> tuple[list[float], Tensor]:
    """Two steps with the first memory options, their state, and two more in a new trainer with the second."""
    begun = make(kind, folder / "first", seed, dtype, **first)
    before = weights_of(begun)
    losses, _ = trained(begun)
    going_on = make(kind, folder / "second", seed, dtype, **second)
    going_on.load_state_dict(begun.state_dict())
    more, after = trained(going_on)
    return losses + more, after - before


# The page.


def table(memory_options: tuple[MemoryOption, ...], kinds: list[Kind], seed: int) -> str:
    """A Markdown table of changes: a row for each memory option, a column for each kind of run."""
    heads = [f"{family} {method}" for family, method in kinds]
    rows = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(kinds)}"]
    for memory_option in memory_options:
        cells = []
        for kind in kinds:
            if not applies(memory_option, kind):
                cells.append("–")
                continue
            with tempfile.TemporaryDirectory() as folder:
                found = change(memory_option, kind, Path(folder), seed)
            cells.append(str(found) if memory_option.promise is not None else f"{found.loss:.0e}, {found.gradient:.0e}")
            sys.stderr.write(f"{memory_option.name}, {kind}: {found}\n")
        rows.append(f"| {memory_option.name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def page(seed: int) -> str:
    """The whole page."""
    exact = table(OPTIONS, list(RUNS), seed)
    rough = table(APPROXIMATE, [kind for kind in RUNS if kind[1] == "network"], seed)
    return f"""# What memory options change

Made by `python -m tests.library.equivalence`; the tests hold every cell to its promise on fresh random data. Each run is two steps of plain
gradient descent in float32 on the small network of its family, on a CPU: same samples, same noise, with the memory option and without.

"same bits" says that losses and weights are equal to the last bit. A number is the relative difference of the weights' movement,
|with - without| / |without|, which for plain gradient descent is that of the gradient; the promise is {ROUNDING:.0e}. A dash: the kind
of run does not have the memory option (the small DDPM's caption encoder has dropout, whose masks follow the batch).

Style transfer's numbers are of float64: its distance sorts, and where two values change places its gradient jumps. In float32 its losses
differ as little as the others', and mostly its gradients, too; where two values did change places, in about one of ten comparisons, the
small network's gradients differed by up to 7e-4. Such values are equal to within rounding, so neither gradient is the better one.

{exact}

Any of these may be combined, and a run may be stopped with some and continued with others: the tests take every pair of positions of two
memory options, with a saved state in between, and ask for the same bits where all of them keep them. Where they do not, they compare in
float64, since a rounding error grows from step to step.

## Weights in fewer bits

These change what is computed. The numbers are the relative differences of the loss and of the adapter's first gradient from the same step
in float64 with the weights as they are. Small networks with random weights show larger differences than trained ones: here each of the few
layers is a large share of the whole.

{rough}

A table of the modulation of Qwen-Image (`modulation_table`) gives what the layers give, to 4e-7.
"""


if __name__ == "__main__":
    PAGE.write_text(page(random.getrandbits(16)), encoding="utf-8")
