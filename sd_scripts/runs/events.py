"""What a run says while it trains: one class for each kind of line in its event log, for whoever writes it and whoever reads it.

docs/events.schema.json is made from these classes, for programs in other languages. Lines of every earlier version are read: `formerly`
of a class says them in the words of today.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, get_type_hints

from sd_scripts.schema.outside import json_of

Line = dict[str, Any]
"""A line of the log as any program reads it."""
KINDS: dict[str, type[Event]] = {}
MOST_SAMPLES = 512
"""Held-out samples whose losses a line has."""
_LARGEST = sys.float_info.max
_FORMER_KINDS = {"rehearsed": "preflight"}


@dataclass(frozen=True, kw_only=True)
class Event:
    """What every line has."""

    kind: ClassVar[str] = ""
    __pydantic_config__: ClassVar[dict[str, bool]] = {"use_attribute_docstrings": True}
    time: float = 0.0
    """Unix seconds when it was written."""

    def __init_subclass__(cls, kind: str = "") -> None:
        if kind:
            cls.kind = kind
            KINDS[kind] = cls

    @staticmethod
    def formerly(line: Line) -> Line:
        """A line of any version, in the words of this one."""
        return line

    def line(self, now: float) -> str:
        """The line of the log; what is not known is left out, and numbers that JSON cannot say (nan, inf) are null."""
        said = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "time"}
        told = {"time": round(now, 3), "kind": self.kind, **{name: _plain(value) for name, value in said.items() if value is not None}}
        return json.dumps(told, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(frozen=True, kw_only=True)
class PhaseBegun(Event, kind="phase"):
    """Work of another kind begins."""

    name: str
    """scan, load, cache, preflight, warmup, train, validate, save or sample."""
    seconds: float = 0.0
    """Of the phase before."""


@dataclass(frozen=True, kw_only=True)
class Cached(Event, kind="cached"):
    """Progress of filling the caches, at most twice a second."""

    what: str
    """latents, text or class images."""
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event, kind="started"):
    """The loop begins."""

    steps: int
    """Of the whole run."""
    start_step: int = 0
    """After which this process goes on."""
    epochs: int | None = None
    images: int | None = None
    batch: int | None = None
    seed: int | None = None
    pid: int | None = None
    script: str = ""


@dataclass(frozen=True, kw_only=True)
class Spent(Event):
    """How long this session has trained so far."""

    step: int
    step_in_session: int | None = None
    trained_seconds: float | None = None
    paused_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepDone(Spent, kind="step"):
    """A point of the curve, every `log_every_n_steps` steps."""

    epoch: int | None = None
    """From 0."""
    loss: float | None = None
    """Mean over the steps since the last point."""
    parts: dict[str, float] = field(default_factory=dict)
    """The same of the named parts of the loss."""
    lr: float | None = None
    grad_norm: float | None = None
    data_fetch: float | None = None
    fwd_bwd: float | None = None
    opt_step: float | None = None
    step_total: float | None = None
    fwd_bwd_gpu: float | None = None
    opt_step_gpu: float | None = None
    step_total_gpu: float | None = None
    seconds_per_step: float | None = None
    images_per_second: float | None = None
    eta_seconds: float | None = None
    peak_gib: float | None = None
    scale: float | None = None
    """Of fp16's gradients."""
    overflowed: int | None = None
    ema_decay: float | None = None

    @staticmethod
    def formerly(line: Line) -> Line:
        """Runs of 0.1 said the parts of the loss beside all other numbers, and early ones the time of a step as seconds."""
        line = {"step_total": line.get("seconds"), **line, "lr": _first(line.get("lr"))}
        return line if "parts" in line else {**line, "parts": _others(StepDone, line, "seconds")}


@dataclass(frozen=True, kw_only=True)
class EpochDone(Event, kind="epoch"):
    """An epoch is over, or the run ends within it."""

    step: int
    epoch: int
    """From 1, as in epochs.csv."""
    loss: float | None = None
    """Mean over the steps of the epoch."""
    parts: dict[str, float] = field(default_factory=dict)
    lr: float | None = None
    seconds: float | None = None

    @staticmethod
    def formerly(line: Line) -> Line:
        """Runs of 0.1 said the columns of epochs.csv."""
        if "parts" in line:
            return line
        parts = {name.removeprefix("loss_"): value for name, value in _others(EpochDone, line).items() if name != "loss_total"}
        return {**line, "loss": line.get("loss_total"), "parts": parts}


