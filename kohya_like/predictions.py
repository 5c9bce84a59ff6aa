"""The queue of predictions, the images people gave, and what was made before. Knows files and a Backend, not how an image is made.

On disk, in the folder of runs:
- `predictions/<date>-<time>-<id>/` one prediction: `settings.json`, `control-0.png` ... as given, and the files of the backend.
- `.pictures/` what was uploaded, as PNG named by its content; removed after a day.

A session is a browser; it sees its own predictions only.
"""

from __future__ import annotations

import contextvars
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from sd_scripts.dataset import images
from sd_scripts.schema.errors import OptionError, Problem, of_disk
from sd_scripts.schema.files import write_atomically, written_aside
from sd_scripts.schema.outside import object_in

from .files import entries
from .inference import Backend, Event

logger = logging.getLogger(__name__)

FOLDER = "predictions"
UPLOADS = ".pictures"
SETTINGS = "settings.json"
MAX_UPLOAD_BYTES = 50 << 20
KEEP_UPLOADS_SECONDS = 86_400.0
MAX_WAITING = 20
MAX_WAITING_OF_SESSION = 4
MAX_HISTORY = 24
MAX_REMEMBERED = 200
_UPLOAD = re.compile(r"[0-9a-f]{32}\.png")
_SESSION = re.compile(r"[0-9a-f]{16,64}")

State = Literal["queued", "running", "done", "failed", "cancelled"]
ENDED = ("done", "failed", "cancelled")


@dataclass(frozen=True)
class PredictionOrder:
    """What somebody asked for, checked."""

    request: dict[str, Any]
    """Keys of the backend's protocol, without id and out."""
    controls: tuple[Path, ...]
    settings: dict[str, Any]
    """What the page needs to ask for the same again."""
    target: Path | None = None
    """Where the one image goes that is made; None keeps it in a folder of its own, with its settings. Orders that have a target wait until
    nobody waits for any other."""


@dataclass
class Prediction:
    """One order on its way. The queue's thread writes, routes read."""

    ident: str
    session: str
    order: PredictionOrder
    context: contextvars.Context
    """Of the request that brought the order: a backend may need to know who asks."""
    state: State = "queued"
    phase: str = ""
    step: int = 0
    steps: int = 0
    done: int = 0
    images: int = 1
    preview: str = ""
    previews: int = 0
    """How many previews there were: a page that has this one needs no other."""
    seeds: tuple[int, ...] = ()
    warnings: list[str] = field(default_factory=list)
    text: str = ""
    advice: str = ""
    lines: tuple[str, ...] = ()
    problems: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    folder: str = ""
    wants_cancel: bool = False
    cancel_told: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    """Set when it has ended."""

    def fold(self, event: Event) -> None:
        """Takes over what an event says."""
        kind = event.get("event")
        if kind == "starting":
            self.phase = "Starting the worker"
        elif kind == "loading":
            self.phase = f"Loading {event.get('text') or 'the model'}"
        elif kind == "loaded":
            self.phase = "Reading the images and the instruction"
        elif kind == "started":
            self.phase = "Reading the images and the instruction"
            self.steps, self.images = int(event.get("steps") or 0), int(event.get("images") or 1)
            self.seeds = tuple(int(seed) for seed in event.get("seeds") or ())
        elif kind == "step":
            self.phase = "Drawing"
            self.step, self.steps = int(event.get("step") or 0), int(event.get("steps") or 0)
            self.done, self.images = int(event.get("done") or 0), int(event.get("images") or self.images)
            self.seconds = float(event.get("seconds") or 0.0)
            if event.get("preview"):
                self.preview, self.previews = str(event["preview"]), self.previews + 1
        elif kind == "warning":
            self.warnings.append(str(event.get("text") or ""))
        elif kind == "failed":
            self.text, self.advice = str(event.get("text") or "It failed without a word."), str(event.get("advice") or "")
            self.lines = tuple(map(str, event.get("lines") or ()))
            self.problems = [
                {"option": str(item.get("option") or ""), "message": str(item["message"])} for item in event.get("problems") or ()
            ]
        elif kind == "done":
            self.seconds = float(event.get("seconds") or self.seconds)


