"""Memory options that are turned on when a step has no memory: the step is done again, with the numbers of a run with enough memory."""

from __future__ import annotations

import random
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sd_scripts.families import RUNS
from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.library.memory.arranging import Arranged
from sd_scripts.library.memory.oom_fallback import OomFallback, check_alone, fallback_of, pieces_of
from sd_scripts.library.memory.swapping import BlockSwap
from sd_scripts.library.train.trainer import Trainer
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.memory import MemoryOptions
from tests.library.equivalence import BITS, ROUNDING, dtype_of
from tests.library.small_trainers import make, options_of, weights_of

KINDS = [("sdxl", "network"), ("flux", "network"), ("qwen_edit", "network"), ("zimage", "full"), ("lgt", "scratch")]
Kind = tuple[str, str]


def trained(trainer: Trainer, steps: int = 3) -> tuple[list[float], torch.Tensor]:
    """Losses and weights of a run of so many steps."""
    trainer.timetable = replace(trainer.timetable, total_steps=steps)
    assert trainer.fit()
    logged = [event["loss"] for event in trainer.run.events()[0] if event["kind"] == "step"]
    assert len(logged) == steps
    return logged, weights_of(trainer)


def with_fallback(
    kind: Kind, folder: Path, seed: int, dtype: torch.dtype = torch.float32, **given: Any
) -> tuple[Trainer, BlockSwap, list[str]]:
    """A trainer whose OOM fallback has everything that its options leave, and what it has said."""
    trainer = make(kind, folder, seed, dtype, **given)
    said: list[str] = []
    swap = BlockSwap(trainer.learner.model.parts.backbone, torch.device("cpu"))
    trainer.steps.fallback = fallback_of(
        options_of(kind, **given), Arranged(trainer.learner.model.parts, swap), trainer.learner, said.append
    )
    return trainer, swap, said


def runs_out(network: nn.Module, call: int, until: Callable[[], bool]) -> None:
    """The last block has no memory from its so-manieth call on, in the middle of a step, until the memory option is on."""
    count = 0

    def full(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        count += 1
        if count >= call and not until():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    list(blocks_of(network).values())[-1].register_forward_pre_hook(full)


@pytest.fixture(scope="module")
def with_memory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[int, tuple[list[float], torch.Tensor]]]:
    """The seed, losses and weights of a run that has all the memory it wants: one for all memory options with the same options."""
    seed = random.getrandbits(16)

    @cache
    def made(kind: Kind, dtype: torch.dtype, given: tuple[tuple[str, Any], ...]) -> tuple[int, tuple[list[float], torch.Tensor]]:
        return seed, trained(make(kind, tmp_path_factory.mktemp("plain"), seed, dtype, **dict(given)))

    return lambda kind, dtype, given: made(kind, dtype, tuple(given.items()))


@pytest.mark.parametrize(
    ("memory_option", "kind"),
    [
        # Every memory option and every kind; all pairs with --all.
        pytest.param(memory_option, kind, marks=pytest.mark.long if (row + column) % 3 else ())
        for row, memory_option in enumerate(("pieces", "recomputed", "offloaded", "swapped"))
        for column, kind in enumerate(KINDS)
        if memory_option != "swapped" or kind[1] == "network"
    ],
)
def test_a_step_without_memory_is_done_again_with_the_next_memory_option(
    memory_option: str, kind: Kind, tmp_path: Path, with_memory: Any
) -> None:
    given: dict[str, Any] = {} if memory_option == "pieces" else {"train_batch_size": 1}
    if kind[0] == "lgt":
        given["swd_pooling"] = "sample"
    dtype = dtype_of(kind, ROUNDING if memory_option == "pieces" else BITS)
    seed, plain = with_memory(kind, dtype, given)
    trainer, swap, said = with_fallback(kind, tmp_path, seed, dtype, **given)
    backbone = trainer.learner.model.parts.backbone
    pulled = {
        "pieces": lambda: trainer.learner.pieces == 2,
        "recomputed": lambda: backbone.is_gradient_checkpointing,
        "offloaded": lambda: len(said) == 2,
        "swapped": lambda: swap.swapped > 0,
    }[memory_option]
    runs_out(backbone, 2, pulled)
    losses, weights = trained(trainer)
    assert len(said) == {"pieces": 1, "recomputed": 1, "offloaded": 2, "swapped": 3}[memory_option] and re.match(
        r"step [12]: the device", said[0]
    )
    if memory_option == "pieces":
        assert losses == pytest.approx(plain[0], rel=1e-6)
        assert float((weights - plain[1]).norm() / plain[1].norm()) < ROUNDING
    else:
        assert losses == plain[0] and torch.equal(weights, plain[1])


