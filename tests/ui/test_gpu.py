"""Readings of GPUs over a driver at the binding's boundary: what is not told is None, what is missing is a sentence, one thread asks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from kohya_like import gpu, gpu_drivers
from kohya_like.gpu import ProcessUsage, Sampler, as_json, used_by
from kohya_like.gpu_drivers import Amd, Device, Drivers, GpuProcess, Nvidia, Readings
from tests.ui.fake_nvml import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GIB,
    GPU_IS_LOST,
    NOT_SUPPORTED,
    UNINITIALISED,
    Card,
    FakeNvml,
)
from tests.ui.standin_runs import until

KEYS = {"name", "memoryTotal", "memoryUsed", "memoryPercent", "utilization", "temperature", "numGpus", "gpus"}
KEYS_OF_ONE = {
    *("index", "uuid", "name", "memoryTotal", "memoryUsed", "memoryPercent", "utilization", "temperature"),
    *("power", "powerLimit", "clock", "fan", "processes"),
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeNvml]:
    """Puts cards under the binding."""

    def put(*cards: Card, raises: int = 0) -> FakeNvml:
        fake = FakeNvml(list(cards), raises)
        fake.install(monkeypatch.setattr)
        return fake

    return put


def has_driver() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


# What is told


def test_there_is_a_sentence_without_a_driver_and_a_name_and_memory_for_every_gpu_with_one() -> None:
    readings = gpu.read()
    if not has_driver():
        assert readings.devices == () and readings.problem.endswith(".") and gpu.count() == 0
        assert "NVIDIA driver" in readings.problem
        return
    assert gpu.count() == len(readings.devices) > 0
    for each in readings.devices:
        assert each.name and (each.memory_total_gib is None or 0 <= (each.memory_used_gib or 0) <= each.memory_total_gib)


def test_one_gpu_is_told_with_all_its_fields(driver: Callable[..., FakeNvml]) -> None:
    driver(Card(processes=[(77, 5 * GIB), (88, None), (99, GIB)]))
    found = as_json(Nvidia().read(), pids={77, 88})
    assert found == {
        "name": "NVIDIA GeForce RTX 4090",
        "memoryTotal": 24.0,
        "memoryUsed": 6.0,
        "memoryPercent": 25,
        "utilization": 90,
        "temperature": 64,
        "numGpus": 1,
        "gpus": [
            {
                "index": 0,
                "uuid": "GPU-00000000-1111-2222-3333-444444444444",
                "name": "NVIDIA GeForce RTX 4090",
                "memoryTotal": 24.0,
                "memoryUsed": 6.0,
                "memoryPercent": 25,
                "utilization": 90,
                "temperature": 64,
                "power": 310.0,
                "powerLimit": 450.0,
                "clock": 2520,
                "fan": 45,
                "processes": [{"pid": 77, "memory": 5.0}, {"pid": 88, "memory": None}],
            }
        ],
    }


@pytest.mark.parametrize("number", [0, 1, 2, 8])
def test_several_gpus_are_summed_averaged_or_the_hottest(driver: Callable[..., FakeNvml], number: int) -> None:
    driver(*(Card(used=(index + 1) * GIB, utilisation=10 * index, temperature=50 + index) for index in range(number)))
    readings = Nvidia().read()
    found = as_json(readings)
    assert set(found) == KEYS and found["numGpus"] == number and all(set(each) == KEYS_OF_ONE for each in found["gpus"])
    assert [each["index"] for each in found["gpus"]] == list(range(number))
    if number == 0:
        assert found["name"] == "Unknown" and readings.problem == "The NVIDIA driver is here but shows no GPU."
        assert all(found[name] is None for name in KEYS - {"name", "numGpus", "gpus"})
        return
    used = sum(range(1, number + 1))
    assert found["name"] == ("NVIDIA GeForce RTX 4090" if number == 1 else f"{number}x NVIDIA GeForce RTX 4090")
    assert (found["memoryTotal"], found["memoryUsed"]) == (24.0 * number, float(used))
    assert found["memoryPercent"] == round(100 * used / (24 * number))
    assert found["utilization"] == round(10 * (number - 1) / 2) and found["temperature"] == 49 + number


def test_unlike_gpus_are_named_in_their_order(driver: Callable[..., FakeNvml]) -> None:
    driver(Card(name="A"), Card(name="B", total=80 * GIB, used=71 * GIB), Card(name="A"))
    found = as_json(Nvidia().read())
    assert found["name"] == "2x A, 1x B" and found["memoryPercent"] == round(100 * 83 / 128) and found["gpus"][1]["memoryPercent"] == 89


def test_memory_is_counted_as_nvidia_smi_counts_it_and_by_old_drivers_as_they_can(driver: Callable[..., FakeNvml]) -> None:
    driver(Card(), Card(refuses={"nvmlDeviceGetMemoryInfo_v2": FUNCTION_NOT_FOUND}))
    assert [each.memory_used_gib for each in Nvidia().read().devices] == [6.0, 6.5]


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetUUID", "uuid"),
        ("nvmlDeviceGetUtilizationRates", "utilization"),
        ("nvmlDeviceGetTemperature", "temperature"),
        ("nvmlDeviceGetPowerUsage", "power"),
        ("nvmlDeviceGetEnforcedPowerLimit", "powerLimit"),
        ("nvmlDeviceGetClockInfo", "clock"),
        ("nvmlDeviceGetFanSpeed", "fan"),
    ],
)
@pytest.mark.parametrize("code", [NOT_SUPPORTED, FUNCTION_NOT_FOUND])
def test_a_metric_that_is_refused_hides_nothing_else(driver: Callable[..., FakeNvml], function: str, field: str, code: int) -> None:
    driver(Card(refuses={function: code}), Card())
    found = as_json(Nvidia().read())
    first, second = found["gpus"]
    assert first[field] is None and [name for name, value in first.items() if value is None] == [field]
    assert None not in second.values() and found["numGpus"] == 2 and None not in found.values()


def test_what_one_gpu_does_not_tell_is_taken_from_the_others(driver: Callable[..., FakeNvml]) -> None:
    silent = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature")
    driver(Card(utilisation=80), Card(refuses=dict.fromkeys(silent, NOT_SUPPORTED)))
    found = as_json(Nvidia().read())
    assert (found["memoryTotal"], found["memoryPercent"], found["utilization"], found["temperature"]) == (24.0, 25, 80, 64)
    assert [found["gpus"][1][name] for name in ("memoryTotal", "memoryUsed", "memoryPercent", "utilization")] == [None] * 4


def test_old_drivers_tell_processes_in_their_own_form(driver: Callable[..., FakeNvml]) -> None:
    driver(Card(processes=[(5, GIB)], refuses={"nvmlDeviceGetComputeRunningProcesses_v3": FUNCTION_NOT_FOUND}))
    assert Nvidia().read().devices[0].processes == (GpuProcess(5, 1.0),)


# Drivers that come and go


def test_a_gpu_that_is_lost_keeps_its_place_and_name_and_is_told_in_a_sentence(driver: Callable[..., FakeNvml]) -> None:
    fake, nvidia = driver(Card(name="A"), Card(name="B"), Card(name="C")), Nvidia()
    assert nvidia.read().problem == ""
    fake.cards[1].refuses["*"] = GPU_IS_LOST
    readings = nvidia.read()
    assert [device.name for device in readings.devices] == ["A", "B", "C"] and "GPU 1 is lost" in readings.problem
    found = as_json(readings)
    assert found["gpus"][1]["memoryUsed"] is None and found["memoryUsed"] == 12.0 and found["name"] == "1x A, 1x B, 1x C"
    fake.cards[2].refuses["*"] = GPU_IS_LOST
    assert "GPUs 1, 2 are lost" in nvidia.read().problem
    # One that was lost before anybody asked has no name.
    assert [device.name for device in Nvidia().read().devices] == ["A", "GPU 1", "GPU 2"]


def test_the_driver_is_taken_once_and_again_after_it_was_gone(driver: Callable[..., FakeNvml]) -> None:
    fake, nvidia = driver(Card(), Card()), Nvidia()
    for _ in range(5):
        assert len(nvidia.read().devices) == 2
    assert fake.inits == 1
    fake.restart_driver()
    fake.raises = DRIVER_NOT_LOADED
    gone = nvidia.read()
    assert gone.devices == () and "No NVIDIA driver" in gone.problem and nvidia.read() == gone
    fake.raises, fake.cards = 0, [Card(name="New")]
    assert [device.name for device in nvidia.read().devices] == ["New"] and fake.inits == 2
    nvidia.close()
    assert fake.references == 0
    nvidia.close()
    assert len(nvidia.read().devices) == 1 and fake.inits == 3


def test_a_gpu_that_takes_the_place_of_another_has_its_own_name(driver: Callable[..., FakeNvml]) -> None:
    fake, nvidia = driver(Card(name="A", uuid="GPU-a"), Card(name="B", uuid="GPU-b")), Nvidia()
    nvidia.read()
    # The first one fell off the bus, and the driver numbers anew.
    del fake.cards[0]
    assert [(device.index, device.name, device.uuid) for device in nvidia.read().devices] == [(0, "B", "GPU-b")]


def test_a_driver_that_was_restarted_between_two_looks_is_not_noticed(driver: Callable[..., FakeNvml]) -> None:
    fake, nvidia = driver(Card()), Nvidia()
    nvidia.read()
    fake.restart_driver()
    assert len(nvidia.read().devices) == 1 and fake.inits == 2


@pytest.mark.parametrize("code", [DRIVER_NOT_LOADED, 12, 4, 18, UNINITIALISED, 999])
def test_every_error_of_the_driver_becomes_a_sentence(driver: Callable[..., FakeNvml], code: int) -> None:
    driver(Card(), raises=code)
    readings = Drivers().read()
    assert readings.devices == () and readings.problem.endswith(".") and len(readings.problem) > 30
    assert as_json(readings)["numGpus"] == 0 and gpu.count() == 0


def test_windows_is_named_where_wsl_has_no_driver(driver: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch) -> None:
    driver(raises=12)
    monkeypatch.setattr("platform.release", lambda: "5.15.153.1-microsoft-standard-WSL2")
    assert "in Windows, not in Linux" in Drivers().read().problem


def test_a_mac_is_told_in_a_sentence_with_its_memory(driver: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch) -> None:
    driver(raises=12)
    monkeypatch.setattr(gpu_drivers, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    problem = Drivers().read().problem
    assert "Apple" in problem and f"{psutil.virtual_memory().total / GIB:.0f} GiB" in problem


# AMD


def amdsmi(cards: list[dict[str, Any]]) -> ModuleType:
    """ROCm's package over these cards. A card without a function's answer raises, as a card without the sensor does."""
    package = ModuleType("amdsmi")

    class AmdSmiException(Exception):
        pass

    def answer(name: str) -> Callable[..., Any]:
        def tell(card: dict[str, Any], *arguments: object) -> Any:
            key = name if not arguments else f"{name}/{arguments[0]}"
            if key not in card:
                raise AmdSmiException("not supported")
            return card[key]

        return tell

    names = ("vram_usage", "activity", "asic_info", "device_uuid", "process_list")
    for name in (*(f"amdsmi_get_gpu_{each}" for each in names), "amdsmi_get_power_info", "amdsmi_get_temp_metric", "amdsmi_get_clock_info"):
        setattr(package, name, answer(name.removeprefix("amdsmi_get_").removeprefix("gpu_")))
    package.__dict__.update(
        AmdSmiException=AmdSmiException,
        AmdSmiTemperatureType=SimpleNamespace(EDGE="edge", HOTSPOT="hotspot"),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT="current"),
        AmdSmiClkType=SimpleNamespace(GFX="gfx"),
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: cards,
    )
    return package


def test_gpus_of_amd_are_read_where_there_are_none_of_nvidia(driver: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch) -> None:
    workstation = {
        "asic_info": {"market_name": "Radeon PRO W7900"},
        "device_uuid": "d5ff744f",
        "vram_usage": {"vram_total": 49152, "vram_used": 12288},
        "activity": {"gfx_activity": 88, "mm_activity": "N/A"},
        "temp_metric/edge": 71,
        "power_info": {"current_socket_power": "N/A", "average_socket_power": 203, "power_limit": 241_000_000},
        "clock_info/gfx": {"clk": 2304},
        "process_list": [{"pid": 4711, "memory_usage": {"vram_mem": 3 * GIB}}, {"pid": "N/A"}],
    }
    data_centre = {
        "asic_info": {"market_name": "N/A"},
        "temp_metric/hotspot": 55,
        "power_info": {"socket_power": 410, "power_limit": 750},
        "clock_info/gfx": {"cur_clk": 1900},
    }
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi([workstation, data_centre]))
    fake, both = driver(raises=12), Drivers()
    first, second = both.read().devices
    assert first == Device(0, "d5ff744f", "Radeon PRO W7900", 88, 12.0, 48.0, 71, 203, 241.0, 2304, None, (GpuProcess(4711, 3.0),))
    assert second == Device(1, None, "GPU 1", None, None, None, 55, 410, 750, 1900)
    assert as_json(both.read(), {4711})["gpus"][0]["processes"] == [{"pid": 4711, "memory": 3.0}]
    both.close()
    fake.raises, fake.cards = 0, [Card()]
    assert [device.name for device in both.read().devices] == ["NVIDIA GeForce RTX 4090"]


def test_a_driver_of_amd_that_fails_is_a_sentence(driver: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch) -> None:
    package = amdsmi([])
    monkeypatch.setitem(sys.modules, "amdsmi", package)

    def fail(*_: object) -> None:
        raise package.AmdSmiException("no permission")

    monkeypatch.setattr(package, "amdsmi_init", fail)
    assert Amd().read() == Readings((), "The AMD driver does not answer: no permission.")
    monkeypatch.setattr(package, "amdsmi_init", lambda: None)
    monkeypatch.setattr(package, "amdsmi_get_processor_handles", fail)
    assert "does not answer" in Amd().read().problem


# Which are of a run


def test_a_run_uses_the_gpus_it_was_given_and_those_its_processes_are_on() -> None:
    devices = [Device(index, f"GPU-{index}a{index}b", "x") for index in range(3)] + [Device(3, None, "x", processes=(GpuProcess(9, 1.0),))]
    assert used_by(devices, ["2", "0"], []) == [0, 2] and used_by(devices, ["GPU-1A"], []) == [1]
    assert used_by(devices, [], [9]) == [3] and used_by(devices, ["1"], [9]) == [1, 3]
    assert used_by(devices, ["", "cpu", "7", "MIG-1"], [1]) == []


# The sampler


class Counting:
    """A driver that counts how often it is asked, taken and let go."""

    def __init__(self, gpus: int = 1) -> None:
        self.reads = self.closes = 0
        self.gate = threading.Event()
        self.gate.set()
        self.gpus = gpus

    def read(self) -> Readings:
        self.gate.wait()
        self.reads += 1
        return Readings(tuple(Device(index, None, "x", self.reads) for index in range(self.gpus)), "" if self.gpus else "None here.")

    def close(self) -> None:
        self.closes += 1


def test_many_readers_ask_the_driver_once_a_period_and_share_one_history() -> None:
    source = Counting()
    sampler = Sampler(source, period=0.2, idle=60.0)
    readers = [threading.Thread(target=lambda: [sampler.readings() for _ in range(300)]) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    until(lambda: source.reads >= 4)
    fewest, moments, most = source.reads - 1, sampler.history(), source.reads
    assert fewest <= len(moments) <= most and [moment.gpus[0][0] for moment in moments] == list(range(1, len(moments) + 1))
    assert sampler.history(moments[1].time)[0] == moments[2] and sampler.history(time.time() + 1) == []
    assert sum(thread.name == "gpu readings" and thread.is_alive() for thread in threading.enumerate()) >= 1
    sampler._idle = 0.0
    until(lambda: source.closes == 1)


def test_nobody_is_asked_when_nobody_looks_and_the_driver_is_let_go(driver: Callable[..., FakeNvml]) -> None:
    fake = driver(Card())
    sampler = Sampler(period=0.05, idle=600.0)
    assert len(sampler.readings().devices) == 1 and fake.references == 1
    sampler._idle = 0.0
    until(lambda: fake.references == 0)
    asked, sampler._idle = len(fake.asked), 600.0
    time.sleep(0.3)
    assert len(fake.asked) == asked
    kept = len(sampler.history())
    assert len(sampler.readings().devices) == 1 and fake.inits == 2 and len(sampler.history()) > kept
    sampler._idle = 0.0
    until(lambda: fake.references == 0)


def test_the_history_is_bounded_and_has_no_rows_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "HISTORY_SECONDS", 0.2)
    source, empty = Counting(2), Counting(0)
    sampler, none = Sampler(source, period=0.02, idle=600.0), Sampler(empty, period=0.02, idle=600.0)
    sampler.readings()
    assert none.readings() == Readings((), "None here.")
    until(lambda: source.reads > 15 and empty.reads > 3)
    assert len(sampler.history()) == 10 and none.history() == []
    assert len(sampler.history()[-1].gpus) == 2 and sampler.history()[-1].gpus[0][0] > 5
    sampler._idle = none._idle = 0.0
    until(lambda: source.closes and empty.closes)


def test_a_driver_that_hangs_is_told_and_does_not_hang_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PATIENCE_SECONDS", 0.1)
    source = Counting()
    source.gate.clear()
    sampler = Sampler(source, period=0.05, idle=600.0)
    # The driver answers only once the gate is open: waiting for it would take for ever.
    assert "has not answered yet" in sampler.readings().problem
    source.gate.set()
    until(lambda: sampler.readings().devices)
    source.gate.clear()
    until(lambda: "has not answered for" in sampler.readings().problem)
    assert len(sampler.readings().devices) == 1
    source.gate.set()
    until(lambda: sampler.readings().problem == "")
    sampler._idle = 0.0
    until(lambda: source.closes == 1)


# Processes


def test_the_usage_of_a_process_is_what_it_took_of_the_time() -> None:
    def now() -> tuple[float, float]:
        times = busy.cpu_times()
        return times.user + times.system, time.monotonic()

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        usage = ProcessUsage()
        busy = psutil.Process(child.pid)
        before = now()
        first = usage.read(lambda: [busy])
        assert "cpu_percent" not in first and 0 < first["memory_gib"] < first["memory_total_gib"]
        begun = now()
        until(lambda: now()[0] > begun[0] + 0.2 and now()[1] > begun[1] + gpu.PERIOD_SECONDS + 0.2)
        ended = now()
        second = usage.read(lambda: [busy])
        after = now()
        child.kill()
    # However little a busy machine gave it; the clock of processes goes in steps of 0.01 s.
    least, most = ((ended[0] - begun[0] - 0.02) / (after[1] - before[1]), (after[0] - before[0] + 0.02) / (ended[1] - begun[1]))
    assert 100 * least - 1 <= second["cpu_percent"] <= 100 * most + 1


def test_a_process_that_is_gone_uses_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        gone = psutil.Process(child.pid)
    assert ProcessUsage().read(lambda: [gone])["memory_gib"] == 0.0 and os.getpid() != gone.pid
