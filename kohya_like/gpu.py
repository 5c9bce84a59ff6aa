"""Readings of all NVIDIA GPUs through NVML, and of a run's processes where there is none. Degrades to a sentence without a driver."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import psutil
import pynvml

CACHE_SECONDS = 2.0
GIB = 2**30
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Device:
    """One GPU. None stands for what this GPU, driver or virtual machine does not tell."""

    index: int
    name: str
    utilisation_percent: float | None
    memory_used_gib: float | None
    memory_total_gib: float | None
    temperature_celsius: float | None
    power_watts: float | None
    power_limit_watts: float | None
    fan_percent: float | None
    clock_mhz: float | None


@dataclass(frozen=True)
class Readings:
    """All GPUs at one moment."""

    devices: tuple[Device, ...]
    problem: str
    """Why there are none, in a sentence; empty when there are."""

    @property
    def aggregate(self) -> dict[str, float | None]:
        """Memory and power summed, utilisation averaged, temperature of the hottest; over the GPUs that tell."""
        devices = self.devices
        return {
            "utilisation_percent": _over(_mean, (device.utilisation_percent for device in devices)),
            "memory_used_gib": _over(sum, (device.memory_used_gib for device in devices)),
            "memory_total_gib": _over(sum, (device.memory_total_gib for device in devices)),
            "temperature_celsius": _over(max, (device.temperature_celsius for device in devices)),
            "power_watts": _over(sum, (device.power_watts for device in devices)),
        }

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        return {"devices": [asdict(device) for device in self.devices], "aggregate": self.aggregate, "problem": self.problem}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _over(combine: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return combine(known) if known else None


def _ask(question: Callable[[], _Value]) -> _Value | None:
    """The answer, or None where NVML has none: each metric is missing on some card, under WSL or with MIG."""
    try:
        return question()
    except pynvml.NVMLError:
        return None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _read(index: int) -> Device | None:
    handle = _ask(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        return None
    memory = _ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    name = _ask(lambda: pynvml.nvmlDeviceGetName(handle))
    return Device(
        index=index,
        name=name.decode(errors="replace") if isinstance(name, bytes) else name or f"GPU {index}",
        utilisation_percent=_ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        memory_used_gib=None if memory is None else memory.used / GIB,
        memory_total_gib=None if memory is None else memory.total / GIB,
        temperature_celsius=_ask(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        power_watts=_scaled(_ask(lambda: pynvml.nvmlDeviceGetPowerUsage(handle)), 1e-3),
        power_limit_watts=_scaled(_ask(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)), 1e-3),
        fan_percent=_ask(lambda: pynvml.nvmlDeviceGetFanSpeed(handle)),
        clock_mhz=_ask(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
    )


def _problem(err: pynvml.NVMLError) -> str:
    if err.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        return "No NVIDIA driver on this machine; training runs on the CPU or on another kind of device."
    return f"The NVIDIA driver does not answer: {err}."


def read() -> Readings:
    """Asks the driver now (milliseconds per GPU). NVML sees all GPUs, whatever CUDA_VISIBLE_DEVICES says."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as err:
        return Readings((), _problem(err))
    try:
        found = [_read(index) for index in range(_ask(pynvml.nvmlDeviceGetCount) or 0)]
        devices = tuple(device for device in found if device is not None)
        return Readings(devices, "" if devices else "The NVIDIA driver is here but shows no GPU.")
    finally:
        _ask(pynvml.nvmlShutdown)


def count() -> int:
    """Number of GPUs; 0 without a driver."""
    return len(read().devices)


class GpuCache:
    """Readings at most two seconds old while somebody looks; one thread asks the driver, however many tabs are open."""

    def __init__(self, source: Callable[[], Readings] = read) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._readings: Readings | None = None
        self._read_at = 0.0
        self._thread: threading.Thread | None = None

    def readings(self) -> Readings:
        """The latest readings; only the first call waits for the driver."""
        with self._lock:
            if self._readings is None:
                self._readings, self._read_at = self._source(), time.monotonic()
            elif time.monotonic() - self._read_at > CACHE_SECONDS and self._thread is None:
                self._thread = threading.Thread(target=self._refresh, name="gpu readings", daemon=True)
                self._thread.start()
            return self._readings

    def _refresh(self) -> None:
        readings = self._source()
        with self._lock:
            self._readings, self._read_at, self._thread = readings, time.monotonic(), None


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
        if now - self._at < CACHE_SECONDS and self._cached:
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
