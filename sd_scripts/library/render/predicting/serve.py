"""What a script for prediction is with `--serve`: requests as JSON lines on standard input, events as JSON lines on standard output.

Standard output carries events and nothing else; what libraries print, and lines for people, go to standard error. One request is worked on
at a time, in the order of arrival. The worker ends when standard input closes (what runs is cancelled), on `quit`, and on SIGTERM.
Images travel as paths of files on this machine. Unknown keys of a request are refused with a sentence, unknown events are to be ignored.

Requests
--------

`{"op": "predict", "id": "a1", ...}`: make images. `id` is any text that is not in use. All other keys are optional:

* every option of the script under its flat name; of generate.py those of the family that `draw_with`, `family` and the files tell
  (`sd_scripts/schema/generate.py`), of a family's own script those of its `predict_options.py`:
  `prompt`, `images`, `negative_prompt`, `steps`, `true_cfg_scale`, `seed`, `size`
  ([width, height]), `num_images`, `out` (folder of the files), `lora`, `lora_weight`, and those of the model:
  `pretrained_model_name_or_path`, `model_version`, `vae`, `text_encoder`, `control_resolution`, `transformer_quantization`,
  `text_encoder_quantization`, `vae_device`, `text_encoder_device`, `transformer_device`, `precision`, `vae_dtype`, `offload`, ...
  A key that is absent has its value from the worker's command line, or else its default. The model is loaded with the first request and
  again only when one of its options changes; other adapters or strengths never load it again.
* `variants`: compare mode, a list of `{"lora": [...], "lora_weight": [...], "label": "..."}` in place of lora and lora_weight; `{}` is the
  base model alone. Every variant makes the same images from the same seeds; label defaults to the names of its files.
* `preview_every`: steps between two thumbnails, 0 for none; 1 when absent.

`{"op": "cancel", "id": "a1"}`: ends that request, between two steps when it runs, at once while it waits.
`{"op": "free", "id": "f1"}`: lets go of the model and its memory after what was asked before it; `id` is optional.
`{"op": "quit"}`: cancels everything and ends the worker.

Events
------

Every event has `event`, and `id` where it belongs to a request. Each predict request ends with exactly one of done, failed, cancelled.

* `{"event": "ready", "protocol": 1, "pid": 123, "devices": ["cpu", "cuda:0"]}`: the first line, before a model is loaded.
* `{"event": "queued", "id", "ahead": 2}`: accepted; `ahead` requests are before it. Sent again whenever that number changes; 0 is next.
* `{"event": "loading", "id", "text": "toy"}`, then `{"event": "loaded", "id", "model_version": "edit-2509", "seconds": 3.1,
  "devices": {"transformer": "cuda:0", "vae": "cpu", "text_encoder": "cpu"}, "precision": "bf16", "controls": [1, 3]}`: only when the model
  is loaded. `controls`: fewest and most control images of this model.
* `{"event": "started", "id", "size": [1024, 768], "seeds": [7], "steps": 40, "images": 2, "variants": ["base", "my lora"]}`: checked and
  under way. `images` counts over all variants.
* `{"event": "step", "id", "step": 3, "steps": 40, "variant": 0, "done": 0, "images": 2, "seconds": 1.2,
  "preview": "data:image/jpeg;..."}`: one step more of the image at hand. `done`: images that are finished. `seconds`: since the start
  of the request. `preview`: a thumbnail of what the image will be, or null.
* `{"event": "image", "id", "file": "/…/1.png", "seed": 7, "variant": 0, "index": 0, "width": 1024, "height": 768}`: an image is written.
* `{"event": "warning", "id", "text"}`: something is less than was asked for.
* `{"event": "done", "id", "files": [...], "seeds": [...], "variants": [{"label", "lora", "lora_weight", "files": [...]}], "grid": null,
  "size": [1024, 768], "seconds": 9.5}`: `files` in the order of variants, then of seeds. `grid`: one image of all, in compare mode:
  variants are its columns, seeds its rows.
* `{"event": "failed", "id", "text", "problems": [{"option": "steps", "message": "..."}], "advice": ""}`: sentences for a person; `problems`
  where options are wrong, empty otherwise. `id` is null for a line that is no request.
* `{"event": "cancelled", "id", "files": [...]}`: `files` that were finished before.
* `{"event": "freed", "id"}`: the model is gone from memory.

`InProcess` (in_process.py) gives the same events from the same requests without a second process.
"""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from sd_scripts.library.tools.run import ToolCancelled, ended_by_signals
from sd_scripts.runs.importing import uncollected
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.outside import json_of

from .orders import PredictOrder, Read, order_of

log = logging.getLogger(__name__)

PROTOCOL = 1
"""Number of this protocol; a worker says it with ready."""
MAX_LINE_CHARACTERS = 1 << 20


def serve(read: Read, defaults: Mapping[str, object]) -> int:
    """Answers requests until standard input closes; defaults are for what requests leave out. Returns the exit code."""
    with _events_alone() as out:
        worker = Worker(read, out, defaults)
        lines = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", errors="replace")
        reader = threading.Thread(target=worker.read, args=(lines,), name="requests", daemon=True)
        try:
            with ended_by_signals():
                worker.greet()
                reader.start()
                worker.work()
        except (ToolCancelled, KeyboardInterrupt):
            return 130
        except BrokenPipeError:
            log.info("nobody reads the events any more")
    return 0


