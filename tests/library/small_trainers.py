"""Trainers of every kind of run on its family's tiny model, with made-up batches: to compare runs with different memory options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.full import train_whole
from sd_scripts.library.core.protocols import Batch
from sd_scripts.library.core.rng import rng_for
from sd_scripts.library.memory.arranging import arrange
from sd_scripts.library.memory.quantize import quantize_network
from sd_scripts.library.train import stepping
from sd_scripts.library.train.checkpoint import Checkpointer, Identity
from sd_scripts.library.train.conditioned import TrainedModel
from sd_scripts.library.train.epochs import EpochTable
from sd_scripts.library.train.fallbacks import Steps
from sd_scripts.library.train.learner import Learner
from sd_scripts.library.train.optim import make_optimizer
from sd_scripts.library.train.process import Process
from sd_scripts.library.train.timetable import Timetable
from sd_scripts.library.train.trainer import Trainer
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.stopping import StopRequest
from sd_scripts.schema import flat
from sd_scripts.schema.network import NetworkOptions
from sd_scripts.schema.runs import RunOptions
from tests.library.batches import a_call

GIVEN: dict[str, Any] = {
    "train_data_dir": "images",
    "optimizer_type": "SGD",
    "learning_rate": 0.5,
    "max_grad_norm": 0.0,
    "train_batch_size": 2,
}
"""Plain gradient descent: its step is the gradient, here large beside the rounding of the weights."""
SAMPLES = 8
"""Different samples."""


@dataclass
class MadeUp:
    """Batches that follow from their sample numbers."""

    family: str
    samples: list[tuple[Tensor, dict[str, Tensor]]]
    batch: int
    accumulation: int
    trained_encoders: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32

    def micro_batch(self, step: int, micro: int, rank: int) -> Batch:
        first = (step * self.accumulation + micro) * self.batch
        numbers = list(range(first, first + self.batch))
        chosen = [self.samples[number % SAMPLES] for number in numbers]
        conditions = [dict(condition) for _, condition in chosen]
        names = ["flat", "line", "night"]
        others = [self.samples[(number + 1) % SAMPLES][1] for number in numbers]
        styled = self.family == "lgt"
        return Batch(
            x0=torch.stack([x0 for x0, _ in chosen]).to(self.dtype),
            conditions=conditions,
            numbers=torch.tensor(numbers),
            weights=torch.ones(self.batch),
            names=[f"{number}.png" for number in numbers],
            captions=[f"an image {number % 3}" for number in numbers],
            towards=[dict(other) for other in others] if styled else [],
            goals=[names[(number + 1) % SAMPLES % 3] for number in numbers] if styled else [],
            references=[
                torch.randn(2, *chosen[0][0].shape, generator=rng_for(3, number, "references")).to(self.dtype) for number in numbers
            ]
            if styled
            else [],
            step=step,
        )

    def validation_batches(self) -> list[Callable[[], Batch]]:
        return []

    def empty_text(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.samples[0][1].items() if name in ("text", "t5", "pooled")}


def options_of(kind: tuple[str, str], **given: Any) -> RunOptions:
    """The options of a small run of this kind."""
    base = {} if kind[1] == "scratch" else {"pretrained_model_name_or_path": "tiny"}
    more = {"network_dim": 2, "train_text_encoder": False, "learning_rate": 2.0} if kind[1] == "network" else {}
    known = flat.fields(RUNS[kind])
    return flat.build(RUNS[kind], {**GIVEN, **{name: value for name, value in {**base, **more}.items() if name in known}, **given})


def samples_of(family: str, seed: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Latents and conditions of SAMPLES samples, as the family's tiny model encodes them; to spoil."""
    return [(latents.clone(), {name: one.clone() for name, one in condition.items()}) for latents, condition in _samples(family, seed)]


@cache
def _samples(family: str, seed: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    parts = families.family(family).tiny()
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    while len(found) < SAMPLES:
        latents, _, conditions = a_call(family, parts, size=2, seed=seed + len(found))
        found += list(zip(latents, conditions, strict=True))
    return found


def make(kind: tuple[str, str], folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **given: Any) -> Trainer:
    """A trainer of this kind, whose first weights follow from the family and whose data from `seed`; further options by their names."""
    options = options_of(kind, **given)
    family = families.family(kind[0])
    parts = family.tiny()
    samples = samples_of(kind[0], seed)
    if dtype is not torch.float32:
        parts.backbone.to(dtype)
    if getattr(options.model, "transformer_quantization", "none") != "none":
        quantize_network(parts.backbone, options.model.transformer_quantization)
    folder.mkdir(parents=True, exist_ok=True)
    run = RunDirectory(folder)
    network_options = options.network
    network: Any
    if isinstance(network_options, NetworkOptions):
        network = attach(parts, network_options, family.adapter_targets(parts, network_options.wants_convolutions), seed=5)
    else:
        trained_dtype = stepping.trained_dtype(options.memory)
        network = train_whole(parts, network_options, family, trained_dtype if dtype is torch.float32 else dtype)
    # An adapter that is zero at the start has no gradient in its other half.
    spread = torch.Generator().manual_seed(7)
    if isinstance(network_options, NetworkOptions):
        for weight in network.parameters():
            weight.data.add_(torch.randn(weight.shape, generator=spread) * 0.05)
    arranged = arrange(parts, options, torch.device("cpu"))
    batch, accumulation = options.dataset.train_batch_size, options.training.gradient_accumulation_steps
    trained_encoders = tuple(sorted(parts.text_encoders)) if network_options.train_text_encoder else ()
    optimizer = make_optimizer(options.optimizer, network.parameter_groups(network_options, options.optimizer.learning_rate))
    steps = 100
    table = Timetable(
        total_steps=steps,
        epochs_done=lambda step: step // 4,
        learning_rate_at=lambda step: 1.0,
        sample_due=lambda step: False,
        samples_with_saves=False,
        validation_due=lambda step: False,
        validates_with_saves=False,
        global_batch=batch * accumulation,
        max_grad_norm=options.optimizer.max_grad_norm,
        state_on_train_end=False,
        names_of=lambda step: [],
    )
    data = MadeUp(kind[0], samples, batch, accumulation, trained_encoders, dtype)
    learner = Learner(
        TrainedModel(family=family, parts=parts, network=network, data=data, compilation=arranged.compilation),
        family.objective(options.objective, parts.path, parts.kind, parts.scheduler_config),
        optimizer,
        options.training,
        table,
        Process(Accelerator(cpu=True), StopRequest(run), run),
        stepping.stepping_of(options.memory, optimizer, options.training.seed),
    )
    return Trainer(
        Steps(learner),
        checkpointer=Checkpointer(run, options.output, Identity("s", "d", 1), lambda step: step // 4, steps),
        export=lambda path, step: None,
        samples=None,
        observers=[EpochTable(learner, run.epochs)],
    )


def trained(trainer: Trainer, steps: int = 2) -> tuple[list[float], Tensor]:
    """Losses of the next steps, and all trained weights after them in one row; the trainer's count goes on."""
    trainer.learner.model.network.train()
    losses = []
    for _ in range(steps):
        losses.append(trainer.steps.step(trainer.step).loss)
        trainer.step += 1
    return losses, weights_of(trainer)


def weights_of(trainer: Trainer) -> Tensor:
    """All trained weights in one row, float64."""
    return torch.cat([weight.detach().double().cpu().flatten() for weight in trainer.learner.weights.values()])