class PredictionQueue:
    """Takes orders, works through them one after the other, and keeps what came out."""

    def __init__(self, backend: Backend, root: Path, keep_results_seconds: float | None = None) -> None:
        """root is the folder of runs. With keep_results_seconds, older predictions are removed: for a page that strangers use."""
        self.backend = backend
        self.results = root / FOLDER
        self.uploads = root / UPLOADS
        self._keep_results_seconds = keep_results_seconds
        self._lock = threading.RLock()
        self._waiting: list[Prediction] = []
        self._running: Prediction | None = None
        self._known: OrderedDict[str, Prediction] = OrderedDict()
        self._wake = threading.Condition(self._lock)
        self._closed = False
        self._thread: threading.Thread | None = None

    # Images that people give

    def take_image(self, data: bytes) -> tuple[str, tuple[int, int]]:
        """Keeps an uploaded image as an upright RGB PNG without its metadata, and gives its name and (width, height).

        Raises OptionError for what is no image, or too large.
        """
        if len(data) > MAX_UPLOAD_BYTES:
            raise OptionError(f"images: the file has {len(data) / 2**20:.0f} MiB; {MAX_UPLOAD_BYTES >> 20} MiB is the most")
        self.sweep()
        name = f"{hashlib.sha256(data).hexdigest()[:32]}.png"
        path = self.uploads / name
        if not path.is_file():
            self.uploads.mkdir(parents=True, exist_ok=True)
            raw = self.uploads / f".{uuid.uuid4().hex}.upload"
            try:
                raw.write_bytes(data)
                pixels = images.decode(raw).rgb
                with written_aside(path) as aside:
                    Image.fromarray(pixels).save(aside, format="PNG")
            except images.BadImage as err:
                raise OptionError(Problem("images", f"images: the file {err}")) from err
            except OSError as err:
                raise of_disk(err, self.uploads) from err
            finally:
                raw.unlink(missing_ok=True)
        os.utime(path)
        return name, images.read_size(path)

    def upload(self, name: str) -> Path | None:
        """The upload of this name; None when the name is none of an upload. Raises KeyError for one that is gone."""
        if not _UPLOAD.fullmatch(name):
            return None
        if not (self.uploads / name).is_file():
            raise KeyError(name)
        return self.uploads / name

    def image(self, name: str, session: str) -> Path:
        """The file behind a name that the page gives: an upload, or `<folder>/<file>` of a prediction of this session. Raises KeyError."""
        upload = self.upload(name)
        if upload is not None:
            return upload
        folder, slash, file = name.partition("/")
        if slash:
            return self.result(folder, file, session)
        raise KeyError(name)

    def sweep(self) -> None:
        """Removes old uploads, and old predictions where they are not kept."""
        now = time.time()
        for path in entries(self.uploads):
            if now - path.stat().st_mtime > KEEP_UPLOADS_SECONDS:
                path.unlink(missing_ok=True)
        if self._keep_results_seconds is not None:
            for path in entries(self.results):
                if now - path.stat().st_mtime > self._keep_results_seconds:
                    shutil.rmtree(path, ignore_errors=True)

    # What was made before

    def result(self, folder: str, file: str, session: str) -> Path:
        """A file of a prediction of this session. Names are compared, never joined to a path first. Raises KeyError."""
        for path in entries(self.results):
            if path.name == folder and object_in(path / SETTINGS).get("session") == session:
                for each in entries(path):
                    if each.name == file and each.suffix == ".png" and each.resolve().parent == path.resolve():
                        return each
        raise KeyError(f"{folder}/{file}")

    def entry(self, folder: str) -> dict[str, Any]:
        """What is known of a finished prediction. Raises KeyError when it is gone."""
        found = next((object_in(path / SETTINGS) for path in entries(self.results) if path.name == folder), {})
        if not found:
            raise KeyError(folder)
        return found

    def history(self, session: str) -> list[dict[str, Any]]:
        """What this session has made, newest first."""
        found = []
        for path in sorted(entries(self.results), key=lambda each: each.name, reverse=True):
            settings = object_in(path / SETTINGS)
            if settings.get("session") == session and settings.get("results"):
                found.append({**{key: value for key, value in settings.items() if key != "session"}, "folder": path.name})
            if len(found) == MAX_HISTORY:
                break
        return found

    # The queue

    def submit(self, order: PredictionOrder, session: str) -> Prediction:
        """Puts an order at the end of the queue. Raises OptionError when there are too many."""
        with self._lock:
            if self._closed:
                raise OptionError("the studio is ending; start it again")
            if len(self._waiting) >= MAX_WAITING:
                raise OptionError(f"{len(self._waiting)} predictions are waiting, and that is the most; try again in a while")
            mine = sum(1 for each in self._waiting if each.session == session)
            if mine >= MAX_WAITING_OF_SESSION:
                raise OptionError(f"{mine} of your predictions are waiting, and that is the most; cancel one, or wait until one is done")
            prediction = Prediction(uuid.uuid4().hex, session, order, contextvars.copy_context())
            self._waiting.append(prediction)
            self._known[prediction.ident] = prediction
            while len(self._known) > MAX_REMEMBERED and next(iter(self._known.values())).state in ENDED:
                self._known.popitem(last=False)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="predictions", daemon=True)
                self._thread.start()
            self._wake.notify_all()
        return prediction

    def find(self, ident: str) -> Prediction:
        """Raises KeyError for an order that was never given, or long ago."""
        with self._lock:
            return self._known[ident]

    def of_session(self, session: str) -> list[str]:
        """Orders of this session that have not ended, the first first."""
        with self._lock:
            running = [self._running] if self._running is not None else []
            return [each.ident for each in [*running, *self._waiting] if each.session == session]

    def ahead(self, prediction: Prediction) -> int:
        """How many orders are worked on before this one."""
        with self._lock:
            if prediction not in self._waiting:
                return 0
            before = self._waiting[: self._waiting.index(prediction)]
            return sum(1 for each in before if each.order.target is None) + (self._running is not None)

    @property
    def busy(self) -> int:
        """Orders that have not ended."""
        with self._lock:
            return len(self._waiting) + (self._running is not None)

    def cancel(self, prediction: Prediction) -> None:
        """Takes an order out of the queue, or asks the backend to end it between two steps."""
        with self._lock:
            prediction.wants_cancel = True
            if prediction in self._waiting:
                self._waiting.remove(prediction)
                prediction.state = "cancelled"
                prediction.over.set()
                return
        if prediction.state == "running":
            self.backend.cancel(prediction.ident)

    def free(self) -> None:
        """Lets the backend go of its memory. Raises OptionError while somebody's prediction needs it."""
        with self._lock:
            if self.busy:
                raise OptionError(f"{self.busy} predictions are under way or waiting; cancel them first, or wait until they are done")
            self.backend.free()

    def close(self) -> None:
        """Ends everything, with the studio."""
        with self._lock:
            self._closed = True
            for prediction in self._waiting:
                prediction.state = "cancelled"
                prediction.over.set()
            self._waiting.clear()
            self._wake.notify_all()
        self.backend.free()
        if self._thread is not None:
            self._thread.join(10.0)

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                prediction = next((each for each in self._waiting if each.order.target is None), self._waiting[0])
                self._waiting.remove(prediction)
                self._running = prediction
                prediction.state = "running"
            try:
                prediction.context.run(self._predict, prediction)
            except OptionError as err:
                _fail(prediction, str(err))
            except OSError as err:
                _fail(prediction, str(of_disk(err, self.results)))
            except Exception as err:
                # Whatever happens to one order, the next one has its turn.
                logger.exception("a prediction failed")
                _fail(prediction, f"The prediction failed: {type(err).__name__}: {err}")
            finally:
                with self._lock:
                    self._running = None
                prediction.over.set()

    def _predict(self, prediction: Prediction) -> None:
        """Runs one order through the backend, in a folder of its own."""
        folder = self._new_folder(prediction)
        try:
            controls = _kept_controls(folder, prediction.order.controls)
            request = {**prediction.order.request, "id": prediction.ident, "out": str(folder)}
            if controls:
                request["images"] = [str(path) for path in controls]
            end = self._listen(prediction, request)
            results = _results(folder, end)
            target = prediction.order.target
            if target is not None:
                if results:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    (folder / results[0]["file"]).replace(target)
            elif results:
                _keep(folder, prediction, results, [path.name for path in controls], end)
                prediction.folder = folder.name
            prediction.state = "cancelled" if end["event"] == "cancelled" else "done" if end["event"] == "done" else "failed"
        finally:
            if not prediction.folder:
                shutil.rmtree(folder, ignore_errors=True)

    def _listen(self, prediction: Prediction, request: Mapping[str, Any]) -> Event:
        images: list[Event] = []
        last: Event = {"event": "failed", "text": "The backend ended without an answer."}
        for event in self.backend.submit(request):
            prediction.fold(event)
            last = event
            if event.get("event") == "image":
                images.append(event)
            # An order may be cancelled before the backend knows it.
            if prediction.wants_cancel and not prediction.cancel_told and event.get("event") not in ("starting", *ENDED):
                prediction.cancel_told = True
                self.backend.cancel(prediction.ident)
        if last.get("event") not in ENDED:
            last = {"event": "failed", "text": "The backend ended without an answer."}
            prediction.fold(last)
        return {**last, "images": images}

    def _new_folder(self, prediction: Prediction) -> Path:
        path = self.results / f"{datetime.now():%Y%m%d-%H%M%S}-{prediction.ident[:8]}"
        try:
            path.mkdir(parents=True)
        except OSError as err:
            raise OptionError(f"the folder {path} cannot be made: {err.strerror}; free some space there") from err
        return path


