"""Encoded images and texts, kept by content: what an encoder made of the same bytes in the same way is never made again.

A key is the hash of everything that decides an entry's content: the image's bytes (or the text), how it was cut, the family,
a fingerprint of the encoder, and CODE_REVISION. Entries are safetensors files in 256 sub-folders, written under a temporary name
and renamed, with a checksum that is verified whenever one is read. They are not fsynced: an entry that a power cut tore fails its
checksum and is made again.

A note of what each subject's entry was made from says, when something has to be encoded again, why.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from sd_scripts.dataset.cache_files import CacheFile
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import unfinished
from sd_scripts.schema.outside import json_of

CODE_REVISION = 1
"""Raised when this code makes other content of the same inputs; all entries are then made again."""

What = Literal["latents", "text", "instructions"]
Facts = dict[str, Any]
"""What an entry is made from, as plain JSON values; the key is its hash."""

_REASONS = {
    "picture": "the image changed",
    "pictures": "a control image changed",
    "mask": "the mask changed",
    "bucket": "the resolution changed",
    "resized": "the resolution changed",
    "cuts": "the size or the cut of a control image changed",
    "crop": "the crop changed",
    "interpolation": "resize_interpolation changed",
    "alpha": "alpha_mask changed",
    "processor": "the settings of the model's image processor changed",
    "settings": "an option of the text encoding changed, such as the number of tokens",
    "family": "the model family changed",
    "revision": "the code revision changed",
}
_ENCODER_CHANGED = {"latents": "the VAE changed", "text": "the text encoder changed", "instructions": "the text encoder changed"}
_BY_DEPTH = (
    *("picture", "pictures", "encoder", "mask", "alpha", "bucket", "resized", "cuts", "interpolation", "crop", "processor", "settings"),
    *("family", "revision"),
)
_SAMPLES_PER_TENSOR = 64
_NO_CONTENT = {"transformers_version", "torch_dtype", "dtype", "architectures", "name_or_path"}


class CorruptEntry(ValueError):
    """A cache file that is not what was written; the message says what is wrong with it."""


def key_of(facts: Facts) -> str:
    """The name of an entry: 40 hexadecimal digits. Raises TypeError for facts that are not plain JSON values."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=20).hexdigest()


