"""Readings of GPUs: what is not told is None, what is missing is a sentence, and many readers ask the driver once."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pynvml

from kohya_like import gpu
from kohya_like.gpu import Device, GpuCache, ProcessUsage, Readings


def device(index: int, utilisation: float | None, used: float | None, heat: float | None) -> Device:
    return Device(index, f"card {index}", utilisation, used, 24.0, heat, 100.0, None, None, None)


def has_driver() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


def test_there_is_a_sentence_without_a_driver_and_a_name_and_memory_for_every_gpu_with_one() -> None:
    readings = gpu.read()
    if not has_driver():
        assert readings.devices == () and "No NVIDIA driver" in readings.problem and gpu.count() == 0
        assert readings.as_json()["aggregate"]["memory_used_gib"] is None
        return
    assert readings.problem == "" and gpu.count() == len(readings.devices)
    for each in readings.devices:
        assert each.name and (each.memory_total_gib is None or 0 <= (each.memory_used_gib or 0) <= each.memory_total_gib)


def test_several_gpus_are_summed_averaged_or_the_hottest_over_those_that_tell() -> None:
    readings = Readings((device(0, 90.0, 10.0, 70.0), device(1, 50.0, 6.0, 80.0), device(2, None, None, None)), "")
    assert readings.aggregate == {
        "utilisation_percent": 70.0,
        "memory_used_gib": 16.0,
        "memory_total_gib": 72.0,
        "temperature_celsius": 80.0,
        "power_watts": 300.0,
    }
    assert [each["index"] for each in readings.as_json()["devices"]] == [0, 1, 2]


def test_a_metric_that_the_driver_refuses_is_none() -> None:
    def refuse() -> float:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    assert gpu._ask(refuse) is None and gpu._scaled(None, 2.0) is None and gpu._scaled(3.0, 2.0) == 6.0


def test_every_driver_error_becomes_a_sentence() -> None:
    for code in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_NO_PERMISSION):
        assert gpu._problem(pynvml.NVMLError(code)).endswith(".")


def test_many_readers_ask_the_driver_once_in_two_seconds() -> None:
    asked: list[float] = []

    def source() -> Readings:
        asked.append(time.monotonic())
        return Readings((device(0, float(len(asked)), 1.0, 1.0),), "")

    cache = GpuCache(source)
    for _ in range(50):
        cache.readings()
    assert len(asked) == 1
    end = time.monotonic() + gpu.CACHE_SECONDS + 0.5
    while time.monotonic() < end:
        cache.readings()
        time.sleep(0.02)
    assert len(asked) == 2 and cache.readings().devices[0].utilisation_percent == 2.0


def test_the_usage_of_a_busy_process_is_about_one_core() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        usage = ProcessUsage()
        busy = psutil.Process(child.pid)
        first = usage.read(lambda: [busy])
        assert "cpu_percent" not in first and 0 < first["memory_gib"] < first["memory_total_gib"]
        time.sleep(gpu.CACHE_SECONDS + 0.2)
        begun = busy.cpu_times().user
        second = usage.read(lambda: [busy])
        child.kill()
    # Other work on the machine takes its share, but never gives more than a core.
    assert begun > 0 and 5 < second["cpu_percent"] < 130


def test_a_process_that_is_gone_uses_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        gone = psutil.Process(child.pid)
    assert ProcessUsage().read(lambda: [gone])["memory_gib"] == 0.0 and os.getpid() != gone.pid
