"""Who is asked for readings of GPUs: NVML for NVIDIA's, amdsmi for AMD's under ROCm. Degrades to a sentence. Knows drivers, not runs."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import psutil
import pynvml

from sd_scripts.runs.events import number

GIB = 2**30


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    memory_gib: float | None


@dataclass(frozen=True)
class Device:
    """One GPU. None stands for what this GPU, driver or virtual machine does not tell."""

    index: int
    """In the order of the PCI bus, whatever CUDA_VISIBLE_DEVICES says."""
    uuid: str | None
    name: str
    utilisation_percent: float | None = None
    memory_used_gib: float | None = None
    memory_total_gib: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    clock_mhz: float | None = None
    fan_percent: float | None = None
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True)
class Readings:
    """All GPUs at one moment."""

    devices: tuple[Device, ...]
    problem: str = ""
    """Why there are none, or what is wrong with one, in a sentence; empty when all is well."""


class Driver(Protocol):
    """What can be asked for readings, from one thread at a time."""

    def read(self) -> Readings: ...

    def close(self) -> None:
        """Lets go of the driver, which cannot be restarted before; the next read() takes it again."""
        ...


# --- NVIDIA ---------------------------------------------------------------------------------------------------------


class _Questions:
    """Asks one GPU. Each metric is missing on some card, under WSL or with MIG: a refusal is None and hides nothing else."""

    def __init__(self, index: int) -> None:
        self.lost = False
        self._handle = self._answer(pynvml.nvmlDeviceGetHandleByIndex, index)

    def __call__(self, question: Callable[..., Any], *arguments: Any) -> Any:
        return None if self._handle is None else self._answer(question, self._handle, *arguments)

    def _answer(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except pynvml.NVMLError as err:
            self.lost |= err.value == pynvml.NVML_ERROR_GPU_IS_LOST
            return None


class Nvidia:
    """NVML: taken at the first question and kept; taken anew when the driver was restarted in between."""

    def __init__(self) -> None:
        self._taken = False
        self._names: dict[int, tuple[str, str | None]] = {}
        """Name and UUID by index when they were last told: a GPU that is lost keeps them."""

    def read(self) -> Readings:
        try:
            found = [self._device(index) for index in range(self._count())]
        except pynvml.NVMLError as err:
            return Readings((), _sentence(err))
        lost = [str(device.index) for device, is_lost in found if is_lost]
        problem = "" if found else "The NVIDIA driver is here but shows no GPU."
        if lost:
            which = f"GPU {lost[0]} is" if len(lost) == 1 else f"GPUs {', '.join(lost)} are"
            problem = f"{which} lost: the driver cannot reach it any more, and runs on it fail; restart the machine."
        return Readings(tuple(device for device, _ in found), problem)

    def _count(self) -> int:
        if self._taken:
            try:
                return int(pynvml.nvmlDeviceGetCount())
            except pynvml.NVMLError:
                self.close()
        pynvml.nvmlInit()
        self._taken = True
        return int(pynvml.nvmlDeviceGetCount())

    def close(self) -> None:
        if self._taken:
            self._taken = False
            self._names.clear()
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _device(self, index: int) -> tuple[Device, bool]:
        ask = _Questions(index)
        name, uuid = _text(ask(pynvml.nvmlDeviceGetName)), _text(ask(pynvml.nvmlDeviceGetUUID))
        if ask.lost:
            name, uuid = self._names.get(index, (None, None))
        elif name is not None:
            self._names[index] = name, uuid
        # The second form counts as nvidia-smi does: without what the driver keeps for itself.
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2) or ask(pynvml.nvmlDeviceGetMemoryInfo)
        rates = ask(pynvml.nvmlDeviceGetUtilizationRates)
        processes = ask(pynvml.nvmlDeviceGetComputeRunningProcesses_v3)
        if processes is None:
            # Drivers from before 2021 know the second form only.
            processes = ask(pynvml.nvmlDeviceGetComputeRunningProcesses_v2) or ()
        device = Device(
            index=index,
            uuid=uuid,
            name=name or f"GPU {index}",
            utilisation_percent=None if rates is None else rates.gpu,
            memory_used_gib=None if memory is None else memory.used / GIB,
            memory_total_gib=None if memory is None else memory.total / GIB,
            temperature_celsius=ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
            power_watts=_scaled(ask(pynvml.nvmlDeviceGetPowerUsage), 1e-3),
            power_limit_watts=_scaled(ask(pynvml.nvmlDeviceGetEnforcedPowerLimit), 1e-3),
            clock_mhz=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
            fan_percent=ask(pynvml.nvmlDeviceGetFanSpeed),
            processes=tuple(GpuProcess(process.pid, _scaled(process.usedGpuMemory, 1 / GIB)) for process in processes),
        )
        return device, ask.lost


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _sentence(err: pynvml.NVMLError) -> str:
    if err.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        if "microsoft" in platform.release().lower():
            return "WSL shows no NVIDIA driver: install it in Windows, not in Linux, and run `wsl --update`. Training runs on the CPU."
        return "No NVIDIA driver on this machine; training runs on the CPU or on another kind of device."
    if err.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "The NVIDIA driver was updated while it was running; restart the machine."
    return f"The NVIDIA driver does not answer: {err}."


# --- AMD ------------------------------------------------------------------------------------------------------------


class Amd:
    """amdsmi, the Python package of ROCm; where it is missing, there is nobody to ask."""

    def __init__(self) -> None:
        self._smi: ModuleType | None = None

    def read(self) -> Readings:
        if self._smi is None:
            try:
                smi = importlib.import_module("amdsmi")
            except (ImportError, OSError, AttributeError):
                # The package is there without ROCm's library, or not at all.
                is_here = os.path.exists("/dev/kfd")
                return Readings((), "The readings of AMD GPUs need the Python package amdsmi, which comes with ROCm." if is_here else "")
            try:
                smi.amdsmi_init()
            except smi.AmdSmiException as err:
                return Readings((), f"The AMD driver does not answer: {err}.")
            self._smi = smi
        try:
            handles = self._smi.amdsmi_get_processor_handles()
        except self._smi.AmdSmiException as err:
            self.close()
            return Readings((), f"The AMD driver does not answer: {err}.")
        return Readings(tuple(self._device(index, handle) for index, handle in enumerate(handles)))

    def close(self) -> None:
        if self._smi is not None:
            with contextlib.suppress(self._smi.AmdSmiException):
                self._smi.amdsmi_shut_down()
            self._smi = None

    def _device(self, index: int, handle: object) -> Device:
        smi = self._smi
        assert smi is not None

        def ask(name: str, *arguments: object) -> Any:
            # Metrics differ between cards, and names between versions of the package.
            try:
                return getattr(smi, name)(handle, *arguments)
            except (smi.AmdSmiException, AttributeError):
                return None

        def told(answer: Any, *names: str) -> float | None:
            # What a card has no sensor for is "N/A".
            found = (number(answer.get(name)) for name in names) if isinstance(answer, dict) else ()
            return next((value for value in found if value is not None), None)

        memory, power = ask("amdsmi_get_gpu_vram_usage"), ask("amdsmi_get_power_info")
        sensors = (ask("amdsmi_get_temp_metric", sensor, smi.AmdSmiTemperatureMetric.CURRENT) for sensor in _sensors(smi))
        limit = told(power, "power_limit")
        asic = ask("amdsmi_get_gpu_asic_info")
        name = asic.get("market_name") if isinstance(asic, dict) else None
        uuid = ask("amdsmi_get_gpu_device_uuid")
        processes = [process for process in ask("amdsmi_get_gpu_process_list") or () if isinstance(process, dict)]
        return Device(
            index=index,
            uuid=uuid if isinstance(uuid, str) else None,
            name=name if isinstance(name, str) and name not in ("", "N/A") else f"GPU {index}",
            utilisation_percent=told(ask("amdsmi_get_gpu_activity"), "gfx_activity"),
            memory_used_gib=_scaled(told(memory, "vram_used"), 1 / 1024),
            memory_total_gib=_scaled(told(memory, "vram_total"), 1 / 1024),
            temperature_celsius=next((value for value in map(number, sensors) if value is not None), None),
            power_watts=told(power, "socket_power", "current_socket_power", "average_socket_power"),
            # In microwatts since ROCm 6, in watts before.
            power_limit_watts=_scaled(limit, 1e-6 if limit is not None and limit > 1e5 else 1.0),
            clock_mhz=told(ask("amdsmi_get_clock_info", smi.AmdSmiClkType.GFX), "clk", "cur_clk"),
            processes=tuple(
                GpuProcess(int(process["pid"]), _scaled(told(process.get("memory_usage"), "vram_mem"), 1 / GIB))
                for process in processes
                if number(process.get("pid")) is not None
            ),
        )


def _sensors(smi: ModuleType) -> list[object]:
    """The sensor at the edge of the chip, and the hottest one, which is all that data-centre cards have."""
    kinds = smi.AmdSmiTemperatureType
    return [getattr(kinds, name) for name in ("EDGE", "HOTSPOT", "JUNCTION") if hasattr(kinds, name)]


# --- All of them ----------------------------------------------------------------------------------------------------


class Drivers:
    """NVIDIA's GPUs; where there are none, AMD's; else a sentence."""

    def __init__(self) -> None:
        self._nvidia, self._amd = Nvidia(), Amd()

    def read(self) -> Readings:
        nvidia = self._nvidia.read()
        if nvidia.devices:
            return nvidia
        amd = self._amd.read()
        return amd if amd.devices or amd.problem else Readings((), _apple() or nvidia.problem)

    def close(self) -> None:
        self._nvidia.close()
        self._amd.close()


def _apple() -> str:
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return ""
    total = psutil.virtual_memory().total / GIB
    return f"Apple's GPU shares the {total:.0f} GiB of memory of this Mac; macOS tells other programs nothing else about it."
