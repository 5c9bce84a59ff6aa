"""Starts the processes of a training, watches them, starts them again, and leaves none behind. Imports no torch.

Either the ranks themselves, which then find each other through a file (`KOHYA_LIKE_INIT_FILE`, for
`torch.distributed.init_process_group(init_method="file://...")`), or one other launcher, such as accelerate's or torchrun, from outside.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

if __name__ == "__main__":
    # The guard is started by path, so that it needs nothing of the folder in which the launcher was started.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sd_scripts.runs import process_trees
from sd_scripts.runs.events import Event, LastWord, RunFailed, StepDone, Warned
from sd_scripts.runs.process_trees import LAUNCH_ID

INIT_FILE = "KOHYA_LIKE_INIT_FILE"
"""Path of the file through which the ranks find each other: new for each start, not there before the first rank opens it."""
REFUSED_FILE = "KOHYA_LIKE_REFUSED_FILE"
"""Path that a rank touches when it ends because its options are wrong: accelerate and torchrun turn every exit code into 1."""
WRONG_OPTIONS = 2
"""Exit code of a script that cannot do what it was asked for, which a second start does not change."""
GRACE_SECONDS = 30.0
SECOND_SIGNAL_SECONDS = 1.0
"""Whoever passes a signal on may do it twice; only one that comes this much later is a person who will not wait."""
LONGEST_PAUSE_SECONDS = 10.0


@dataclass(frozen=True)
class LaunchOrder:
    """What to start."""

    command: tuple[str, ...]
    """A Python script and its arguments; the whole command of another launcher when num_processes is None."""
    num_processes: int | None
    max_restarts: int = 0
    restart_with: tuple[str, ...] = ()
    """Arguments added to the command from the second start on."""
    grace_seconds: float = GRACE_SECONDS
    """When a process has failed, the others get this long to end by themselves; so do ranks whose launcher was killed."""


@dataclass(frozen=True)
class LaunchEnding:
    """How a start ended."""

    code: int
    """For the shell: 0, the exit code of the first process that failed, or 128 + its signal."""
    text: str
    """What failed; empty when nothing did."""


class Launcher:
    """One call of train_multi_gpu.py."""

    def __init__(self, order: LaunchOrder) -> None:
        self.order = order
        self._id = uuid.uuid4().hex
        self._ended: queue.Queue[tuple[int, int]] = queue.Queue()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []
        self._stop_since: float | None = None
        self._hurried = False

    def run(self) -> int:
        """Trains to the end; the exit code."""
        # A path without signs that mean something in a URL, since the ranks may read it as one.
        folder = Path(tempfile.mkdtemp(prefix="kohya_like-launch-"))
        guard = _start_guard(self._id, folder, self.order.grace_seconds)
        try:
            with self._listening():
                return self._repeated(folder)
        finally:
            process_trees.end_left(LAUNCH_ID, self._id, 0.0)
            shutil.rmtree(folder, ignore_errors=True)
            _dismiss(guard)

    def _repeated(self, folder: Path) -> int:
        restarts = 0
        while True:
            begun = time.time()
            attempt = folder / str(restarts)
            attempt.mkdir()
            ending = self._once(attempt, again=restarts > 0)
            if ending.code == WRONG_OPTIONS or (attempt / "refused").exists():
                # The ranks have said what is wrong.
                return WRONG_OPTIONS
            if ending.code == 0 or not ending.text:
                return ending.code
            if restarts < self.order.max_restarts and not self._stop_asked():
                restarts += 1
                again = f"{ending.text}; all are started again from the newest state (restart {restarts} of {self.order.max_restarts})"
                self._tell(again)
                self._log(Warned(text=again))
                self._pause(min(2.0 ** (restarts - 1), LONGEST_PAUSE_SECONDS))
                if not self._stop_asked():
                    continue
            else:
                self._tell(ending.text)
            self._last_word(ending.text, begun)
            return ending.code

    def _stop_asked(self) -> bool:
        run = self._run_folder()
        # New ranks would obey a stop file at once.
        return self._stop_since is not None or (run is not None and (run / "stop.request").exists())

    # One start

    def _once(self, attempt: Path, again: bool) -> LaunchEnding:
        """Starts all, waits for all, and ends those that one failure has left."""
        self._running, self._readers = {}, []
        self._ended = queue.Queue()
        arguments = [*self.order.command, *(self.order.restart_with if again else ())]
        ending = self._start(arguments, attempt)
        deadline: float | None = None
        while self._running:
            if deadline is None and ending.code != 0:
                deadline = time.monotonic() + self.order.grace_seconds
            if self._hurried or (deadline is not None and time.monotonic() >= deadline):
                break
            with contextlib.suppress(queue.Empty):
                # The queue keeps their order: the first that failed is the cause, the others lost it as their partner.
                number, code = self._ended.get(timeout=0.1)
                del self._running[number]
                if code != 0 and ending.code == 0:
                    ending = LaunchEnding(code if code > 0 else 128 - code, self._sentence(number, code))
        hurried = self._hurried and ending.code == 0
        stuck = process_trees.end_left(LAUNCH_ID, self._id, 0.0)
        if stuck:
            self._tell("these processes cannot be ended: " + ", ".join(str(process.pid) for process in stuck))
        for reader in self._readers:
            # Their last lines; a process that cannot be ended keeps its end open.
            reader.join(2.0)
        return LaunchEnding(128 + signal.SIGTERM, "") if hurried else ending

    def _start(self, arguments: list[str], attempt: Path) -> LaunchEnding:
        count = self.order.num_processes
        common = {LAUNCH_ID: self._id, REFUSED_FILE: str(attempt / "refused")}
        if count is None:
            return self._start_one(0, arguments, common)
        threads = str(max(1, (os.cpu_count() or 1) // count))
        for rank in range(count):
            environment = {
                **common,
                INIT_FILE: str(attempt / "store"),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
            }
            ending = self._start_one(rank, [sys.executable, *arguments], environment)
            if ending.code != 0:
                return ending
        return LaunchEnding(0, "")

    def _start_one(self, number: int, command: list[str], values: Mapping[str, str]) -> LaunchEnding:
        # Only the first rank speaks for itself; what the others say is marked, line by line.
        stream = None if number == 0 else subprocess.PIPE
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=None if number == 0 else subprocess.STDOUT,
                env={**os.environ, **values},
                # Ctrl-C in a terminal comes here first. Under Windows, where no signal can be passed on, it goes to all.
                process_group=None if os.name == "nt" else 0,
            )
        except OSError as err:
            return LaunchEnding(127, f"{command[0]} cannot be started: {err.strerror}")
        self._running[number] = process
        threading.Thread(target=self._await, args=(number, process, self._ended), daemon=True).start()
        if process.stdout is not None:
            self._readers.append(threading.Thread(target=_mark, args=(process.stdout, f"[rank {number}] "), daemon=True))
            self._readers[-1].start()
        if self._stop_since is not None:
            self._pass_on(signal.SIGTERM)
        return LaunchEnding(0, "")

    @staticmethod
    def _await(number: int, process: subprocess.Popen[bytes], ended: queue.Queue[tuple[int, int]]) -> None:
        ended.put((number, process.wait()))

    def _sentence(self, number: int, code: int) -> str:
        count = self.order.num_processes
        who = "the launcher" if count is None else f"process {number + 1} of {count} (rank {number})"
        if code > 0:
            return f"{who} ended with exit code {code}"
        killed = f"{who} was killed (signal {-code})"
        return f"{killed}; often there was no memory left on this machine" if -code == getattr(signal, "SIGKILL", 9) else killed

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._stop_asked():
            time.sleep(0.05)

    # Signals

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._stop_since is None:
            self._stop_since = now
            self._pass_on(number)
        elif now - self._stop_since > SECOND_SIGNAL_SECONDS:
            self._hurried = True

    def _pass_on(self, number: int) -> None:
        """The first request to stop: ranks finish their step, save and end."""
        if os.name == "nt":
            # A signal would end them on the spot there; Ctrl-C has reached them already.
            return
        started = list(self._running.values())
        if self.order.num_processes is None:
            # A launcher would give its ranks half a minute; they are asked themselves, and it ends after them.
            asked = process_trees.ranks(process_trees.carriers(LAUNCH_ID).get(self._id, []))
            if asked:
                process_trees.send(asked, number)
                return
        for process in started:
            # A process that has ended and is not collected yet takes no signal.
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    # What people and the studio read

    @staticmethod
    def _tell(text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"train_multi_gpu: {text}\n")
            sys.stderr.flush()

    def _log(self, event: Event) -> None:
        """An event in the run folder that the script was given, if it was given one."""
        run = self._run_folder()
        if run is not None:
            from .rundir import RunDirectory

            with contextlib.suppress(OSError):
                RunDirectory(run).log(event)

    def _last_word(self, text: str, begun: float) -> None:
        """The run's last word, unless one of the ranks has said it."""
        run = self._run_folder()
        if run is None:
            return
        from .rundir import RunDirectory

        events = [event for event in RunDirectory(run).history() if event.time >= begun]
        if not any(isinstance(event, LastWord) for event in events):
            steps = [event.step for event in events if isinstance(event, StepDone)]
            self._log(RunFailed(step=max(steps, default=0), text=text))

    def _run_folder(self) -> Path | None:
        words = list(self.order.command)
        given = [Path(value) for name, value in itertools.pairwise(words) if name == "--run_dir"]
        return given[-1] if given and given[-1].is_dir() else None


def _mark(stream: IO[bytes], mark: str) -> None:
    """Passes lines on to the error stream with a mark before each; a progress line that is written over ends with a carriage return."""
    with stream:
        for line in stream:
            for part in line.rstrip(b"\r\n").split(b"\r"):
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.buffer.write(mark.encode() + part + b"\n")
                    sys.stderr.flush()


# The guard: a process of its own that ends the ranks when the launcher itself is killed.


def _start_guard(launch_id: str, folder: Path, grace_seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).resolve()), launch_id, str(folder), str(grace_seconds)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def _dismiss(guard: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        guard.communicate(b"done\n")


def guard(launch_id: str, folder: Path, grace_seconds: float) -> None:
    """Waits for the launcher's end, which closes our input. Without a last word from it, its ranks are asked to save, then ended."""
    for number in (signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.readline().strip() == b"done":
        return
    with contextlib.suppress(OSError):
        sys.stderr.write("train_multi_gpu: the launcher was killed; its processes are ended\n")
    process_trees.end_left(LAUNCH_ID, launch_id, grace_seconds)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    guard(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
