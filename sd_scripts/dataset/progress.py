"""Progress that a person sees (a bar on stderr) and that programs read (a callback), from one call."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from sd_scripts.dataset.pictures import Progress

_SECONDS_BETWEEN_CALLS = 0.5


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
            self._bar, self._what = tqdm(desc=what, total=total or None, unit="", delay=1.0, leave=True), what
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
