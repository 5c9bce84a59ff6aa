"""The training loop, one for all families, objectives and networks; nothing in it is meant to be overridden.

A step is a pure function of the weights and the step's number: pictures, times and noise follow from sample numbers, the learning
rate from the step. So the loop has nothing to remember but the step, on any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from sd_scripts.schema.rundir import RunDirectory
from sd_scripts.schema.training import TrainingOptions

from .checkpoint import Checkpointer, NoRoomLeft, State
from .ema import MovingAverage
from .errors import NonFiniteLoss
from .meter import Meter, Phases, Sections, StepLog
from .optim import restore
from .processes import add_up, broadcast, total_norm
from .protocols import Batch, Denoiser, Kind, ModelFamily, Objective, Parts
from .remedies import is_out_of_memory
from .rng import seed_for
from .sharding import is_sharded
from .stopping import StopRequest

SMALLEST_SCALE = 1.0
"""fp16: a loss scale that fell below this will not recover; the gradients themselves are broken."""


class Network(Protocol):
    """What is trained, as the loop sees it."""

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Its tensors by name, in an order that is the same in every process and run; those that require a gradient are trained."""
        ...

    def train(self, mode: bool = True) -> None:
        """Training or evaluation mode of every network it is part of."""
        ...

    def disabled(self) -> AbstractContextManager[None]:
        """Within the block the networks compute as before training."""
        ...

    def after_step(self) -> object:
        """What the options want done to the weights after each optimizer step."""
        ...


class Data(Protocol):
    """Batches by number. trained_encoders: text encoders whose part the conditions lack, because it changes with every step."""

    trained_encoders: Sequence[str]

    def micro_batch(self, step: int, micro: int, rank: int) -> Batch: ...

    def validation_batches(self) -> Sequence[Callable[[], Batch]]: ...


class Samples(Protocol):
    """Previews."""

    def render(self, step: int, missing_only: bool = False) -> None: ...


@dataclass(frozen=True)
class Conditioned:
    """A family's network with the conditions of one batch bound to it; what an objective calls."""

    family: ModelFamily
    parts: Parts
    network: Network
    conditions: list[dict[str, Tensor]]

    @property
    def kind(self) -> Kind:
        return self.parts.kind

    def __call__(self, x_t: Tensor, t: Tensor) -> Tensor:
        return self.family.denoise(self.parts, x_t, t, self.conditions)

    @torch.no_grad()
    def base(self, x_t: Tensor, t: Tensor) -> Tensor:
        with self.network.disabled():
            return self.family.denoise(self.parts, x_t, t, self.conditions)


@dataclass(frozen=True)
class Timetable:
    """When what happens. epochs_done: whole epochs before a step; what is due is asked with the number of steps done."""

    total_steps: int
    epochs_done: Callable[[int], int]
    learning_rate_at: Callable[[int], float]
    """Factor on the peak rates, from the number of the step about to be done."""
    sample_due: Callable[[int], bool]
    samples_with_saves: bool
    validation_due: Callable[[int], bool]
    validates_with_saves: bool
    global_batch: int
    """Samples in an optimizer step, over all processes and micro-batches."""
    max_grad_norm: float
    state_on_train_end: bool
    names_of: Callable[[int], list[str]]
    """Files of all pictures of a step, over all processes, for messages."""


