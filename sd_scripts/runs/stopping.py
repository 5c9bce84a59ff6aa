"""How a run is asked to end: a stop file, Ctrl-C or SIGTERM. During training it is a flag, before it an exception."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from sd_scripts.schema.files import TEMPORARY_MARK

from .process_trees import RUN_FOLDER, age_of_start
from .rundir import RunDirectory

SECOND_CTRL_C_SECONDS = 3.0
"""A launcher passes a Ctrl-C on that we got already; only one that comes this much later is a person who will not wait."""


class Stopped(BaseException):
    """Asked to end while no step is under way (loading, caching): nothing to save.

    No Exception, so that no `except` of a library keeps it.
    """


def is_for_earlier_start(run: RunDirectory, script: str) -> bool:
    """Whether a stop file lies there that is older than this start: than its launcher, and not only than this process."""
    if Path(os.environ.get(RUN_FOLDER, "")) == run.path:
        return False
    try:
        asked = run.stop_file.stat().st_mtime
    except OSError:
        return False
    # The clock that counts is that of the disk, which another machine may have.
    with tempfile.NamedTemporaryFile(prefix=f".now{TEMPORARY_MARK}", dir=run.path) as now:
        return asked < os.stat(now.name).st_mtime - age_of_start(script)


class StopRequest:
    """Whether somebody asked this process to end."""

    def __init__(self, run: RunDirectory | None = None) -> None:
        """run: whose stop file counts; set later where a file that was meant for an earlier start may lie there."""
        self.run = run
        self._since: float | None = None
        self._flagging = False
        self._looked = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes Ctrl-C and SIGTERM within the block. Outside the main thread, where no signal arrives, it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def finishing_steps(self) -> Iterator[None]:
        """Within the block a signal only sets the flag: whoever trains looks at it after each step."""
        self._flagging = True
        try:
            yield
        finally:
            self._flagging = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        impatient = number == signal.SIGINT and self._since is not None and now - self._since > SECOND_CTRL_C_SECONDS
        self._since = self._since or now
        if impatient or not self._flagging:
            raise Stopped

    def requested(self) -> bool:
        """True once a signal came or the run's stop file lies there (looked for five times a second at most)."""
        now = time.monotonic()
        if self._since is None and self.run is not None and now - self._looked > 0.2:
            self._looked = now
            if self.run.stop_requested():
                self._since = now
        return self._since is not None

    def check(self) -> None:
        """Raises Stopped when somebody asked; for long work outside the training loop."""
        if self.requested():
            raise Stopped
