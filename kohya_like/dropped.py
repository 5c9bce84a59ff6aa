"""Files of LoRA and small models that somebody drops on the Generate tab, kept on this computer for a week. Knows files, not the page.

On disk, in the folder of runs: `.dropped/<first letters of the content's hash>/<name>.safetensors`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

from starlette.concurrency import run_in_threadpool

from sd_scripts.runs import drawing
from sd_scripts.runs.model_headers import read_safetensors
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import fsync_directory

from .files import safe_name

FOLDER = ".dropped"
MAX_BYTES = 4 << 30
KEEP_SECONDS = 7 * 86_400.0
LEFT_FREE_BYTES = 1 << 30
"""Of the disk, which runs need while they save."""


class Dropped:
    """The folder of what was dropped."""

    def __init__(self, root: Path) -> None:
        """root is the folder of runs."""
        self.folder = root / FOLDER

    async def take(self, name: str, size: int | None, chunks: AsyncIterator[bytes]) -> Path:
        """Keeps a file as it arrives; where it lies then. size: bytes that are announced.

        Raises OptionError with a sentence for a file that is too large, no whole .safetensors file, or nothing that can be drawn with, and
        where the disk has no room.
        """
        name = Path(name.replace("\\", "/")).name
        if not name.lower().endswith(".safetensors"):
            raise _wrong(f"{name} is not a .safetensors file; files of other kinds can run code when they are read")
        if size is not None and size > MAX_BYTES:
            raise _too_large(name)
        aside = self.folder / f".{uuid.uuid4().hex}.upload"
        try:
            await run_in_threadpool(self._make_room, name, size or 0)
            digest = hashlib.sha256()
            with aside.open("xb") as file:
                async for chunk in chunks:
                    if file.tell() + len(chunk) > MAX_BYTES:
                        raise _too_large(name)
                    digest.update(chunk)
                    await run_in_threadpool(file.write, chunk)
                await run_in_threadpool(_on_disk, file)
            kept = self.folder / digest.hexdigest()[:16] / f"{safe_name(Path(name).stem)}.safetensors"
            return await run_in_threadpool(_settled, aside, kept, name)
        except OSError as err:
            if err.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _wrong(f"the disk of {self.folder.parent} is full: {name} was not kept; free some space, and drop it again") from err
            raise _wrong(f"{name} cannot be kept in {self.folder}: {err.strerror}") from err
        finally:
            aside.unlink(missing_ok=True)

    def _make_room(self, name: str, size: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sweep()
        free = shutil.disk_usage(self.folder).free
        if size + LEFT_FREE_BYTES > free:
            left, wanted = f"{free / 2**30:.1f} GiB left", f"{name} ({size / 2**30:.1f} GiB)"
            raise _wrong(
                f"the disk of {self.folder.parent} has {left}, too little for {wanted} beside what runs save; "
                "free some space, and drop it again"
            )

    def sweep(self) -> None:
        """Removes what was dropped more than a week ago, and what never arrived whole."""
        for path in self.folder.iterdir():
            if time.time() - path.stat().st_mtime > KEEP_SECONDS:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _on_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _settled(aside: Path, kept: Path, name: str) -> Path:
    """Checks what has arrived, and gives it its name. Raises OptionError."""
    named = aside.with_name(f"{aside.stem}.safetensors")
    aside.rename(named)
    try:
        try:
            read_safetensors(named, "draw_with")
            drawing.material(str(named))
        except OptionError as err:
            # What it is called here is nobody's business.
            raise OptionError([Problem("draw_with", _about(one.message, named, name)) for one in err.problems]) from err
        kept.parent.mkdir(exist_ok=True)
        os.replace(named, kept)
        fsync_directory(kept.parent)
        # The week begins again.
        os.utime(kept.parent)
    finally:
        named.unlink(missing_ok=True)
    return kept


def _about(message: str, file: Path, name: str) -> str:
    return message.replace(str(file), name).replace(file.name, name).replace(file.stem, Path(name).stem).removeprefix("draw_with: ")


def _wrong(text: str) -> OptionError:
    return OptionError(Problem("draw_with", text))


def _too_large(name: str) -> OptionError:
    most = f"{MAX_BYTES >> 30} GiB"
    return _wrong(f"{name} is larger than {most}, which is the most; copy it to the studio's computer, and give its path")
