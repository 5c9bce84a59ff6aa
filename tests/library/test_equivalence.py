"""Options for memory and speed change nothing, or as little as docs/equivalence.md says: alone, in pairs, and with a resume in between."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from sd_scripts.families import RUNS
from tests.library.equivalence import (
    APPROXIMATE,
    BITS,
    IN_FLOAT64,
    OPTIONS,
    PAGE,
    ROUNDING,
    Kind,
    MemoryOption,
    applies,
    change,
    compare,
    keeps_bits,
    movement,
    pairwise,
    plain_movement,
    resumed,
)


def is_short(memory_option: MemoryOption, kind: Kind) -> bool:
    """Each memory option once in each family, in adapters and whole networks by turns."""
    other = kind[0], "full" if kind[1] == "network" else "network"
    only = other not in RUNS or not applies(memory_option, other)
    return not memory_option.slow and (only or (kind[1] == "full") == (OPTIONS.index(memory_option) % 2 == 0))


def by_turns(memory_option: MemoryOption) -> list[Kind]:
    """Of the short ones every other; those left out with one memory option are taken with another."""
    short = [kind for kind in RUNS if applies(memory_option, kind) and is_short(memory_option, kind)]
    return short[OPTIONS.index(memory_option) // 2 % min(2, len(short)) :: 2] if short else []


CELLS = [
    pytest.param(
        memory_option,
        kind,
        id=f"{memory_option.name}-{'-'.join(kind)}",
        marks=[] if kind in by_turns(memory_option) else [pytest.mark.long],
    )
    for memory_option in OPTIONS
    for kind in RUNS
    if applies(memory_option, kind)
]
LEFT_OUT = [("sd", "full"), ("sdxl", "network"), ("flux", "full"), ("flux2", "full"), ("chroma", "network"), ("qwen_image21", "network")]
LEFT_OUT += [("zimage", "network"), ("kontext", "full"), ("anima", "network"), ("flux3", "full")]
MOST = {"qint8": 0.05, "qfloat8": 0.2, "fp8": 0.2, "nf4": 0.5}
"""Relative difference of the gradient on the small networks."""


@pytest.fixture(scope="module")
def seed() -> int:
    """One for all, so that each kind's run without memory options is made once."""
    return random.getrandbits(16)


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> None:
    torch._dynamo.reset()


@pytest.mark.covering
@pytest.mark.parametrize(("memory_option", "kind"), CELLS)
def test_a_memory_option_keeps_its_promise(memory_option: MemoryOption, kind: Kind, tmp_path: Path, seed: int) -> None:
    found = change(memory_option, kind, tmp_path, seed)
    assert memory_option.promise is not None and found.holds(memory_option.promise), f"{found.loss}, {found.gradient} with seed {seed}"


@pytest.mark.parametrize("kind", [kind for kind in RUNS if kind[0] in IN_FLOAT64], ids="-".join)
@pytest.mark.parametrize(
    "memory_option",
    [memory_option for memory_option in OPTIONS if memory_option.promise == ROUNDING and not memory_option.slow],
    ids=lambda memory_option: memory_option.name,
)
def test_losses_of_a_distance_that_sorts_hold_in_float32_too(memory_option: MemoryOption, kind: Kind, tmp_path: Path, seed: int) -> None:
    plain, _ = plain_movement(kind, seed, 1, torch.float32)
    found, _ = movement(kind, tmp_path, seed, steps=1, **memory_option.options(kind))
    assert found == pytest.approx(plain, rel=ROUNDING), f"seed {seed}"


@pytest.mark.parametrize(
    ("memory_option", "kind"),
    [
        pytest.param(memory_option, kind, id=f"{memory_option.name}-{kind[0]}", marks=[pytest.mark.long] if (row + column) % 2 else [])
        for row, memory_option in enumerate(APPROXIMATE)
        for column, kind in enumerate(kind for kind in RUNS if kind[1] == "network")
    ],
)
def test_weights_in_fewer_bits_give_nearly_the_gradient(memory_option: MemoryOption, kind: Kind, tmp_path: Path, seed: int) -> None:
    # A single draw is a matter of luck: of 8 draws of FLUX.2 dev with nf4, of mean 0.42, one had 0.60.
    found = [change(memory_option, kind, tmp_path / str(draw), draw).gradient for draw in (seed, seed + 1, seed + 2)]
    most = MOST[memory_option.options(kind)["transformer_quantization"]]
    assert min(found) > 0 and sum(found) / len(found) < most, f"{found} with seed {seed}"


def check_combinations(kind: Kind, folder: Path, seed: int, most: int, compiling: bool) -> None:
    combinations = list(pairwise(kind, seed, compiling))
    for number, first in enumerate(combinations[:most]):
        torch._dynamo.reset()
        second = combinations[(number + 1) % len(combinations)]
        # Several steps of whole weights make a rounding error grow, whatever made it: those are compared with errors too small for that.
        promise, dtype = (BITS, torch.float32) if keeps_bits(first) and keeps_bits(second) else (ROUNDING, torch.float64)
        plain = plain_movement(kind, seed, 4, dtype)
        found = compare(resumed(kind, folder / str(number), seed, first, second, dtype), plain)
        assert found.holds(promise), f"{first}, then {second}: {found.loss}, {found.gradient} with seed {seed}"


@pytest.mark.parametrize(
    "kind",
    # One kind of each family, whole networks among them; the others with --all.
    [pytest.param(kind, marks=pytest.mark.long if kind in LEFT_OUT else ()) for kind in RUNS],
    ids="-".join,
)
def test_a_combination_with_a_resume_in_between(kind: Kind, tmp_path: Path, seed: int) -> None:
    check_combinations(kind, tmp_path, seed, most=1, compiling=False)


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kind", RUNS, ids="-".join)
def test_every_pair_of_memory_options_with_a_resume_in_between(kind: Kind, tmp_path: Path, seed: int) -> None:
    check_combinations(kind, tmp_path, seed, most=1000, compiling=True)


def test_the_page_has_every_memory_option_and_its_figures_keep_the_promises() -> None:
    rows = [row.strip("|").split("|") for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| ") and "---" not in row]
    figures = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if row[0].strip()}
    assert set(figures) == {memory_option.name for memory_option in (*OPTIONS, *APPROXIMATE)}
    for memory_option in OPTIONS:
        for kind, cell in zip(RUNS, figures[memory_option.name], strict=True):
            assert (cell == "–") == (not applies(memory_option, kind))
            if cell != "–":
                assert cell == "same bits" or (
                    memory_option.promise is not None and memory_option.promise > 0 and float(cell) <= memory_option.promise
                )