@dataclass(frozen=True, kw_only=True)
class Validated(Event, kind="validation"):
    """Held-out images were measured."""

    step: int
    loss: float | None = None
    samples: list[list[float]] = field(default_factory=list)
    """Time in [0, 1] and loss of each held-out sample, the first MOST_SAMPLES, in the same order and with the same noise every time."""
    images: int = 0
    """So many images took turns in these samples, always in one order; 0 where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event, kind="evaluation"):
    """Images of every style in every other one are on the disk."""

    step: int
    epoch: int = 0
    folder: str = ""
    means: dict[str, float] = field(default_factory=dict)
    """Of each measure."""

    @staticmethod
    def formerly(line: Line) -> Line:
        """Runs of 0.1 said the means beside all other numbers."""
        return line if "means" in line else {**line, "means": _others(Evaluated, line)}


@dataclass(frozen=True, kw_only=True)
class FileSaved(Event, kind="saved"):
    """A file is on the disk."""

    step: int
    what: str
    """export, state or best."""
    file: str
    loss: float | None = None
    """Of the best."""


@dataclass(frozen=True, kw_only=True)
class Previewed(Event, kind="sample"):
    """A preview is on the disk."""

    step: int
    index: int
    """Of its prompt."""
    file: str
    prompt: str = ""
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Profiled(Event, kind="profiled"):
    """The steps that `profile` asks for are recorded."""

    step: int
    steps: int
    files: list[str]


@dataclass(frozen=True, kw_only=True)
class Uploaded(Event, kind="uploaded"):
    """A saved file is on the hub."""

    text: str
    """The repository and the path in it."""


@dataclass(frozen=True, kw_only=True)
class Warned(Event, kind="warning"):
    """Something is not as asked, and training goes on."""

    text: str


@dataclass(frozen=True, kw_only=True)
class PreflightDone(Event, kind="preflight"):
    """What takes most memory was tried before the first step."""

    seconds: float
    peak_gib: float
    what: str


@dataclass(frozen=True, kw_only=True)
class Compiling(Event, kind="compiling"):
    """The network will be compiled."""

    scope: str
    backend: str
    mode: str | None = None
    dynamic: str
    expected: int | None = None
    """Most graphs; unknown where nobody knows."""
    limit: int
    """Of versions."""


@dataclass(frozen=True, kw_only=True)
class Compiled(Event, kind="compiled"):
    """A step has compiled something."""

    step: int
    graphs: int
    seconds: float
    total: int
    """Graphs so far."""


@dataclass(frozen=True, kw_only=True)
class Forecasted(Event, kind="forecast"):
    """On a GPU: what the run is forecast to take."""

    gib: float | None = None
    """Of all tensors."""
    card_gib: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ForecastChecked(Event, kind="forecast_checked"):
    """On a GPU: what it took, at the end."""

    gib: float
    measured_gib: float
    error_percent: float | None = None


@dataclass(frozen=True, kw_only=True)
class SessionOver(Spent, kind="session"):
    """A process that trained ends; its times, and those of all sessions of the run."""

    save_seconds: float = 0.0
    sample_seconds: float = 0.0
    validate_seconds: float = 0.0
    compile_seconds: float = 0.0
    sessions: int = 0
    total_steps_done: int = 0
    total_trained_seconds: float = 0.0
    total_paused_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LastWord(Event):
    """The last line of a process. A log that ends without one, with no process behind it, is of a run that died."""

    step: int = 0
    text: str = ""
    advice: str = ""
    refused: bool = False
    """The same options would fail again."""

    @staticmethod
    def formerly(line: Line) -> Line:
        """Runs of 0.1 called the advice remedy."""
        return {"advice": line.get("remedy"), **line}


class RunFinished(LastWord, kind="finished"):
    """All steps are done."""


class RunStopped(LastWord, kind="stopped"):
    """It ended as it was asked to."""


class RunFailed(LastWord, kind="failed"):
    """It could not go on."""


def lines_of(data: bytes) -> list[Line]:
    """The lines of a piece of a log; damaged ones are left out."""
    found = []
    for line in data.split(b"\n"):
        try:
            told = json_of(line)
        except ValueError:
            continue
        if isinstance(told, dict) and isinstance(told.get("kind"), str):
            found.append(told)
    return found


def read(lines: Iterable[Line]) -> list[Event]:
    """The events of lines of any version. Kinds and fields that this version does not know are passed over.

    A field that is missing, or holds something else than it should, has its default: None where that may be, else nothing of its type.
    """
    found = []
    for line in lines:
        name: str = line["kind"]
        kind = KINDS.get(_FORMER_KINDS.get(name, name))
        if kind is not None:
            told = kind.formerly(line)
            found.append(kind(**{name: take(told.get(name)) for name, take in _takers(kind.kind)}))
    return found


@cache
def _takers(name: str) -> list[tuple[str, Callable[[object], Any]]]:
    """What takes each field of a kind from a line."""
    kind = KINDS[name]
    hints = get_type_hints(kind)
    return [(item.name, _TAKERS[hints[item.name]]) for item in fields(kind)]


def number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST else None


def whole(value: object) -> int | None:
    """A whole number, or None for anything else."""
    found = number(value)
    # A float has no place for all digits of a large one.
    return None if found is None else value if isinstance(value, int) else int(found)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _numbers(value: object) -> dict[str, float]:
    told = value if isinstance(value, dict) else {}
    return {name: found for name, one in told.items() if (found := number(one)) is not None}


def _rows(value: object) -> list[list[float]]:
    told = [[number(one) for one in row] for row in value if isinstance(row, list)] if isinstance(value, list) else []
    return [[one for one in row if one is not None] for row in told if None not in row]


_TAKERS: dict[Any, Callable[[object], object]] = {
    float: lambda value: number(value) or 0.0,
    float | None: number,
    int: lambda value: whole(value) or 0,
    int | None: whole,
    str: lambda value: _text(value) or "",
    str | None: _text,
    bool: lambda value: value is True,
    dict[str, float]: _numbers,
    list[list[float]]: _rows,
    list[str]: lambda value: [one for one in value if isinstance(one, str)] if isinstance(value, list) else [],
}


def _others(kind: type[Event], line: Mapping[str, object], *former: str) -> dict[str, object]:
    """What a line says that is none of the fields of its kind."""
    known = {"kind", *former, *(item.name for item in fields(kind))}
    return {name: value for name, value in line.items() if name not in known}


def _first(rate: object) -> object:
    """The first learning rate, where an early version told one of each group."""
    if isinstance(rate, Mapping):
        rate = list(rate.values())
    return next(iter(rate), None) if isinstance(rate, list) else rate


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value
