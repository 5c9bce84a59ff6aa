"""What the GPU monitor costs: CPU of the studio with eight GPUs, one run under way and several tabs that watch it.

The driver is the tests' fake one, so the time inside NVIDIA's own library is not in it. The studio without a tab, and with tabs that
watch a run on a machine without a GPU, stand beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from report import report

from kohya_like.supervisor import JobSupervisor
from tests.ui.conftest import Studio, start_studio
from tests.ui.fake_nvml import DRIVER_NOT_LOADED, GIB, Card, environment, write
from tests.ui.standin_runs import SCRIPT, command, options, until

SECONDS = 15.0
TABS = 3


def cpu_percent(studio: Studio, seconds: float = SECONDS) -> float:
    """CPU of the studio's process over some seconds; 100 is one core."""
    process = psutil.Process(studio.process.pid)
    before, begun = process.cpu_times(), time.perf_counter()
    time.sleep(seconds)
    after = process.cpu_times()
    return 100 * (after.user + after.system - before.user - before.system) / (time.perf_counter() - begun)


class Tab(threading.Thread):
    """Asks what a tab asks that shows a run: the run every second, the machine every two, the list of runs every two and a half."""

    def __init__(self, url: str, run: str, token: str) -> None:
        super().__init__(daemon=True)
        self._url, self._run, self._token = url, run, token
        self.over = threading.Event()

    def run(self) -> None:
        begun, due, since = time.monotonic(), [0.0, 0.0, 0.0], 0.0
        while not self.over.wait(0.05):
            paths = (f"kl/run/{self._run}", f"kl/run/{self._run}/machine?since={since}", "kl/runs")
            for place, period in enumerate((1.0, 2.0, 2.5)):
                if time.monotonic() - begun >= due[place]:
                    due[place] = time.monotonic() - begun + period
                    answer = self._ask(paths[place])
                    since = (answer.get("history") or [[since]])[-1][0]

    def _ask(self, path: str) -> dict[str, Any]:
        request = urllib.request.Request(self._url + path, headers={"x-kl-token": self._token})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())  # type: ignore[no-any-return]


def sampled(file: Path, cards: list[Card], seconds: float = SECONDS) -> float:
    """CPU of one sampler alone, in a process that does nothing else."""
    code = (
        "import time; from kohya_like.gpu import Sampler\n"
        "sampler = Sampler(); sampler.readings(); begun, cpu = time.perf_counter(), time.process_time()\n"
        f"time.sleep({seconds}); print(100 * (time.process_time() - cpu) / (time.perf_counter() - begun), len(sampler.history()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment(file, cards)}, capture_output=True, text=True, check=True
    )
    return float(found.stdout.split()[0])


def main() -> None:
    cards = [Card(uuid=f"GPU-{index}", used=(index + 1) * 2 * GIB) for index in range(8)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        root, file = Path(folder) / "output", Path(folder) / "gpus.json"
        root.mkdir()
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        supervisor = JobSupervisor(root, command("endless"))
        job = supervisor.start(SCRIPT, options(root, output_name="watched"))
        stack.callback(supervisor.close)
        stack.callback(supervisor.stop, job, 0)
        until(lambda: (job.path / "events.jsonl").exists())
        record = json.loads((job.path / "run.json").read_text())
        (job.path / "run.json").write_text(json.dumps({**record, "device": "0,1"}))
        cards[0].processes = [(process.pid, GIB) for process in supervisor.members(job)]
        os.environ |= environment(file, cards)
        studio = start_studio(root)
        stack.callback(studio.end)
        with urllib.request.urlopen(studio.url, timeout=120) as page:
            found = re.search(r'"token": ?"([\w-]{20,})"', page.read().decode())
        assert found is not None, "the page does not say its token where it used to"
        figures = {"sampler_percent": sampled(file, cards), "no_tab_percent": cpu_percent(studio)}
        figures["memory_mib"] = psutil.Process(studio.process.pid).memory_info().rss / 2**20
        for number in range(1, TABS + 1):
            tab = Tab(studio.url, job.name, found[1])
            tab.start()
            stack.callback(tab.join)
            stack.callback(tab.over.set)
            if number in (1, TABS):
                time.sleep(5.0)
                figures[f"tabs_{number}_percent"] = cpu_percent(studio)
        figures["memory_watched_mib"] = psutil.Process(studio.process.pid).memory_info().rss / 2**20
        write(file, cards, raises=DRIVER_NOT_LOADED)
        time.sleep(5.0)
        figures[f"tabs_{TABS}_without_gpu_percent"] = cpu_percent(studio)
        report("GPU monitor", "sampler under 1 %, tabs together under 15 % of a core", **figures)


if __name__ == "__main__":
    main()
