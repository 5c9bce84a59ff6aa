"""Of which bytes a run's model is made: a hash of each file that its options name. Reads no tensors and knows no family."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sd_scripts.dataset.records import Progress
from sd_scripts.library.loading.source import find
from sd_scripts.schema import flat
from sd_scripts.schema.files import pipeline_file, write_atomically
from sd_scripts.schema.model import built_in
from sd_scripts.schema.outside import object_in
from sd_scripts.schema.runs import RunOptions

NOTES = "model_files.json"
"""Inside the cache folder: hashes by path, each with the size, times and inode of the file that it is of."""
PART_BYTES = 2**25
"""Threads hash parts of a file side by side; their hashes together are hashed once more."""
TICK_NANOSECONDS = 20_000_000
"""Two changes of a file within such a time may leave the same times behind, so the hash of one that was written just now is not kept."""
_VARIANTS = (".fp16", ".bf16", ".fp32", ".non_ema")


def model_files(options: RunOptions, cache_dir: Path, progress: Progress) -> dict[str, str]:
    """The hash of each file by option and name; of a model from the hub its commit. What did not change since is not read again.

    Every bit of a file counts. Raises OptionError for what is not there.
    """
    found: dict[str, str] = {}
    files: dict[str, Path] = {}
    for option, value in _named(options):
        if Path(value).expanduser().exists():
            files |= {
                f"{option}: {name}": path for name, path in _weights(Path(value).expanduser(), getattr(options.model, "variant", None))
            }
        else:
            revision = getattr(options.model, "revision", None) if option == "pretrained_model_name_or_path" else None
            found[f"{option}: {value}"] = find(option, value, options.family, revision).path.name
    # Of a damaged file nothing is left, and all is hashed again.
    notes = object_in(cache_dir / NOTES)
    begun = time.time_ns()
    stats = {name: path.stat() for name, path in files.items()}
    known = {name: _known(notes.get(str(path)), stats[name]) for name, path in files.items()}
    missing = [name for name, told in known.items() if told is None]
    total, done = sum(stats[name].st_size for name in missing), 0
    for name in missing:
        digest = hashlib.sha256()
        for part in _parts(files[name], stats[name].st_size):
            digest.update(part)
            done += min(PART_BYTES, total - done)
            progress("MiB of the model's files", done >> 20, total >> 20)
        known[name] = digest.hexdigest()
        if begun - stats[name].st_ctime_ns > TICK_NANOSECONDS:
            notes[str(files[name])] = [*_signature(stats[name]), known[name]]
    if missing:
        write_atomically(cache_dir / NOTES, json.dumps(notes))
    return found | {name: told for name, told in known.items() if told is not None}


def _named(options: RunOptions) -> Iterator[tuple[str, str]]:
    """What the model's options name, with the name of the option; the built-in models are part of the program."""
    known = flat.fields(type(options))
    for name, value in flat.flatten(options).items():
        if known[name].section == "model" and known[name].show.kind == "file" and name not in options.model.unread:
            yield from ((name, text) for text in (value if isinstance(value, tuple) else (value,)) if text and built_in(text, "") is None)


def _weights(path: Path, variant: str | None) -> Iterator[tuple[str, Path]]:
    """A file itself, or weights and configurations in a network's or a whole model's folder, without weights of other variants."""
    if path.is_file():
        yield path.name, path
        return
    alone = (path / "config.json").is_file() and pipeline_file(path) is None
    for file in sorted(path.glob("*" if alone else "*/*")):
        other = variant is None and any(mark in file.name for mark in _VARIANTS)
        if file.suffix in (".safetensors", ".json") and not other:
            yield file.relative_to(path).as_posix(), file


def _signature(stat: os.stat_result) -> list[int]:
    # Whoever writes can set st_mtime back, but not st_ctime.
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _known(note: object, stat: os.stat_result) -> str | None:
    return str(note[-1]) if isinstance(note, list) and note[:-1] == _signature(stat) else None


def _parts(path: Path, size: int) -> Iterator[bytes]:
    def hashed(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(PART_BYTES)).digest()

    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        yield from pool.map(hashed, range(0, size, PART_BYTES))
    finally:
        pool.shutdown(cancel_futures=True)
