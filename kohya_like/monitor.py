"""A run folder's event log as what a person wants to see: phase, curve, speed, end, previews, warnings. Knows files, not processes."""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from sd_scripts.runs.events import (
    Cached,
    Evaluated,
    FileSaved,
    Forecasted,
    LastWord,
    Line,
    PhaseBegun,
    Previewed,
    RunStarted,
    StepDone,
    Validated,
    Warned,
    lines_of,
    read,
)
from sd_scripts.runs.sessions import Sessions

CHUNK_BYTES = 1 << 20
EDGE_BYTES = 64 << 10
FAR_BYTES = 4 << 20
"""How far back a step is looked for."""
"""How much of the beginning and of the end of a log is read for the list of runs."""
MOST_LOSS = 3.5e38
MOST_STEPS = 10**12
MAX_POINTS = 2000
"""A series holds between this many points and twice as many, however long the run is."""


@dataclass(frozen=True)
class Chunk:
    """Lines after an offset."""

    events: list[Line]
    offset: int
    """Where the next read begins: always the beginning of a line."""
    reset: bool
    """The file became shorter than the offset, so it was replaced; the events are those from its beginning."""
    complete: bool
    """Nothing more stood in the file."""


def read_events(file: Path, offset: int = 0, limit: int = CHUNK_BYTES) -> Chunk:
    """Whole lines after a byte offset, at most `limit` bytes of them. A half-written last line waits; damaged ones are left out."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            reset = offset > size
            offset = 0 if reset else offset
            stream.seek(offset)
            data = stream.read(limit)
    except OSError:
        # Missing, or damaged: `summary` says so.
        return Chunk([], 0, offset > 0, True)
    end = data.rfind(b"\n") + 1
    if end == 0 and len(data) == limit:
        # No event is this long: it is damage, and waiting for its end would stop the page for good.
        end = len(data)
    return Chunk(lines_of(data[:end]), offset + end, reset, offset + len(data) >= size)


SECTIONS = ("data_fetch", "fwd_bwd", "opt_step", "step_total")
"""Fields of a StepDone: seconds of the parts of a step, on the clock of the processor, and of the whole step."""
GPU_SECTIONS = ("fwd_bwd_gpu", "opt_step_gpu", "step_total_gpu")
"""The same on the clock of the GPU, where there is one."""
MEASURES = ("swd_target", "swd_ratio", "ssm_source", "structure")
"""Means of an Evaluated that are plotted."""


@dataclass
class Point:
    """Neighbouring log lines of the curve, drawn as one: the last step, mean, lowest and highest loss, smoothed loss, learning rate.

    seconds are the means of SECTIONS, and of GPU_SECTIONS behind them where all of them are told; empty where some of the first are not.
    parts are the means of the parts of the loss by name.
    """

    step: int
    loss: float
    low: float
    high: float
    smooth: float
    lr: float
    seconds: tuple[float, ...] = ()
    parts: dict[str, float] = field(default_factory=dict)
    count: int = 1

    def absorb(self, other: Point) -> None:
        total = self.count + other.count
        if len(self.seconds) == len(other.seconds):
            both = zip(self.seconds, other.seconds, strict=True)
            self.seconds = tuple((mine * self.count + its * other.count) / total for mine, its in both)
        else:
            self.seconds = max(self.seconds, other.seconds, key=len)
        for name, its_part in other.parts.items():
            self.parts[name] = (self.parts.get(name, its_part) * self.count + its_part * other.count) / total
        self.loss = (self.loss * self.count + other.loss * other.count) / total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.step, self.smooth, self.lr, self.count = other.step, other.smooth, other.lr, total

    def part_row(self, names: Sequence[str]) -> list[float | None]:
        """The parts of these names; None for one that was not told."""
        return [float(f"{self.parts[name]:.6g}") if name in self.parts else None for name in names]

    def row(self) -> list[float]:
        values = (self.loss, self.low, self.high, self.smooth, self.lr, *self.seconds)
        return [self.step, *(float(f"{value:.6g}") for value in values)]


class Curve:
    """The loss over the steps in bounded memory: neighbours are merged in pairs whenever there are too many.

    The smoothed value is an average over about the last 15 % of what was logged, and at most about the last 50 lines.
    """

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self.points: list[Point] = []
        self.part_names: list[str] = []
        """Parts of the loss in the order in which they came up."""
        self.generation = 0
        """Grows whenever points that were already given out change; until then a reader needs only what is new."""
        self._max = max_points
        self._stride = 1
        self._logged = 0

    def add(self, step: int, loss: float, lr: float, seconds: tuple[float, ...] = (), parts: Mapping[str, float] | None = None) -> None:
        """Appends a line of the log. A step that was seen before replaces everything from there on: the run went back to a state."""
        if self.points and step <= self.points[-1].step:
            self.go_back(step - 1)
        self._logged += 1
        weight = max(0.02, 1 / (0.15 * self._logged + 1)) if self.points else 1.0
        before = self.points[-1].smooth if self.points else loss
        new = Point(step, loss, loss, loss, before + weight * (loss - before), lr, seconds, dict(parts or {}))
        self.part_names += [name for name in new.parts if name not in self.part_names]
        if self.points and self.points[-1].count < self._stride:
            self.points[-1].absorb(new)
        else:
            self.points.append(new)
        if len(self.points) > 2 * self._max:
            self._thin()

    def go_back(self, step: int) -> None:
        """Forgets what came after this step."""
        if self.points and self.points[-1].step > step:
            while self.points and self.points[-1].step > step:
                self.points.pop()
            self._logged = sum(point.count for point in self.points)
            self.generation += 1

    def _thin(self) -> None:
        self._stride *= 2
        self.generation += 1
        merged: list[Point] = []
        for index, point in enumerate(self.points):
            if index % 2 and merged:
                merged[-1].absorb(point)
            else:
                merged.append(point)
        self.points = merged


@dataclass
class Progress:
    """What the log says so far; fold() takes the next events. Times are unix seconds."""

    curve: Curve = field(default_factory=Curve)
    validation: list[tuple[int, float]] = field(default_factory=list)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """MEASURES of the evaluations by step; a repeated step replaces its own."""
    samples: dict[tuple[int, int], Previewed] = field(default_factory=dict)
    """By (step, index of the prompt): a repeated step replaces its preview."""
    saved: list[FileSaved] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)
    """Sentence -> how often."""
    started: RunStarted | None = None
    last_step: StepDone | None = None
    cached: dict[str, tuple[int, int]] = field(default_factory=dict)
    """What -> (done, total)."""
    forecast_gib: float | None = None
    """Memory that tensors were forecast to take at most."""
    farewell: LastWord | None = None
    phase: str = ""
    phase_since: float = 0.0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    sessions: Sessions = field(default_factory=Sessions)
    last_time: float = 0.0

    def fold(self, lines: Iterable[Line]) -> None:
        """Takes the next lines of the log, in order."""
        for event in read(lines):
            self.last_time = event.time or self.last_time
            self.sessions.take([event])
            if isinstance(event, PhaseBegun | Cached | StepDone):
                # A later process is at work; it says that it started only when its data is ready.
                self.farewell = None
            match event:
                case StepDone():
                    self._step(event)
                case RunStarted():
                    self._started(event)
                case PhaseBegun():
                    self._enter(event.name)
                case Cached():
                    self.cached[event.what] = event.done, event.total
                    self._enter("cache")
                case Validated(loss=float(loss)):
                    self.validation = [*self.validation, (event.step, loss)][-MAX_POINTS:]
                case Evaluated():
                    told = {name: event.means[name] for name in MEASURES if name in event.means}
                    self.evaluations = dict(list({**self.evaluations, event.step: told}.items())[-MAX_POINTS:])
                case Forecasted():
                    self.forecast_gib = event.gib
                case FileSaved():
                    self.saved = [*self.saved, event][-500:]
                case Previewed():
                    self.samples[event.step, event.index] = event
                case Warned():
                    self._warn(event.text)
                case LastWord():
                    self.farewell = event
                    self._enter(event.kind)

    def _enter(self, phase: str) -> None:
        if phase != self.phase:
            self.phase, self.phase_since = phase, self.last_time

    def _started(self, event: RunStarted) -> None:
        """A process began, perhaps a later one that continues from a state: what it will do again is forgotten."""
        self.started, self.farewell = event, None
        start = event.start_step
        self.curve.go_back(start)
        self.validation = [item for item in self.validation if item[0] <= start]
        self.evaluations = {step: told for step, told in self.evaluations.items() if step <= start}
        # Speed and remaining time are those of the new session, from its first line on.
        self.seconds.clear()
        self.last_step = None
        if self.phase in ("", "finished", "stopped", "failed"):
            self._enter("load")

    def _step(self, event: StepDone) -> None:
        if (loss := loss_of(event)) is not None:
            self.curve.add(event.step, loss, event.lr or 0.0, sections(event), event.parts)
        if event.step_total is not None:
            self.seconds.append(event.step_total)
        self.last_step = event
        if self.phase in ("", "load", "scan", "cache") or (self.phase == "warmup" and len(self.seconds) > 3):
            self._enter("train")

    def _warn(self, text: str) -> None:
        self.warnings[text] = self.warnings.get(text, 0) + 1
        if len(self.warnings) > 50:
            del self.warnings[next(iter(self.warnings))]

    @property
    def steps(self) -> int:
        """Steps of the whole run; 0 while unknown, and where the log tells a number that cannot be."""
        told = self.started.steps if self.started else 0
        return told if self.step <= told <= MOST_STEPS else 0

    @property
    def step(self) -> int:
        """The last step that was logged, or the step the run continues from."""
        return max(0, self.last_step.step if self.last_step else self.started.start_step if self.started else 0)

    @property
    def loss(self) -> float | None:
        """That of the last step that was logged: the number that the list of runs, its page and its log all show."""
        return loss_of(self.last_step)

    @property
    def seconds_per_step(self) -> float | None:
        """The recent mean of this session as the trainer tells it, or the median of the last 50 log lines."""
        told = self.last_step.seconds_per_step if self.last_step else None
        return told if told is not None else statistics.median(self.seconds) if self.seconds else None

    def eta_seconds(self, now: float, stop: int | None = None) -> float | None:
        """Seconds until the end, counted down since the last log line; None when the log cannot say, and while it is paused. stop: see
        `desk.stop_step`."""
        if self.farewell is not None or self.phase == "pause":
            return None
        eta, since = (self.last_step.eta_seconds, self.last_step.time) if self.last_step else (None, 0.0)
        if eta is None and self.seconds_per_step is not None and self.steps:
            eta = (self.steps - self.step) * self.seconds_per_step
        if eta is not None and stop is not None and self.step < self.steps:
            # Pauses that are still to come are in it too.
            eta *= max(0, stop - self.step) / (self.steps - self.step)
        return None if eta is None else max(0.0, eta - max(0.0, now - (since or now)))

    def fraction(self, stop: int | None = None) -> float | None:
        """How much of the present phase is done, 0 to 1; None where nobody knows. stop: see `desk.stop_step`."""
        if self.phase == "cache" and self.cached:
            done, total = (sum(column) for column in zip(*self.cached.values(), strict=True))
            return min(1.0, done / total) if total else None
        steps = stop or self.steps
        return min(1.0, self.step / steps) if steps else None


def sections(event: StepDone) -> tuple[float, ...]:
    """Seconds of the parts of a step; see Point."""
    found = [[getattr(event, name) for name in names] for names in (SECTIONS, GPU_SECTIONS)]
    told = [[value for value in values if value is not None] for values in found]
    if len(told[0]) < len(SECTIONS):
        return ()
    return tuple(told[0] + (told[1] if len(told[1]) == len(GPU_SECTIONS) else []))


def loss_of(event: StepDone | None) -> float | None:
    """The loss of a step; None for a number that no float32 holds, which is damage."""
    loss = event.loss if event else None
    return loss if loss is None or abs(loss) <= MOST_LOSS else None


@dataclass(frozen=True)
class Summary:
    """One line of the list of runs, read from the two ends of the log only."""

    step: int
    steps: int
    loss: float | None
    pid: int | None
    """Of the process that logs, as it said when it started."""
    started_at: float
    last_time: float
    phase: str
    farewell: LastWord | None
    """The last word of the newest process, if it has spoken one."""
    damage: str = ""
    """Why the log cannot be read, in a sentence."""


def summary(file: Path, since: int = 0) -> Summary:
    """What the list of runs shows. Only a farewell at or after the byte `since` counts: an older process's is history."""
    try:
        now = file.stat()
    except OSError:
        return _summary(file, since)
    return _summary_as_it_was(file, since, (now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns))


