"""What every measurement prints: one JSON line with its figures, the target, and the machine it ran on."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

import psutil


def report(name: str, target: str, **figures: float | int | str) -> None:
    """Prints one line; figures are rounded to four significant digits."""
    rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figures.items()}
    machine = {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
    }
    sys.stdout.write(json.dumps({"bench": name, "target": target, **rounded, "machine": machine}) + "\n")
    sys.stdout.flush()


def best_seconds(do: Callable[[], object], times: int = 5) -> float:
    """The shortest of several wall times: what the work takes when nothing else runs."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        do()
        found.append(time.perf_counter() - started)
    return min(found)


def median(values: list[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def resident_mib() -> float:
    """Memory of this process, MiB."""
    return psutil.Process().memory_info().rss / 2**20
