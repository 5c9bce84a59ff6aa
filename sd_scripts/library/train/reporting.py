"""What a session says of its steps: a point in the event log and the trackers every few steps, and in the end how long it took."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from sd_scripts.dataset.progress import Bar
from sd_scripts.runs.events import StepDone, Warned

from .learner import Learner
from .meter import Meter, StepLog, largest, peak_gib


class SessionLog:
    """The log of one session."""

    def __init__(self, learner: Learner) -> None:
        self._learner, self._process, self._table = learner, learner.process, learner.timetable
        self.meter = Meter(self._table.global_batch, self._process.device)

    def begin(self, total_steps: int, planned: Mapping[str, list[int]]) -> None:
        """planned: the steps after which each kind of pause is still to come."""
        self.meter.begin(total_steps, planned, self._process.phases.seconds())

    def paused(self) -> None:
        """What was due between two steps is done."""
        self.meter.paused(self._process.phases.seconds())

    def add(self, step: int, log: StepLog, bar: Bar, *, warming_up: bool, last: bool) -> None:
        """The step that makes `step` is done; last: the session ends with it."""
        process, learner = self._process, self._learner
        bar.update()
        self.meter.add(log, warming_up)
        if log.overflowed and process.is_main:
            process.log(Warned(text=f"step {step}: a gradient overflowed in fp16; the step was left out, the loss scale halved"))
        if step % learner.options.log_every_n_steps and not last:
            return
        # Of the process that took most: together they need a machine on which each has that much.
        with process.peers.exchanging():
            peak = largest(peak_gib(process.device), process.accelerator)
        if not process.is_main:
            return
        scaled = {"scale": learner.scaler.get_scale(), "overflowed": self.meter.overflowed} if learner.scaler.is_enabled() else {}
        averaged = {} if learner.average is None else {"ema_decay": learner.average.decay_at(step - 1)}
        point = self.meter.point(step, peak) | scaled | averaged
        point["lr"] = learner.learning_rate()
        process.log(StepDone(step=step, epoch=self._table.epochs_done(step - 1), **point))
        process.accelerator.log(point | point.pop("parts"), step=step)
        bar.set_postfix(loss=f"{point['loss']:.4f}", refresh=False)

    def sum_up(self, step: int) -> None:
        """Says how long this session has trained and paused, and all sessions of the run together."""
        run = self._process.run
        if self._process.is_main and run is not None and self.meter.steps:
            self.paused()
            # A disk that is full now must not hide why.
            with suppress(OSError):
                run.log(self.meter.summary(step, run.history()))
