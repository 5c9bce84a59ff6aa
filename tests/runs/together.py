"""Several processes of one run, forked from a server with the libraries in it, as a launcher would start them: they meet in a file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sd_scripts.library.train.launch import main
from sd_scripts.runs.launcher import INIT_FILE
from sd_scripts.runs.rundir import RunDirectory
from tests.forked import forked
from tests.runs.conftest import PATIENCE_SECONDS, Runs


def train_as(rank: int, world: int, meeting: str, console: str, family: str, method: str, arguments: list[str]) -> None:
    """One process of a run; what it says goes to a file of its own."""
    handle = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), INIT_FILE: meeting, "GLOO_SOCKET_IFNAME": "lo"}
    main(family, method, arguments)


class Together:
    """The processes of one start."""

    def __init__(self, runs: Runs, world: int, folder: Path, **options: Any) -> None:
        folder.mkdir(parents=True)
        self.consoles = [folder / f"console-{rank}.txt" for rank in range(world)]
        self.runs, self.processes = runs, list[BaseProcess]()
        for rank, console in enumerate(self.consoles):
            values = (rank, world, str(folder / "meeting"), str(console), runs.family, runs.method, runs.arguments(**options))
            self.processes.append(forked(train_as, *values))

    def said(self) -> str:
        return "\n".join(console.read_text() for console in self.consoles if console.exists())

    def wait(self, seen: Callable[[], bool]) -> None:
        """Returns as soon as something can be seen from outside; fails when a process ends before."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not seen():
            assert all(process.is_alive() for process in self.processes), "a process ended before the moment came:\n" + self.said()
            assert time.monotonic() < end, "the moment did not come:\n" + self.said()
            time.sleep(0.001)

    def end(self) -> list[int | None]:
        """Exit codes, when all have ended."""
        for process in self.processes:
            process.join(PATIENCE_SECONDS)
        return [process.exitcode for process in self.processes]

    def finished(self) -> RunDirectory:
        """The run of processes that ended well."""
        codes = self.end()
        assert codes == [0] * len(codes), self.said()[-6000:]
        return self.runs.newest()


def trained_together(runs: Runs, world: int, folder: Path, **options: Any) -> RunDirectory:
    """Trains to the end with several processes."""
    return Together(runs, world, folder, **options).finished()