class Worker:
    """Reads requests in one thread and works on them, one after the other, in another: the one that calls `work`."""

    def __init__(self, read: Read, out: IO[str], defaults: Mapping[str, object]) -> None:
        """read: makes options of what requests say."""
        self._read, self._out, self._defaults = read, out, defaults
        self._write_lock, self._lock = threading.Lock(), threading.Lock()
        self._queue: queue.SimpleQueue[PredictOrder | _Free | None] = queue.SimpleQueue()
        self._waiting: list[str] = []
        """Predict requests that have not begun, in their order; one that is cancelled meanwhile leaves."""
        self._running: str | None = None
        self._stop = threading.Event()
        """The running request is to end."""
        self._end = threading.Event()
        """Everything is to end."""

    def greet(self) -> None:
        """Says that requests may come."""
        self.tell({"event": "ready", "protocol": PROTOCOL, "pid": os.getpid(), "devices": _devices()})

    def read(self, lines: IO[str]) -> None:
        """Takes requests until the lines end or quit is asked for."""
        try:
            while (line := lines.readline(MAX_LINE_CHARACTERS)) and self._take(line):
                pass
        except BrokenPipeError:
            log.info("nobody reads the events any more")
        finally:
            self._end.set()
            self._stop.set()
            self._queue.put(None)

    def work(self) -> None:
        """Works until everything is to end."""
        with uncollected("torch"):
            from .work import Workbench

        bench = Workbench()
        while (item := self._queue.get()) is not None and not self._end.is_set():
            if isinstance(item, _Free):
                bench.free()
                self.tell({"event": "freed", "id": item.id})
                continue
            with self._lock:
                if item.id not in self._waiting:
                    continue
                self._waiting.remove(item.id)
                self._running = item.id
                self._stop.clear()
                if self._end.is_set():
                    self._stop.set()
            self._tell_positions()
            bench.carry_out(item, self.tell, self._stop.is_set)
            with self._lock:
                self._running = None
            self._tell_positions()
        for ident in self._waiting:
            self.tell({"event": "cancelled", "id": ident, "files": []})

    def tell(self, event: Mapping[str, Any]) -> None:
        """Writes an event."""
        text = json.dumps(event, ensure_ascii=False, allow_nan=False) + "\n"
        with self._write_lock:
            self._out.write(text)
            self._out.flush()

    def _take(self, line: str) -> bool:
        """Understands one line; False when it asks for the end."""
        if not line.strip():
            return True
        try:
            given = json_of(line)
        except ValueError as err:
            self._refuse(None, f"a line is not JSON: {err}")
            return True
        if not isinstance(given, dict):
            self._refuse(None, 'a line is no JSON object; a request looks like {"op": "predict", "id": "1", ...}')
            return True
        op, ident = given.get("op"), given.get("id")
        if op == "quit":
            return False
        if op == "predict":
            self._take_order(given)
        elif op == "cancel":
            self._cancel(str(ident))
        elif op == "free":
            self._queue.put(_Free(ident if isinstance(ident, str) else None))
        else:
            self._refuse(ident if isinstance(ident, str) else None, f"op: {op!r} is not one of predict, cancel, free, quit")
        return True

    def _take_order(self, given: Mapping[str, object]) -> None:
        ident = given.get("id")
        if not isinstance(ident, str) or not ident:
            self._refuse(None, "id is missing: give every request a text of its own")
            return
        with self._lock:
            in_use = ident in self._waiting or ident == self._running
        if in_use:
            # No event with this id: it would end the request that has it.
            self._refuse(None, f"id: {ident} is in use; give every request its own")
            return
        try:
            order = order_of(self._read, given, self._defaults)
        except OptionError as err:
            problems = err.at_options()
            self._refuse(ident, str(err), problems)
            return
        with self._lock:
            self._waiting.append(ident)
            ahead = len(self._waiting) - 1 + (self._running is not None)
        self.tell({"event": "queued", "id": ident, "ahead": ahead})
        self._queue.put(order)

    def _cancel(self, ident: str) -> None:
        with self._lock:
            waits = ident in self._waiting
            if waits:
                self._waiting.remove(ident)
            elif ident == self._running:
                self._stop.set()
        if waits:
            self.tell({"event": "cancelled", "id": ident, "files": []})
            self._tell_positions()

    def _tell_positions(self) -> None:
        with self._lock:
            first = int(self._running is not None)
            positions = [(ident, first + number) for number, ident in enumerate(self._waiting)]
        for ident, ahead in positions:
            self.tell({"event": "queued", "id": ident, "ahead": ahead})

    def _refuse(self, ident: str | None, text: str, problems: list[dict[str, str]] | None = None) -> None:
        self.tell({"event": "failed", "id": ident, "text": text, "problems": problems or [], "advice": ""})


@dataclass(frozen=True)
class _Free:
    """A request to let go of the model."""

    id: str | None


@contextmanager
def _events_alone() -> Iterator[IO[str]]:
    """Standard output for events; within the block everything else that is written there goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    before, sys.stdout = sys.stdout, sys.stderr
    try:
        with os.fdopen(kept, "w", encoding="utf-8", newline="\n") as out:
            yield out
    except BrokenPipeError:
        log.info("nobody reads the events any more")
    finally:
        sys.stdout = before


def _devices() -> list[str]:
    """Devices that options may name on this machine."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{number}" for number in range(gpus)), *(["mps"] if torch.backends.mps.is_available() else [])]
