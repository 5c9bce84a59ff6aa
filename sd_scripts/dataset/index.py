"""What is known about files from earlier scans, so that a later one only asks the file system for times and sizes."""

from __future__ import annotations

import os
import sqlite3
import zlib
from pathlib import Path
from typing import Any

from .cache_files import CacheFile

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
        self._rows = CacheFile(
            file,
            "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, width INTEGER, height INTEGER,"
            " text TEXT, identity TEXT, reason TEXT, checksum INTEGER) WITHOUT ROWID",
        )
        self._pending = 0

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes what is pending."""
        self._rows.close()

    def known(self, paths: list[str]) -> Known:
        """Path -> (size, mtime_ns, width, height, text, identity, reason) for those that are in the index."""
        return self._rows.run(lambda db: _known(db, paths))

    def put(self, path: str, stat: Stat, **fields: str | int) -> None:
        """Replaces what is known about a file; stat is (size, mtime_ns)."""
        row = (path, *stat, *(fields.get(name) for name in ("width", "height", "text", "identity", "reason")))
        self._rows.run(lambda db: db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, _checksum(row))))
        self._pending += 1
        if self._pending >= _COMMIT_EVERY:
            self._rows.run(lambda db: db.commit())
            self._pending = 0


def _known(db: sqlite3.Connection, paths: list[str]) -> Known:
    found: Known = {}
    for start in range(0, len(paths), 500):
        part = paths[start : start + 500]
        marks = ",".join("?" * len(part))
        for *row, checksum in db.execute(
            f"SELECT path, size, mtime_ns, width, height, text, identity, reason, checksum FROM files WHERE path IN ({marks})", part
        ):
            # sqlite notices damage to its own structure only, not to a caption or a size.
            if checksum == _checksum(tuple(row)):
                found[row[0]] = tuple(row[1:])
    return found


def _checksum(row: tuple[Any, ...]) -> int:
    return zlib.crc32(repr(row).encode(errors="surrogateescape"))


def index_file(cache_dir: Path) -> Path:
    """Where the index of a cache folder lies."""
    return cache_dir / "index.sqlite"
