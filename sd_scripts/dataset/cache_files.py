"""sqlite files that are only a cache: one that is damaged is made anew, with a sentence, and costs the work it saved."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sd_scripts.schema.errors import OptionError, Problem

T = TypeVar("T")
log = logging.getLogger("sd_scripts")

_DAMAGED = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
"""SQLITE_ERROR: tables other than those of this version. What is not among them (a full disk, a lock) is no fault of the content."""


class CacheFile:
    """One sqlite file with one table, in memory without a file. Several processes may share it; threads must take turns."""

    def __init__(self, file: Path | None, create: str) -> None:
        self._file, self._create = file, create
        self._db = self._open()
        self.run(lambda db: None)

    def _open(self) -> sqlite3.Connection:
        try:
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
            self._is_new = True
            return sqlite3.connect(self._file or ":memory:", timeout=120, check_same_thread=False)
        except (OSError, sqlite3.Error) as err:
            raise self._refusal(err) from err

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """What the work gives; with a file that turns out to be damaged, once more with an empty one.

        Raises OptionError for a file that cannot be written.
        """
        try:
            return self._tried(work)
        except (sqlite3.Error, ValueError) as err:
            if getattr(err, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF not in _DAMAGED or self._file is None:
                raise self._refusal(err) from err
            log.warning("%s is damaged (%s); it is only a cache and is made anew", self._file, err)
        try:
            self._db.close()
            for ending in ("", "-journal", "-wal", "-shm"):
                self._file.with_name(self._file.name + ending).unlink(missing_ok=True)
            self._db = self._open()
            return self._tried(work)
        except (OSError, sqlite3.Error) as err:
            raise self._refusal(err) from err

    def _tried(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._is_new:
            # What a power cut loses is found again, so nothing here need wait for the disk.
            self._db.execute("PRAGMA synchronous = OFF")
            self._db.execute(self._create)
            self._is_new = False
        return work(self._db)

    def _refusal(self, err: Exception) -> OptionError:
        text = (
            f"cache_dir: {self._file} cannot be written ({err}); free some space there, or choose another cache_dir, which lies in "
            "output_dir unless it is given"
        )
        return OptionError(Problem("cache_dir", text))

    def close(self) -> None:
        """Writes what is pending."""
        try:
            self._db.commit()
            self._db.close()
        except sqlite3.Error as err:
            raise self._refusal(err) from err
