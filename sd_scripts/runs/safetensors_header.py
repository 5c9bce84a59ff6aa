"""The header of a .safetensors file: texts and shapes, read and written anew without any library and without looking at the weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import written_aside
from sd_scripts.schema.outside import json_of

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
BLOCK_BYTES = 1 << 24
"""How much of a file is copied at a time."""
CHOSEN = "kohya_like.chosen"
"""Text of a file that somebody chose among the checkpoints of its run: why. It says nothing about what the file does."""
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class SafetensorsHeader:
    """What stands before the weights."""

    texts: dict[str, str]
    shapes: dict[str, tuple[int, ...]]

    def has(self, *parts: str) -> bool:
        """Whether some tensor's name contains one of these."""
        return any(part in key for key in self.shapes for part in parts)

    def starts(self, *prefixes: str) -> bool:
        """Whether some tensor's name starts with one of these."""
        return any(key.startswith(prefixes) for key in self.shapes)


def needed_bytes(start: bytes) -> int:
    """How much of a file its header takes, from its first 8 bytes; 0 when that is no safetensors file."""
    if len(start) < _LENGTH_BYTES:
        return 0
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    return _LENGTH_BYTES + length if 2 <= length <= MAX_HEADER_BYTES else 0


def looks_like_safetensors(data: bytes) -> bool:
    """Whether bytes start as a safetensors file does: a length, then an object in JSON."""
    return needed_bytes(data) > 0 and data[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{"


def read_header(name: str, data: bytes) -> SafetensorsHeader:
    """The header in the first bytes of a file; the weights may be missing. Raises OptionError with a sentence."""
    needed = needed_bytes(data)
    if not needed or not looks_like_safetensors(data):
        raise OptionError(f"{name} is not a safetensors file: it does not start with a header")
    if len(data) < needed:
        raise OptionError(f"{name} ends within its header ({len(data)} of {needed} bytes); download or export it again")
    try:
        header = json_of(data[_LENGTH_BYTES:needed].decode("utf-8"))
        texts = header.pop("__metadata__", {}) if isinstance(header, dict) else None
        if not isinstance(texts, dict):
            raise TypeError("it is not an object")
        shapes = {str(key): tuple(int(side) for side in entry["shape"]) for key, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as err:
        raise OptionError(f"{name} has a header that cannot be read ({type(err).__name__}); download or export it again") from err
    return SafetensorsHeader({str(key): str(value) for key, value in texts.items()}, shapes)


def not_told(block: bytes) -> None:
    """Nobody wants to hear of the bytes."""


def copy_bytes(path: Path, start: int, size: int, file: BinaryIO, told: Callable[[bytes], object] = not_told) -> None:
    """Writes a part of a file to another one, a block at a time; told hears each of them."""
    with path.open("rb") as source:
        source.seek(start)
        while size > 0:
            block = source.read(min(size, BLOCK_BYTES))
            if not block:
                raise OptionError(f"{path.name} ends too early; it was changed while it was read")
            told(block)
            file.write(block)
            size -= len(block)


def entries_of(path: Path) -> tuple[dict[str, Any], int]:
    """What the header says as it stands there, and where the tensors begin, in bytes. Raises OptionError, OSError."""
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        needed = needed_bytes(start)
        data = start + file.read(needed - len(start)) if needed else start
    read_header(path.name, data)
    return json_of(data[_LENGTH_BYTES:needed]), needed


def replace_texts(path: Path, target: Path, texts: Mapping[str, str], told: Callable[[bytes], object] = not_told) -> None:
    """Writes the file with other texts, aside, and puts it in its place; the order and the bytes of the tensors stay.

    told hears each block. Raises OptionError, OSError.
    """
    header, data_start = entries_of(path)
    header.pop("__metadata__", None)
    content = {"__metadata__": dict(texts), **header} if texts else header
    raw = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with written_aside(target) as aside, aside.open("wb") as new:
        new.write(len(raw).to_bytes(_LENGTH_BYTES, "little") + raw)
        copy_bytes(path, data_start, path.stat().st_size - data_start, new, told)


def digest_of(path: Path) -> str:
    """SHA-256 of all that a file says of itself, CHOSEN apart, and of what follows; of the whole file where it is no safetensors file.

    Raises OSError.
    """
    try:
        header, start = entries_of(path)
        texts = {name: text for name, text in (header.pop("__metadata__", None) or {}).items() if name != CHOSEN}
        known = hashlib.sha256(json.dumps([texts, header], sort_keys=True).encode())
    except OptionError:
        start, known = 0, hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while block := file.read(BLOCK_BYTES):
            known.update(block)
    return known.hexdigest()
