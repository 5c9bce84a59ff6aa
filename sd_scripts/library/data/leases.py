"""Who encodes what, where several processes fill one cache folder, also from several machines on a shared disk. Knows files, not contents.

A lease is a small file that only one process can make (O_EXCL); in it stands its owner. Each owner has a file of its own, in which it
writes a new number every few seconds. An owner whose number stands still is taken for dead, by the watch of whoever looks: clocks of
machines are never compared, and no lock of the file system is used. Should two processes take over the same lease at once, both encode
the same thing and the last one's whole file stays.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sd_scripts.schema.outside import json_of

FOLDER = ".leases"
"""Inside the cache's folder."""
BEAT_SECONDS, SILENCE_SECONDS = 5.0, 60.0
"""How often an owner says that it lives, and how long it may be silent."""
_OWNER = "owner-"
_FORGOTTEN_SECONDS = 86400.0


@dataclass
class Leases:
    """Leases on names, of one process; made by `leases_in`. Without a folder nobody else can see the cache, and all are granted."""

    folder: Path | None
    owner: str = ""
    """Name of our own file."""
    identity: str = ""
    """What stands in our leases: that name, and which process of which machine we are."""
    _held: set[str] = field(default_factory=set)
    _heard: dict[str, tuple[str, float]] = field(default_factory=dict)
    """What the owner of each lease last said, and when that was new to us."""

    def take(self, name: str) -> bool:
        """Whether the lease is ours now; a dead owner's is taken over."""
        if self.folder is None:
            return True
        path = self.folder / name
        if not self._make(path):
            if self._lives(name, _text_of(path)):
                return False
            # Of several that find it dead only one can move it away.
            aside = self.folder / f"{name}.{self.owner}"
            try:
                path.rename(aside)
            except FileNotFoundError:
                return False
            aside.unlink(missing_ok=True)
            if not self._make(path):
                return False
        self._held.add(name)
        return True

    def release(self, name: str) -> None:
        """Gives a lease back."""
        if self.folder is not None:
            self._held.discard(name)
            (self.folder / name).unlink(missing_ok=True)

    def release_all(self) -> None:
        """Gives back whatever is held."""
        for name in tuple(self._held):
            self.release(name)

    def _make(self, path: Path) -> bool:
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(handle, self.identity.encode())
        finally:
            os.close(handle)
        return True

    def _lives(self, name: str, lease: str | None) -> bool:
        """Whether the owner of a lease is at work; None: it has just been given back."""
        if lease is None:
            return True
        if not _runs(lease):
            return False
        said = lease + (self._beat_of(lease) or "")
        now = time.monotonic()
        before, since = self._heard.get(name, (None, now))
        if said != before:
            self._heard[name] = (said, now)
            return True
        # Also one who has not written its name yet has this long to do it.
        return now - since < SILENCE_SECONDS

    def _beat_of(self, lease: str) -> str | None:
        assert self.folder is not None
        with suppress(ValueError, KeyError, TypeError):
            return _text_of(self.folder / Path(json_of(lease)["owner"]).name)
        return None


@contextmanager
def leases_in(folder: Path | None) -> Iterator[Leases]:
    """Leases on what is made in a cache's folder; given back at the end, also after an error. None: a cache in memory."""
    if folder is None:
        yield Leases(None)
        return
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    _tidy(place)
    owner, me = f"{_OWNER}{secrets.token_hex(8)}", psutil.Process()
    known = {"owner": owner, "host": platform.node(), "boot": psutil.boot_time(), "pid": me.pid, "born": me.create_time()}
    leases = Leases(place, owner, json.dumps(known))
    ended = threading.Event()
    _beat(leases, 0)
    thread = threading.Thread(target=_keep_beating, args=(leases, ended), name="leases", daemon=True)
    thread.start()
    try:
        yield leases
    finally:
        ended.set()
        thread.join()
        leases.release_all()
        (place / leases.owner).unlink(missing_ok=True)


def _keep_beating(leases: Leases, ended: threading.Event) -> None:
    count = 0
    while not ended.wait(BEAT_SECONDS):
        count += 1
        # A disk that does not answer for a moment costs a beat, not the run.
        with suppress(OSError):
            _beat(leases, count)


def _beat(leases: Leases, count: int) -> None:
    assert leases.folder is not None
    (leases.folder / leases.owner).write_text(f"{leases.identity} {count}", encoding="utf-8")


def _text_of(path: Path) -> str | None:
    """What a file says; None when it is not there."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _runs(said: str) -> bool:
    """Whether a process that wrote its identity may be at work; False only for one of this machine that is known to have ended."""
    try:
        owner, _ = json.JSONDecoder().raw_decode(said)
        if (owner["host"], owner["boot"]) != (platform.node(), psutil.boot_time()):
            return True
        process = psutil.Process(owner["pid"])
        return abs(process.create_time() - owner["born"]) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except (ValueError, KeyError, TypeError, psutil.Error):
        # Half written, or not to be known: silence will tell.
        return True


def _tidy(place: Path) -> None:
    """Removes what dead processes have left: files of owners that ended on this machine, and anything that is a day old."""
    for path in place.iterdir():
        with suppress(OSError):
            dead = path.name.startswith(_OWNER) and not _runs(_text_of(path) or "")
            if dead or time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS:
                path.unlink()