def is_session(text: str) -> bool:
    """Whether a text can be the name of a session: what the page draws at random."""
    return _SESSION.fullmatch(text) is not None


def _fail(prediction: Prediction, text: str) -> None:
    prediction.text, prediction.state = text, "failed"


def _kept_controls(folder: Path, controls: Sequence[Path]) -> list[Path]:
    """The control images beside the result, where they stay as long as it does."""
    kept = []
    for number, path in enumerate(controls):
        target = folder / f"control-{number}.png"
        try:
            shutil.copyfile(path, target)
        except OSError as err:
            if path.is_file():
                raise of_disk(err, target) from err
            raise OptionError(Problem("images", "images: a control image is gone from the disk; give it again")) from err
        kept.append(target)
    return kept


def _results(folder: Path, end: Event) -> list[dict[str, Any]]:
    """The images that were made, in order, with seed, size and the label of their variant."""
    variants = [str(item.get("label") or "") for item in end.get("variants") or ()]
    found = []
    for event in end["images"]:
        path = Path(str(event.get("file")))
        if path.parent.resolve() != folder.resolve() or not path.is_file():
            continue
        variant = int(event.get("variant") or 0)
        label = variants[variant] if len(variants) > 1 and variant < len(variants) else ""
        found.append({"file": path.name, "label": label, **{key: event.get(key) for key in ("seed", "width", "height", "variant")}})
    return sorted(found, key=lambda item: item["variant"] or 0)


def _keep(folder: Path, prediction: Prediction, results: list[dict[str, Any]], controls: list[str], end: Event) -> None:
    grid = end.get("grid")
    settings = {
        **prediction.order.settings,
        "session": prediction.session,
        "time": time.time(),
        "seconds": end.get("seconds"),
        "warnings": prediction.warnings,
        "controls": controls,
        "results": results,
        "grid": Path(str(grid)).name if grid and (folder / Path(str(grid)).name).is_file() else "",
    }
    write_atomically(folder / SETTINGS, json.dumps(settings, ensure_ascii=False))


def as_page(queue: PredictionQueue, prediction: Prediction, previews: int) -> dict[str, Any]:
    """What a page needs to show an order; the preview only when it has not got it yet."""
    return {
        "job": prediction.ident,
        "state": prediction.state,
        "ahead": queue.ahead(prediction),
        "cancelling": prediction.wants_cancel and prediction.state == "running",
        **{
            name: getattr(prediction, name)
            for name in ("phase", "step", "steps", "done", "images", "previews", "seeds", "warnings", "text", "advice", "lines")
            + ("problems", "seconds", "folder")
        },
        "preview": prediction.preview if prediction.previews > previews else "",
    }
