"""The tail of console.log as lines, the way a terminal would show it: a carriage return takes the line back, colours are dropped."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES = 32_000
CHUNK_BYTES = 256_000
OPEN_BYTES = 4_000
"""A line that is still being written is read again with each poll, at most this much of it."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_SECRETS = re.compile(r"\b(hf_|sk-|ghp_|github_pat_)[A-Za-z0-9_-]{12,}")


@dataclass(frozen=True)
class ConsoleChunk:
    """What follows an offset of the console."""

    lines: tuple[str, ...]
    """Finished lines, in order."""
    open: str
    """The line still being written, such as a progress bar; it replaces the open line of the chunk before."""
    offset: int
    """Where the next read begins."""
    reset: bool
    """The lines do not follow those read before: this is a first read, or the file was replaced."""


def plain(text: str) -> str:
    """Text without terminal escapes and control characters, and with access tokens masked."""
    return _SECRETS.sub(lambda match: match.group(1) + "***", _ESCAPES.sub("", text))


def _shown(line: bytes) -> str:
    """What a terminal shows of a line that was taken back by carriage returns: the last part that says something."""
    parts = [part for part in line.split(b"\r") if part.strip()]
    return plain(parts[-1].decode("utf-8", errors="replace")).rstrip() if parts else ""


def read_console(file: Path, offset: int = -1) -> ConsoleChunk:
    """The lines after a byte offset; -1, or an offset beyond the end (a replaced file), starts at the tail.

    A chunk is at most CHUNK_BYTES long. When the log grew by more than that, it starts again at the tail.
    """
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            reset = offset < 0 or offset > size or size - offset > CHUNK_BYTES
            start = max(0, size - TAIL_BYTES) if reset else offset
            stream.seek(start)
            data = stream.read(CHUNK_BYTES)
    except FileNotFoundError:
        return ConsoleChunk((), "", 0, offset != 0)
    if reset and start > 0:
        # The tail begins in the middle of a line, or of a character.
        cut = min((data.find(mark) for mark in (b"\n", b"\r") if mark in data), default=-1) + 1
        data, start = data[cut:], start + cut
    end = data.rfind(b"\n") + 1
    rest = data[end:]
    lines = tuple(_shown(line) for line in data[:end].replace(b"\r\n", b"\n").split(b"\n")[:-1])
    if len(rest) > OPEN_BYTES:
        # A progress bar of thousands of steps is one line of megabytes: go on from its last state.
        last = max(rest.rstrip(b"\r").rfind(b"\r") + 1, len(rest) - OPEN_BYTES)
        end, rest = end + last, rest[last:]
    return ConsoleChunk(lines, _shown(rest), start + end, reset)


def last_lines(file: Path, count: int = 40) -> list[str]:
    """The last lines of a console that say something, oldest first."""
    chunk = read_console(file)
    return [line for line in (*chunk.lines, chunk.open) if line.strip()][-count:]


def told(errors: str) -> str:
    """The sentences in which a script has said on stderr what is wrong; "" where it said none."""
    return " ".join(line.removeprefix("  - ") for line in errors.splitlines() if line.startswith("  - "))


def last_line(errors: str) -> str:
    """The beginning of the last line that is not empty; "" where there is none."""
    return next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")[:300]
