"""Grids of images in the background: checkpoints and strengths beside each other, prompts and seeds below one another.

On disk, in the folder of runs:
- `comparisons/<date>-<time>-<id>/` one grid: `comparison.json`, and its control images.
- `comparisons/.cells/<key>.png` the images. A key is a hash of all that an image depends on, of LoRA files by their content, so that an
  image which two grids share is drawn once, and a grid goes on where it ended.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from sd_scripts.runs.safetensors_header import digest_of
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.files import write_atomically
from sd_scripts.schema.outside import json_of, read_as

from . import votes
from .files import entries, modified
from .predict_routes import MODEL, Menu, order_of, prompt_problems
from .predictions import Prediction, PredictionOrder, PredictionQueue

logger = logging.getLogger(__name__)

FOLDER = "comparisons"
CELLS = ".cells"
FILE = "comparison.json"
MAX_CELLS = 600
MAX_COLUMNS = 24
MAX_COMPARISONS = 100
"""So many are listed, the newest."""
MAX_SEED = 2**63
_OWN_SEED = re.compile(r"\s--d\s+(\d+)")
_KEY = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Column:
    """One column. varied is the place of the file in loras whose strength the grid changes; -1 for none."""

    label: str
    loras: tuple[tuple[str, float], ...] = ()
    varied: int = -1
    draw_with: str = ""
    """A whole model of a run, in place of what the page draws with."""
    is_base: bool = False
    strength: float | None = None


@dataclass(frozen=True)
class Row:
    """One row: a line of prompts with its seed."""

    prompt: str
    seed: int

    @property
    def line(self) -> str:
        """As a list of prompts has it."""
        return self.prompt if _OWN_SEED.search(self.prompt) else f"{self.prompt} --d {self.seed}"


@dataclass(frozen=True)
class _Told:
    """What the file of a grid must say, so that it can be shown."""

    title: str
    time: float
    family: str
    said: str
    asked: dict[str, Any]
    controls: list[str]
    keys: list[list[str]]
    rows: list[_RowTold]
    columns: list[_ColumnTold]


@dataclass(frozen=True)
class _RowTold:
    prompt: str
    seed: int


@dataclass(frozen=True)
class _ColumnTold:
    label: str
    strength: float | None
    is_base: bool
    file: str


class Cells(Protocol):
    """Makes the order of one cell."""

    def __call__(self, column: Column, row: Row) -> PredictionOrder: ...


class Comparisons:
    """The grids of a studio. One is drawn at a time, whenever nobody waits for another image."""

    def __init__(self, menu: Menu, queue: PredictionQueue, root: Path) -> None:
        """root is the folder of runs."""
        self._menu, self._queue, self.folder = menu, queue, root / FOLDER
        self.cells = self.folder / CELLS
        self._lock = threading.Condition()
        self._votes = threading.Lock()
        self._waiting: deque[str] = deque()
        self._current: tuple[str, Prediction | None] | None = None
        self._stopping: set[str] = set()
        self._took: dict[str, list[float]] = {}
        """Seconds of the cells of each grid that this studio has drawn."""
        self._unkept: dict[str, str] = {}
        """Why grids ended whose file could not take it, the disk being full."""
        self._thread: threading.Thread | None = None
        self._is_closed = False

    # What there is

    def listed(self) -> list[dict[str, Any]]:
        """Every grid in a line, the newest first."""
        names = sorted((path.name for path in entries(self.folder)), reverse=True)[:MAX_COMPARISONS]
        known = [(name, self._shown(name)) for name in names]
        # Names tell the second; of one second the time in the file tells which came first.
        known.sort(key=lambda item: (item[0][:15], item[1]["time"]), reverse=True)
        return [self._line(name, told) for name, told in known]

    def one(self, name: str) -> dict[str, Any]:
        """A grid: its axes, the keys of its images, and which of them are there. Raises KeyError."""
        told = self._shown(name)
        there = {path.stem for path in entries(self.cells)}
        columns = [{key: column[key] for key in ("label", "strength", "is_base")} for column in told["columns"]]
        present = [[key in there for key in row] for row in told["keys"]]
        return {**self._line(name, told), "columns": columns, "rows": told["rows"], "keys": told["keys"], "there": present}

    def told(self, name: str) -> dict[str, Any]:
        """What the file of a grid says. Raises KeyError."""
        found = self._read(name)
        if found is None:
            raise KeyError(name)
        return found

    def _shown(self, name: str) -> dict[str, Any]:
        """What the file of a grid says; of one that is damaged, an empty grid that says so and can be deleted. Raises KeyError."""
        if name not in {path.name for path in entries(self.folder)}:
            raise KeyError(name)
        damaged = f"{FILE} of this grid is missing or damaged: its images cannot be told apart any more. Delete it, or put the file back."
        empty = {"title": name, "time": modified(self.folder / name), "family": "", "said": damaged, "keys": [], "rows": [], "columns": []}
        return self._read(name) or empty

    def cell(self, name: str, key: str) -> Path:
        """The file of one image of a grid. Raises KeyError."""
        if not _KEY.fullmatch(key) or not any(key in row for row in self.told(name)["keys"]):
            raise KeyError(key)
        return self.cells / f"{key}.png"

    # Blind votes

    def given_votes(self, name: str) -> list[votes.Vote]:
        """The votes that were given on a grid as it is now. Raises KeyError."""
        known = self.told(name)
        rows, columns = len(known["rows"]), len(known["columns"])
        given = [votes.told(each) for each in _rows(known.get("votes"))]
        return [one for one in given if one is not None and one.row < rows and max(one.left, one.right) < columns]

    def voting(self, name: str) -> dict[str, Any]:
        """The next question of a grid, and what the votes say so far. Raises KeyError."""
        shown, given, standings = self.one(name), self.given_votes(name), self.standings(name)
        pair = votes.next_pair(shown["there"], given, name)
        return {
            "pair": None if pair is None else dict(zip(("row", "left", "right"), pair, strict=True)),
            "prompt": "" if pair is None else _words_of(shown["rows"][pair[0]]["prompt"]),
            "votes": len(given),
            "ranking": [{**asdict(one), "label": shown["columns"][one.column]["label"]} for one in standings],
            "clear": votes.is_clear(standings),
        }

    def standings(self, name: str) -> list[votes.Standing]:
        """The columns of a grid by its votes, the best first. Raises KeyError."""
        return votes.ranking(len(self.told(name)["columns"]), self.given_votes(name))

    def vote(self, name: str, given: Mapping[str, Any]) -> None:
        """Keeps the answer to the question at hand. Raises KeyError, and OptionError for an answer to another one."""
        with self._votes:
            one, asked = votes.told(given), self.voting(name)["pair"]
            if one is None or asked != {"row": one.row, "left": one.left, "right": one.right}:
                raise OptionError("this question was answered already; here is the next one")
            self._keep(name, one)

    def add_vote(self, name: str, one: votes.Vote, keys: Sequence[str]) -> None:
        """Keeps a vote of somebody who was asked about the images with these keys. Raises KeyError, and OptionError where the grid has
        other ones by now."""
        with self._votes:
            rows = self.told(name)["keys"]
            there = rows[one.row] if one.row < len(rows) else []
            if [there[column] for column in (one.left, one.right) if column < len(there)] != list(keys):
                raise OptionError("the images of this grid have changed; here is the next question")
            self._keep(name, one)

    def _keep(self, name: str, one: votes.Vote) -> None:
        known = self.told(name)
        self._write(name, {**known, "votes": [*_rows(known.get("votes")), asdict(one)]})

    def _line(self, name: str, told: Mapping[str, Any]) -> dict[str, Any]:
        keys = {key for row in told["keys"] for key in row}
        done = sum((self.cells / f"{key}.png").is_file() for key in keys)
        with self._lock:
            busy = self._current is not None and self._current[0] == name
            state = "done" if done == len(keys) else "running" if busy else "waiting" if name in self._waiting else "stopped"
            took = self._took.get(name, [])
            prediction = self._current[1] if busy and self._current is not None else None
        left = (len(keys) - done) * sum(took) / len(took) if took and state == "running" else None
        phase = prediction.phase if prediction is not None and prediction.state == "running" else ""
        kept = {key: told[key] for key in ("title", "time", "family", "said")}
        kept["said"] = kept["said"] or self._unkept.get(name, "")
        return {"name": name, **kept, "state": state, "done": done, "total": len(keys), "left": left, "phase": phase}

    def _read(self, name: str) -> dict[str, Any] | None:
        if name.startswith(".") or Path(name).name != name:
            return None
        try:
            data = (self.folder / name / FILE).read_bytes()
            found, told = json_of(data), read_as(_Told, data)
        except (OSError, ValueError):
            return None
        fits = len(told.keys) == len(told.rows) and all(len(row) == len(told.columns) for row in told.keys)
        return found if fits and all(_KEY.fullmatch(key) for row in told.keys for key in row) else None

    # What is done with them

    def start(self, asked: Mapping[str, Any], session: str) -> str:
        """Begins a grid; its name. asked: `texts` and `images` as for one image, `columns` [{label, loras, varied, draw_with, is_base}],
        and the texts `prompts`, `strengths` and `seeds`. Raises OptionError with every problem."""
        columns, rows = axes(asked, self._menu)
        title = _words_of(rows[0].prompt)
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}"
        controls = order_of(self._menu, self._queue, _of_page(asked), session).controls
        folder = self.folder / name
        try:
            folder.mkdir(parents=True)
            kept = [shutil.copyfile(path, folder / f"control-{number}.png").name for number, path in enumerate(controls)]
        except OSError as err:
            raise OptionError(f"the folder {folder} cannot be made: {err.strerror}; free some space there") from err
        told = {"asked": {**asked, "images": []}, "controls": kept, "title": title, "time": time.time(), "said": ""}
        try:
            self._write(name, {**told, **self._drawn(name, told, columns, rows)})
        except OptionError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._begin(name)
        return name

    def go_on(self, name: str) -> None:
        """Draws what is missing, with the files as they are now. Raises KeyError, and OptionError for files that are gone."""
        with self._votes:
            told = self.told(name)
            fresh = self._drawn(name, told, *axes(told["asked"], self._menu))
            # Votes are about the images that were there.
            kept = told.get("votes") if fresh["keys"] == told["keys"] else []
            self._write(name, {**told, "said": "", "votes": kept or [], **fresh})
        self._begin(name)

    def stop(self, name: str) -> None:
        """Ends a grid between two steps of the image at hand; what is drawn stays."""
        with self._lock:
            if name in self._waiting:
                self._waiting.remove(name)
            current = self._current
            if current is None or current[0] != name:
                return
            self._stopping.add(name)
        if current[1] is not None:
            self._queue.cancel(current[1])

    def delete(self, name: str) -> None:
        """Removes a grid, and images that no other one has. Raises KeyError."""
        keys = {key for row in self._shown(name)["keys"] for key in row}
        self.stop(name)
        shutil.rmtree(self.folder / name)
        for path in entries(self.folder):
            other = self._read(path.name)
            keys -= {key for row in other["keys"] for key in row} if other is not None else set()
        for key in keys:
            (self.cells / f"{key}.png").unlink(missing_ok=True)

    def _write(self, name: str, told: Mapping[str, Any]) -> None:
        """Raises OptionError where the disk is full or the file may not be written; what it said before stays."""
        try:
            write_atomically(self.folder / name / FILE, json.dumps(told, ensure_ascii=False))
        except OSError as err:
            text = f"{self.folder / name / FILE} cannot be written: {err.strerror}; free some space there, then try again"
            raise OptionError(text) from err

    def _drawn(self, name: str, told: Mapping[str, Any], columns: Sequence[Column], rows: Sequence[Row]) -> dict[str, Any]:
        """Axes and keys of a grid as its files are now. Raises OptionError with every problem."""
        order, problems = self._orders(name, told), []
        keys: list[list[str]] = [[] for _ in rows]
        family = ""
        for column in columns:
            try:
                # The rows differ in their line alone.
                first = order(column, rows[0])
                family = str(first.request.get("family") or family)
                for place, row in enumerate(rows):
                    keys[place].append(key_of({**first.request, "prompt_list": row.line}, first.controls))
            except OptionError as err:
                problems += [Problem(one.option, f"{column.label}: {one.message}") for one in err.problems]
        refuse(problems)
        return {
            "family": family,
            "keys": keys,
            "rows": [{"prompt": row.prompt, "seed": row.seed} for row in rows],
            "columns": [
                {
                    "label": column.label,
                    "strength": column.strength,
                    "is_base": column.is_base,
                    "file": "" if column.is_base else column.draw_with or (column.loras[column.varied][0] if column.varied >= 0 else ""),
                }
                for column in columns
            ],
        }

    def _orders(self, name: str, told: Mapping[str, Any]) -> Cells:
        asked = _of_page(told["asked"])
        controls = tuple(self.folder / name / file for file in told["controls"])

        def order(column: Column, row: Row) -> PredictionOrder:
            texts, chosen = dict(asked["texts"]), None
            if column.draw_with:
                # A model of its own says what its base, text encoders and versions are.
                texts = {key: text for key, text in texts.items() if key not in MODEL}
                family = str(texts.get("family") or "")
                if column.is_base:
                    chosen = self._menu.untrained(column.draw_with, family)
                else:
                    texts["draw_with"] = column.draw_with
            texts |= {"prompt": "", "prompt_list": row.line, "num_images": "1", "seed": ""}
            loras = [{"name": file, "weight": weight} for file, weight in column.loras]
            made = order_of(self._menu, self._queue, {"texts": texts, "loras": loras}, "", chosen)
            return replace(made, controls=controls)

        return order

    # The thread that draws

    def close(self) -> None:
        """Ends the grid at hand between two steps, and the thread; what is drawn stays, and can be gone on with."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            current = self._current
            self._lock.notify_all()
        if current is not None:
            self.stop(current[0])
        if self._thread is not None:
            # A model that is being loaded answers late; its process ends with the predictions.
            self._thread.join(10.0)

    def _begin(self, name: str) -> None:
        with self._lock:
            self._unkept.pop(name, None)
            self._stopping.discard(name)
            if name not in self._waiting and (self._current is None or self._current[0] != name):
                self._waiting.append(name)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="comparisons", daemon=True)
                self._thread.start()
            self._lock.notify_all()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: bool(self._waiting) or self._is_closed)
                if self._is_closed:
                    return
                name = self._waiting.popleft()
                self._current = (name, None)
            said = ""
            try:
                said = self._draw(name)
            except OptionError as err:
                said = str(err)
            except KeyError:
                logger.info("the comparison %s was deleted while it was drawn", name)
            except Exception as err:
                # Whatever happens to one grid, the next one has its turn.
                logger.exception("a comparison failed")
                said = f"{type(err).__name__}: {err}"
            with self._votes:
                told = self._read(name)
                try:
                    if said and told is not None:
                        self._write(name, {**told, "said": said})
                except OptionError as err:
                    self._unkept[name] = said
                    logger.warning("the comparison %s cannot keep why it ended (%s): %s", name, said, err)
            with self._lock:
                self._current = None

    def _draw(self, name: str) -> str:
        """Draws what is missing of a grid, column by column, so that adapters are put on once; why it could not go on, or ""."""
        told = self.told(name)
        columns, rows = axes(told["asked"])
        order = self._orders(name, told)
        for place, column in enumerate(columns):
            for number, row in enumerate(rows):
                target = self.cells / f"{told['keys'][number][place]}.png"
                if target.is_file():
                    continue
                with self._lock:
                    if name in self._stopping:
                        return ""
                    prediction = self._queue.submit(replace(order(column, row), target=target), "")
                    self._current = (name, prediction)
                started = time.monotonic()
                prediction.over.wait()
                self._took.setdefault(name, []).append(time.monotonic() - started)
                if prediction.state == "cancelled":
                    return ""
                if prediction.state == "failed":
                    return f"{column.label}, {row.prompt!r}: {prediction.text} {prediction.advice}".strip()
        return ""