def test_what_the_failed_step_has_made_is_gone_when_a_memory_option_is_pulled(tmp_path: Path) -> None:
    trainer = make(("sdxl", "network"), tmp_path, gradient_accumulation_steps=2)
    made: list[weakref.ref[torch.Tensor]] = []
    first = next(iter(blocks_of(trainer.learner.model.parts.backbone).values()))
    first.register_forward_hook(lambda module, arguments, output: made.append(weakref.ref(output)))
    pulled = []

    def memory_option() -> str:
        pulled.append((len(made), sum(ref() is not None for ref in made), [weight.grad for weight in trainer.learner.weights.values()]))
        return "pulled"

    trainer.steps.fallback = OomFallback([memory_option], lambda text: None)
    # In the second micro-batch, when there are gradients of the first.
    runs_out(trainer.learner.model.parts.backbone, 2, lambda: bool(pulled))
    trained(trainer, 1)
    ((calls, alive, gradients),) = pulled
    assert calls == 2 and alive == 0 and all(gradient is None for gradient in gradients)


def test_without_memory_options_the_error_is_the_usual_one(tmp_path: Path) -> None:
    trainer, swap, said = with_fallback(("sdxl", "network"), tmp_path / "a", 0)
    runs_out(trainer.learner.model.parts.backbone, 1, lambda: False)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 GiB"):
        trained(trainer)
    count = len(blocks_of(trainer.learner.model.parts.backbone))
    assert swap.swapped == count and trainer.learner.pieces == 2
    assert len(said) == 3 + -(-count // -(-count // 4)) and f"{count} of {count} blocks" in said[-1]
    off = make(("sdxl", "network"), tmp_path / "b", 0)
    runs_out(off.learner.model.parts.backbone, 1, lambda: False)
    with pytest.raises(torch.OutOfMemoryError):
        trained(off)


def test_other_errors_and_weights_in_motion_end_the_run(tmp_path: Path) -> None:
    trainer, _, said = with_fallback(("sdxl", "network"), tmp_path / "a", 0)
    trainer.learner.model.network.after_step = lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        trained(trainer)
    other, _, _ = with_fallback(("sdxl", "network"), tmp_path / "b", 0)
    other.learner.objective = lambda *_: (_ for _ in ()).throw(RuntimeError("something else"))  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="something else"):
        trained(other)
    assert said == []


@pytest.mark.parametrize("kind", RUNS, ids="/".join)
def test_memory_options_that_the_options_pull_already_are_left_out(kind: Kind, tmp_path: Path) -> None:
    given = {"gradient_checkpointing": True, "gradient_checkpointing_share": 0.5, "train_batch_size": 1}
    trainer, swap, said = with_fallback(kind, tmp_path, 0, **given)
    assert trainer.steps.fallback is not None
    while trainer.steps.fallback.turn_on_next("here"):
        pass
    assert trainer.learner.pieces == 1 and "(gradient_checkpointing)" in said[0] and "(gradient_checkpointing_cpu_offload)" in said[1]
    swaps = [text for text in said if "blocks_to_swap" in text]
    assert bool(swaps) == (kind[1] == "network") and len(swaps) == len(said) - 2 and (swap.swapped == swap.count) == bool(swaps)


def test_samples_that_are_compared_with_each_other_stay_together(tmp_path: Path) -> None:
    trainer, _, said = with_fallback(("lgt", "scratch"), tmp_path, 0, swd_pooling="style")
    assert trainer.steps.fallback is not None and trainer.steps.fallback.turn_on_next("here")
    assert trainer.learner.pieces == 1 and "gradient_checkpointing" in said[0]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_pieces_of_a_batch_hold_every_sample_once_in_order(count: int, tmp_path: Path) -> None:
    trainer = make(("lgt", "scratch"), tmp_path, 0, train_batch_size=5)
    batch = trainer.learner.model.data.micro_batch(1, 0, 0)
    batch = replace(batch, masks=torch.rand(5, 1, 8, 8), regularisation=torch.rand(5) > 0.5, terms={"cosine": torch.rand(5)})
    parts = pieces_of(batch, count)
    assert 1 <= len(parts) <= count and max(len(part.numbers) for part in parts) == -(-5 // count)
    for name in ("conditions", "names", "captions", "towards", "goals", "references"):
        assert [one for part in parts for one in getattr(part, name)] == getattr(batch, name), name
    for name in ("x0", "numbers", "weights", "masks", "regularisation"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name)), name
    assert torch.equal(torch.cat([part.terms["cosine"] for part in parts]), batch.terms["cosine"])
    assert all((part.step, part.progress) == (batch.step, batch.progress) for part in parts)


def test_several_processes_have_no_oom_fallback() -> None:
    check_alone(MemoryOptions(oom_fallback=True), 1)
    check_alone(MemoryOptions(), 2)
    with pytest.raises(OptionError, match="oom_fallback: 2 processes train together"):
        check_alone(MemoryOptions(oom_fallback=True), 2)
