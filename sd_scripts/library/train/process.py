"""One process of a start: its device, the others, the folder of its run, and what it says last. Knows no networks and no images."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace

import torch
from accelerate import Accelerator

from sd_scripts.library.memory.oom_advice import Work
from sd_scripts.library.parallel.peers import PeerLost, Peers
from sd_scripts.runs.events import Cached, Event, LastWord, RunFailed, Warned
from sd_scripts.runs.resume import RunLock
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.states import state_folders
from sd_scripts.runs.stopping import StopRequest, is_for_earlier_start
from sd_scripts.schema import command_line

from .checkpoint import remove_leftovers
from .environment import check_processes, make_accelerator
from .meter import Phases

log = logging.getLogger("sd_scripts")


class _ConsoleFile(logging.FileHandler):
    """The run's own copy of what is said; one that cannot be written any more is not worth an error."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Says nothing: whoever loses the folder says so."""

    def close(self) -> None:
        """Closes the file."""
        with suppress(OSError):
            super().close()


class Process:
    """This process of a start, from before the options are looked at to its last word."""

    def __init__(self, accelerator: Accelerator, stop: StopRequest, run: RunDirectory | None = None, peers: Peers | None = None) -> None:
        """run: its folder, where there is one already that somebody else has opened; see open."""
        self.started = time.time()
        self.accelerator, self.device, self.is_main = accelerator, accelerator.device, accelerator.is_main_process
        self.stop = stop
        self.run = run
        self.phases = Phases(run)
        self.peers = Peers() if peers is None else peers
        self.work: Work = "train"
        """What it does, for advice where memory runs out."""
        self.steps_done: Callable[[], int] = lambda: 0
        self.resources = ExitStack()
        """What is given back at the end, the newest first."""
        self._owns_group = False
        self._lock: RunLock | None = None
        self._console: logging.Handler | None = None

    @classmethod
    def begin(cls, asked: command_line.Invocation, stop: StopRequest) -> Process:
        """Joins the other processes, and takes the folder that the command names. Raises OptionError and TrainingError."""
        check_processes(asked.options)
        # Whoever called us may have made the process group, and has more to do with it.
        joined_before = torch.distributed.is_available() and torch.distributed.is_initialized()
        accelerator = make_accelerator(asked.options)
        peers = Peers(60.0 * asked.options.distributed.distributed_timeout, lambda err: process._end_without_return(err))
        process = cls(accelerator, stop, None, peers)
        process._owns_group = not joined_before
        if asked.run_dir is not None and not asked.dry_run and process.is_main:
            process.open(RunDirectory(asked.run_dir), asked.options.script)
        return process

    def open(self, run: RunDirectory, script: str) -> None:
        """Takes a run folder for this process: lock, console file, and nothing left of a process that was killed."""
        if self.run is not None:
            return
        run.path.mkdir(parents=True, exist_ok=True)
        lock = RunLock(run)
        lock.take()
        self._lock = lock
        self.join(run)
        self.phases.run = run
        if is_for_earlier_start(run, script):
            run.clear_stop()
        remove_leftovers(run)
        # Whoever started this process with run.json beside it catches its output already.
        if not (run.path / "run.json").exists():
            self._console = _ConsoleFile(run.console, encoding="utf-8")
            logging.getLogger().addHandler(self._console)

    def join(self, run: RunDirectory) -> None:
        """Works for a run whose folder the first process has opened."""
        self.run = self.stop.run = run

    # What is said on the way.

    def working(self, work: Work) -> None:
        """What this process does from here on."""
        self.work = work

    def log(self, event: Event) -> None:
        """An event of the run, whose folder is open."""
        assert self.run is not None
        self.run.log(event)

    def warn(self, text: str) -> None:
        """A sentence for the log, from any thread."""
        log.warning("%s", text)
        if self.run is not None:
            self.run.log(Warned(text=text))

    def checked(self, what: str, done: int, total: int) -> None:
        """Progress of long work before the loop: a chance to stop."""
        self.peers.progress()
        self.stop.check()

    def cached(self, what: str, done: int, total: int) -> None:
        """The same of what is encoded, which the event log tells too."""
        if self.run is not None and self.is_main:
            self.run.log(Cached(what=what, done=done, total=total))
        self.checked(what, done, total)

    # The end.

    def last_word(self, word: LastWord) -> None:
        """Logs the one last event of this start. A full disk may have no room for it; the console has said it then."""
        run = self.run
        if run is None or not (self.is_main or isinstance(word, RunFailed)):
            return
        if any(isinstance(event, LastWord) and event.time >= self.started for event in run.history()):
            return
        with suppress(OSError):
            run.log(replace(word, step=self.steps_done()))

    def about_loss(self, err: PeerLost) -> str:
        """The sentence about a process that is gone, and what is left."""
        folders = state_folders(self.run.state) if self.run is not None else []
        left = f"the last saved state is that of step {int(folders[-1].name)}" if folders else "nothing is saved yet"
        return f"{err}; {left}. Start again to go on"

    def _end_without_return(self, err: PeerLost) -> None:
        """The last word of a process whose main thread waits for one that is gone."""
        if self.peers.speaks or "distributed_timeout" in str(err):
            text = self.about_loss(err)
            sys.stderr.write(f"{text}\n")
            self.last_word(RunFailed(text=text, advice=err.advice))

    def close(self) -> None:
        """Gives everything back that outlives a process."""
        self.resources.close()
        self.peers.leave()
        with suppress(RuntimeError):
            for tracker in self.accelerator.trackers:
                tracker.finish()
            if self._owns_group:
                self.accelerator.state.destroy_process_group()
        if self._console is not None:
            logging.getLogger().removeHandler(self._console)
            self._console.close()
        if self._lock is not None:
            self._lock.release()