@lru_cache(maxsize=2048)
def _summary_as_it_was(file: Path, since: int, _state: tuple[int, ...]) -> Summary:
    """The pages that are open ask for all runs every second, and most have ended."""
    return _summary(file, since)


def _summary(file: Path, since: int) -> Summary:
    damage = ""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            head = stream.read(min(size, EDGE_BYTES))
            begin = max(0, size - EDGE_BYTES)
            stream.seek(begin)
            tail = stream.read(EDGE_BYTES)
            lines = recent = _whole_lines(tail)
            if since > begin:
                stream.seek(min(since, size))
                recent = _whole_lines(stream.read(EDGE_BYTES))
            # A long line that is no event may stand between the last step and the end.
            while begin > 0 and size - begin < FAR_BYTES and not any(line["kind"] == StepDone.kind for line in lines):
                begin = max(0, size - 4 * len(tail))
                stream.seek(begin)
                tail = stream.read(size - begin)
                lines = _whole_lines(tail)
    except OSError as err:
        head, lines, recent = b"", [], []
        if not isinstance(err, FileNotFoundError):
            damage = f"{file.name} cannot be read: {err.strerror}."
    begun = b"\n".join(line for line in head[: head.rfind(b"\n") + 1].split(b"\n") if RunStarted.kind.encode() in line)
    both = Progress()
    both.fold(line for line in lines_of(begun) if line["kind"] == RunStarted.kind)
    both.fold(lines)
    newest = both
    if recent is not lines:
        newest = Progress()
        newest.fold(recent)
    pid = both.started.pid if both.started else None
    return Summary(
        step=both.step,
        steps=both.steps,
        loss=both.loss,
        pid=pid if pid and pid > 0 else None,
        started_at=both.started.time if both.started else 0.0,
        last_time=both.last_time,
        phase=both.phase,
        farewell=newest.farewell,
        damage=damage,
    )


def _whole_lines(data: bytes) -> list[Line]:
    return lines_of(data[: data.rfind(b"\n") + 1])
