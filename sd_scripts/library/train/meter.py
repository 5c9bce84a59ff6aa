"""What the loop measures of itself: seconds of each part of a step, speed, memory, and when it will be done."""

from __future__ import annotations

import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import psutil
import torch
from accelerate import Accelerator

from sd_scripts.runs.events import Event, PhaseBegun, SessionOver
from sd_scripts.runs.orders import Asked
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.sessions import Sessions

PAUSES = ("save", "sample", "validate")
"""Phases between two steps."""
DECAY = 0.98
"""Of the mean time of a step: one counts half after 34 later ones."""


class DeviceEvent(Protocol):
    """A mark in the work of a GPU, as torch.cuda.Event is one."""

    def record(self) -> None: ...

    def query(self) -> bool:
        """Whether the GPU has come past it."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to a later mark."""
        ...


Marks = dict[str, list[tuple[DeviceEvent, DeviceEvent]]]
"""First and last mark of each time that a section was entered in a step."""


@dataclass
class StepLog:
    """One optimizer step: mean loss over the global batch, its named parts, gradient norm before clipping, seconds of each section."""

    loss: float
    grad_norm: float
    parts: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    overflowed: bool = False
    stop: bool = False
    asked: Asked = Asked.NOTHING
    """What somebody wants after this step."""
    marks: Marks = field(default_factory=dict)
    compile_seconds: float = 0.0
    """Spent in compiling, which is in none of the sections."""

    def without_compiling(self, compile_seconds: float) -> StepLog:
        """The step without that part of its forward and backward pass; its marks, which a waiting GPU has made, are left out."""
        if not compile_seconds:
            return self
        names = ("fwd_bwd", "step_total")
        seconds = {name: max(0.0, spent - compile_seconds) if name in names else spent for name, spent in self.seconds.items()}
        return replace(self, seconds=seconds, marks={}, compile_seconds=compile_seconds)


class Sections:
    """Seconds spent in the named sections of one step: on the clock, and between marks on the GPU where there is one."""

    def __init__(self, mark: Callable[[], DeviceEvent] | None = None) -> None:
        """mark makes an event of the GPU, with timing; None is for devices without."""
        self.seconds = {"data_fetch": 0.0, "fwd_bwd": 0.0, "opt_step": 0.0}
        self.marks: Marks = {}
        self._mark = mark
        self._start = time.perf_counter()
        self._first = self._marked()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        start, first = time.perf_counter(), None if name == "data_fetch" else self._marked()
        yield
        self._close(name, first)
        self.seconds[name] += time.perf_counter() - start

    def _marked(self) -> DeviceEvent | None:
        if self._mark is None:
            return None
        event = self._mark()
        event.record()
        return event

    def _close(self, name: str, first: DeviceEvent | None) -> None:
        last = self._marked() if first is not None else None
        if first is not None and last is not None:
            self.marks.setdefault(name, []).append((first, last))

    def all(self) -> dict[str, float]:
        """The sections, and the whole step as `step_total`; the step is over."""
        self._close("step_total", self._first)
        return {**self.seconds, "step_total": time.perf_counter() - self._start}


def marks_of(device: torch.device) -> Callable[[], DeviceEvent] | None:
    """What makes marks in the work of this device; None where it has none."""
    return partial(torch.cuda.Event, enable_timing=True) if device.type == "cuda" else None


def _gpu_seconds(steps: Sequence[Marks]) -> dict[str, float]:
    """Mean seconds of a step in each section on the GPU, as `<section>_gpu`; without waiting for marks that it has not come past."""
    passed = [marks for marks in steps if marks and all(last.query() for pairs in marks.values() for _, last in pairs)]
    return {
        f"{name}_gpu": round(statistics.fmean(sum(a.elapsed_time(b) for a, b in marks.get(name, ())) for marks in passed) / 1000, 5)
        for name in (passed[0] if passed else ())
    }


class Phases:
    """Says in the event log what the process is doing, and how long the phase before took."""

    def __init__(self, run: RunDirectory | None) -> None:
        self.run = run
        self._seconds: dict[str, float] = {}
        self._name, self._start = "", time.perf_counter()

    def enter(self, name: str) -> None:
        if name == self._name:
            return
        now = time.perf_counter()
        if self._name:
            self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._start
        if self.run is not None:
            self.run.log(PhaseBegun(name=name, seconds=round(now - self._start, 3) if self._name else 0.0))
        self._name, self._start = name, now

    def seconds(self) -> dict[str, float]:
        """What each phase has taken so far, the present one included."""
        present = self._seconds.get(self._name, 0.0) + time.perf_counter() - self._start
        return {**self._seconds, self._name: present} if self._name else dict(self._seconds)


