"""Captions of a data set, as files beside its images: read, written so that nobody's words are lost, and taken back.

Who writes names the version that they have read; when somebody else has written since, nothing is written and the present words come back.
Each change is noted in `.captions.jsonl` in the data set's folder before the file is touched: time, order, file, words before and after.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import fsync_directory, one_at_a_time, write_atomically
from sd_scripts.schema.outside import json_of

HISTORY = ".captions.jsonl"
LOCK = ".captions.lock"
MAX_BYTES = 1 << 20
UNDO = "undo"


@dataclass(frozen=True)
class Words:
    """What a caption file holds; None where there is no file."""

    text: str | None

    @property
    def version(self) -> str:
        """Differs for other words; that of no file is not that of an empty one."""
        return "none" if self.text is None else hashlib.sha256(self.text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class CaptionChange:
    """A file that somebody wants other words in. before: the version that they have read."""

    file: Path
    before: str
    after: str | None


def read(file: Path) -> Words:
    """The words of a caption file, as training reads them. Raises OptionError for one that is no text."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Words(None)
    except OSError as err:
        raise OptionError(f"{file} cannot be read: {err.strerror or err}.") from err
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
        return Words(data.decode("utf-8-sig").strip())
    except ValueError as err:
        raise OptionError(f"{file} cannot be edited here: it is not a caption in UTF-8 ({err}).") from err


