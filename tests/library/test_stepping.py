"""Weights that move one at a time: in the backward pass as the optimizer moves them all, and in bf16 right on average."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd_scripts.families import RUNS
from sd_scripts.library.core.errors import NonFiniteLoss
from sd_scripts.library.train.checkpoint import read_state
from sd_scripts.library.train.optim import make_optimizer
from sd_scripts.library.train.stepping import Stepping, round_stochastically
from sd_scripts.library.train.trainer import Trainer
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.optimizer import WEIGHT_BY_WEIGHT, OptimizerOptions
from tests.library.small_trainers import make, trained, weights_of

FLUX = ("flux", "full")
KINDS = (("sdxl", "full"), FLUX, ("zimage", "full"), ("ddpm", "scratch"))
OPTIMIZERS = ("AdamW", "SGD", "Lion", "Adafactor")
BF16 = {"full_bf16": True, "mixed_precision": "bf16"}
FUSED = {"fused_backward_pass": True}
GIVEN: dict[str, Any] = {"optimizer_type": "AdamW", "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def seed() -> int:
    return random.getrandbits(16)


@pytest.fixture(scope="module")
def whole(seed: int, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Trainer]:
    """Four steps of a run that nothing interrupts, in float32 or bf16, by the name of its optimizer; to look at alone."""

    @cache
    def made(optimizer: str, in_bf16: bool) -> Trainer:
        trainer = make(FLUX, tmp_path_factory.mktemp("whole"), seed, **_with(optimizer, in_bf16))
        trained(trainer, 4)
        return trainer

    return made


def _with(optimizer: str, in_bf16: bool) -> dict[str, Any]:
    return {"optimizer_type": optimizer, "learning_rate": 1e-3, **({"use_ema": True, **BF16} if in_bf16 else {})}


# Rounding.


def neighbours(value: float) -> tuple[float, float]:
    """The nearest numbers of bf16 below and above, by halving the interval that they are at the ends of."""
    exponent = math.floor(math.log2(abs(value)))
    distance = 2.0 ** (max(exponent, -126) - 7)
    low = math.floor(value / distance) * distance
    return low, low + distance


@pytest.mark.parametrize("value", [1.0 + 1 / 512, -3.14159, 1e-3, -7.7e-12, 65000.1, 3.1e-39])
def test_a_number_is_rounded_to_its_neighbours_and_right_on_average(value: float, seed: int) -> None:
    value = float(torch.tensor(value))
    low, high = neighbours(value)
    count = 200_000
    found = round_stochastically(torch.full((count,), value), torch.Generator().manual_seed(seed)).double()
    assert found.unique().tolist() == [low, high]
    share = (value - low) / (high - low)
    # Closed form: a choice of two numbers, of which one has this share; five standard deviations.
    spread = (high - low) * math.sqrt(share * (1 - share))
    assert abs(float(found.mean()) - value) < 5 * spread / math.sqrt(count), f"seed {seed}"
    assert float(found.std()) == pytest.approx(spread, rel=0.02)


def test_numbers_of_bf16_and_no_numbers_stay_what_they_are(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    exact = torch.cat([torch.randn(1000, generator=rng).bfloat16().float(), torch.tensor([0.0, -0.0, math.inf, -math.inf])])
    assert torch.equal(round_stochastically(exact, rng).float(), exact)
    broken = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert round_stochastically(broken, rng).isnan().all()


def test_small_updates_count_on_average_where_plain_bf16_loses_them(seed: int) -> None:
    def moved(stepwise: bool) -> Tensor:
        weight = nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        stepping = Stepping(optimizer, seed, fused=False)
        stepping.watch({"weight": weight})
        for step in range(200):
            weight.grad = torch.ones_like(weight)
            if stepwise:
                stepping.move_all(step)
            else:
                optimizer.step()
        return weight.detach().float()

    assert torch.equal(moved(False), torch.ones(4000))
    # Each step is right on average and adds at most the variance of a choice between two numbers 2**-8 apart.
    deviation = math.sqrt(200 * (2**-8) ** 2 / 4 / 4000)
    assert abs(float(moved(True).mean()) - (1 - 200 * 1e-4)) < 5 * deviation, f"seed {seed}"


# The same as the optimizer.


def both(kind: tuple[str, str], folder: Path, seed: int, steps: int = 3, **given: Any) -> tuple[Trainer, Trainer]:
    """Two trainers after these steps: plain, and with fused_backward_pass."""
    plain = make(kind, folder / "plain", seed, **given)
    fused = make(kind, folder / "fused", seed, **given, **FUSED)
    assert trained(plain, steps)[0] == trained(fused, steps)[0]
    return plain, fused


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        # Every optimizer, every kind, and factored state of convolutions; the others with --all.
        pytest.param(kind, name, marks=[] if kind == FLUX or name == one else [pytest.mark.long])
        for kind, one in zip(KINDS, ("Adafactor", "", "AdamW", "AdamW"), strict=True)
        for name in OPTIMIZERS
    ],
)
def test_a_fused_backward_pass_moves_the_weights_to_the_same_bits(kind: tuple[str, str], optimizer: str, tmp_path: Path, seed: int) -> None:
    plain, fused = both(kind, tmp_path, seed, optimizer_type=optimizer, learning_rate=1e-3)
    assert torch.equal(weights_of(plain), weights_of(fused)), f"seed {seed}"
    one, other = plain.steps.step(3), fused.steps.step(3)
    assert one.loss == other.loss and one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
    assert all(weight.grad is None for weight in fused.learner.weights.values())
    states = [trainer.learner.optimizer.state_dict()["state"] for trainer in (plain, fused)]
    assert states[0].keys() == states[1].keys()
    for number, values in states[0].items():
        assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][number][name])) for name, value in values.items())


@pytest.mark.parametrize("given", [{"blocks_to_swap": 2}, {"gradient_checkpointing": True}, {"train_text_encoder": True}], ids=str)
def test_so_it_does_with_other_memory_options(given: dict[str, Any], tmp_path: Path, seed: int) -> None:
    more = {"cache_text_encoder_outputs": False} if "train_text_encoder" in given else {}
    plain, fused = both(("sdxl", "full"), tmp_path, seed, **GIVEN, **given, **more)
    assert torch.equal(weights_of(plain), weights_of(fused)), f"seed {seed}"


def test_so_it_does_when_a_batch_goes_through_in_pieces(tmp_path: Path, seed: int) -> None:
    plain, fused = (make(("flux", "full"), tmp_path / str(number), seed, **GIVEN, **more) for number, more in enumerate(({}, FUSED)))
    plain.learner.pieces = fused.learner.pieces = 2
    assert trained(plain)[0] == trained(fused)[0]
    assert torch.equal(weights_of(plain), weights_of(fused)), f"seed {seed}"


def test_gradients_are_never_there_together(tmp_path: Path) -> None:
    fused = make(("flux", "full"), tmp_path, **GIVEN, **FUSED)
    alive: list[int] = []
    for weight in fused.learner.weights.values():
        weight.register_hook(lambda _: alive.append(sum(one.grad is not None for one in fused.learner.weights.values())))
    trained(fused, 1)
    assert len(alive) > 50 and max(alive) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_without_a_gradient_moves_as_by_a_gradient_of_zero(fused: bool, dtype: torch.dtype) -> None:
    used, unused = (nn.Parameter(torch.full((4,), 2.0, dtype=dtype)) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [used], "lr": 0.0}, {"params": [unused], "lr": 0.5}], weight_decay=0.5)
    stepping = Stepping(optimizer, 0, fused)
    stepping.watch({"used": used, "unused": unused})
    stepping.begin(0)
    used.float().sum().backward()
    if not fused:
        unused.grad = torch.zeros_like(unused)
    norm = stepping.finish()
    if not fused:
        stepping.move_all(0)
    assert float(norm) == 2.0
    assert used.tolist() == [2.0] * 4 and unused.tolist() == [1.5] * 4
    assert [group["params"] for group in optimizer.param_groups] == [[used], [unused]]


def test_a_tried_out_step_moves_nothing_and_keeps_no_gradient() -> None:
    weight = nn.Parameter(torch.ones(3))
    stepping = Stepping(torch.optim.SGD([weight], lr=1.0), 0, fused=True)
    stepping.watch({"weight": weight})
    with stepping.dropping():
        weight.sum().backward()
    assert weight.grad is None and weight.tolist() == [1.0] * 3
    stepping.begin(0)
    weight.sum().backward()
    assert weight.tolist() == [0.0] * 3


# States.


def continued(kind: tuple[str, str], folder: Path, seed: int, first: dict[str, Any], second: dict[str, Any], **given: Any) -> Trainer:
    """Two steps with the first options, a state on disk, and two more steps of another trainer with the second options."""
    begun = make(kind, folder / "begun", seed, **given, **first)
    trained(begun, 2)
    begun.checkpointer.save_state(begun.step, begun.state_dict())
    state, _ = read_state(next((folder / "begun" / "state").iterdir()))
    after = make(kind, folder / "after", seed, **given, **second)
    after.load_state_dict(state)
    trained(after, 2)
    return after


@pytest.mark.parametrize(("first", "second"), [(FUSED, {}), ({}, FUSED)])
@pytest.mark.parametrize("optimizer", ["AdamW", "Adafactor"])
def test_a_run_goes_on_with_or_without_a_fused_backward_pass(
    optimizer: str, first: dict[str, Any], second: dict[str, Any], tmp_path: Path, seed: int, whole: Callable[[str, bool], Trainer]
) -> None:
    found = continued(FLUX, tmp_path, seed, first, second, **_with(optimizer, False))
    assert torch.equal(weights_of(found), weights_of(whole(optimizer, False))), f"seed {seed}"


@pytest.mark.parametrize(
    ("optimizer", "fused"),
    [
        # Every optimizer, and both ways; the others with --all.
        pytest.param(name, fused, id=f"{name}-{'fused' if fused else ''}", marks=pytest.mark.long if (row + bool(fused)) % 2 else ())
        for row, name in enumerate(("Adafactor", "AdamW", "Lion"))
        for fused in ({}, FUSED)
    ],
)
def test_a_resumed_run_in_bf16_repeats_the_uninterrupted_one(
    optimizer: str, fused: dict[str, Any], tmp_path: Path, seed: int, whole: Callable[[str, bool], Trainer]
) -> None:
    wanted, found = whole(optimizer, True), continued(FLUX, tmp_path, seed, fused, fused, **_with(optimizer, True))
    assert all(weight.dtype is torch.bfloat16 for weight in found.learner.weights.values())
    assert torch.equal(weights_of(found), weights_of(wanted)), f"seed {seed}"
    assert wanted.learner.average is not None and found.learner.average is not None
    averages = wanted.learner.average.state_dict(), found.learner.average.state_dict()
    assert all(average.dtype is torch.float32 and torch.equal(average, averages[1][name]) for name, average in averages[0].items())
    for values in found.learner.optimizer.state.values():
        assert all(value.dtype is torch.float32 for value in values.values() if isinstance(value, Tensor))


# Norms of weights in float32 on numbers in bf16.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("kind", [("flux", "full"), ("zimage", "full")], ids="-".join)
def test_training_in_bf16_goes_where_training_in_float32_goes(kind: tuple[str, str], tmp_path: Path, seed: int) -> None:
    given: dict[str, Any] = {"optimizer_type": "SGD", "learning_rate": 1e-2, "mixed_precision": "bf16"}
    high = make(kind, tmp_path / "high", seed, **given)
    low = make(kind, tmp_path / "low", seed, **given, full_bf16=True)
    begun = weights_of(high), weights_of(low)
    losses, others = trained(high, 8)[0], trained(low, 8)[0]
    assert others == pytest.approx(losses, rel=0.02)
    one, other = weights_of(high) - begun[0], weights_of(low) - begun[1]
    # The rounding of each weight is noise, so the movement is right along its direction, not weight by weight.
    assert float(one @ other / (one @ one)) == pytest.approx(1, abs=0.25), f"seed {seed}"


# What is no number, and what is refused.


def test_a_loss_that_is_no_number_stops_a_fused_step_before_weights_move(tmp_path: Path) -> None:
    fused = make(("flux", "full"), tmp_path, **GIVEN, **FUSED)
    before = weights_of(fused)
    for latents, _ in fused.learner.model.data.samples:
        latents[:] = math.nan
    with pytest.raises(NonFiniteLoss, match="loss"):
        fused.fit()
    assert torch.equal(weights_of(fused), before)


@pytest.mark.parametrize(("more", "saves"), [({}, True), (FUSED, False)])
def test_a_gradient_that_is_no_number_leaves_no_damaged_state(more: dict[str, Any], saves: bool, tmp_path: Path) -> None:
    trainer = make(("flux", "full"), tmp_path, **GIVEN, **more)
    trained(trainer, 1)
    list(trainer.learner.weights.values())[5].register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(NonFiniteLoss, match="gradient"):
        trainer.fit()
    assert (tmp_path / "state" / "000001").exists() == saves


@pytest.mark.parametrize("option", ["fused_backward_pass", "full_bf16"])
def test_optimizers_that_need_all_weights_at_once_are_refused(option: str) -> None:
    places = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star"}
    given = {**places, "max_grad_norm": 0, "mixed_precision": "bf16", "gradient_accumulation_steps": 1}
    for name in WEIGHT_BY_WEIGHT:
        flat.build(RUNS["flux", "full"], {**given, option: True, "optimizer_type": name})
    for name in ("Prodigy", "CAME"):
        flat.build(RUNS["flux", "full"], {**given, "optimizer_type": name})
        with pytest.raises(OptionError, match=f"{option} moves weights one at a time, and {name} may need all at once; choose"):
            flat.build(RUNS["flux", "full"], {**given, option: True, "optimizer_type": name})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_for_one_weight_after_the_other_is_the_optimizer(name: str, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    begun = [torch.randn(shape, generator=rng) for shape in ((5, 7), (3,), (2, 3, 3, 3))]
    gradients = [[torch.randn(one.shape, generator=rng) for one in begun] for _ in range(3)]

    def moved(alone: bool) -> list[Tensor]:
        weights = [nn.Parameter(one.clone()) for one in begun]
        groups = [{"params": weights[:1], "lr": 0.1, "name": "a"}, {"params": weights[1:], "lr": 0.01, "name": "b"}]
        optimizer = make_optimizer(OptimizerOptions(optimizer_type=name, learning_rate=0.1), groups)
        stepping = Stepping(optimizer, 0, fused=False)
        stepping.watch({str(number): weight for number, weight in enumerate(weights)})
        for number, these in enumerate(gradients):
            for weight, gradient in zip(weights, these, strict=True):
                weight.grad = gradient.clone()
            if alone:
                stepping.move_all(number)
            else:
                optimizer.step()
        return weights

    assert all(torch.equal(one, other) for one, other in zip(moved(True), moved(False), strict=True))
