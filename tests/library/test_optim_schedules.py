"""Learning-rate schedules against those of diffusers and transformers."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from diffusers.optimization import get_scheduler as diffusers_scheduler
from transformers.optimization import get_scheduler as transformers_scheduler

from sd_scripts.runs.schedules import factor_at, num_steps
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.optimizer import OptimizerOptions

RATE = 0.0137


def reference(make: Any, name: str, total: int, **arguments: Any) -> list[float]:
    """Factors that the library's own scheduler gives over a run."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    schedule = make(name, optimizer, **arguments)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"] / RATE)
        optimizer.step()
        schedule.step()
    return rates


def ours(total: int, **options: Any) -> list[float]:
    factor = factor_at(OptimizerOptions(learning_rate=RATE, **options), total)
    return [factor(step) for step in range(total)]


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_a_schedule_equals_diffusers(name: str) -> None:
    total, warmup = random.randint(40, 200), random.randint(1, 20)
    cycles, power = random.randint(1, 4), random.uniform(0.5, 3)
    wanted = reference(
        diffusers_scheduler,
        name,
        total,
        num_warmup_steps=warmup,
        num_training_steps=total,
        num_cycles=cycles if "restarts" in name else 0.5,
        power=power,
    )
    found = ours(total, lr_scheduler=name, lr_warmup_steps=warmup, lr_scheduler_num_cycles=cycles, lr_scheduler_power=power)
    assert found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("timescale", [None, 37])
def test_inverse_sqrt_equals_transformers(timescale: int | None) -> None:
    wanted = reference(
        transformers_scheduler,
        "inverse_sqrt",
        120,
        num_warmup_steps=11,
        num_training_steps=120,
        scheduler_specific_kwargs={"timescale": timescale} if timescale else {},
    )
    assert ours(120, lr_scheduler="inverse_sqrt", lr_warmup_steps=11, lr_scheduler_timescale=timescale) == pytest.approx(wanted, abs=1e-12)


def test_cosine_with_min_lr_equals_transformers() -> None:
    wanted = reference(
        transformers_scheduler,
        "cosine_with_min_lr",
        90,
        num_warmup_steps=7,
        num_training_steps=90,
        scheduler_specific_kwargs={"min_lr_rate": 0.15},
    )
    assert ours(90, lr_scheduler="cosine_with_min_lr", lr_warmup_steps=7, lr_scheduler_min_lr_ratio=0.15) == pytest.approx(
        wanted, abs=1e-12
    )


@pytest.mark.parametrize("half_waves", [1, 2, 3])
def test_cycles_are_half_waves_of_a_cosine_with_a_floor_as_in_kohyas_scripts(half_waves: int) -> None:
    # There num_cycles / 2 goes into 0.5 (1 + cos(2 pi cycles p)): p runs over the steps after the warm-up, or over those of the decay.
    def wave(p: float) -> float:
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * half_waves * p))

    floor = {"lr_scheduler_num_cycles": half_waves, "lr_scheduler_min_lr_ratio": 0.1, "lr_warmup_steps": 0}
    found = ours(40, lr_scheduler="cosine_with_min_lr", **floor)
    assert found == pytest.approx([wave(step / 40) for step in range(40)], abs=1e-12)
    found = ours(40, lr_scheduler="warmup_stable_decay", lr_decay_steps=10, **floor)
    assert found == pytest.approx([1.0] * 30 + [wave(step / 10) for step in range(10)], abs=1e-12)


@pytest.mark.parametrize("decay", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize("warm", ["linear", "cosine", "1-sqrt"])
def test_warmup_stable_decay_equals_transformers(warm: str, decay: str) -> None:
    wanted = reference(
        transformers_scheduler,
        "warmup_stable_decay",
        100,
        num_warmup_steps=10,
        num_training_steps=100,
        scheduler_specific_kwargs={"num_decay_steps": 25, "min_lr_ratio": 0.1, "warmup_type": warm, "decay_type": decay},
    )
    found = ours(
        100,
        lr_scheduler="warmup_stable_decay",
        lr_warmup_steps=10,
        lr_decay_steps=0.25,
        lr_scheduler_min_lr_ratio=0.1,
        lr_scheduler_args=(f"warmup_type={warm}", f"decay_type={decay}"),
    )
    assert found == pytest.approx(wanted, abs=1e-12)


def test_piecewise_constant_equals_diffusers() -> None:
    rules = "1:10,0.1:20,0.01:30,0.005"
    wanted = reference(diffusers_scheduler, "piecewise_constant", 40, step_rules=rules)
    assert ours(40, lr_scheduler="piecewise_constant", lr_scheduler_args=(f"step_rules={rules}",)) == pytest.approx(wanted, abs=1e-12)


def test_lengths_below_one_are_fractions_of_the_run() -> None:
    assert (num_steps(0.05, 1000), num_steps(0, 1000), num_steps(1, 1000), num_steps(250.0, 1000)) == (50, 0, 1, 250)
    assert ours(100, lr_warmup_steps=0.1) == ours(100, lr_warmup_steps=10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr_scheduler": "piecewise_constant"}, "step_rules"),
        ({"lr_scheduler": "piecewise_constant", "lr_scheduler_args": ("step_rules=1:x,2",)}, "step_rules"),
        ({"lr_scheduler": "linear", "lr_scheduler_args": ("num_cycles=2",)}, "no further arguments"),
        ({"lr_scheduler": "cosine", "lr_scheduler_args": ("cycles=2",)}, "it knows num_cycles"),
        ({"lr_scheduler": "cosine", "lr_scheduler_args": ("num_cycles=many",)}, "must be a number"),
        ({"lr_scheduler": "polynomial", "lr_scheduler_args": ("lr_end=1",)}, "must be below learning_rate"),
        ({"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": 80, "lr_decay_steps": 80}, "longer than the run"),
        ({"lr_scheduler": "warmup_stable_decay", "lr_scheduler_args": ("decay_type=square",)}, "not one of"),
    ],
)
def test_wrong_schedule_arguments_are_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError) as caught:
        factor_at(OptimizerOptions(**options), 100)
    assert words in str(caught.value)