class Book:
    """The captions below one folder. Safe to use from several threads and processes."""

    noun: ClassVar[str] = "captions"
    history_name: ClassVar[str] = HISTORY
    lock_name: ClassVar[str] = LOCK

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()

    @property
    def history(self) -> Path:
        """Every change that was made here, oldest first."""
        return self.root / self.history_name

    def read(self, file: Path) -> Words:
        """What a file holds now. Raises OptionError."""
        return read(file)

    def _keep(self, file: Path) -> None:
        """Whatever must be kept of a file before it is written over; the history has the words of a caption."""

    def _put(self, file: Path, text: str) -> None:
        write_atomically(file, text)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock, one_at_a_time(self.root, self.lock_name):
            yield

    def write(self, what: str, changes: Iterable[CaptionChange], order: str | None = None) -> tuple[dict[Path, Words], dict[Path, Words]]:
        """Writes what nobody has changed since: what is there now of those files that were written, and of those that were not.

        what: a sentence for the history. order: the name under which Undo takes it back, together with all that was written under it; None
        for a new one. Raises OptionError where the disk takes no more; what the history says was done then.
        """
        with self._alone():
            return self._write(what, changes, order or f"{time.time_ns():x}")

    def _write(self, what: str, changes: Iterable[CaptionChange], order: str) -> tuple[dict[Path, Words], dict[Path, Words]]:
        done: dict[Path, Words] = {}
        others: dict[Path, Words] = {}
        for change in changes:
            now = self.read(change.file)
            if now.version != change.before:
                others[change.file] = now
                continue
            if now.text == change.after:
                done[change.file] = now
                continue
            name = change.file.relative_to(self.root).as_posix()
            line = {"time": time.time(), "order": order, "what": what, "file": name, "before": now.text, "after": change.after}
            try:
                self._keep(change.file)
                self._note(line)
                if change.after is None:
                    change.file.unlink(missing_ok=True)
                    fsync_directory(change.file.parent)
                else:
                    self._put(change.file, change.after)
            except OSError as err:
                raise OptionError(
                    f"{change.file} cannot be written: {err.strerror or err}. {len(done)} {self.noun} were changed before it; "
                    "Undo takes them back."
                ) from err
            done[change.file] = Words(change.after)
        return done, others

    def _note(self, line: Mapping[str, Any]) -> None:
        # One write: two studios append, and a reader must never meet half a line.
        handle = os.open(self.history, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)

    def _lines(self) -> Iterator[dict[str, Any]]:
        with suppress(FileNotFoundError), self.history.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                with suppress(ValueError):  # one that a full disk has cut off
                    said = json_of(line)
                    if _is_ours(said):
                        yield said

    def _in_force(self) -> dict[str, list[dict[str, Any]]]:
        """What was written and not taken back, by the name of its order, oldest first."""
        orders: dict[str, list[dict[str, Any]]] = {}
        for line in self._lines():
            if line.get("what") != UNDO:
                orders.setdefault(str(line.get("order")), []).append(line)
            elif "undone" in line:
                # An order that went on afterwards begins anew.
                orders.pop(str(line["undone"]), None)
        return orders

    def last(self) -> tuple[str, list[dict[str, Any]]]:
        """The newest order that is still in force, by its name in the history, with its changes; ("", []) for none. Raises OSError."""
        orders = self._in_force()
        name = max(orders, key=lambda name: orders[name][-1]["time"], default="")
        return name, orders.get(name, [])

    def written_by(self, order: str) -> set[Path]:
        """The files that an order has written and that were not taken back."""
        return {self.root / str(line.get("file")) for line in self._in_force().get(order, [])}

    def size(self) -> int:
        """Bytes of the history; whoever takes it before reading captions misses nothing of `news` from there."""
        try:
            return self.history.stat().st_size
        except OSError:
            return 0

    def news(self, offset: int, files: Iterable[Path]) -> tuple[dict[Path, Words], int]:
        """What those of some files hold that were written, by whomever, since the history had so many bytes; and how many it has now.

        Raises OptionError.
        """
        size = self.size()
        if size in (0, offset):
            return {}, size
        offset = 0 if size < offset else offset
        # The history says what is about to be written: read in between, a file has its old words, and nobody would look again.
        with self._alone():
            try:
                with self.history.open("rb") as file:
                    file.seek(offset)
                    data = file.read()
            except OSError as err:
                raise OptionError(f"{self.history} cannot be read: {err.strerror or err}; what others write is not seen.") from err
            end = data.rfind(b"\n") + 1
            found = set()
            for line in data[:end].splitlines():
                with suppress(ValueError):
                    said = json_of(line)
                    inside = self._inside(said["file"]) if _is_ours(said) and "file" in said else None
                    found |= {inside} if inside is not None else set()
            return {each: self.read(each) for each in files if each in found}, offset + end

    def undo(self) -> tuple[str, dict[Path, Words], dict[Path, Words]]:
        """Takes the newest order back where its words still stand: what it was, and as `write`."""
        with self._alone():
            try:
                order, lines = self.last()
            except OSError as err:
                raise OptionError(f"{self.history} cannot be read: {err.strerror or err}; nothing can be taken back.") from err
            if not order:
                return "", {}, {}
            changes = [
                CaptionChange(file, Words(line["after"]).version, line["before"])
                for line in reversed(lines)
                if (file := self._inside(str(line.get("file")))) is not None
            ]
            done, others = self._write(UNDO, changes, f"{time.time_ns():x}")
            # Whatever became of it: the next one comes to the order before.
            with suppress(OSError):  # the changes are noted, and say as much
                self._note({"time": time.time(), "order": f"{time.time_ns():x}", "what": UNDO, "undone": order})
            return str(lines[0].get("what")), done, others

    def _inside(self, name: str) -> Path | None:
        """A file that the history names, unless somebody has written a way out there."""
        file = self.root / name
        is_named = name and "\0" not in name and not Path(name).is_absolute() and ".." not in Path(name).parts
        return file if is_named and not file.is_symlink() else None


def _is_ours(said: object) -> bool:
    """Whether a line of the history was written here. Undoing another one would write what nobody had."""
    if not isinstance(said, dict) or not isinstance(said.get("order"), str) or not isinstance(said.get("time"), int | float):
        return False
    json.dumps(said, ensure_ascii=False).encode()  # half a character, a ValueError, cannot be written into a caption
    is_change = isinstance(said.get("file"), str) and all(
        name in said and isinstance(said[name], str | None) for name in ("before", "after")
    )
    return is_change != isinstance(said.get("undone"), str)
