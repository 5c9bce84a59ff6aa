"""Readings of all GPUs for the page: one sampler for all tabs, its last minutes, sums over GPUs; and what a run's processes use."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import psutil

from .gpu_drivers import GIB, Device, Driver, Drivers, Readings

PERIOD_SECONDS = 2.0
HISTORY_SECONDS = 300.0
"""How far the history goes back, and how long after the last look the sampler goes on, so that it has no hole after a short absence."""
PATIENCE_SECONDS = 5.0
"""A page waits this long for the first answer of a driver; older answers than this twice are called old."""


def _over(combine: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return combine(known) if known else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _rounded(value: float | None, digits: int | None = None) -> float | None:
    return None if value is None else round(value, digits)


def _percent(devices: Iterable[Device]) -> int | None:
    """Memory used of all there is, over the GPUs that tell both."""
    pairs = [(each.memory_used_gib, each.memory_total_gib) for each in devices]
    told = [(used, total) for used, total in pairs if used is not None and total is not None]
    whole = sum(total for _, total in told)
    return round(100 * sum(used for used, _ in told) / whole) if whole else None


def _name(devices: Collection[Device]) -> str:
    """ "2x A", "2x A, 1x B"; without a number for a single GPU."""
    names = Counter(device.name for device in devices)
    if len(devices) == 1:
        return next(iter(names))
    return ", ".join(f"{number}x {name}" for name, number in names.items()) or "Unknown"


def as_json(readings: Readings, pids: Collection[int] = ()) -> dict[str, Any]:
    """All GPUs together, and each in `gpus`. Memory in GiB, temperature in degrees Celsius, power in watts, clock in MHz, else percent.

    Together: memory is summed, utilization averaged, temperature that of the hottest, all over the GPUs that tell; null stands for what
    none of them tells. The memory that they have is that of the GPUs whose use is told. pids: whose processes are listed.
    """
    devices = readings.devices
    telling = [each for each in devices if each.memory_used_gib is not None] or devices
    return {
        "name": _name(devices),
        "memoryTotal": _rounded(_over(sum, (each.memory_total_gib for each in telling)), 1),
        "memoryUsed": _rounded(_over(sum, (each.memory_used_gib for each in devices)), 1),
        "memoryPercent": _percent(devices),
        "utilization": _rounded(_over(_mean, (each.utilisation_percent for each in devices))),
        "temperature": _rounded(_over(max, (each.temperature_celsius for each in devices))),
        "numGpus": len(devices),
        "gpus": [_device_json(each, pids) for each in devices],
    }


def _device_json(device: Device, pids: Collection[int]) -> dict[str, Any]:
    return {
        "index": device.index,
        "uuid": device.uuid,
        "name": device.name,
        "memoryTotal": _rounded(device.memory_total_gib, 1),
        "memoryUsed": _rounded(device.memory_used_gib, 1),
        "memoryPercent": _percent([device]),
        "utilization": _rounded(device.utilisation_percent),
        "temperature": _rounded(device.temperature_celsius),
        "power": _rounded(device.power_watts, 1),
        "powerLimit": _rounded(device.power_limit_watts, 1),
        "clock": _rounded(device.clock_mhz),
        "fan": _rounded(device.fan_percent),
        "processes": [{"pid": each.pid, "memory": _rounded(each.memory_gib, 1)} for each in device.processes if each.pid in pids],
    }


def used_by(devices: Iterable[Device], names: Collection[str], pids: Collection[int]) -> list[int]:
    """Which GPUs a run uses: those it was given, by number or (the beginning of) a UUID as in CUDA_VISIBLE_DEVICES, and those on which
    one of its processes computes."""

    def is_named(device: Device) -> bool:
        uuid = (device.uuid or "").lower()
        return any(name == str(device.index) or (not name.isdigit() and uuid.startswith(name.lower())) for name in names if name)

    return [each.index for each in devices if is_named(each) or any(process.pid in pids for process in each.processes)]


def read() -> Readings:
    """Asks the driver now, and lets go of it."""
    driver = Drivers()
    try:
        return driver.read()
    finally:
        driver.close()


def count() -> int:
    """Number of GPUs; 0 without a driver."""
    return len(read().devices)


@dataclass(frozen=True)
class Moment:
    """One row of the history."""

    time: float
    """Unix time."""
    gpus: tuple[tuple[float | None, float | None, float | None, float | None], ...]
    """Of each GPU: utilization, memory in percent, temperature, power."""


class Sampler:
    """One thread that asks the driver every two seconds while somebody looks, however many tabs are open, and keeps the last minutes.

    It ends, and lets go of the driver, when nobody has looked for a while; the next look begins it again.
    """

    def __init__(self, driver: Driver | None = None, period: float = PERIOD_SECONDS, idle: float = HISTORY_SECONDS) -> None:
        self._driver = Drivers() if driver is None else driver
        self._period, self._idle = period, idle
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._answered = threading.Event()
        self._readings: Readings | None = None
        self._read_at = self._looked_at = 0.0
        self._moments: deque[Moment] = deque(maxlen=round(HISTORY_SECONDS / period))

    def readings(self) -> Readings:
        """The latest readings. Only a first look waits for the driver, and not for long."""
        with self._lock:
            self._looked_at = time.monotonic()
            if self._thread is None:
                self._answered.clear()
                self._thread = threading.Thread(target=self._run, name="gpu readings", daemon=True)
                self._thread.start()
        self._answered.wait(PATIENCE_SECONDS)
        with self._lock:
            age = time.monotonic() - self._read_at
            if self._readings is None:
                return Readings((), "The driver of the GPU has not answered yet.")
            if age > self._period + 2 * PATIENCE_SECONDS:
                return replace(self._readings, problem=f"The driver of the GPU has not answered for {age:.0f} s; what is shown is old.")
            return self._readings

    def history(self, since: float = 0.0) -> list[Moment]:
        """The moments after a Unix time, oldest first."""
        with self._lock:
            return [moment for moment in self._moments if moment.time > since]

    def _run(self) -> None:
        try:
            while True:
                readings = self._driver.read()
                with self._lock:
                    self._keep(readings)
                    if time.monotonic() - self._looked_at > self._idle:
                        return
                self._answered.set()
                time.sleep(self._period)
        finally:
            with self._lock:
                self._driver.close()
                self._thread = None

    def _keep(self, readings: Readings) -> None:
        self._readings, self._read_at = readings, time.monotonic()
        if readings.devices:
            rows = ((each.utilisation_percent, _percent([each]), each.temperature_celsius, each.power_watts) for each in readings.devices)
            self._moments.append(Moment(round(time.time(), 2), tuple(rows)))


class ProcessUsage:
    """CPU and memory of a run's processes, for machines without a GPU and for runs that swap to memory."""

    def __init__(self) -> None:
        self._cpu: dict[tuple[int, float], float] = {}
        self._at = 0.0
        self._cached: dict[str, float] = {}

    def read(self, members: Callable[[], Iterable[psutil.Process]]) -> dict[str, float]:
        """cpu_percent (100 is one core; since the last reading), memory_gib (resident) and the machine's memory_total_gib.

        members finds the processes; it is asked at most once in two seconds.
        """
        now = time.monotonic()
        if now - self._at < PERIOD_SECONDS and self._cached:
            return self._cached
        seconds, memory = {}, 0
        for process in members():
            # A process that just ended uses nothing.
            with contextlib.suppress(psutil.Error, OSError):
                times = process.cpu_times()
                seconds[process.pid, process.create_time()] = times.user + times.system
                memory += process.memory_info().rss
        spent = sum(max(0.0, value - self._cpu[key]) for key, value in seconds.items() if key in self._cpu)
        usage = {"memory_gib": memory / GIB, "memory_total_gib": psutil.virtual_memory().total / GIB}
        if self._cpu:
            usage["cpu_percent"] = 100 * spent / max(now - self._at, 1e-3)
        self._cpu, self._at, self._cached = seconds, now, usage
        return usage


def as_page() -> dict[str, Any]:
    """The GPUs that a form offers to choose from, and a sentence when there are none."""
    readings = read()
    found = [
        {"number": str(device.index), "uuid": device.uuid or "", "name": device.name, "memory_gib": device.memory_total_gib}
        for device in readings.devices
    ]
    return {"gpus": found, "problem": readings.problem}
