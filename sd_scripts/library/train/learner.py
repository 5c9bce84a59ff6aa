"""One optimizer step: batches forward and backward, gradients of all processes, the weights moved. Knows no schedule of saves and previews.

A step is a pure function of the weights and the step's number: images, times and noise follow from sample numbers, the learning rate from
the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from sd_scripts.library.core.errors import NonFiniteLoss
from sd_scripts.library.core.protocols import Batch, Objective
from sd_scripts.library.core.rng import seed_for
from sd_scripts.library.memory.oom_fallback import pieces_of
from sd_scripts.library.parallel.collectives import all_reduce, broadcast
from sd_scripts.library.parallel.sharding import is_sharded, own, sharded, sharded_optimizer_state, total_norm
from sd_scripts.runs.orders import Asked
from sd_scripts.schema.training import TrainingOptions

from .checkpoint import State, mismatch
from .conditioned import TrainedModel
from .ema import MovingAverage
from .meter import Sections, StepLog, marks_of
from .nonfinite import ShownMicroBatch, times_among, write_report
from .optim import restore, shown
from .process import Process
from .stepping import Stepping
from .timetable import Timetable

SMALLEST_SCALE = 1.0
"""fp16: a loss scale that fell below this will not recover; the gradients themselves are broken."""


class Learner:
    """What a step changes: the trained weights and everything that follows them, and how it is done."""

    def __init__(
        self,
        model: TrainedModel,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        options: TrainingOptions,
        timetable: Timetable,
        process: Process,
        stepping: Stepping | None = None,
    ) -> None:
        """stepping: what moves the weights one at a time; None has the optimizer move all at once."""
        self.model, self.objective, self.optimizer = model, objective, optimizer
        self.options, self.timetable, self.process, self.stepping = options, timetable, process, stepping
        self.weights = {name: weight for name, weight in model.network.named_parameters().items() if weight.requires_grad}
        if stepping is not None:
            stepping.watch(self.weights)
        self.sharded = is_sharded(model.parts.backbone)
        self.moving = False
        """Whether the weights are between two steps, so that nothing of them may be saved."""
        self.pieces = 1
        """In how many parts each micro-batch goes through the network."""
        self.wanted: Callable[[int], Asked] = lambda step: Asked.NOTHING
        """What somebody wants after a step, as this process knows; all are told with the sums of the step."""
        precision = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(options.mixed_precision)
        self._precision = precision
        self.scaler = torch.amp.GradScaler(process.device.type, enabled=precision is torch.float16)
        self._peak_rates = [group["lr"] for group in optimizer.param_groups]
        self._whole = [weight for weight in self.weights.values() if own(weight) is weight]
        """Trained weights that every process has: their gradients are summed here, those of shared weights in the backward pass."""
        broadcast(self._whole, process.accelerator)
        self.average = MovingAverage(self.weights, options.ema_decay) if options.use_ema else None

    def step(self, step: int) -> StepLog:
        """One optimizer step over the global batch of `step`. Raises NonFiniteLoss before the weights are touched."""
        process, rank = self.process, self.process.accelerator.process_index
        sections, shown = Sections(marks_of(process.device)), list[ShownMicroBatch]()
        micro_batches = self.options.gradient_accumulation_steps
        sums: dict[str, Tensor] = {}
        for micro in range(micro_batches):
            with sections.of("data_fetch"):
                batch = self.model.data.micro_batch(step, micro, rank).to(process.device)
            with sections.of("fwd_bwd"):
                # Dropout inside modules draws from the global generator: the same step drops the same, resumed or not.
                torch.manual_seed(seed_for(self.options.seed, step * micro_batches + micro, f"dropout/{rank}"))
                pieces = pieces_of(batch, self.pieces)
                for number, piece in enumerate(pieces):
                    with self._autocast():
                        denoiser = self.model.denoiser(piece)
                        losses = self.objective(denoiser, piece, self.options.seed)
                    shown.append(ShownMicroBatch.of(piece, losses.loss, denoiser.seen))
                    share = losses.loss.sum() / self.timetable.global_batch
                    if self._fused:
                        self._begin_moving(step, share, micro == micro_batches - 1 and number == len(pieces) - 1, shown)
                    self.scaler.scale(share).backward()
                    for name, value in {"loss": losses.loss, **losses.parts}.items():
                        sums[name] = sums.get(name, 0) + value.detach().sum().float() / self.timetable.global_batch
        with sections.of("fwd_bwd"):
            for name, asked in (("stop", process.stop.requested()), ("asked", self.wanted(step))):
                sums[name] = torch.tensor(float(asked), device=process.device)
            gradients = [] if self._fused else self._gradients()
            with process.peers.exchanging():
                all_reduce([] if self._fused else [weight.grad for weight in self._whole], sums, process.accelerator)
                if self.scaler.is_enabled():
                    self.scaler.unscale_(self.optimizer)
                norm = total_norm(gradients) if self.stepping is None else self.stepping.finish()
                # The one place where the loop waits for the device.
                *values, grad_norm = torch.stack([*sums.values(), norm.to(process.device)]).tolist()
        found = dict(zip(sums, values))
        stop, asked, loss = found.pop("stop") > 0, Asked(round(found.pop("asked"))), found.pop("loss")
        with sections.of("opt_step"):
            overflowed = self._move(step, loss, grad_norm, gradients, shown)
        return StepLog(loss, grad_norm, found, sections.all(), overflowed, stop, asked, sections.marks)

    def _move(self, step: int, loss: float, grad_norm: float, gradients: list[Tensor], shown: Sequence[ShownMicroBatch]) -> bool:
        """Moves the weights; in fp16 a step whose scaled gradients overflowed is left out, which is what the return value says."""
        finite_loss, finite_norm = loss - loss == 0, grad_norm - grad_norm == 0
        overflowed = self.scaler.is_enabled() and finite_loss and not finite_norm
        if not finite_loss or (not finite_norm and (not overflowed or self.scaler.get_scale() < SMALLEST_SCALE)):
            raise self._not_finite(step, loss, grad_norm, shown)
        limit = self.timetable.max_grad_norm
        if limit and grad_norm > limit and not overflowed:
            torch._foreach_mul_([own(gradient) for gradient in gradients], limit / (grad_norm + 1e-6))
        self._set_rates(step)
        self.moving = True
        if self.stepping is None:
            self.scaler.step(self.optimizer)
        elif not self._fused:
            self.stepping.move_all(step)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if not overflowed:
            self.model.network.after_step()
            if self.average is not None:
                self.average.update(step)
        self.moving = False
        return overflowed

    def _set_rates(self, step: int) -> None:
        """Gives each group of the optimizer its learning rate."""
        for group, peak in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = peak * self.timetable.learning_rate_at(step)

    def learning_rate(self) -> float:
        """The largest of the groups' rates: LoRA+ and text encoders have their own."""
        return float(max(group["lr"] * group.get("d", 1.0) for group in self.optimizer.param_groups))

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

    def _begin_moving(self, step: int, loss: Tensor, last: bool, shown: Sequence[ShownMicroBatch]) -> None:
        """Before a backward pass of a step whose last one moves the weights: its loss must be a number by now.

        Raises NonFiniteLoss while the weights are whole. From the last pass on they are not until the step is over, so an error leaves no
        state.
        """
        if not math.isfinite(value := float(loss.detach())):
            raise self._not_finite(step, value, math.nan, shown)
        if last:
            assert self.stepping is not None
            self._set_rates(step)
            self.moving = True
            self.stepping.begin(step)

    def _not_finite(self, step: int, loss: float, grad_norm: float, shown: Sequence[ShownMicroBatch]) -> NonFiniteLoss:
        """Writes what is known of a step whose loss or gradient is no number, and makes the error."""
        facts = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": [peak * self.timetable.learning_rate_at(step) for peak in self._peak_rates],
            "scale": self.scaler.get_scale() if self.scaler.is_enabled() else None,
            "mixed_precision": self.options.mixed_precision,
        }
        assert self.process.run is not None
        folder = write_report(self.process.run.path / f"nonfinite-{step:06d}", shown, self.process.accelerator.process_index, facts)
        return NonFiniteLoss(step, self.timetable.names_of(step), "gradient" if loss - loss == 0 else "loss", folder)

    # Without a step.

    def try_out(self, batch: Batch) -> None:
        """A forward and a backward pass that leave no trace: gradients are thrown away, nothing is summed over processes, and whatever is
        drawn later is drawn as if nothing had been."""
        self.model.network.train()
        batch = batch.to(self.process.device)
        held = nullcontext() if self.stepping is None else self.stepping.dropping()
        try:
            with torch.random.fork_rng(), held, self.together():
                for piece in pieces_of(batch, self.pieces):
                    (self.losses(piece, self.options.seed)[0].sum() / self.timetable.global_batch).backward()
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def _autocast(self) -> AbstractContextManager[None]:
        precision: AbstractContextManager[None] = torch.autocast(self.process.device.type, dtype=self._precision)
        return nullcontext() if self._precision is None else precision

    def losses(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor | None]:
        """The loss of each sample (B,) of a batch on the device, and the times (B,) in [0, 1] where they are known."""
        denoiser = self.model.denoiser(batch)
        with self._autocast():
            loss = self.objective(denoiser, batch, seed).loss
        return loss, times_among(denoiser.seen, len(batch.numbers))

    def together(self) -> AbstractContextManager[None]:
        """Around what all processes do together when the network is sharded, and the first one alone otherwise."""
        return self.process.peers.exchanging() if self.sharded else nullcontext()

    def averaged(self) -> AbstractContextManager[None]:
        """Within the block the networks carry the moving average, or that of the optimizer, where there is one."""
        return shown(self.optimizer) if self.average is None else self.average.shown()

    def state_dict(self) -> State:
        """Weights, optimizer and moving average, each process its share of what is sharded."""
        return {
            "weights": {name: weight.detach().float() for name, weight in self.weights.items()},
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Goes back to a saved state. Raises ValueError when it belongs to other weights, with a table of them, or another optimizer."""
        if found := mismatch(state["weights"], self.weights):
            raise ValueError(f"it holds other weights than this run trains: {found}")
        for name, weight in self.weights.items():
            own(weight).copy_(own(sharded(state["weights"][name], weight)))
        restore(self.optimizer, sharded_optimizer_state(self.optimizer, state["optimizer"]))
        if self.average is not None:
            self.average.load_state_dict(state["average"] or state["weights"])
        if self.scaler.is_enabled() and state["loop"]["scaler"]:
            self.scaler.load_state_dict(state["loop"]["scaler"])
