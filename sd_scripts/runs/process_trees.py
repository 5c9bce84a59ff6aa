"""Find and end processes by what they carry in their environment, on every system psutil knows. Imports no torch.

A process group or a session does not hold a training together: torchrun puts each rank into a session of its own. What every
descendant has is the environment it was born with.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

RUN_ID = "KOHYA_LIKE_RUN_ID"
"""Environment variable that every process of a run of the studio inherits."""
RUN_FOLDER = "KOHYA_LIKE_RUN_FOLDER"
"""Environment variable with the folder of a run whose old request to stop was taken away before its processes were started."""
LAUNCH_ID = "KOHYA_LIKE_LAUNCH_ID"
"""As RUN_ID, for what train_multi_gpu.py has started."""


def living(pid: int) -> psutil.Process | None:
    """The process with this pid, unless it is gone or a zombie."""
    try:
        process = psutil.Process(pid)
        return None if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else process
    except (psutil.Error, OSError):
        return None


def carried(process: psutil.Process, variable: str) -> str | None:
    """What the process was given in this environment variable; None for nothing, or when it may not be asked."""
    try:
        return process.environ().get(variable)
    except (psutil.Error, OSError):
        return None


def carriers(variable: str) -> dict[str, list[psutil.Process]]:
    """All living processes that were given this environment variable, by its value."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        value = carried(process, variable)
        if value and living(process.pid) is not None:
            found.setdefault(value, []).append(process)
    return found


def ranks(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that are ranks of a training: they carry RANK and did not inherit it from one of the others, as data workers do."""
    return tops(process for process in processes if carried(process, "RANK") is not None)


def tops(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those whose parent is none of the others."""
    found = {process.pid: process for process in processes}
    return [process for process in found.values() if parent_of(process) not in found]


def parent_of(process: psutil.Process) -> int:
    """Pid of the parent; 0 for a process that is gone."""
    try:
        return process.ppid()
    except (psutil.Error, OSError):
        return 0


def age_of_start(script: str) -> float:
    """Seconds since the first process of this start was made: this one, or the eldest launcher above it that was given the script."""
    me = psutil.Process()
    started = [me, *(process for process in me.parents() if was_given(process, script))][-1]
    if hasattr(time, "CLOCK_BOOTTIME"):
        # As Unix time it would be off by up to a second, since the system tells the moment of its boot in whole ones.
        return time.clock_gettime(time.CLOCK_BOOTTIME) - (started.create_time() - psutil.boot_time())
    return time.time() - started.create_time()


def command_of(process: psutil.Process) -> list[str]:
    """The words of its command; none when it is gone, or when it may not be asked."""
    try:
        return process.cmdline()
    except (psutil.Error, OSError):
        return []


def was_given(process: psutil.Process, name: str) -> bool:
    """Whether a file of this name is among the words of its command, as it is with whatever launches a script."""
    return any(Path(word).name == name for word in command_of(process))


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it."""
    process = living(pid)
    if process is None:
        return []
    try:
        return [process, *process.children(recursive=True)]
    except (psutil.Error, OSError):
        return [process]


def alive(processes: Iterable[psutil.Process]) -> Iterator[psutil.Process]:
    """Those of them that still live."""
    # Compared with their start time, so that a pid given to somebody else in the meantime is not touched.
    return (process for process in processes if process.is_running() and living(process.pid) is not None)


def send(processes: Iterable[psutil.Process], number: int) -> None:
    """Sends a signal to each of them that still lives."""
    for process in alive(processes):
        # Gone in the meantime is what we want; not permitted shows in what lives on.
        with contextlib.suppress(psutil.Error, OSError):
            process.send_signal(number)


def end(processes: list[psutil.Process], patience_seconds: float = 3.0) -> list[psutil.Process]:
    """Terminates, waits, kills, and gives back those that still live (stuck in a driver, or not ours to end)."""
    for act in ("terminate", "kill"):
        for process in alive(processes):
            with contextlib.suppress(psutil.Error, OSError):
                getattr(process, act)()
                # One that is suspended hears nothing until it goes on.
                process.resume()
        _wait(processes, patience_seconds)
    return list(alive(processes))


def end_left(variable: str, value: str, grace_seconds: float, without: Iterable[int] = ()) -> list[psutil.Process]:
    """Ends everything that still carries a value: who trains is asked to save and end, and after the grace period all are ended.

    without: pids that are left alone. Gives back what could not be ended.
    """

    def left() -> list[psutil.Process]:
        return [process for process in carriers(variable).get(value, []) if process.pid not in without]

    found = left()
    asked = ranks(found) or tops(found)
    send(asked, signal.SIGTERM)
    _wait(asked, grace_seconds)
    while found := left():
        # Whoever was born while the others ended is ended in the next round.
        stuck = end(found)
        if stuck:
            return stuck
    return []


def _wait(processes: list[psutil.Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(alive(processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