class Trainer:
    """Trains until the last step, a request to stop, or an error; see fit."""

    def __init__(
        self,
        options: TrainingOptions,
        timetable: Timetable,
        family: ModelFamily,
        parts: Parts,
        network: Network,
        objective: Objective,
        data: Data,
        optimizer: torch.optim.Optimizer,
        checkpointer: Checkpointer,
        export: Callable[[Path, int], None],
        samples: Samples | None,
        run: RunDirectory,
        accelerator: Accelerator,
        stop: StopRequest,
        phases: Phases,
    ) -> None:
        self.options, self.timetable, self.family, self.parts = options, timetable, family, parts
        self.network, self.objective, self.data, self.optimizer = network, objective, data, optimizer
        self.checkpointer, self.export, self.samples = checkpointer, export, samples
        self.run, self.accelerator = run, accelerator
        self.stop, self.phases = stop, phases
        self.step = 0
        """Optimizer steps done; the only state of the loop itself."""
        self.weights = {name: weight for name, weight in network.named_parameters().items() if weight.requires_grad}
        self._peak_rates = [group["lr"] for group in optimizer.param_groups]
        self._main = accelerator.is_main_process
        self._takes_part = self._main or is_sharded(parts.backbone)
        """Whether this process computes previews and held-out losses: alone, or because the others need its share of the network."""
        self._moving = False
        device = accelerator.device
        precision = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(options.mixed_precision)
        self._autocast = lambda: torch.autocast(device.type, dtype=precision) if precision is not None else nullcontext()
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision is torch.float16)
        broadcast(self.weights.values(), accelerator)
        self.average = MovingAverage(self.weights, options.ema_decay) if options.use_ema else None
        self.meter = Meter(timetable.global_batch, device)

    def state_dict(self) -> State:
        """Everything that a later process needs to go on from here."""
        return {
            "weights": {name: weight.detach().float() for name, weight in self.weights.items()},
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "loop": {"step": self.step, "scaler": self.scaler.state_dict()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Goes back to a saved state. Raises ValueError when it belongs to other weights or another optimizer."""
        if state["weights"].keys() != self.weights.keys():
            raise ValueError("it holds other weights than this run trains")
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])
        restore(self.optimizer, state["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(state["average"] or state["weights"])
        if self.scaler.is_enabled() and state["loop"]["scaler"]:
            self.scaler.load_state_dict(state["loop"]["scaler"])
        self.step = state["loop"]["step"]

    def fit(self) -> bool:
        """Trains to the last step and saves; True at the end, False after a request to stop.

        On an error the state of the last good step is saved before the error goes on: NonFiniteLoss, torch.OutOfMemoryError, any other.
        """
        total = self.timetable.total_steps
        self.network.train()
        with self.stop.finishing_steps(), tqdm(total=total, initial=self.step, desc="train", unit="step", disable=not self._main) as bar:
            try:
                self._after_step(again=True)
                first, stopped = self.step, False
                self.phases.enter("warmup")
                while self.step < total and not stopped:
                    log = self.train_step(self.step)
                    self.step += 1
                    if self.step == first + 1:
                        self.phases.enter("train")
                    self._report(log, self.step == first + 1, bar)
                    stopped = log.stop and self.step < total
                    self._after_step(stopping=stopped)
            except BaseException as err:
                self._rescue(err)
                raise
        return self.step >= total

    def train_step(self, step: int) -> StepLog:
        """One optimizer step over the global batch of `step`. Raises NonFiniteLoss before the weights are touched."""
        sections = Sections()
        micro_batches = self.options.gradient_accumulation_steps
        sums: dict[str, Tensor] = {}
        for micro in range(micro_batches):
            with sections.of("data_fetch"):
                batch = self._to_device(self.data.micro_batch(step, micro, self.accelerator.process_index))
            with sections.of("forward_backward"):
                # Dropout inside modules draws from the global generator: the same step drops the same, resumed or not.
                torch.manual_seed(seed_for(self.options.seed, step * micro_batches + micro, f"dropout/{self.accelerator.process_index}"))
                with self._autocast():
                    losses = self.objective(self._denoiser(batch), batch, self.options.seed)
                share = losses.loss.sum() / self.timetable.global_batch
                self.scaler.scale(share).backward()
                for name, value in {"loss": losses.loss, **losses.parts}.items():
                    sums[name] = sums.get(name, 0) + value.detach().sum().float() / self.timetable.global_batch
        with sections.of("forward_backward"):
            sums["stop"] = torch.tensor(float(self.stop.requested()), device=self.accelerator.device)
            for weight in self.weights.values():
                # A layer that was dropped, or whose output nobody reads: another process may have used it, and sums need a partner.
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            gradients = [weight.grad for weight in self.weights.values()]
            add_up(gradients, sums, self.accelerator)
            if self.scaler.is_enabled():
                self.scaler.unscale_(self.optimizer)
            norm = total_norm(gradients)
            # The one place where the loop waits for the device.
            *values, grad_norm = torch.stack([*sums.values(), norm]).tolist()
        found = dict(zip(sums, values))
        stop, loss = found.pop("stop") > 0, found.pop("loss")
        with sections.of("optimizer"):
            overflowed = self._optimizer_step(step, loss, grad_norm, gradients)
        return StepLog(loss, grad_norm, found, sections.all(), overflowed, stop)

    def _optimizer_step(self, step: int, loss: float, grad_norm: float, gradients: list[Tensor]) -> bool:
        """Moves the weights; in fp16 a step whose scaled gradients overflowed is left out, which is what the return value says."""
        finite_loss, finite_norm = loss - loss == 0, grad_norm - grad_norm == 0
        overflowed = self.scaler.is_enabled() and finite_loss and not finite_norm
        if not finite_loss or (not finite_norm and (not overflowed or self.scaler.get_scale() < SMALLEST_SCALE)):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteLoss(step, self.timetable.names_of(step), "gradient" if finite_loss else "loss")
        limit = self.timetable.max_grad_norm
        if limit and grad_norm > limit and not overflowed:
            torch._foreach_mul_(gradients, limit / (grad_norm + 1e-6))
        for group, peak in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = peak * self.timetable.learning_rate_at(step)
        self._moving = True
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if not overflowed:
            self.network.after_step()
            if self.average is not None:
                self.average.update(step)
        self._moving = False
        return overflowed

    def _denoiser(self, batch: Batch) -> Denoiser:
        conditions = batch.conditions
        if self.data.trained_encoders:
            live = self.data.trained_encoders if self.family.separate_texts else None
            texts = self.family.encode_prompts(self.parts, batch.captions, live)
            conditions = [{**condition, **text} for condition, text in zip(conditions, texts, strict=True)]
        return Conditioned(self.family, self.parts, self.network, conditions)

    def _to_device(self, batch: Batch) -> Batch:
        device = self.accelerator.device

        def moved(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        conditions = [{name: moved(tensor) for name, tensor in condition.items()} for condition in batch.conditions]
        return replace(
            batch,
            x0=moved(batch.x0),
            weights=moved(batch.weights),
            masks=moved(batch.masks),
            references=moved(batch.references),
            conditions=conditions,
        )

    def _report(self, log: StepLog, warming_up: bool, bar: tqdm) -> None:  # type: ignore[type-arg]
        bar.update()
        self.meter.add(log, warming_up)
        if log.overflowed and self._main:
            self.run.log("warning", text=f"step {self.step}: a gradient overflowed in fp16; the step was left out, the loss scale halved")
        last = log.stop or self.step == self.timetable.total_steps
        if not self._main or (self.step % self.options.log_every_n_steps and not last):
            return
        point = self.meter.point(self.timetable.total_steps - self.step)
        # The largest of the groups' rates: LoRA+ and text encoders have their own.
        point["lr"] = max(group["lr"] * group.get("d", 1.0) for group in self.optimizer.param_groups)
        self.run.log("step", step=self.step, epoch=self.timetable.epochs_done(self.step - 1), **point)
        self.accelerator.log(point, step=self.step)
        bar.set_postfix(loss=f"{point['loss']:.4f}", refresh=False)

    def _after_step(self, again: bool = False, stopping: bool = False) -> None:
        """Validates, saves and samples what is due after `self.step` steps; again: only what a killed process did not come to."""
        step, table = self.step, self.timetable
        ended, started = step >= table.total_steps, step == 0
        exports = (ended or self.checkpointer.export_due(step)) and not started
        validates = not again and (table.validation_due(step) or (exports and table.validates_with_saves))
        samples = self.samples is not None and (table.sample_due(step) or (exports and table.samples_with_saves))
        state = not again and (stopping or self.checkpointer.state_due(step) or (ended and table.state_on_train_end))
        if again and exports:
            exports = not self.checkpointer.export_path(step).exists()
        if not (exports or validates or samples or state):
            return
        if state and self._main:
            self.phases.enter("save")
            self.checkpointer.save_state(step, self.state_dict())
        with self.average.shown() if self.average is not None else nullcontext():
            if validates:
                self._validate()
            if exports and self._main:
                self.phases.enter("save")
                self.export(self.checkpointer.export_path(step), step)
                self.checkpointer.exported(step, self.checkpointer.export_path(step))
            if samples and self._takes_part and self.samples is not None:
                self.phases.enter("sample")
                self.samples.render(step, missing_only=again)
        if not (again or ended or stopping):
            self.phases.enter("train")

    @torch.no_grad()
    def _validate(self) -> None:
        """Mean loss of the held-out pictures, each with the same time and noise every time: its number is that of the picture."""
        self.phases.enter("validate")
        seed, total, count = seed_for(self.options.seed, 0, "validation"), 0.0, 0
        self.network.train(False)
        try:
            batches = self.data.validation_batches()
            for make in tqdm(batches, desc="validate", unit="batch", leave=False, disable=not self._main) if self._takes_part else ():
                batch = self._to_device(make())
                with self._autocast():
                    loss = self.objective(self._denoiser(batch), batch, seed).loss
                total, count = total + float(loss.sum()), count + len(batch.names)
        finally:
            self.network.train()
        if count and self._main:
            self.run.log("validation", step=self.step, loss=total / count)
            self.accelerator.log({"validation_loss": total / count}, step=self.step)

    def _rescue(self, err: BaseException) -> None:
        """After an error: saves the last good step's state, unless the weights were being moved or nothing new was done."""
        # What an error leaves behind keeps memory that saving may need.
        self.optimizer.zero_grad(set_to_none=True)
        if is_out_of_memory(err) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        new = self.step > (self.checkpointer.saved_step or 0)
        if self._main and new and not self._moving and not isinstance(err, NoRoomLeft):
            self.checkpointer.save_state(self.step, self.state_dict())
