"""Masks of a data set as files: read, written so that nobody's work is lost, and taken back, as captions are.

A mask is named by the hash of its file. What a change writes over, and what it writes, is kept in the hidden folder `.masks` of the data
set under that name; `.masks.jsonl` says which file had which. Undo brings files back to the byte.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import write_atomically

from .caption_files import Book, Words
from .images import Pixels

KEPT = ".masks"
MAX_BYTES = 64 << 20


class MaskBook(Book):
    """The masks below one folder. The words of a change are the names of masks in the folder of those that are kept."""

    noun: ClassVar[str] = "masks"
    history_name: ClassVar[str] = ".masks.jsonl"
    lock_name: ClassVar[str] = ".masks.lock"

    def keep(self, data: bytes) -> str:
        """Keeps a mask's file, and names it. Raises OSError."""
        name = hashlib.sha256(data).hexdigest()
        place = self._kept(name)
        if not place.is_file():
            write_atomically(place, data)
        return name

    def read(self, file: Path) -> Words:
        data = _bytes_of(file)
        return Words(None if data is None else hashlib.sha256(data).hexdigest())

    def _kept(self, name: str) -> Path:
        return self.root / KEPT / f"{name}.png"

    def _keep(self, file: Path) -> None:
        data = _bytes_of(file)
        if data is not None:
            self.keep(data)

    def _put(self, file: Path, text: str) -> None:
        # A name out of a history that somebody has written leads nowhere else.
        data = _bytes_of(self._kept(os.path.basename(text)))
        if data is None or hashlib.sha256(data).hexdigest() != text:
            raise OptionError(f"{file} cannot be written: {self._kept(text)}, where the mask was kept, is gone or was changed.")
        write_atomically(file, data)


def _bytes_of(file: Path) -> bytes | None:
    """What a mask's file holds; None where there is none. Raises OptionError."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as err:
        raise OptionError(f"{file} cannot be read: {err.strerror or err}.") from err
    if len(data) > MAX_BYTES:
        raise OptionError(f"{file} has more than {MAX_BYTES >> 20} MiB, which is more than a mask here may have.")
    return data


def png_of(mask: Pixels) -> bytes:
    """The file of a mask (H, W): a PNG of one grey channel, without loss."""
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(mask)).save(stream, "PNG")
    return stream.getvalue()
