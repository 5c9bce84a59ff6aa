"""Progress that a person sees (a bar on stderr) and that programs read (a callback), from one call."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, ClassVar, Self

from tqdm import tqdm

from .records import Progress

_SECONDS_BETWEEN_CALLS = 0.5
SECONDS_BETWEEN_LINES = 30.0
"""Where there is no terminal: all bars of a process together write one line at most in this time, the first after as long."""


class Bar(tqdm):  # type: ignore[type-arg]
    """A progress bar. A file, which keeps every refresh, gets a line now and then instead."""

    _last_line: ClassVar[float] = 0.0

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._in_place = (settings.get("file") or sys.stderr).isatty()
        self._begun = time.monotonic()
        # What would be left, or overwritten, is a line of its own there.
        super().__init__(*args, **(settings if self._in_place else {**settings, "leave": False, "position": 0}))

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:  # type: ignore[override]
        """Draws the bar, or writes a line when one is due."""
        if self._in_place:
            return bool(super().display(msg, pos))
        now = time.monotonic()
        if now - max(Bar._last_line, self._begun) >= SECONDS_BETWEEN_LINES:
            Bar._last_line = now
            self.fp.write(f"{self}\n")
            self.fp.flush()
        return False

    def clear(self, nolock: bool = False) -> None:
        """Takes the bar off the screen; what stands in a file stays."""
        if self._in_place:
            super().clear(nolock)


class Bars:
    """Is called with (what, done, total) and shows one bar for each `what`; passes at most two calls a second on, and every last one."""

    def __init__(self, callback: Progress | None = None, shown: bool = True) -> None:
        self._callback, self._shown = callback, shown
        self._bar: Any = None
        self._what = ""
        self._last_call = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._shown:
            self._draw(what, done, total)
        now = time.monotonic()
        if self._callback is not None and (done == total or now - self._last_call >= _SECONDS_BETWEEN_CALLS):
            self._last_call = now
            self._callback(what, done, total)

    def _draw(self, what: str, done: int, total: int) -> None:
        if self._bar is None or what != self._what:
            self.close()
            # Short work needs no bar.
            self._bar, self._what = Bar(desc=what, total=total or None, unit="", delay=1.0, leave=True), what
        if total:
            self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Finishes the current bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