def fingerprint(*modules: nn.Module) -> str:
    """Tells encoders apart without reading every weight.

    Hash over name, shape, dtype and up to 64 evenly spaced values of each parameter and buffer, and over the configuration (a VAE's
    scaling factor is in no weight). Training changes every value, so the sample sees it; a change of a few chosen weights may slip by.
    """
    digest = hashlib.blake2b(digest_size=16)
    for module in modules:
        digest.update(json.dumps(_configuration(module), sort_keys=True, default=str).encode())
        for name, tensor in sorted(module.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            flat = tensor.detach().reshape(-1)
            places = torch.linspace(0, max(flat.numel() - 1, 0), min(flat.numel(), _SAMPLES_PER_TENSOR), dtype=torch.float64).long()
            values = flat[places.to(flat.device)]
            digest.update(values.cpu().contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()


def _configuration(module: nn.Module) -> dict[str, Any]:
    config = getattr(module, "config", None)
    if config is None:
        return {}
    values = config if isinstance(config, Mapping) else config.to_dict() if hasattr(config, "to_dict") else {}
    return {key: value for key, value in values.items() if not key.startswith("_") and key not in _NO_CONTENT}


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of a tokenizer's vocabulary and special tokens."""
    vocabulary = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else []
    special = {name: str(token) for name, token in getattr(tokenizer, "special_tokens_map", {}).items()}
    return hashlib.blake2b(json.dumps([vocabulary, special], sort_keys=True).encode(), digest_size=16).hexdigest()


def processor_settings(processor: Any | None) -> dict[str, Any]:
    """What a processor does to the images that a text encoder sees, as plain JSON values; nothing without one."""
    images = getattr(processor, "image_processor", processor)
    if images is None:
        return {}
    settings: dict[str, Any] = json.loads(json.dumps(images.to_dict(), sort_keys=True, default=str))
    return {name: value for name, value in settings.items() if not name.startswith("_") and name not in _NO_CONTENT}


def _checksum(header: dict[str, Any], body: bytes | memoryview) -> str:
    digest = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)
    digest.update(body)
    return digest.hexdigest()


def _split(data: bytes) -> tuple[dict[str, Any], memoryview]:
    """Header and tensor bytes of a safetensors file. Raises ValueError."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("it is too short")
    header = json_of(data[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError("its header is not a table")
    return header, memoryview(data)[8 + length :]


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file with a checksum over names, shapes, types and values."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(plain, metadata={"checksum": _checksum(*_split(save(plain)))})


def unpack(data: bytes) -> dict[str, Tensor]:
    """The tensors of a packed file. Raises CorruptEntry."""
    try:
        header, body = _split(data)
        wanted = header.pop("__metadata__", {}).get("checksum")
        if wanted != _checksum(header, body):
            raise CorruptEntry("its checksum is wrong")
        return load(data)
    except CorruptEntry:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise CorruptEntry(f"it cannot be read ({err})") from err


class Cache:
    """Entries by key, on disk or, without a folder, in memory; recently used ones stay in memory. Safe to use from several threads."""

    def __init__(self, folder: Path | None, recent_bytes: int = 256 * 2**20) -> None:
        self.folder = folder
        self._memory: dict[str, dict[str, Tensor]] = {}
        self._recent: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._recent_bytes, self._held_bytes = recent_bytes, 0
        self._lock = Lock()

    def path_of(self, key: str) -> Path:
        """Where an entry lies; only for a cache on disk."""
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.safetensors"

    def missing(self, keys: Iterable[str]) -> set[str]:
        """Those of the keys that have no entry. Asks only whether files are there; what is in them is verified when they are read."""
        wanted = set(keys)
        if self.folder is None:
            return wanted - self._memory.keys()
        by_folder: dict[str, set[str]] = {}
        for key in wanted:
            by_folder.setdefault(key[:2], set()).add(key)
        return {key for name, part in by_folder.items() for key in part - self._present(self.folder / name)}

    def has(self, key: str) -> bool:
        """Whether there is an entry, whatever is in it; for one key at a time."""
        return key in self._memory if self.folder is None else self.path_of(key).exists()

    def num_bytes(self, keys: Iterable[str]) -> int:
        """Bytes that these entries take; those that are not there take none."""
        if self.folder is None:
            return sum(_num_bytes(self._memory.get(key, {})) for key in set(keys))
        return sum(_file_size(self.path_of(key)) for key in set(keys))

    def _present(self, folder: Path) -> set[str]:
        try:
            with os.scandir(folder) as entries:
                return {entry.name.removesuffix(".safetensors") for entry in entries}
        except FileNotFoundError:
            return set()

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Adds an entry, whole or not at all. Raises OptionError when the folder cannot be written, with the reason."""
        if self.folder is None:
            self._memory[key] = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
            return
        path = self.path_of(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, pack(tensors))
        except OSError as err:
            text = f"cache_dir: {path.parent} cannot be written ({err.strerror or err}); free some space or choose another cache_dir"
            raise OptionError(Problem("cache_dir", text)) from err
        with self._lock:
            self._forget(key)

    def get(self, key: str) -> dict[str, Tensor]:
        """The tensors of an entry; not to be changed in place. Raises KeyError when there is none and CorruptEntry when it is damaged."""
        if self.folder is None:
            return self._memory[key]
        with self._lock:
            if key in self._recent:
                self._recent.move_to_end(key)
                return self._recent[key]
        try:
            data = self.path_of(key).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None
        except OSError as err:
            raise CorruptEntry(f"it cannot be read ({err.strerror or err})") from err
        tensors = unpack(data)
        with self._lock:
            self._remember(key, tensors)
        return tensors

    def discard(self, key: str) -> None:
        """Removes an entry if it is there."""
        with self._lock:
            self._forget(key)
        if self.folder is None:
            self._memory.pop(key, None)
        else:
            self.path_of(key).unlink(missing_ok=True)

    def _remember(self, key: str, tensors: dict[str, Tensor]) -> None:
        self._forget(key)
        self._recent[key] = tensors
        self._held_bytes += _num_bytes(tensors)
        while self._held_bytes > self._recent_bytes:
            _, oldest = self._recent.popitem(last=False)
            self._held_bytes -= _num_bytes(oldest)

    def _forget(self, key: str) -> None:
        tensors = self._recent.pop(key, None)
        self._held_bytes -= _num_bytes(tensors) if tensors is not None else 0


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _replace(path: Path, data: bytes) -> None:
    aside = unfinished(path)
    try:
        aside.write_bytes(data)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Entry:
    """One thing to be encoded: its key, the facts the key is made from, and the subject a person knows it by (a file, a caption).

    Without a subject it is a part of others, and nothing is said about it.
    """

    key: str
    facts: Facts
    subject: str


def entry_of(facts: Facts, subject: str) -> Entry:
    """An entry with its key."""
    return Entry(key_of(facts), facts, subject)


@dataclass(frozen=True)
class Caches:
    """What a run keeps of its encoders' work; make it with `open_caches`."""

    latents: Cache
    texts: Cache
    notes: Notes


def open_caches(options: DatasetOptions, cache_dir: Path) -> Caches:
    """The caches below cache_dir, in memory where the options say so."""
    on_disk = options.cache_latents_to_disk or options.cache_text_encoder_outputs_to_disk
    return Caches(
        Cache(cache_dir / "latents" if options.cache_latents_to_disk else None),
        Cache(cache_dir / "text" if options.cache_text_encoder_outputs_to_disk else None),
        Notes(cache_dir / "notes.sqlite" if on_disk else None),
    )


class Notes:
    """What each subject's entry was made from when it was last used. In memory without a file; a damaged file only costs the reasons."""

    def __init__(self, file: Path | None) -> None:
        self._lock = Lock()
        self._rows = CacheFile(
            file, "CREATE TABLE IF NOT EXISTS notes (what TEXT, subject TEXT, facts TEXT, PRIMARY KEY (what, subject)) WITHOUT ROWID"
        )

    def write(self, what: What, entries: Iterable[Entry]) -> None:
        """Replaces the notes of these subjects."""
        rows = [(what, entry.subject, json.dumps(entry.facts, sort_keys=True)) for entry in entries if entry.subject]

        def put(db: sqlite3.Connection) -> None:
            db.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", rows)
            db.commit()

        with self._lock:
            self._rows.run(put)

    def reasons(self, what: What, entries: Sequence[Entry]) -> Counter[str]:
        """Why each of these missing entries has to be encoded, counted; "" counts those never seen before."""
        found: Counter[str] = Counter()
        for entry in entries:
            if not entry.subject:
                continue
            with self._lock:
                before = self._rows.run(partial(_facts, what=what, subject=entry.subject))
            found[_reason(what, before, entry.facts) if before is not None else ""] += 1
        return found

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._rows.close()


def _facts(db: sqlite3.Connection, what: What, subject: str) -> Facts | None:
    row = db.execute("SELECT facts FROM notes WHERE what = ? AND subject = ?", (what, subject)).fetchone()
    facts = json_of(row[0]) if row else None
    if facts is not None and not isinstance(facts, dict):
        raise ValueError("a note is not a table")
    return facts


def _reason(what: What, before: Facts, now: Facts) -> str:
    changed = [name for name in _BY_DEPTH if before.get(name) != now.get(name)]
    if not changed:
        return "its cache file is gone"
    # A new image may be cut differently: one reason is enough, the first is the deepest.
    return _ENCODER_CHANGED[what] if changed[0] == "encoder" else _REASONS[changed[0]]


def tell(what: What, reasons: Counter[str]) -> list[str]:
    """Sentences about what is encoded again; nothing about what is new."""

    def sentence(count: int, reason: str) -> str:
        return {
            "latents": f"{count} {'image is' if count == 1 else 'images are'} encoded again: {reason}",
            "text": f"{count} {'caption is' if count == 1 else 'captions are'} encoded again: {reason}",
            "instructions": f"{count} {'instruction is' if count == 1 else 'instructions are'} encoded again: {reason}",
        }[what]

    return [sentence(count, reason) for reason, count in sorted(reasons.items()) if reason]
