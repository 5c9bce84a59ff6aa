"""The header of a .safetensors file: texts and shapes, read without any library and without the weights."""

from __future__ import annotations

from dataclasses import dataclass

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.outside import json_of

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Header:
    """What stands before the weights."""

    texts: dict[str, str]
    shapes: dict[str, tuple[int, ...]]


def needed_bytes(start: bytes) -> int:
    """How much of a file its header takes, from its first 8 bytes; 0 when that is no safetensors file."""
    if len(start) < _LENGTH_BYTES:
        return 0
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    return _LENGTH_BYTES + length if 2 <= length <= MAX_HEADER_BYTES else 0


def looks_like_safetensors(data: bytes) -> bool:
    """Whether bytes start as a safetensors file does: a length, then an object in JSON."""
    return needed_bytes(data) > 0 and data[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{"


def read_header(name: str, data: bytes) -> Header:
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
    return Header({str(key): str(value) for key, value in texts.items()}, shapes)
