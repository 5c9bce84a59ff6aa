"""The training loop, one for all families, objectives and networks; nothing in it is meant to be overridden.

A step is a pure function of the weights and the step's number: pictures, times and noise follow from sample numbers, the learning
rate from the step. So the loop has nothing to remember but the step, on any number of processes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.core.errors import NonFiniteLoss
from sd_scripts.library.core.protocols import Batch, Condition, ModelFamily, Network, Objective, Parts
from sd_scripts.library.core.rng import seed_for
from sd_scripts.library.memory.compiling import Compilation, plain_code
from sd_scripts.library.memory.ladder import Ladder, pieces_of
from sd_scripts.library.memory.remedies import is_out_of_memory
from sd_scripts.library.parallel.peers import Peers
from sd_scripts.library.parallel.processes import add_up, broadcast
from sd_scripts.library.parallel.sharding import gathered, is_sharded, own, shared_out, shared_out_optimizer_state, total_norm
from sd_scripts.runs.rundir import RunDirectory, RunFolderLost
from sd_scripts.runs.stopping import StopRequest
from sd_scripts.schema.training import TrainingOptions

from .checkpoint import Checkpointer, NoRoomLeft, State, mismatch, room_for
from .conditioned import Conditioned
from .ema import MovingAverage
from .epochs import EpochLog
from .meter import PAUSES, Meter, Phases, Sections, StepLog, largest, marks_of, peak_gib
from .nonfinite import Shown, write_report
from .optim import restore
from .profiling import StepProfiler
from .stepping import Stepping
from .timetable import Timetable

logger = logging.getLogger("sd_scripts")
SMALLEST_SCALE = 1.0
"""fp16: a loss scale that fell below this will not recover; the gradients themselves are broken."""


class Data(Protocol):
    """Batches by number. trained_encoders: text encoders whose part the conditions lack, because it changes with every step."""

    trained_encoders: Sequence[str]

    def micro_batch(self, step: int, micro: int, rank: int) -> Batch: ...

    def validation_batches(self) -> Sequence[Callable[[], Batch]]: ...

    def empty_text(self) -> dict[str, Tensor]: ...


class Samples(Protocol):
    """Previews."""

    def render(self, step: int, missing_only: bool = False) -> None: ...

    def try_out(self) -> str:
        """Renders what takes most memory, as short as possible, into nowhere; says what it was. Raises what rendering raises."""
        ...


class Due(NamedTuple):
    """What happens between two steps."""

    exports: bool
    state: bool
    samples: bool
    validates: bool

    def pauses(self) -> tuple[str, ...]:
        """The phases it takes, of meter.PAUSES."""
        due = {"save": self.exports or self.state, "sample": self.samples, "validate": self.validates}
        return tuple(name for name in PAUSES if due[name])


Given, Result = ParamSpec("Given"), TypeVar("Result")


def _may_compile(work: Callable[Concatenate[Trainer, Given], Result]) -> Callable[Concatenate[Trainer, Given], Result]:
    """Work of which nothing remains but gradients until the weights are moved: done once more, with plain code, where compiling fails and
    the options say so."""

    @wraps(work)
    def done(trainer: Trainer, *given: Given.args, **named: Given.kwargs) -> Result:
        try:
            return work(trainer, *given, **named)
        except Exception as err:
            reason = "" if trainer.compilation is None or trainer._moving else trainer.compilation.gives_up(err)
            if not reason:
                raise
        trainer.warn(reason)
        trainer.optimizer.zero_grad(set_to_none=True)
        return work(trainer, *given, **named)

    return done


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
        peers: Peers | None = None,
        leading_parts: Sequence[str] = (),
        compilation: Compilation | None = None,
        stepping: Stepping | None = None,
    ) -> None:
        """leading_parts: parts of the loss that come first in the table of epochs. compilation: the code of the backbone, if it is made.
        stepping: what moves the weights one at a time; None has the optimizer move all at once.
        """
        self.options, self.timetable, self.family, self.parts = options, timetable, family, parts
        self.network, self.objective, self.data, self.optimizer = network, objective, data, optimizer
        self.checkpointer, self.export, self.samples = checkpointer, export, samples
        self.run, self.accelerator = run, accelerator
        self.stop, self.phases = stop, phases
        self.peers = Peers() if peers is None else peers
        self.compilation = compilation
        self.step = 0
        """Optimizer steps done; the only state of the loop itself."""
        self.weights = {name: weight for name, weight in network.named_parameters().items() if weight.requires_grad}
        self.stepping = stepping
        if stepping is not None:
            stepping.watch(self.weights)
        self._peak_rates = [group["lr"] for group in optimizer.param_groups]
        self._main = accelerator.is_main_process
        self._sharded = is_sharded(parts.backbone)
        self._takes_part = self._main or self._sharded
        """Whether this process computes previews and held-out losses: alone, or because the others need its share of the network."""
        self._moving = False
        device = accelerator.device
        precision = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(options.mixed_precision)
        self._autocast = lambda: torch.autocast(device.type, dtype=precision) if precision is not None else nullcontext()
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision is torch.float16)
        self._whole = [weight for weight in self.weights.values() if own(weight) is weight]
        """Trained weights that every process has: their gradients are summed here, those of shared weights in the backward pass."""
        broadcast(self._whole, accelerator)
        self.average = MovingAverage(self.weights, options.ema_decay) if options.use_ema else None
        self.meter = Meter(timetable.global_batch, device)
        self.epochs = EpochLog(run.epochs, leading_parts)
        self.profiler = StepProfiler(run, options.profile if self._main else 0, device)
        self.best: tuple[float, int] | None = None
        """Lowest held-out loss whose file is kept, and its step; see save_best."""
        self.ladder: Ladder | None = None
        """What to do when a step has no memory, apart from ending the run."""
        self.pieces = 1
        """In how many parts each micro-batch goes through the network."""

    def state_dict(self) -> State:
        """Everything that a later process needs to go on from here, whole in the first process, on any number of processes.

        When the network is shared out all processes must call it together.
        """
        state = {
            "weights": {name: weight.detach().float() for name, weight in self.weights.items()},
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "loop": {
                "step": self.step,
                "scaler": self.scaler.state_dict(),
                "best": self.best,
                "epochs": self.epochs.state_dict(),
            },
        }
        return {name: gathered(group, keep=self._main) for name, group in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Goes back to a saved state. Raises ValueError when it belongs to other weights, with a table of them, or another optimizer."""
        if found := mismatch(state["weights"], self.weights):
            raise ValueError(f"it holds other weights than this run trains: {found}")
        for name, weight in self.weights.items():
            own(weight).copy_(own(shared_out(state["weights"][name], weight)))
        restore(self.optimizer, shared_out_optimizer_state(self.optimizer, state["optimizer"]))
        if self.average is not None:
            self.average.load_state_dict(state["average"] or state["weights"])
        if self.scaler.is_enabled() and state["loop"]["scaler"]:
            self.scaler.load_state_dict(state["loop"]["scaler"])
        self.step = state["loop"]["step"]
        # A state of an earlier version says nothing of these, and a new run folder has no file of the best.
        self.epochs.load_state_dict(state["loop"].get("epochs"), self.step)
        best = state["loop"].get("best")
        self.best = best if best is not None and self.checkpointer.best_path.exists() else None

    def fit(self) -> bool:
        """Trains to the last step and saves; True at the end, False after a request to stop.

        On an error the state of the last good step is saved before the error goes on: NonFiniteLoss, torch.OutOfMemoryError, any other.
        """
        total = self.timetable.total_steps
        self.network.train()
        with self.stop.finishing_steps(), Bar(total=total, initial=self.step, desc="train", unit="step", disable=not self._main) as bar:
            try:
                self.meter.begin(total, self._planned(), self.phases.seconds())
                self._write_epochs()
                self._after_step(again=True)
                self.meter.compile_seconds += self._tell_compiled()
                first, stopped = self.step, False
                self.phases.enter("warmup")
                self.meter.paused(self.phases.seconds())
                while self.step < total and not stopped:
                    self.profiler.before_step()
                    # A shared network exchanges weights and gradients all the time, a whole one when the gradients are summed.
                    with self._together():
                        log = self._step_that_fits(self.step)
                    self.step += 1
                    log = log.without_compiling(self._tell_compiled())
                    self.profiler.after_step(self.step)
                    if self.step == first + 1:
                        self.phases.enter("train")
                    self._report(log, self.step == first + 1, bar)
                    stopped = log.stop and self.step < total
                    self._after_step(stopping=stopped, asked=log.asked)
                    self.meter.paused(self.phases.seconds())
                self.profiler.finish(self.step)
            except BaseException as err:
                with suppress(OSError):
                    self.profiler.finish(self.step)
                # What a lost folder had is lost with it: nothing can be rescued into it.
                if not isinstance(err, RunFolderLost):
                    self._rescue(err)
                    self._sum_up()
                raise
            finally:
                if self.compilation is not None:
                    self.compilation.close()
            self._sum_up()
        return self.step >= total

    def _tell_compiled(self) -> float:
        """Says what was compiled since the last step, and what that means; seconds that it took."""
        if self.compilation is None:
            return 0.0
        made = self.compilation.take()
        if made.graphs and self._main:
            self.run.log("compiled", step=self.step, graphs=made.graphs, seconds=round(made.seconds, 3), total=self.compilation.graphs)
        for text in self.compilation.warnings(made):
            self.warn(text)
        return made.seconds

    def warn(self, text: str) -> None:
        """A sentence for the log, of the first process."""
        if self._main:
            logger.warning("%s", text)
            self.run.log("warning", text=text)

    def _step_that_fits(self, step: int) -> StepLog:
        """train_step, done again with one more lever of the ladder each time that memory runs out before the weights are moved."""
        while True:
            try:
                return self.train_step(step)
            except (RuntimeError, MemoryError) as err:
                if self.ladder is None or self._moving or not is_out_of_memory(err):
                    raise
                # Its frames keep the graph.
                failed = err.with_traceback(None)
            self.optimizer.zero_grad(set_to_none=True)
            if not self.ladder.pull(f"step {step + 1}"):
                raise failed

    @_may_compile
    def try_out(self, batch: Batch) -> None:
        """A forward and a backward pass that leave no trace: gradients are thrown away, nothing is summed over processes, and whatever is
        drawn later is drawn as if nothing had been."""
        self.network.train()
        batch = self._to_device(batch)
        held = nullcontext() if self.stepping is None else self.stepping.dropping()
        try:
            with torch.random.fork_rng(), held, self._together():
                for piece in pieces_of(batch, self.pieces):
                    with self._autocast():
                        losses = self.objective(self._denoiser(piece), piece, self.options.seed)
                    (losses.loss.sum() / self.timetable.global_batch).backward()
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def try_out_samples(self) -> str:
        """Renders the largest previews of the run as short as possible, into nowhere; says what they were, nothing without previews."""
        if self.samples is None or not self._takes_part:
            return ""
        with self._averaged(), self._together(), plain_code(self.parts.backbone):
            return self.samples.try_out()

    @_may_compile
    def train_step(self, step: int) -> StepLog:
        """One optimizer step over the global batch of `step`. Raises NonFiniteLoss before the weights are touched."""
        sections, shown = Sections(marks_of(self.accelerator.device)), list[Shown]()
        micro_batches = self.options.gradient_accumulation_steps
        sums: dict[str, Tensor] = {}
        for micro in range(micro_batches):
            with sections.of("data_fetch"):
                batch = self._to_device(self.data.micro_batch(step, micro, self.accelerator.process_index))
            with sections.of("fwd_bwd"):
                # Dropout inside modules draws from the global generator: the same step drops the same, resumed or not.
                torch.manual_seed(seed_for(self.options.seed, step * micro_batches + micro, f"dropout/{self.accelerator.process_index}"))
                pieces = pieces_of(batch, self.pieces)
                for number, piece in enumerate(pieces):
                    with self._autocast():
                        denoiser = self._denoiser(piece)
                        losses = self.objective(denoiser, piece, self.options.seed)
                    shown.append(Shown.of(piece, losses.loss, denoiser.seen))
                    share = losses.loss.sum() / self.timetable.global_batch
                    if self._fused:
                        self._begin_moving(step, share, micro == micro_batches - 1 and number == len(pieces) - 1, shown)
                    self.scaler.scale(share).backward()
                    for name, value in {"loss": losses.loss, **losses.parts}.items():
                        sums[name] = sums.get(name, 0) + value.detach().sum().float() / self.timetable.global_batch
        with sections.of("fwd_bwd"):
            for name, asked in (("stop", self.stop.requested()), ("asked", self._asked_for_samples())):
                sums[name] = torch.tensor(float(asked), device=self.accelerator.device)
            gradients = [] if self._fused else self._gradients()
            with self.peers.exchanging():
                add_up([] if self._fused else [weight.grad for weight in self._whole], sums, self.accelerator)
                if self.scaler.is_enabled():
                    self.scaler.unscale_(self.optimizer)
                norm = total_norm(gradients) if self.stepping is None else self.stepping.finish()
                # The one place where the loop waits for the device.
                *values, grad_norm = torch.stack([*sums.values(), norm.to(self.accelerator.device)]).tolist()
        found = dict(zip(sums, values))
        stop, asked, loss = found.pop("stop") > 0, found.pop("asked") > 0, found.pop("loss")
        with sections.of("opt_step"):
            overflowed = self._optimizer_step(step, loss, grad_norm, gradients, shown)
        return StepLog(loss, grad_norm, found, sections.all(), overflowed, stop, asked, sections.marks)

    def _optimizer_step(self, step: int, loss: float, grad_norm: float, gradients: list[Tensor], shown: Sequence[Shown]) -> bool:
        """Moves the weights; in fp16 a step whose scaled gradients overflowed is left out, which is what the return value says."""
        finite_loss, finite_norm = loss - loss == 0, grad_norm - grad_norm == 0
        overflowed = self.scaler.is_enabled() and finite_loss and not finite_norm
        if not finite_loss or (not finite_norm and (not overflowed or self.scaler.get_scale() < SMALLEST_SCALE)):
            self.optimizer.zero_grad(set_to_none=True)
            raise self._not_finite(step, loss, grad_norm, shown)
        limit = self.timetable.max_grad_norm
        if limit and grad_norm > limit and not overflowed:
            torch._foreach_mul_([own(gradient) for gradient in gradients], limit / (grad_norm + 1e-6))
        self._set_rates(step)
        self._moving = True
        if self.stepping is None:
            self.scaler.step(self.optimizer)
        elif not self._fused:
            self.stepping.move_all(step)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if not overflowed:
            self.network.after_step()
            if self.average is not None:
                self.average.update(step)
        self._moving = False
        return overflowed

    def _set_rates(self, step: int) -> None:
        """Gives each group of the optimizer its learning rate."""
        for group, peak in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = peak * self.timetable.learning_rate_at(step)

    @property
    def _fused(self) -> bool:
        """Whether the weights are moved within the backward pass."""
        return self.stepping is not None and self.stepping.fused

    def _gradients(self) -> list[Tensor]:
        """The gradient of each weight."""
        for weight in self.weights.values():
            # A layer that was dropped, or whose output nobody reads: another process may have used it, and sums need a partner.
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        return [weight.grad for weight in self.weights.values()]

    def _begin_moving(self, step: int, loss: Tensor, last: bool, shown: Sequence[Shown]) -> None:
        """Before a backward pass of a step whose last one moves the weights: its loss must be a number by now.

        Raises NonFiniteLoss while the weights are whole. From the last pass on they are not until the step is over, so an error leaves no
        state.
        """
        if not math.isfinite(value := float(loss.detach())):
            self.optimizer.zero_grad(set_to_none=True)
            raise self._not_finite(step, value, math.nan, shown)
        if last:
            assert self.stepping is not None
            self._set_rates(step)
            self._moving = True
            self.stepping.begin(step)

    def _not_finite(self, step: int, loss: float, grad_norm: float, shown: Sequence[Shown]) -> NonFiniteLoss:
        """Writes what is known of a step whose loss or gradient is no number, and makes the error."""
        facts = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": [peak * self.timetable.learning_rate_at(step) for peak in self._peak_rates],
            "scale": self.scaler.get_scale() if self.scaler.is_enabled() else None,
            "mixed_precision": self.options.mixed_precision,
        }
        folder = write_report(self.run.path / f"nonfinite-{step:06d}", shown, self.accelerator.process_index, facts)
        return NonFiniteLoss(step, self.timetable.names_of(step), "gradient" if loss - loss == 0 else "loss", folder)

    def _denoiser(self, batch: Batch) -> Conditioned:
        if self.compilation is not None:
            self.compilation.begin_batch()
        conditions = batch.conditions
        if self.data.trained_encoders:
            conditions = [{**condition, **text} for condition, text in zip(conditions, self._live_texts(batch.captions), strict=True)]
        return Conditioned(self.family, self.parts, self.network, conditions, self._empty_text)

    def _live_texts(self, captions: Sequence[str]) -> list[dict[str, Tensor]]:
        """What the trained text encoders make of captions."""
        encoders = self.data.trained_encoders if self.family.separate_texts else None
        return self.family.encode_prompts(self.parts, captions, encoders)

    def _empty_text(self) -> dict[str, Tensor]:
        """The text part of the empty caption's condition, on the device."""
        kept = {name: tensor.to(self.accelerator.device) for name, tensor in self.data.empty_text().items()}
        return {**kept, **self._live_texts([""])[0]} if self.data.trained_encoders else kept

    def _to_device(self, batch: Batch) -> Batch:
        device = self.accelerator.device

        def moved(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        def all_moved(conditions: list[Condition]) -> list[Condition]:
            return [{name: moved(tensor) for name, tensor in condition.items()} for condition in conditions]

        return replace(
            batch,
            x0=moved(batch.x0),
            weights=moved(batch.weights),
            masks=moved(batch.masks),
            towards=all_moved(batch.towards),
            references=[moved(latents) for latents in batch.references],
            terms={name: moved(tensor) for name, tensor in batch.terms.items()},
            conditions=all_moved(batch.conditions),
        )

    def _report(self, log: StepLog, warming_up: bool, bar: Bar) -> None:
        bar.update()
        self.meter.add(log, warming_up)
        self._count_epoch(log)
        if log.overflowed and self._main:
            self.run.log("warning", text=f"step {self.step}: a gradient overflowed in fp16; the step was left out, the loss scale halved")
        last = log.stop or self.step == self.timetable.total_steps
        if self.step % self.options.log_every_n_steps and not last:
            return
        # Of the process that took most: together they need a machine on which each has that much.
        with self.peers.exchanging():
            peak = largest(peak_gib(self.accelerator.device), self.accelerator)
        if not self._main:
            return
        scaled = {"scale": self.scaler.get_scale(), "overflowed": self.meter.overflowed} if self.scaler.is_enabled() else {}
        averaged = {} if self.average is None else {"ema_decay": self.average.decay_at(self.step - 1)}
        point = self.meter.point(self.step, peak) | scaled | averaged
        point["lr"] = self._learning_rate()
        self.run.log("step", step=self.step, epoch=self.timetable.epochs_done(self.step - 1), **point)
        self.accelerator.log(point, step=self.step)
        bar.set_postfix(loss=f"{point['loss']:.4f}", refresh=False)

    def _learning_rate(self) -> float:
        """The largest of the groups' rates: LoRA+ and text encoders have their own."""
        return float(max(group["lr"] * group.get("d", 1.0) for group in self.optimizer.param_groups))

    def _count_epoch(self, log: StepLog) -> None:
        """Adds a step to its epoch, and writes down an epoch that is over; the run may end within one."""
        self.epochs.add(log)
        table, before = self.timetable, self.timetable.epochs_done(self.step - 1)
        ends = table.epochs_done(self.step) > before
        if not ends and self.step < table.total_steps:
            return
        rate = self._learning_rate()
        row = self.epochs.end(before + 1, rate) if ends else self.epochs.so_far(before + 1, rate)
        if row is None or not self._main:
            return
        with room_for(self.run.epochs.name, self.run.path):
            if ends:
                self.epochs.append()
            else:
                self.epochs.write(row)
        self.run.log("epoch", step=self.step, **row)

    def _write_epochs(self) -> None:
        """Brings the table of epochs to what is known at the beginning of a session."""
        if self._main:
            ended = self.step >= self.timetable.total_steps
            row = self.epochs.so_far(self.timetable.epochs_done(self.step - 1) + 1, self._learning_rate()) if ended else None
            with room_for(self.run.epochs.name, self.run.path):
                self.epochs.write(row)

    def _planned(self) -> dict[str, list[int]]:
        """The steps after which each kind of pause is still to come."""
        planned: dict[str, list[int]] = {name: [] for name in PAUSES}
        for step in range(self.step + 1, self.timetable.total_steps + 1) if self._main else ():
            for name in self._due(step).pauses():
                planned[name].append(step)
        return planned

    def _sum_up(self) -> None:
        """Says how long this session has trained and paused, and all sessions of the run together."""
        if self._main and self.meter.steps:
            self.meter.paused(self.phases.seconds())
            # A disk that is full now must not hide why.
            with suppress(OSError):
                self.run.log("session", step=self.step, **self.meter.summary(self.run.events()[0]))

    def _due(self, step: int) -> Due:
        """What the options want done after `step` steps."""
        table = self.timetable
        ended, started = step >= table.total_steps, step == 0
        exports = (ended or self.checkpointer.export_due(step)) and not started
        return Due(
            exports=exports,
            state=self.checkpointer.state_due(step) or (ended and table.state_on_train_end),
            samples=self.samples is not None and (table.sample_due(step) or (exports and table.samples_with_saves)),
            validates=table.validation_due(step) or (exports and table.validates_with_saves),
        )

    def _asked_for_samples(self) -> bool:
        """Whether somebody wants to see now what the network can do; the first process looks, and tells the others in a step's sums."""
        return self._main and self.samples is not None and self.run.evaluation_requested()

    def _after_step(self, again: bool = False, stopping: bool = False, asked: bool = False) -> None:
        """Validates, saves and samples what is due after `self.step` steps; again: only what a killed process did not come to.

        asked: samples are wanted, due or not.
        """
        step = self.step
        ended = step >= self.timetable.total_steps
        exports, state, samples, validates = self._due(step)
        samples = samples or asked
        state = not again and (stopping or state)
        validates = not again and validates
        if again and exports:
            exports = self.peers.same_text("" if self.checkpointer.export_path(step).exists() else "missing") == "missing"
        if not (exports or validates or samples or state):
            return
        if validates:
            with self._averaged():
                self._validate()
        # After validation, so that a state knows which file is the best.
        if state:
            self._save_state()
        with self._averaged() if exports or samples else nullcontext():
            if exports and self._takes_part:
                self._export(self.checkpointer.export_path(step))
                if self._main:
                    self.checkpointer.exported(step, self.checkpointer.export_path(step))
            if samples and self._takes_part and self.samples is not None:
                self.phases.enter("sample")
                if self._main:
                    self.run.clear_evaluation()
                with self._together(), plain_code(self.parts.backbone):
                    self.samples.render(step, missing_only=again)
        # Those who had nothing to do wait here, however long it takes, and not in the next sum of gradients, which has a limit.
        self.peers.barrier()
        if not (again or ended or stopping):
            self.phases.enter("train")

    def _save_state(self) -> None:
        """The first process writes the state; when the network is shared out the others give their part."""
        if self._takes_part:
            self.phases.enter("save")
            with self._together():
                state = self.state_dict()
            if self._main:
                self.checkpointer.save_state(self.step, state)
            self.checkpointer.saved_step = self.step
            self.peers.progress()

    def _export(self, path: Path) -> None:
        """Writes the file of the weights as they are shown now."""
        self.phases.enter("save")
        with self._together():
            self.export(path, self.step)
        self.peers.progress()

    def _averaged(self) -> AbstractContextManager[None]:
        """Within the block the networks carry the moving average, where there is one."""
        return nullcontext() if self.average is None else self.average.shown()

    def _together(self) -> AbstractContextManager[None]:
        """Around what all processes do together when the network is shared out, and the first one alone otherwise."""
        return self.peers.exchanging() if self._sharded else nullcontext()

    @torch.no_grad()
    def _validate(self) -> None:
        """Mean loss of the held-out pictures, each with the same time and noise every time: its number is that of the picture."""
        self.phases.enter("validate")
        seed, total, count = seed_for(self.options.seed, 0, "validation"), 0.0, 0
        self.network.train(False)
        try:
            batches = self.data.validation_batches()
            for make in Bar(batches, desc="validate", unit="batch", leave=False, disable=not self._main) if self._takes_part else ():
                batch = self._to_device(make())
                with self._together(), self._autocast(), plain_code(self.parts.backbone):
                    loss = self.objective(self._denoiser(batch), batch, seed).loss
                self.peers.progress()
                total, count = total + float(loss.sum()), count + len(batch.names)
        finally:
            self.network.train()
        if count and self._main:
            self.run.log("validation", step=self.step, loss=total / count)
            self.accelerator.log({"validation_loss": total / count}, step=self.step)
        if count and self.checkpointer.keeps_best:
            self._keep_best(total / count)

    def _keep_best(self, loss: float) -> None:
        """Writes the file of the lowest held-out loss so far, in the processes that measured it."""
        better = math.isfinite(loss) and (self.best is None or loss < self.best[0])
        if self._sharded:
            better = self.peers.same_text("better" if better else "") == "better"
        if better:
            path = self.checkpointer.best_path
            self._export(path)
            self.best = (loss, self.step)
            if self._main:
                self.run.log("saved", step=self.step, what="best", file=path.name, loss=loss)

    def _rescue(self, err: BaseException) -> None:
        """After an error: saves the last good step's state, unless the weights were being moved or nothing new was done."""
        # What an error leaves behind keeps memory that saving may need.
        self.optimizer.zero_grad(set_to_none=True)
        if is_out_of_memory(err) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        new = self.step > (self.checkpointer.saved_step or 0)
        # A state of shared weights needs all processes, and only numbers that are no numbers reach all of them in the same step.
        possible = isinstance(err, NonFiniteLoss) if self._sharded else self._main
        if new and possible and not self._moving and not isinstance(err, NoRoomLeft):
            self._save_state()
