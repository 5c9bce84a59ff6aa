"""A folder `.trash` that keeps what somebody deleted until it is emptied, by hand or after 30 days. Knows files, not runs.

Each deletion is a folder in it, with the time as its name: `entry.json` says what it was and where it lay, `held` has it. Moved, never
copied, so it takes no time and no room; who deletes asks first, and makes sure that nobody is at work there.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import fsync_directory, write_atomically
from sd_scripts.schema.outside import json_of

FOLDER = ".trash"
KEPT_SECONDS = 30 * 24 * 3600.0


@dataclass(frozen=True)
class Discarded:
    """One deletion. paths: where each thing lay; time: Unix time."""

    name: str
    what: str
    time: float
    paths: tuple[str, ...]


def bytes_of(path: Path) -> int:
    """What a file or a folder with all in it takes up; links are not followed, and what goes meanwhile counts nothing."""
    total = 0
    try:
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        with os.scandir(path) as entries:
            for entry in entries:
                total += bytes_of(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else entry.stat(follow_symlinks=False).st_size
    except OSError:
        pass
    return total


class Trash:
    """The trash of one folder of runs, which is `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / FOLDER

    def put(self, what: str, paths: Sequence[Path]) -> Discarded:
        """Moves files or folders that lie below the root into the trash, as one deletion that `what` names in words.

        Raises OptionError for what is not there, or lies elsewhere, before anything is moved; and where a move fails.
        """
        wrong = [f"{path} is not there" for path in paths if not (path.exists() or path.is_symlink())]
        wrong += [f"{path} does not lie in {self.root}" for path in paths if not path.parent.resolve().is_relative_to(self.root.resolve())]
        if wrong or not paths:
            raise OptionError("Nothing was deleted: " + ("; ".join(wrong) or "nothing was named") + ".")
        moment = time.time()
        entry = Discarded(
            f"{datetime.fromtimestamp(moment):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}",
            what,
            moment,
            tuple(str(path.absolute()) for path in paths),
        )
        held = self.folder / entry.name / "held"
        try:
            held.mkdir(parents=True)
            write_atomically(held.parent / "entry.json", json.dumps(asdict(entry), indent=1))
            for number, path in enumerate(paths):
                path.rename(_place(held, number, path))
                fsync_directory(path.parent)
            fsync_directory(held)
        except OSError as err:
            raise OptionError(f"{what} could not be moved into {self.folder}: {err.strerror or err}.") from err
        return entry

    def entries(self) -> list[Discarded]:
        """What is in it, newest first."""
        if not self.folder.is_dir() or self.folder.is_symlink():
            return []
        found = [_read(path) for path in self.folder.iterdir() if path.is_dir() and not path.is_symlink()]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.time, reverse=True)

    def find(self, name: str) -> Discarded:
        """The deletion of this name. Raises OptionError when there is none; no path comes from a name."""
        entry = next((entry for entry in self.entries() if entry.name == name), None)
        if entry is None:
            raise OptionError(f"{name} is no longer in the trash.")
        return entry

    def held(self, entry: Discarded) -> list[Path]:
        """Where each thing of a deletion is now, in the order of its paths."""
        return [_place(self.folder / entry.name / "held", number, Path(path)) for number, path in enumerate(entry.paths)]

    def bytes_of(self, entry: Discarded) -> int:
        """What emptying it would free."""
        return bytes_of(self.folder / entry.name)

    def restore(self, name: str) -> Discarded:
        """Puts a deletion back where it lay. Raises OptionError where something else lies now; then nothing has moved."""
        entry = self.find(name)
        folder = self.folder / entry.name
        moves = [(kept, Path(path)) for kept, path in zip(self.held(entry), entry.paths, strict=True)]
        moves = [(kept, path) for kept, path in moves if kept.exists() or kept.is_symlink()]
        root = self.root.resolve()
        taken = [str(path) for _, path in moves if path.exists() or not path.parent.resolve().is_relative_to(root)]
        if taken:
            raise OptionError(f"{entry.what} cannot be put back: {', '.join(taken)} is taken or no longer in this folder.")
        try:
            for kept, path in moves:
                path.parent.mkdir(parents=True, exist_ok=True)
                kept.rename(path)
                fsync_directory(path.parent)
            shutil.rmtree(folder)
        except OSError as err:
            raise OptionError(f"{entry.what} could not be put back: {err.strerror or err}; the rest is in {folder / 'held'}.") from err
        return entry

    def empty(self, names: Iterable[str] | None = None, older_than_seconds: float = 0.0) -> int:
        """Ends deletions for good, all of them without names, and gives the bytes that they took."""
        wanted, freed = None if names is None else set(names), 0
        for entry in self.entries():
            if (wanted is None or entry.name in wanted) and time.time() - entry.time >= older_than_seconds:
                size = self.bytes_of(entry)
                try:
                    shutil.rmtree(self.folder / entry.name)
                except OSError as err:
                    raise OptionError(f"{entry.what} could not be deleted from the trash: {err.strerror or err}.") from err
                freed += size
        return freed


def _place(held: Path, number: int, path: Path) -> Path:
    """Two things of one deletion may have one name."""
    return held / f"{number}-{path.name}"


def _read(folder: Path) -> Discarded | None:
    """A deletion; None for what is none, or is already being ended."""
    try:
        said = json_of((folder / "entry.json").read_bytes())
        paths = tuple(path for path in said["paths"] if isinstance(path, str))
        return Discarded(folder.name, str(said["what"]), float(said["time"]), paths)
    except (OSError, ValueError, ArithmeticError, KeyError, TypeError):
        return None
