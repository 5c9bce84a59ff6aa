"""Start, find, recognise and end the processes of a run, on every system psutil knows."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

RUNNER = Path(__file__).with_name("runner.py")
ENVIRONMENT = {"PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
RUN_ID = "KOHYA_LIKE_RUN_ID"
"""Environment variable that every process of a run inherits. Ranks that torchrun puts into sessions of their own are found by it."""
_lock = threading.Lock()
_children: list[subprocess.Popen[bytes]] = []
"""Started by this process and not collected yet: they live as long as they like, whoever started them and has gone since."""


def start(folder: Path, argv: list[str], run_id: str, console: Path, environment: Mapping[str, str] | None = None) -> int:
    """Starts a command under runner.py, in a session of its own that outlives the studio; exit.json in the folder will tell its end.

    environment is added to the studio's own. Gives the pid. Raises OSError.
    """
    with console.open("ab") as stream:
        child = subprocess.Popen(
            [sys.executable, "-P", str(RUNNER), str(folder), *argv],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, RUN_ID: run_id, **ENVIRONMENT, **(environment or {})},
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0) | getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    with _lock:
        _children.append(child)
    return child.pid


def collect() -> None:
    """Collects children that have ended, so that none stays as a zombie."""
    with _lock:
        _children[:] = [child for child in _children if child.poll() is None]


def run_id_of(process: psutil.Process) -> str | None:
    """The run a process belongs to; None when it belongs to none or may not be asked."""
    try:
        return process.environ().get(RUN_ID)
    except (psutil.Error, OSError):
        return None


def living(pid: int) -> psutil.Process | None:
    """The process with this pid, unless it is gone or a zombie."""
    try:
        process = psutil.Process(pid)
        return None if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else process
    except (psutil.Error, OSError):
        return None


def created(process: psutil.Process) -> float:
    """Unix time at which the process began; 0.0 when it is gone."""
    try:
        return process.create_time()
    except (psutil.Error, OSError):
        return 0.0


def is_same(pid: int, create_time: float, run_id: str) -> bool:
    """Whether this pid still is the process that was noted down, not a later one that got the same number.

    The run id in its environment decides. Where the environment cannot be read, the start time does, which a clock change moves.
    """
    process = living(pid)
    if process is None:
        return False
    found = run_id_of(process)
    return found == run_id if found is not None else abs(created(process) - create_time) < 0.05


def of_runs() -> dict[str, list[psutil.Process]]:
    """All living processes that carry a run id, by run id."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        name = run_id_of(process)
        if name and living(process.pid) is not None:
            found.setdefault(name, []).append(process)
    return found


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it."""
    process = living(pid)
    if process is None:
        return []
    try:
        return [process, *process.children(recursive=True)]
    except (psutil.Error, OSError):
        return [process]


def _alive(processes: Iterable[psutil.Process]) -> Iterator[psutil.Process]:
    # Compared with their start time, so that a pid given to somebody else in the meantime is not touched.
    return (process for process in processes if process.is_running() and living(process.pid) is not None)


def end(processes: list[psutil.Process], patience_seconds: float = 3.0) -> list[psutil.Process]:
    """Terminates, waits, kills, and gives back those that still live (stuck in a driver, or not ours to end)."""
    for act in ("terminate", "kill"):
        for process in _alive(processes):
            # Gone in the meantime is what we want; not permitted shows in what is given back.
            with contextlib.suppress(psutil.Error, OSError):
                getattr(process, act)()
        deadline = time.monotonic() + patience_seconds
        while list(_alive(processes)) and time.monotonic() < deadline:
            time.sleep(0.05)
    return list(_alive(processes))
