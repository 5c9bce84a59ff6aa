"""What is known about files from earlier scans, so that a later one only asks the file system for times and sizes."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

from sd_scripts.schema.errors import OptionError, Problem

Stat = tuple[int, int]
"""(size in bytes, time of change in ns)"""
Known = dict[str, tuple[Any, ...]]
"""Path -> (size, mtime_ns, width, height, text, identity, reason)"""

_COMMIT_EVERY = 2000


def stat_of(path: str) -> Stat:
    """Size and time of change of a file. Raises OSError."""
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


class Index:
    """What is known about files from earlier scans, by path, size and time of change. Safe to share between processes, not threads."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._open()
            except sqlite3.DatabaseError as err:
                if isinstance(err, sqlite3.OperationalError):
                    raise
                # A damaged index only costs a new scan.
                file.unlink()
                self._open()
        except (OSError, sqlite3.Error) as err:
            raise OptionError(
                Problem("cache_dir", f"cache_dir: the index {file} cannot be written ({err}); choose another cache_dir")
            ) from err

    def _open(self) -> None:
        self._db = sqlite3.connect(self.file, timeout=120)
        # What a power cut loses is found again by looking at the files, so the index need not wait for the disk.
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, width INTEGER, height INTEGER,"
            " text TEXT, identity TEXT, reason TEXT) WITHOUT ROWID"
        )
        self._db.commit()
        self._pending = 0

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes what is pending."""
        self._db.commit()
        self._db.close()

    def known(self, paths: list[str]) -> Known:
        """Path -> (size, mtime_ns, width, height, text, identity, reason) for those that are in the index."""
        found: Known = {}
        for start in range(0, len(paths), 500):
            part = paths[start : start + 500]
            marks = ",".join("?" * len(part))
            for row in self._db.execute(
                f"SELECT path, size, mtime_ns, width, height, text, identity, reason FROM files WHERE path IN ({marks})", part
            ):
                found[row[0]] = row[1:]
        return found

    def put(self, path: str, stat: Stat, **fields: str | int) -> None:
        """Replaces what is known about a file; stat is (size, mtime_ns)."""
        self._db.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (path, *stat, *(fields.get(name) for name in ("width", "height", "text", "identity", "reason"))),
        )
        self._pending += 1
        if self._pending >= _COMMIT_EVERY:
            self._db.commit()
            self._pending = 0


def index_file(cache_dir: Path) -> Path:
    """Where the index of a cache folder lies."""
    return cache_dir / "index.sqlite"
