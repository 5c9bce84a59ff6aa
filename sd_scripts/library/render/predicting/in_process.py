"""The worker's protocol without a second process: for a page that runs where the model is, such as an exported Space."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping

from sd_scripts.schema.errors import OptionError

from .orders import Read, order_of
from .work import Event, Workbench, failed


class InProcess:
    """Gives the events of serve.py from its requests. Several requests at once wait for one another, in the order of arrival."""

    def __init__(self, read: Read, defaults: Mapping[str, object] | None = None) -> None:
        """read: makes options of what requests say. defaults: values that requests leave out, such as pretrained_model_name_or_path."""
        self._read, self._defaults = read, dict(defaults or {})
        self._bench: Workbench | None = None
        self._lock = threading.Condition()
        self._waiting: list[threading.Event] = []
        self._cancelled: dict[str, threading.Event] = {}

    def load(self) -> None:
        """Loads the model of the defaults before the first request. Raises OptionError.

        Where each request runs in a process that is forked from this one, it is then loaded once for all of them.
        """
        if self._bench is None:
            self._bench = Workbench()
        self._bench.load(order_of(self._read, {"id": "load", "prompt": "-"}, self._defaults))

    def submit(self, request: Mapping[str, object]) -> Iterator[Event]:
        """The events of a predict request, the last of which is done, failed or cancelled. Closing the iterator cancels the request."""
        ident = str(request.get("id", ""))
        with self._lock:
            taken = ident in self._cancelled
            cancelled = threading.Event()
            if not taken:
                self._cancelled[ident] = cancelled
                self._waiting.append(cancelled)
        if taken:
            yield failed(ident, OptionError(f"id: {ident} is in use; give every request its own"))
            return
        events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        # A thread of its own for each request, started by whoever asks: it also works in the process that a GPU is lent to.
        worker = threading.Thread(target=self._work, args=(ident, request, events, cancelled), name=f"prediction {ident}", daemon=True)
        worker.start()
        try:
            while (event := events.get()) is not None:
                yield event
        finally:
            cancelled.set()
            self._wake()
            worker.join()

    def cancel(self, ident: str) -> None:
        """Asks the request of this id to end; its events go on until they say so."""
        with self._lock:
            if ident in self._cancelled:
                self._cancelled[ident].set()
                self._lock.notify_all()

    def free(self) -> None:
        """Lets go of the model and its memory, after what was asked before."""
        mine = threading.Event()
        with self._lock:
            self._waiting.append(mine)
            self._lock.wait_for(lambda: self._waiting[0] is mine)
        try:
            if self._bench is not None:
                self._bench.free()
        finally:
            self._done(mine)

    def holds_memory(self) -> bool:
        """Whether free() would give anything back."""
        return self._bench is not None and self._bench.holds_memory()

    def _work(self, ident: str, request: Mapping[str, object], events: queue.SimpleQueue[Event | None], cancelled: threading.Event) -> None:
        try:
            try:
                order = order_of(self._read, {**request, "id": ident}, self._defaults)
            except OptionError as err:
                events.put(failed(ident, err))
                return
            if not self._my_turn(ident, events, cancelled):
                events.put({"event": "cancelled", "id": ident, "files": []})
                return
            if self._bench is None:
                self._bench = Workbench()
            self._bench.carry_out(order, events.put, cancelled.is_set)
        finally:
            self._done(cancelled, ident)
            events.put(None)

    def _my_turn(self, ident: str, events: queue.SimpleQueue[Event | None], cancelled: threading.Event) -> bool:
        """Waits for the requests before this one; False when it is cancelled meanwhile."""
        told = -1
        with self._lock:
            while not cancelled.is_set():
                ahead = self._waiting.index(cancelled)
                if ahead != told:
                    events.put({"event": "queued", "id": ident, "ahead": ahead})
                    told = ahead
                if ahead == 0:
                    return True
                self._lock.wait()
        return False

    def _done(self, mine: threading.Event, ident: str | None = None) -> None:
        with self._lock:
            self._waiting.remove(mine)
            if ident is not None:
                del self._cancelled[ident]
            self._lock.notify_all()

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify_all()
