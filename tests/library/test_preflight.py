"""What is tried before the first step: that it is the heaviest there is, that it says what did not fit, and that it leaves no trace."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sd_scripts.families import RUNS
from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.library.core.errors import OutOfMemory
from sd_scripts.library.core.protocols import Batch
from sd_scripts.library.memory import preflight
from sd_scripts.library.memory.oom_advice import Work, is_out_of_memory
from sd_scripts.library.memory.oom_fallback import OomFallback
from sd_scripts.library.train.optim import make_optimizer
from sd_scripts.library.train.trainer import Trainer
from sd_scripts.schema.memory import MemoryOptions
from sd_scripts.schema.optimizer import OptimizerOptions
from tests.library.equivalence import Kind
from tests.library.small_trainers import make, trained

CPU = torch.device("cpu")


class Heaviest:
    """A batch of a trainer's data, as the pipeline would give it."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def heaviest(self) -> tuple[Batch, str]:
        return self.trainer.learner.model.data.micro_batch(7, 0, 0), "a batch of 2 images of 64 x 64"


def preflights(trainer: Trainer) -> list[Work]:
    tried: list[Work] = []
    preflight.run(trainer, Heaviest(trainer), tried.append)
    return tried


LEFT_OUT = [("sd", "network"), ("sd", "full"), ("sdxl", "network"), ("flux", "full"), ("zimage", "network")]


@pytest.mark.parametrize(
    "kind",
    # Both ways of training, new networks, and one kind of each but one of the families; the others with --all.
    [pytest.param(kind, marks=pytest.mark.long if kind in LEFT_OUT else ()) for kind in RUNS],
    ids="/".join,
)
def test_a_run_is_the_same_after_a_preflight(kind: Kind, tmp_path: Path) -> None:
    seed = random.getrandbits(16)
    given: dict[str, Any] = {"optimizer_type": "AdamW", "learning_rate": 1e-3, "use_ema": True}
    given |= {"network_dropout": 0.3} if kind[1] == "network" else {}
    plain, other = (make(kind, tmp_path / name, seed, **given) for name in "ab")
    torch.manual_seed(seed)
    drawn = torch.get_rng_state()
    assert preflights(other) == ["train", "sample", "train"]
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not other.learner.optimizer.state_dict()["state"] and all(weight.grad is None for weight in other.learner.weights.values())
    assert (other.step, other.report.meter.steps) == (0, 0)
    ours, theirs = trained(other, 3), trained(plain, 3)
    assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1])
    assert plain.learner.average is not None and other.learner.average is not None
    for name, average in plain.learner.average.state_dict().items():
        assert torch.equal(average, other.learner.average.state_dict()[name])
    (event,) = [event for event in other.run.events()[0] if event["kind"] == "preflight"]
    assert event["what"] == "a batch of 2 images of 64 x 64" and event["peak_gib"] > 0 and event["seconds"] > 0
    assert [event["name"] for event in other.run.events()[0] if event["kind"] == "phase"] == ["preflight"]


@pytest.mark.parametrize("memory", [{"fused_backward_pass": True}, {"full_bf16": True, "mixed_precision": "bf16"}])
def test_weights_that_move_in_the_backward_pass_stay(memory: dict[str, Any], tmp_path: Path) -> None:
    seed = random.getrandbits(16)
    plain, other = (make(("sdxl", "full"), tmp_path / name, seed, **memory) for name in "ab")
    preflights(other)
    ours, theirs = trained(other), trained(plain)
    assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1])


def runs_out(trainer: Trainer, until: Any) -> None:
    def full(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if not until():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    list(blocks_of(trainer.learner.model.parts.backbone).values())[-1].register_forward_pre_hook(full)


def test_what_does_not_fit_is_named_before_anything_is_trained(tmp_path: Path) -> None:
    trainer = make(("sdxl", "network"), tmp_path)
    runs_out(trainer, lambda: False)
    with pytest.raises(OutOfMemory, match=r"a batch of 2 images of 64 x 64 of this run: the device has no memory") as caught:
        preflights(trainer)
    assert is_out_of_memory(caught.value) and all(weight.grad is None for weight in trainer.learner.weights.values())
    assert not [event for event in trainer.run.events()[0] if event["kind"] == "preflight"]


def test_memory_options_of_the_oom_fallback_are_pulled_in_the_preflight(tmp_path: Path) -> None:
    trainer, said, pulled = make(("sdxl", "network"), tmp_path), list[str](), list[bool]()
    trainer.steps.fallback = OomFallback([lambda: "pulled" if not pulled and not pulled.append(True) else ""], said.append)  # type: ignore[func-returns-value]
    runs_out(trainer, lambda: bool(pulled))
    preflights(trainer)
    assert said == ["preflight: the device had no memory left; pulled"]


class Broken:
    """Previews that cannot be rendered."""

    def __init__(self, err: Exception) -> None:
        self.err = err

    def render(self, step: int, missing_only: bool = False) -> None:
        raise self.err

    def try_out(self) -> str:
        raise self.err


def test_a_preview_that_does_not_fit_is_told_apart_from_one_that_cannot_be_rendered(tmp_path: Path) -> None:
    trainer = make(("sdxl", "network"), tmp_path)
    trainer.samples = Broken(torch.OutOfMemoryError("CUDA out of memory"))
    tried: list[Work] = []
    with pytest.raises(OutOfMemory, match="the largest previews of this run"):
        preflight.run(trainer, Heaviest(trainer), tried.append)
    assert tried[-1] == "sample"
    trainer.samples = Broken(ValueError("image sides 65 x 64 are not multiples of 8"))
    assert preflights(trainer)[-1] == "train"


def test_a_run_has_a_preflight_on_a_gpu_unless_it_is_told_otherwise() -> None:
    gpu = torch.device("cuda")
    wanted = {
        (name, device.type): preflight.is_wanted(MemoryOptions(preflight=name), device)
        for name in ("auto", "on", "off")
        for device in (CPU, gpu)
    }
    assert {key for key, value in wanted.items() if value} == {("auto", "cuda"), ("on", "cuda"), ("on", "cpu")}


@pytest.mark.parametrize("name", ["AdamW", "Lion", "SGD", "Adafactor"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_an_optimizer_will_remember_is_known_before_its_first_step(name: str, momentum: float) -> None:
    weights = [torch.nn.Parameter(torch.randn(random.randint(40, 90), random.randint(40, 90))) for _ in range(3)]
    arguments = [f"momentum={momentum}"] if name == "SGD" else []
    optimizer = make_optimizer(OptimizerOptions(optimizer_type=name, optimizer_args=arguments), [{"params": weights, "lr": 1.0}])
    expected = preflight.state_bytes(optimizer, CPU)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    kept = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim == 2
    )
    assert expected == kept and preflight.state_bytes(optimizer, CPU) == 0
