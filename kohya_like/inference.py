"""What makes images: requests in, events out. The worker process of the studio is one such backend; this module imports no torch.

The protocol is that of a family's script for prediction with --serve: JSON lines through the worker's standard input and output, and
nothing else, so no port is open. Its keys and events are described in sd_scripts/library/render/predicting/serve.py.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from sd_scripts.families import PREDICTS
from sd_scripts.runs.command import SCRIPTS, cpu_threads
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.generate import GenerateOptions
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.predict import PredictOptions

from . import console, processes

Event = Mapping[str, Any]
LAST_WORDS = frozenset({"done", "failed", "cancelled"})
"""Every request ends with exactly one of these events."""
CANCEL_SECONDS = 120.0
"""A request that is cancelled gets this long to finish its step; then the backend is ended."""
KEPT_LINES = 60
_GOODBYE_SECONDS = 3.0


class Backend(Protocol):
    """Something that answers prediction requests, one at a time."""

    def submit(self, request: Mapping[str, Any]) -> Iterator[Event]:
        """The events of one request, the last of which is one of LAST_WORDS. request has an id of its own."""

    def cancel(self, ident: str) -> None:
        """Asks the request of this id to end; its events go on until they say so."""

    def free(self) -> None:
        """Lets go of the model and its memory."""

    def holds_memory(self) -> bool:
        """Whether free() would give anything back."""


def offered() -> type[PredictOptions]:
    """What a Space asks of its model: the options of the first family with a script of its own. Raises OptionError where none has one."""
    if not PREDICTS:
        raise OptionError("no model family of this version draws on request")
    return next(iter(PREDICTS.values()))


def worker_command() -> list[str]:
    """The command line of the worker."""
    return [sys.executable, str(SCRIPTS / GenerateOptions.script), "--serve"]


@dataclass
class _Worker:
    """A running worker: its process, its events, and the last lines of what it said to people."""

    process: subprocess.Popen[bytes]
    events: queue.SimpleQueue[Event | None] = field(default_factory=queue.SimpleQueue)
    """None is the end of its output."""
    said: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    readers: list[threading.Thread] = field(default_factory=list)

    def send(self, message: Mapping[str, Any]) -> None:
        """One line into the worker. Raises OSError when it is gone."""
        stream = self.process.stdin
        assert stream is not None
        stream.write(json.dumps(message, ensure_ascii=False).encode() + b"\n")
        stream.flush()

    def read(self) -> None:
        """Starts to read both of its outputs."""
        for stream, take in ((self.process.stdout, self._take_event), (self.process.stderr, self._take_line)):
            assert stream is not None
            thread = threading.Thread(target=_each_line, args=(stream, take), name="prediction worker", daemon=True)
            thread.start()
            self.readers.append(thread)

    def _take_event(self, line: bytes | None) -> None:
        if line is None:
            self.events.put(None)
            return
        try:
            event = json_of(line)
        except ValueError:
            # A library that prints: for people.
            self._take_line(line)
            return
        if isinstance(event, dict):
            self.events.put(event)

    def _take_line(self, line: bytes | None) -> None:
        if line is None:
            return
        # A progress bar takes its line back; what it said last counts.
        text = console.plain(line.rstrip(b"\r\n").rsplit(b"\r", 1)[-1].decode("utf-8", errors="replace")).rstrip()
        if text:
            self.said.append(text)


def _each_line(stream: IO[bytes], take: Any) -> None:
    try:
        with stream:
            for line in stream:
                take(line)
    except (OSError, ValueError):
        # The pipe broke with the process; that it ended is told below.
        take(None)
        return
    take(None)


class WorkerBackend:
    """A Backend in a process of its own, started when it is first needed. It ends with the studio, or when it is told to free its memory.

    command is an argument list; environment is added to the studio's own.
    """

    def __init__(self, command: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._environment = dict(environment or {})
        self._lock = threading.RLock()
        self._worker: _Worker | None = None
        self._current = ""
        self._overdue: threading.Timer | None = None

    @property
    def pid(self) -> int | None:
        """Of the worker, while it lives."""
        worker = self._worker
        return worker.process.pid if worker is not None and worker.process.poll() is None else None

    def holds_memory(self) -> bool:
        return self.pid is not None

    def submit(self, request: Mapping[str, Any]) -> Iterator[Event]:
        ident = str(request["id"])
        fresh = self.pid is None
        if fresh:
            yield {"event": "starting", "id": ident}
        try:
            worker = self._living()
            self._current = ident
            worker.send({"op": "predict", **request})
        except OSError as err:
            self.free()
            yield {
                "event": "failed",
                "id": ident,
                "text": f"The prediction worker could not be started: {err}",
                "problems": [],
                "advice": "",
            }
            return
        try:
            while True:
                event = worker.events.get()
                if event is None:
                    yield {"id": ident, **self._farewell(worker)}
                    return
                if event.get("event") == "ready" or event.get("id") in (ident, None):
                    yield event
                if event.get("id") in (ident, None) and event.get("event") in LAST_WORDS:
                    return
        finally:
            self._current = ""
            self._forget_overdue()

    def cancel(self, ident: str) -> None:
        with self._lock:
            worker = self._worker
            if worker is None or ident != self._current:
                return
            try:
                worker.send({"op": "cancel", "id": ident})
            except OSError:
                # It is gone, and submit() will say so.
                return
            if self._overdue is None:
                self._overdue = threading.Timer(CANCEL_SECONDS, self.free)
                self._overdue.daemon = True
                self._overdue.start()

    def free(self) -> None:
        """Ends the worker: closing its input asks it, and after three seconds it is ended. Whatever it was doing fails."""
        with self._lock:
            worker, self._worker = self._worker, None
            self._forget_overdue()
        if worker is None:
            return
        tree = processes.tree(worker.process.pid)
        try:
            assert worker.process.stdin is not None
            worker.process.stdin.close()
            worker.process.wait(_GOODBYE_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            processes.end(tree)
        worker.process.wait()
        processes.end(tree, patience_seconds=0.5)
        for reader in worker.readers:
            reader.join(_GOODBYE_SECONDS)

    close = free

    def _forget_overdue(self) -> None:
        with self._lock:
            if self._overdue is not None:
                self._overdue.cancel()
                self._overdue = None

    def _living(self) -> _Worker:
        with self._lock:
            if self._worker is not None and self._worker.process.poll() is None:
                return self._worker
            self.free()
            process = subprocess.Popen(
                list(self._command or worker_command()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **processes.ENVIRONMENT, "OMP_NUM_THREADS": cpu_threads(), **self._environment},
                # Ctrl-C in the studio's terminal is the studio's business, which then ends the worker.
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0) | getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
            self._worker = _Worker(process)
            self._worker.read()
            return self._worker

    def _farewell(self, worker: _Worker) -> Event:
        """The event of a worker that ended in the middle of a request."""
        try:
            code: int | None = worker.process.wait(_GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        for reader in worker.readers:
            reader.join(_GOODBYE_SECONDS)
        lines = list(worker.said)[-12:]
        self.free()
        return {"event": "failed", "text": ended(code), "problems": [], "advice": advice(code), "lines": lines}


def ended(code: int | None) -> str:
    """How a worker ended in the middle of a request, as a sentence."""
    if code is None:
        return "The prediction worker closed its output without an answer."
    if code < 0 or code > 128:
        number = -code if code < 0 else code - 128
        why = ", most often because memory ran out" if number == 9 else ""
        return f"The prediction worker was ended by signal {number}{why}."
    return f"The prediction worker ended with code {code} before the image was there."


def advice(code: int | None) -> str:
    """What to do after a worker ended."""
    if code in (-9, 137):
        return "Take a smaller size, turn on offload or a quantisation, or free memory; then predict again. A new worker is started for it."
    return "Predict again: a new worker is started for it. If it comes back, the lines below say more."
