"""Small copies of images and what they are compared by, made once and kept beside the runs."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
from PIL import Image

from sd_scripts.dataset import images, triage
from sd_scripts.schema.files import write_atomically
from sd_scripts.schema.outside import json_of

FOLDER = ".thumbnails"
SIDE = 256
LARGE_SIDE = 1280
KEPT_SECONDS = 60 * 86_400.0
_AT_ONCE = threading.Semaphore(2)
"""A photo of 50 megapixels takes some 300 MB while it is decoded."""


class Thumbnails:
    """Copies of the images of any data set, in one folder."""

    def __init__(self, output_dir: Path) -> None:
        self.folder = output_dir / FOLDER

    def _place(self, path: Path, ending: str) -> Path:
        """Where what is made of a file is kept: another file, or the same changed, has another place."""
        stat = path.stat()
        name = hashlib.sha256(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:40]
        return self.folder / name[:2] / f"{name}{ending}"

    def small(self, path: Path) -> bytes:
        """A JPEG with SIDE pixels on its longer side. Raises BadImage and OSError."""
        place = self._place(path, ".jpg")
        with suppress(FileNotFoundError):
            return place.read_bytes()
        with _AT_ONCE:
            data = _jpeg(path, SIDE)
        write_atomically(place, data)
        return data

    def large(self, path: Path) -> bytes:
        """One with LARGE_SIDE pixels; nothing is kept. Raises BadImage and OSError."""
        with _AT_ONCE:
            return _jpeg(path, LARGE_SIDE)

    def signs(self, path: Path) -> triage.Signs:
        """What an image is compared by. Raises BadImage and OSError."""
        place = self._place(path, ".json")
        with suppress(OSError, ValueError, TypeError, KeyError):
            said = json_of(place.read_text(encoding="utf-8"))
            grey = np.frombuffer(bytes.fromhex(said["grey"]), np.uint8).reshape(triage.SIDE, triage.SIDE)
            return triage.Signs(**{**said, "hash": int(said["hash"], 16), "grey": grey})
        with _AT_ONCE:
            signs = triage.signs_of(path)
        write_atomically(place, json.dumps({**asdict(signs), "hash": f"{signs.hash:x}", "grey": signs.grey.tobytes().hex()}))
        return signs

    def tidy(self) -> None:
        """Removes what nobody has looked at for long."""
        before = time.time() - KEPT_SECONDS
        with suppress(OSError):
            for file in self.folder.glob("*/*"):
                with suppress(OSError):
                    if max(file.stat().st_atime, file.stat().st_mtime) < before:
                        file.unlink()


def _jpeg(path: Path, side: int) -> bytes:
    image = Image.fromarray(images.decode(path).rgb)
    image.thumbnail((side, side), Image.Resampling.BOX, reducing_gap=2.0)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=82)
    return stream.getvalue()
