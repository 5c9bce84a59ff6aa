"""What the loop measures of itself: seconds of each part of a step, speed, memory, and when it will be done."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import torch

from sd_scripts.schema.rundir import RunDirectory

RECENT = 50
"""Steps whose median says how long a step takes."""


@dataclass
class StepLog:
    """One optimizer step: mean loss over the global batch, its named parts, gradient norm before clipping, seconds of each section."""

    loss: float
    grad_norm: float
    parts: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    overflowed: bool = False
    stop: bool = False


class Sections:
    """Seconds spent in the named sections of one step."""

    def __init__(self) -> None:
        self.seconds = {"data_fetch": 0.0, "forward_backward": 0.0, "optimizer": 0.0}
        self._start = time.perf_counter()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def all(self) -> dict[str, float]:
        """The sections, and the whole step as `total`."""
        return {**self.seconds, "total": time.perf_counter() - self._start}


class Phases:
    """Says in the event log what the process is doing, and how long the phase before took."""

    def __init__(self, run: RunDirectory | None) -> None:
        self.run = run
        self.seconds: dict[str, float] = {}
        self._name, self._start = "", time.perf_counter()

    def enter(self, name: str) -> None:
        if name == self._name:
            return
        now = time.perf_counter()
        if self._name:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._start
        if self.run is not None:
            self.run.log("phase", name=name, seconds=round(now - self._start, 3) if self._name else 0.0)
        self._name, self._start = name, now


class Meter:
    """Means since the last point of the curve, and the median step for the estimated end. Caching, warm-up and sampling do not count."""

    def __init__(self, global_batch: int, device: torch.device) -> None:
        self._global_batch, self._device = global_batch, device
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._since: list[StepLog] = []

    def add(self, log: StepLog, warming_up: bool) -> None:
        self._since.append(log)
        if not warming_up:
            self._recent.append(log.seconds["total"])

    def point(self, steps_left: int) -> dict[str, float]:
        """The fields of a `step` event for the steps since the last one, which are then forgotten."""
        logs, self._since = self._since, []
        seconds = {name: statistics.fmean(log.seconds[name] for log in logs) for name in logs[-1].seconds}
        usual = statistics.median(self._recent) if self._recent else seconds["total"]
        parts = {name: statistics.fmean(log.parts[name] for log in logs if name in log.parts) for name in logs[-1].parts}
        return {
            "loss": statistics.fmean(log.loss for log in logs),
            "grad_norm": logs[-1].grad_norm,
            "seconds": round(seconds.pop("total"), 5),
            **{name: round(value, 5) for name, value in seconds.items()},
            "images_per_second": round(self._global_batch / usual, 4) if usual else 0.0,
            "peak_gib": round(peak_gib(self._device), 3),
            "eta_seconds": round(usual * steps_left, 1),
            **parts,
        }


def peak_gib(device: torch.device) -> float:
    """Most memory taken so far: of the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset) / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