def _of_page(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What a grid's page says about every image."""
    texts = asked.get("texts")
    first = next(iter(lines_of(asked.get("prompts"))), "")
    shared = {**texts, "prompt": first, "prompt_list": ""} if isinstance(texts, Mapping) else {}
    return {"texts": shared, "images": asked.get("images") or []}


def axes(asked: Mapping[str, Any], menu: Menu | None = None) -> tuple[list[Column], list[Row]]:
    """Columns with their strengths, and rows with their seeds, that a page asks for. Raises OptionError with every problem; with a menu, of
    the prompts' flags too."""
    problems: list[Problem] = []
    prompts = lines_of(asked.get("prompts"))
    if not prompts:
        problems.append(Problem("prompts", "prompts: there is none; write one a line"))
    texts = asked.get("texts")
    if menu is not None and isinstance(texts, Mapping):
        # A comment at the end: one line alone may be the name of a file.
        problems += prompt_problems("prompts", f"{asked.get('prompts') or ''}\n#", str(texts.get("family") or ""), menu.roots)
    strengths = _numbers(asked.get("strengths"), "strengths", problems) or [1.0]
    seeds = _seeds(asked.get("seeds"), problems) or [1]
    columns = [each for given in _rows(asked.get("columns")) for each in _with_strengths(given, strengths, problems)]
    owns = {prompt: _OWN_SEED.search(prompt) for prompt in prompts}
    rows = [Row(prompt, seed) for prompt, own in owns.items() for seed in ([int(own[1])] if own else seeds)]
    if not problems and len(columns) < 2:
        problems.append(Problem("columns", "there is nothing to compare: choose the base and a checkpoint, or two checkpoints"))
    if len(columns) > MAX_COLUMNS:
        problems.append(Problem("columns", f"{len(columns)} columns are more than {MAX_COLUMNS}, which is the most"))
    if len(columns) * len(rows) > MAX_CELLS:
        text = f"{len(columns)} x {len(rows)} = {len(columns) * len(rows)} images are more than {MAX_CELLS}, which is the most"
        problems.append(Problem("prompts", text))
    refuse(problems)
    return columns, rows


def _rows(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def lines_of(value: object) -> list[str]:
    """The prompts in a text, one a line, without comments."""
    lines = [line.strip() for line in str(value or "").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _words_of(prompt: str) -> str:
    """A line of a list of prompts without its flags."""
    return prompt.partition(" --")[0]


def _with_strengths(given: Mapping[str, Any], strengths: Sequence[float], problems: list[Problem]) -> list[Column]:
    label, draw_with, is_base = str(given.get("label") or "")[:80], str(given.get("draw_with") or ""), given.get("is_base") is True
    loras: list[tuple[str, float]] = []
    for row in _rows(given.get("loras")):
        try:
            loras.append((str(row.get("name") or ""), float(str(row.get("weight", 1.0)).replace(",", ".") or 1.0)))
        except ValueError:
            problems.append(Problem("lora", f"lora_weight: {row.get('weight')!r} is not a number, such as 0.8"))
    varied = given.get("varied")
    place = varied if isinstance(varied, int) and 0 <= varied < len(loras) else -1
    plain = Column(label, tuple(loras), place, draw_with, is_base)
    if place < 0:
        return [plain]
    many = len(strengths) > 1
    return [
        replace(
            plain,
            loras=tuple((name, strength if index == place else weight) for index, (name, weight) in enumerate(loras)),
            label=f"{label} {strength:g}" if many else label,
            strength=strength,
        )
        for strength in strengths
    ]


def _numbers(value: object, option: str, problems: list[Problem]) -> list[float]:
    found = []
    words = flat.fractions(str(value or ""))
    for word in words:
        try:
            found.append(float(flat.with_point(word) if len(words) > 1 else word))
        except ValueError:
            problems.append(Problem(option, f"{option}: {word!r} is not a number; write them with spaces between, such as 0.6 0.8 1"))
    return list(dict.fromkeys(found))


def _seeds(value: object, problems: list[Problem]) -> list[int]:
    found: list[int] = []
    for word in re.split(r"[\s,;]+", str(value or "").strip()):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if word and (not match or not first <= last < min(MAX_SEED, first + MAX_CELLS)):
            text = f"seeds: {word!r} is neither a whole number of 0 or more nor a range; write them with spaces between, such as 1 2 or 1-4"
            problems.append(Problem("seeds", text))
        elif word:
            found += range(first, last + 1)
    return list(dict.fromkeys(found))


def key_of(request: Mapping[str, Any], controls: Sequence[Path]) -> str:
    """A hash of all that an image depends on: LoRA files and control images by content, models by path, size and time of change."""
    files = [content_hash(name) for name in request.get("lora") or ()]
    told = {name: [value, _identity(value)] for name, value in request.items() if name != "lora"}
    images = [content_hash(str(path)) for path in controls]
    return hashlib.sha256(json.dumps([told, files, images], sort_keys=True).encode()).hexdigest()[:40]


def content_hash(name: str) -> str:
    """SHA-256 of a file as it is now, without the mark of a choice. Raises OptionError where it cannot be read."""
    try:
        stat = Path(name).stat()
        return _content_hash(name, stat.st_size, stat.st_mtime_ns)
    except OSError as err:
        raise OptionError(Problem("lora", f"{name} cannot be read: {err.strerror}")) from err


@lru_cache(maxsize=1000)
def _content_hash(name: str, _size: int, _mtime_ns: int) -> str:
    return digest_of(Path(name))


def _identity(value: object) -> object:
    """Size and time of change of the file that a value names, of a folder those of what lies in it."""
    path = Path(value) if isinstance(value, str) and 0 < len(value) < 4096 and "\n" not in value else None
    try:
        if path is None or not path.is_absolute() or not path.exists():
            return None
        stats = [path.stat()] if path.is_file() else [each.stat() for each in sorted(path.rglob("*")) if each.is_file()]
        return [[stat.st_size, stat.st_mtime_ns] for stat in stats]
    except OSError:
        return None
