"""A driver to try the GPU monitor on: NVML's functions as the binding offers them, over cards that a test describes.

In a test: `fake = FakeNvml([Card()]); fake.install(monkeypatch.setattr)`. In a studio of its own: `environment(file, cards)`, which puts
the folder fake_driver before the real binding; the file may be written again at any time.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

GIB = 2**30
HERE = Path(__file__).resolve().parent
UNINITIALISED, NOT_SUPPORTED, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, GPU_IS_LOST = 1, 3, 9, 13, 15


@dataclass
class Card:
    """One GPU; memory in bytes, power in milliwatts. refuses: error codes by the name of the function that raises them, "*" for all."""

    name: str = "NVIDIA GeForce RTX 4090"
    uuid: str = "GPU-00000000-1111-2222-3333-444444444444"
    total: int = 24 * GIB
    used: int = 6 * GIB
    utilisation: int = 90
    temperature: int = 64
    power: int = 310_000
    power_limit: int = 450_000
    clock: int = 2520
    fan: int = 45
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    refuses: dict[str, int] = field(default_factory=dict)


class FakeNvml:
    """The state of the driver. raises: the error code of nvmlInit, 0 for none."""

    def __init__(self, cards: list[Card], raises: int = 0) -> None:
        self.cards, self.raises = cards, raises
        self.references = self.inits = 0
        self.asked: list[str] = []
        self.error: Callable[[int], Exception] = RuntimeError
        self._strangers: set[threading.Thread] = set()
        """Threads that were there before it: samplers of other tests ask the binding for minutes, and find no driver."""

    def install(self, put: Callable[[ModuleType, str, object], object], module: ModuleType | None = None) -> None:
        """Puts its functions into the binding, with the binding's own errors."""
        if module is None:
            import pynvml as module  # type: ignore[no-redef]
        assert module is not None
        self.error = module.NVMLError
        self._strangers = {thread for thread in threading.enumerate() if thread is not threading.current_thread()}
        for name in dir(self):
            if name.startswith("nvml"):
                put(module, name, getattr(self, name))

    def restart_driver(self) -> None:
        """Whoever had taken the driver has lost it."""
        self.references = 0

    def _check(self, name: str, card: Card | None = None) -> None:
        self.asked.append(name)
        if not self.references:
            raise self.error(UNINITIALISED)
        if card is not None:
            code = card.refuses.get(name) or card.refuses.get("*")
            if code:
                raise self.error(code)

    def nvmlInit(self) -> None:
        if threading.current_thread() in self._strangers:
            raise self.error(DRIVER_NOT_LOADED)
        if self.raises:
            raise self.error(self.raises)
        self.references += 1
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self._check("nvmlShutdown")
        self.references -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._check("nvmlDeviceGetCount")
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        self._check("nvmlDeviceGetHandleByIndex", self.cards[index])
        return self.cards[index]

    def _told(self, name: str, card: Card, value: Any) -> Any:
        self._check(name, card)
        return value

    def nvmlDeviceGetName(self, card: Card) -> str:
        return str(self._told("nvmlDeviceGetName", card, card.name))

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return str(self._told("nvmlDeviceGetUUID", card, card.uuid))

    def nvmlDeviceGetMemoryInfo(self, card: Card, version: int | None = None) -> SimpleNamespace:
        name = "nvmlDeviceGetMemoryInfo_v2" if version else "nvmlDeviceGetMemoryInfo"
        # The first form counts the driver's own share, here half a GiB, as used.
        used = card.used if version else card.used + GIB // 2
        return self._told(name, card, SimpleNamespace(total=card.total, used=used))  # type: ignore[no-any-return]

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> SimpleNamespace:
        return self._told("nvmlDeviceGetUtilizationRates", card, SimpleNamespace(gpu=card.utilisation, memory=10))  # type: ignore[no-any-return]

    def nvmlDeviceGetTemperature(self, card: Card, sensor: int) -> int:
        return int(self._told("nvmlDeviceGetTemperature", card, card.temperature))

    def nvmlDeviceGetPowerUsage(self, card: Card) -> int:
        return int(self._told("nvmlDeviceGetPowerUsage", card, card.power))

    def nvmlDeviceGetEnforcedPowerLimit(self, card: Card) -> int:
        return int(self._told("nvmlDeviceGetEnforcedPowerLimit", card, card.power_limit))

    def nvmlDeviceGetClockInfo(self, card: Card, kind: int) -> int:
        return int(self._told("nvmlDeviceGetClockInfo", card, card.clock))

    def nvmlDeviceGetFanSpeed(self, card: Card) -> int:
        return int(self._told("nvmlDeviceGetFanSpeed", card, card.fan))

    def nvmlDeviceGetComputeRunningProcesses_v3(self, card: Card) -> list[SimpleNamespace]:
        found = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.processes]
        return list(self._told("nvmlDeviceGetComputeRunningProcesses_v3", card, found))

    def nvmlDeviceGetComputeRunningProcesses_v2(self, card: Card) -> list[SimpleNamespace]:
        found = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.processes]
        return list(self._told("nvmlDeviceGetComputeRunningProcesses_v2", card, found))


class FakeFromFile(FakeNvml):
    """The cards that a file describes now; their use and power go up and down a little, so that a history has something to show."""

    def __init__(self, file: Path) -> None:
        super().__init__([])
        self._file = file

    def _look(self) -> None:
        content = json.loads(self._file.read_text())
        self.raises, self.cards = content["raises"], [Card(**card) for card in content["cards"]]
        for index, card in enumerate(self.cards):
            wave = int(time.time() * 0.7 + 3 * index) % 7
            card.utilisation = max(0, card.utilisation - 3 * wave)
            card.power = max(0, card.power - 9000 * wave)

    def nvmlInit(self) -> None:
        self._look()
        super().nvmlInit()

    def nvmlDeviceGetCount(self) -> int:
        self._look()
        if self.raises:
            self.restart_driver()
        return super().nvmlDeviceGetCount()


def write(file: Path, cards: list[Card], raises: int = 0) -> None:
    """Describes the cards of a studio's driver."""
    aside = file.with_suffix(".new")
    aside.write_text(json.dumps({"raises": raises, "cards": [asdict(card) for card in cards]}))
    os.replace(aside, file)


def environment(file: Path, cards: list[Card], raises: int = 0) -> dict[str, str]:
    """Variables under which a new Python process meets these cards."""
    write(file, cards, raises)
    return {"PYTHONPATH": os.pathsep.join([str(HERE / "fake_driver"), str(HERE.parents[1])]), "FAKE_GPUS": str(file)}