class Meter:
    """Speed and remaining time of this session: its own steps and its own pauses, whatever step the run had reached before.

    Loading, caching, the first step, which chooses kernels, and steps in which code is compiled do not count for the speed.
    """

    def __init__(self, global_batch: int, device: torch.device) -> None:
        self._global_batch, self._device = global_batch, device
        self._since: list[StepLog] = []
        self._marks: list[Marks] = []
        """Of the steps before the last point, which the GPU has done by the next one."""
        self._sum = self._weight = 0.0
        self._total_steps = 0
        self._planned: dict[str, list[int]] = {}
        self._times = dict.fromkeys(PAUSES, 0)
        self._before = dict.fromkeys(PAUSES, 0.0)
        self._paused = dict.fromkeys(PAUSES, 0.0)
        self.steps = 0
        """Done in this session."""
        self.trained_seconds = 0.0
        """Spent in them, without compiling."""
        self.compile_seconds = 0.0
        """Spent in compiling, also before the first step."""

    def begin(self, total_steps: int, planned: Mapping[str, list[int]], phases: Mapping[str, float]) -> None:
        """A session begins. planned: for each kind of pause the steps after which it is due; phases: seconds that phases took before."""
        self._total_steps, self._planned = total_steps, dict(planned)
        self._before = {name: phases.get(name, 0.0) for name in PAUSES}

    def add(self, log: StepLog, warming_up: bool) -> None:
        """One step was done."""
        self._since.append(log)
        self.steps += 1
        self.trained_seconds += log.seconds["step_total"]
        self.compile_seconds += log.compile_seconds
        if not warming_up and not log.compile_seconds:
            # An exponential mean, corrected for its beginning. A median would leave out the larger sizes where images differ in size.
            self._sum, self._weight = DECAY * self._sum + log.seconds["step_total"], DECAY * self._weight + 1.0

    def paused(self, phases: Mapping[str, float]) -> None:
        """What was due after a step is done. phases: seconds that each phase has taken so far."""
        for name in PAUSES:
            spent = phases.get(name, 0.0) - self._before[name]
            self._times[name] += spent > self._paused[name]
            self._paused[name] = spent

    @property
    def overflowed(self) -> int:
        """Steps since the last point that were left out because a gradient overflowed in fp16."""
        return sum(log.overflowed for log in self._since)

    @property
    def seconds_per_step(self) -> float:
        """The recent mean; of the first step until there is another, 0 before it."""
        return self._sum / self._weight if self._weight else self.trained_seconds

    @property
    def paused_seconds(self) -> float:
        """Spent between the steps of this session."""
        return sum(self._paused.values())

    def eta_seconds(self, step: int) -> float:
        """Until the end, after `step` steps of the whole run: those left at the recent speed, and the pauses left at their mean cost.

        A kind of pause that has not happened yet in this session has no cost yet.
        """
        pauses = 0.0
        for name, times in self._times.items():
            due = self._planned.get(name, [])
            pauses += self._paused[name] / max(1, times) * (len(due) - bisect_right(due, step))
        return self.seconds_per_step * (self._total_steps - step) + pauses

    def point(self, step: int, peak: float) -> dict[str, Any]:
        """The fields of a `StepDone` for the steps since the last one, which are then forgotten. peak: GiB, see peak_gib.

        The GPU's own times, `<section>_gpu`, are those of the steps of the event before, so that nobody waits for them.
        """
        logs, self._since = self._since, []
        marks, self._marks = self._marks, [log.marks for log in logs]
        seconds = {name: statistics.fmean(log.seconds[name] for log in logs) for name in logs[-1].seconds}
        usual = self.seconds_per_step
        parts = {name: statistics.fmean(log.parts[name] for log in logs if name in log.parts) for name in logs[-1].parts}
        return {
            "loss": statistics.fmean(log.loss for log in logs),
            "grad_norm": logs[-1].grad_norm,
            **{name: round(value, 5) for name, value in seconds.items()},
            **_gpu_seconds(marks),
            "seconds_per_step": round(usual, 5),
            "images_per_second": round(self._global_batch / usual, 4) if usual else 0.0,
            "eta_seconds": round(self.eta_seconds(step), 1),
            **self._session(),
            "peak_gib": round(peak, 3),
            "parts": parts,
        }

    def _session(self) -> dict[str, Any]:
        return {
            "step_in_session": self.steps,
            "trained_seconds": round(self.trained_seconds, 3),
            "paused_seconds": round(self.paused_seconds, 3),
        }

    def summary(self, step: int, earlier: Iterable[Event]) -> SessionOver:
        """What this session took. earlier: the whole event log so far, with the sessions before."""
        pauses: dict[str, Any] = {f"{name}_seconds": round(spent, 3) for name, spent in self._paused.items()}
        over = SessionOver(step=step, **self._session(), **pauses, compile_seconds=round(self.compile_seconds, 3))
        sessions = Sessions()
        sessions.take([*earlier, over])
        total = sessions.total
        return replace(
            over,
            sessions=sessions.count,
            total_steps_done=total.steps,
            total_trained_seconds=round(total.trained_seconds, 3),
            total_paused_seconds=round(total.paused_seconds, 3),
        )


def largest(value: float, accelerator: Accelerator) -> float:
    """The largest of the values of all processes, which must all call this."""
    if accelerator.num_processes == 1:
        return value
    found = torch.tensor(value, dtype=torch.float64 if accelerator.device.type == "cpu" else torch.float32, device=accelerator.device)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return float(found)


def peak_gib(device: torch.device) -> float:
    """Most memory taken so far: of the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset) / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
