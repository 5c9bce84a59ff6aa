"""Makes the next items in background threads while the current one is used, by number instead of by position."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class Prefetcher(Generic[Key, Item]):
    """Gives the item of any key, and starts on those that follow it.

    make must be a pure function of the key, safe in several threads; following is the key that is likely asked for next, or None.
    With no threads everything is made when it is asked for. An error in make is raised by the get() of that key.
    """

    def __init__(self, make: Callable[[Key], Item], following: Callable[[Key], Key | None], num_threads: int, ahead: int) -> None:
        self._make, self._following, self._ahead = make, following, ahead
        self._pool = ThreadPoolExecutor(num_threads, "prefetch") if num_threads else None
        self._coming: dict[Key, Future[Item]] = {}

    def get(self, key: Key) -> Item:
        """The item of this key."""
        if self._pool is None:
            return self._make(key)
        wanted = [key]
        while len(wanted) <= self._ahead and (after := self._following(wanted[-1])) is not None:
            wanted.append(after)
        for other in self._coming.keys() - set(wanted):
            self._coming.pop(other).cancel()
        for other in wanted:
            if other not in self._coming:
                self._coming[other] = self._pool.submit(self._make, other)
        return self._coming.pop(key).result()

    def close(self) -> None:
        """Ends the threads; what is being made is finished and dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._coming.clear()
