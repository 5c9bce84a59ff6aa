"""The training loop, one for all families, objectives and networks; nothing in it is meant to be overridden.

What a step is stands in learner.py, what it does where memory or a compiler fails in fallbacks.py. The loop has nothing to remember but the
number of steps, on any number of processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.core.errors import NonFiniteLoss
from sd_scripts.library.core.protocols import PromptSamples, Samples
from sd_scripts.library.core.rng import seed_for
from sd_scripts.library.memory.compiling import plain_code
from sd_scripts.library.memory.oom_advice import is_out_of_memory
from sd_scripts.library.parallel.sharding import gathered
from sd_scripts.runs.events import MOST_SAMPLES, FileSaved, Validated, Warned
from sd_scripts.runs.orders import Asked
from sd_scripts.runs.rundir import RunFolderLost

from .checkpoint import Checkpointer, NoRoomLeft, State
from .fallbacks import Steps
from .meter import PAUSES
from .observing import Observer
from .reporting import SessionLog

PAUSE_SECONDS = 0.2
"""Between two looks whether a pause is over."""


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


class Trainer:
    """Trains until the last step, a request to stop, or an error; see fit."""

    def fit(self) -> bool:
        """Trains to the last step and saves; True at the end, False after a request to stop.

        On an error the state of the last good step is saved before the error goes on: NonFiniteLoss, torch.OutOfMemoryError, any other.
        """
        total, report, phases = self.timetable.total_steps, self.report, self.process.phases
        self.learner.model.network.train()
        progress = Bar(total=total, initial=self.step, desc="train", unit="step", disable=not self._main)
        with self.process.stop.finishing_steps(), progress as bar:
            try:
                report.begin(total, self._planned())
                for observer in self.observers:
                    observer.begin(self.step)
                if self._main:
                    # Of a session before.
                    self.run.orders.take_back(Asked.PAUSE)
                self._between_steps(again=True)
                report.meter.compile_seconds += self.steps.tell_compiled(self.step)
                first, stopped = self.step, False
                phases.enter("warmup")
                report.paused()
                while self.step < total and not stopped:
                    for observer in self.observers:
                        observer.before_step(self.step)
                    # A sharded network exchanges weights and gradients all the time, a whole one when the gradients are summed.
                    with self.learner.together():
                        log = self.steps.step(self.step)
                    self.step += 1
                    if self.step == first + 1:
                        phases.enter("train")
                    for observer in self.observers:
                        observer.after_step(self.step, log)
                    report.add(
                        self.step,
                        log,
                        bar,
                        warming_up=self.step == first + 1,
                        last=log.stop or Asked.STOP in log.asked or self.step == total,
                    )
                    stopped = (log.stop or Asked.STOP in log.asked) and self.step < total
                    self._between_steps(stopping=stopped, asked=log.asked)
                    if Asked.PAUSE in log.asked and not stopped and self.step < total:
                        self._pause()
                    stopped = stopped or bool(self.ended_early)
                    report.paused()
                self._end_observers()
            except BaseException as err:
                with suppress(OSError):
                    self._end_observers()
                # What a lost folder had is lost with it: nothing can be rescued into it.
                if not isinstance(err, RunFolderLost):
                    self._rescue(err)
                    report.sum_up(self.step)
                raise
            finally:
                self.steps.close()
            report.sum_up(self.step)
        return self.step >= total

    def __init__(
        self,
        steps: Steps,
        *,
        checkpointer: Checkpointer,
        export: Callable[[Path, int], None],
        samples: Samples | None,
        observers: Sequence[Observer] = (),
    ) -> None:
        """export writes the file or folder of the trained network as it is after so many steps."""
        self.steps, self.learner, self.process = steps, steps.learner, steps.learner.process
        self.timetable = self.learner.timetable
        assert self.process.run is not None
        self.run = self.process.run
        self.checkpointer, self.export, self.samples, self.observers = checkpointer, export, samples, tuple(observers)
        self.report = SessionLog(self.learner)
        self.step = 0
        """Optimizer steps done; the only state of the loop itself."""
        self.best: tuple[float, int] | None = None
        """Lowest held-out loss whose file is kept, and its step; see save_best."""
        self.waited = 0
        """Held-out losses since then that were not lower."""
        self.ended_early = ""
        """Why training ends before its last step, in words; see early_stop_patience."""
        self._main = self.process.is_main
        self._takes_part = self._main or self.learner.sharded
        """Whether this process computes previews and held-out losses: alone, or because the others need its share of the network."""
        self.learner.wanted = self._wanted

    def _end_observers(self) -> None:
        for observer in self.observers:
            observer.end(self.step)

    # What is due between two steps.

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

    def _planned(self) -> dict[str, list[int]]:
        """The steps after which each kind of pause is still to come."""
        planned: dict[str, list[int]] = {name: [] for name in PAUSES}
        for step in range(self.step + 1, self.timetable.total_steps + 1) if self._main else ():
            for name in self._due(step).pauses():
                planned[name].append(step)
        return planned

    def _wanted(self, step: int) -> Asked:
        """What somebody wants after a step; the first process looks, and tells the others in the step's sums."""
        asked = self.run.orders.asked(step + 1) if self._main else Asked.NOTHING
        if self.samples is None:
            asked &= ~Asked.SAMPLES
        return asked if isinstance(self.samples, PromptSamples) else asked & ~Asked.OTHER

    def _pause(self) -> None:
        """Waits until the pause is taken back, or somebody wants the run to end: then it does after one more step."""
        self.process.phases.enter("pause")
        while self._main and Asked.PAUSE in self.run.orders.asked() and not self.process.stop.requested():
            self.process.peers.progress()
            time.sleep(PAUSE_SECONDS)
        self.process.peers.barrier()
        self.process.phases.enter("train")

    def _between_steps(self, again: bool = False, stopping: bool = False, asked: Asked = Asked.NOTHING) -> None:
        """Validates, saves and samples what is due after `self.step` steps; again: only what a killed process did not come to.

        asked: what is wanted, due or not. A pause is one from which the run can go on, so it begins with a state.
        """
        step = self.step
        ended = step >= self.timetable.total_steps
        exports, state, samples, validates = self._due(step)
        samples = samples or Asked.SAMPLES in asked
        exports = exports or Asked.SAVE in asked
        state = not again and (stopping or state or bool(asked & (Asked.SAVE | Asked.PAUSE)))
        other = Asked.OTHER in asked
        prompts = self.run.orders.other_prompts() if other and self._main else ""
        if self._main:
            # Before they are followed: what is asked meanwhile is for the next step.
            self.run.orders.take_back(asked & ~Asked.PAUSE)
        validates = not again and validates
        if again and exports:
            exports = self.process.peers.same_text("" if self.checkpointer.export_path(step).exists() else "missing") == "missing"
        if not (exports or validates or samples or other or state):
            return
        if validates:
            with self.learner.averaged():
                self._validate()
            self.ended_early = "" if ended else self._lost_patience()
        # After validation, so that a state knows which file is the best.
        if state or self.ended_early:
            self._save_state()
        with self.learner.averaged() if exports or samples or other else nullcontext():
            if exports and self._takes_part:
                self._export(self.checkpointer.export_path(step))
                if self._main:
                    self.checkpointer.exported(step, self.checkpointer.export_path(step))
            if (samples or other) and self._takes_part and self.samples is not None:
                self.process.phases.enter("sample")
                if self._main and samples:
                    self.run.clear_evaluation()
                with self.learner.together(), plain_code(self.learner.model.parts.backbone):
                    if samples:
                        self.samples.render(step, missing_only=again)
                    if other and isinstance(self.samples, PromptSamples):
                        self.samples.render_other(step, prompts)
        # Those who had nothing to do wait here, however long it takes, and not in the next sum of gradients, which has a limit.
        self.process.peers.barrier()
        if not (again or ended or stopping or self.ended_early):
            self.process.phases.enter("train")

    def _save_state(self) -> None:
        """The first process writes the state; when the network is sharded the others give their part."""
        if self._takes_part:
            self.process.phases.enter("save")
            with self.learner.together():
                state = self.state_dict()
            if self._main:
                self.checkpointer.save_state(self.step, state)
            self.checkpointer.saved_step = self.step
            self.process.peers.progress()

    def _export(self, path: Path) -> None:
        """Writes the file of the weights as they are shown now."""
        self.process.phases.enter("save")
        with self.learner.together():
            self.export(path, self.step)
        self.process.peers.progress()

    @torch.no_grad()
    def _validate(self) -> None:
        """Mean loss of the held-out images, each with the same time and noise every time: its number is that of the image."""
        process, learner, model = self.process, self.learner, self.learner.model
        process.phases.enter("validate")
        seed, total, count = seed_for(learner.options.seed, 0, "validation"), 0.0, 0
        samples: list[list[float]] = []
        images = set[str]()
        model.network.train(False)
        try:
            batches = model.data.validation_batches()
            for make in Bar(batches, desc="validate", unit="batch", leave=False, disable=not self._main) if self._takes_part else ():
                batch = make().to(process.device)
                with learner.together(), plain_code(model.parts.backbone):
                    loss, times = learner.losses(batch, seed)
                process.peers.progress()
                total, count = total + float(loss.sum()), count + len(batch.names)
                images |= set(batch.names)
                if times is not None:
                    pairs = zip(times.tolist(), loss.tolist(), strict=True)
                    samples += [[round(time, 5), float(f"{value:.6g}")] for time, value in pairs]
        finally:
            model.network.train()
        if count and self._main:
            self.run.log(Validated(step=self.step, loss=total / count, samples=samples[:MOST_SAMPLES], images=len(images)))
            process.accelerator.log({"validation_loss": total / count}, step=self.step)
        if count and self.checkpointer.keeps_best:
            self._keep_best(total / count)

    def _keep_best(self, loss: float) -> None:
        """Writes the file of the lowest held-out loss so far, in the processes that measured it."""
        better = math.isfinite(loss) and (self.best is None or loss < self.best[0])
        if self.learner.sharded:
            better = self.process.peers.same_text("better" if better else "") == "better"
        self.waited = 0 if better else self.waited + 1
        if better:
            path = self.checkpointer.best_path
            self._export(path)
            self.best = (loss, self.step)
            if self._main:
                self.run.log(FileSaved(step=self.step, what="best", file=path.name, loss=loss))

    def _lost_patience(self) -> str:
        """Why training ends now, in all processes, when the held-out loss has not become lower for long; "" when it goes on."""
        patience, said = self.checkpointer.patience, ""
        if patience is None:
            return ""
        if self._main and self.best is not None and self.waited >= patience:
            loss, step = self.best
            times = "one held-out loss" if self.waited == 1 else f"{self.waited} held-out losses"
            said = f"{times} since step {step} not lower than its {loss:.4g}; {self.checkpointer.best_path.name} is of that step"
            self.run.log(Warned(text=f"step {self.step}: training ends early: {said} (early_stop_patience = {patience})"))
        return self.process.peers.same_text(said)

    def try_out_samples(self) -> str:
        """Renders the largest previews of the run as short as possible, into nowhere; says what they were, nothing without previews."""
        if self.samples is None or not self._takes_part:
            return ""
        with self.learner.averaged(), self.learner.together(), plain_code(self.learner.model.parts.backbone):
            return self.samples.try_out()

    # States.

    def state_dict(self) -> State:
        """Everything that a later process needs to go on from here, whole in the first process, on any number of processes.

        When the network is sharded all processes must call it together.
        """
        kept = {observer.kept: observer.state_dict() for observer in self.observers if observer.kept}
        loop = {"step": self.step, "scaler": self.learner.scaler.state_dict(), "best": self.best, "waited": self.waited, **kept}
        return {name: gathered(group, keep=self._main) for name, group in {**self.learner.state_dict(), "loop": loop}.items()}

    def load_state_dict(self, state: State) -> None:
        """Goes back to a saved state. Raises ValueError when it belongs to other weights, with a table of them, or another optimizer."""
        self.learner.load_state_dict(state)
        self.step = state["loop"]["step"]
        # A state of an earlier version says nothing of these, and a new run folder has no file of the best.
        for observer in self.observers:
            if observer.kept:
                observer.load_state_dict(state["loop"].get(observer.kept), self.step)
        best = state["loop"].get("best")
        self.best = best if best is not None and self.checkpointer.best_path.exists() else None
        self.waited = state["loop"].get("waited", 0) if self.best is not None else 0

    def _rescue(self, err: BaseException) -> None:
        """After an error: saves the last good step's state, unless the weights were being moved or nothing new was done."""
        # What an error leaves behind keeps memory that saving may need.
        self.learner.optimizer.zero_grad(set_to_none=True)
        if is_out_of_memory(err) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        new = self.step > (self.checkpointer.saved_step or 0)
        # A state of sharded weights needs all processes, and only numbers that are no numbers reach all of them in the same step.
        possible = isinstance(err, NonFiniteLoss) if self.learner.sharded else self._main
        if new and possible and not self.learner.moving and not isinstance(err, NoRoomLeft):
            self._save_state()
