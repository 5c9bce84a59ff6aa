"""Start, find, recognise and end the processes of a run, on every system psutil knows."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil

from sd_scripts.runs.process_trees import RUN_FOLDER, RUN_ID, carried, carriers, end, living, tree

__all__ = ["collect", "created", "end", "is_same", "living", "of_runs", "start", "tree"]

RUNNER = Path(__file__).with_name("runner.py")
ENVIRONMENT = {"PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
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
            env={**os.environ, RUN_ID: run_id, RUN_FOLDER: str(folder), **ENVIRONMENT, **(environment or {})},
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
    found = carried(process, RUN_ID)
    return found == run_id if found is not None else abs(created(process) - create_time) < 0.05


def of_runs() -> dict[str, list[psutil.Process]]:
    """All living processes that carry a run id, by run id."""
    return carriers(RUN_ID)
