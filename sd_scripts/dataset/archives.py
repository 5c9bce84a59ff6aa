"""Images in archives (webdataset's .tar, tables in .parquet): written into the cache folder once, as images with captions beside them.

They are read by the package datasets, which whoever has such files installs. It loads torch, so it works in a process of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from sd_scripts.schema.errors import OptionError, Problem

from .metadata import caption_in_json

KINDS = {".tar": "webdataset", ".parquet": "parquet"}
"""Endings of archives, and what the package datasets calls them."""
_IMAGES = ("image", "img", "jpg", "jpeg", "png", "webp")
_CAPTIONS = ("txt", "caption", "text", "prompt")
_MAGIC = {b"\xff\xd8": ".jpg", b"\x89PNG": ".png", b"RIFF": ".webp", b"GIF8": ".gif", b"BM": ".bmp", b"II": ".tif", b"MM": ".tif"}


def archives_in(place: Path) -> list[Path]:
    """The archives that a path means: itself, or those in the folder and its `data`; of several splits the one for training."""
    if place.is_file():
        return [place] if place.suffix.lower() in KINDS else []
    found = sorted(path for folder in (place, place / "data") for ending in KINDS for path in folder.glob(f"*{ending}"))
    return [path for path in found if path.name.startswith("train")] or found


def unpacked(files: list[Path], cache_dir: Path) -> Path:
    """The folder with the images of these archives, made now if it is not there yet. Raises OptionError with a sentence."""
    stats = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    target = cache_dir / "unpacked" / hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]
    if target.is_dir():
        return target
    shown = files[0].name + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    if importlib.util.find_spec("datasets") is None:
        raise _wrong(f"{shown}: images in archives are read by the package datasets, which is not installed: pip install datasets")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unpacking-", dir=target.parent) as made:
        command = [sys.executable, "-m", __name__, made, *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False)
        if done.returncode:
            raise _wrong(f"{shown} cannot be read: {(done.stderr.strip().splitlines() or ['the reader ended without a word'])[-1]}")
        if not any(Path(made).iterdir()):
            raise _wrong(f"{shown}: no row has an image (a column such as image, jpg or png)")
        try:
            # Renamed when complete. Another process may have been faster; then its folder is the same.
            os.replace(made, target)
        except OSError:
            if not target.is_dir():
                raise
        else:
            os.mkdir(made)
    return target


def _wrong(text: str) -> OptionError:
    return OptionError(Problem("train_data_dir", f"train_data_dir: {text}"))


def write_rows(rows: Iterable[Mapping[str, Any]], folder: Path) -> int:
    """Writes the image of each row that has one, byte for byte, with its caption beside it; how many there were.

    Names are the rows' numbers: what an archive calls a file may lead anywhere.
    """
    # Loads Pillow, which whoever only asks for archives has no use for.
    from .images import EXTENSIONS

    count = 0
    for number, row in enumerate(rows):
        data, name = _image(row, EXTENSIONS)
        if data is None:
            continue
        count += 1
        ending = os.path.splitext(name)[1].lower()
        if ending not in EXTENSIONS:
            ending = next((ending for magic, ending in _MAGIC.items() if data.startswith(magic)), ".png")
        (folder / f"{number:08d}{ending}").write_bytes(data)
        if caption := _caption(row):
            (folder / f"{number:08d}.txt").write_text(caption, encoding="utf-8")
    return count


def _image(row: Mapping[str, Any], endings: Collection[str]) -> tuple[bytes | None, str]:
    """The bytes of a row's image, and a name that may tell its kind."""
    names = [*(name for name in _IMAGES if name in row), *row]
    for name in names:
        value = row[name]
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            return value["bytes"], str(value.get("path") or f".{name}")
        if isinstance(value, bytes) and f".{name}" in endings:
            return value, f".{name}"
    return None, ""


def _caption(row: Mapping[str, Any]) -> str:
    for name in _CAPTIONS:
        value = row.get(name)
        if isinstance(value, bytes):
            value = value.decode("utf-8", errors="replace")
        if isinstance(value, str):
            return value.strip()
    described = row.get("json") if isinstance(row.get("json"), dict) else {name: row[name] for name in ("tags",) if name in row}
    return caption_in_json(json.dumps(described, default=str), ",") or ""


def main(target: str, *files: str) -> None:
    """Reads archives of one or both kinds into a folder."""
    import datasets

    folder = Path(target)
    for kind in sorted(set(KINDS.values())):
        chosen = [path for path in files if KINDS[Path(path).suffix.lower()] == kind]
        if not chosen:
            continue
        rows = datasets.load_dataset(kind, data_files={"train": chosen}, split="train", streaming=True)
        for name, feature in (rows.features or {}).items():
            if isinstance(feature, datasets.Image):
                rows = rows.cast_column(name, datasets.Image(decode=False))
        within = folder / kind
        within.mkdir()
        if not write_rows(rows, within):
            shutil.rmtree(within)


if __name__ == "__main__":
    main(*sys.argv[1:])
