"""How large a JPEG XL image says it is, before a decoder that knows no limit is let loose on it.

Only the size header is read (ISO/IEC 18181-1: bits from the lowest up; the codestream may lie in a container of boxes).
"""

from __future__ import annotations

from typing import BinaryIO

MAGIC = (b"\xff\x0a", b"\x00\x00\x00\x0cJXL ")
_SIDE_BITS = (9, 13, 18, 30)
_RATIOS = {1: (1, 1), 2: (12, 10), 3: (4, 3), 4: (3, 2), 5: (16, 9), 6: (5, 4), 7: (2, 1)}


def stored_size(file: BinaryIO) -> tuple[int, int]:
    """(width, height) as stored, not turned. Leaves the file at its start. Raises ValueError for a broken file."""
    try:
        return _size(_codestream(file))
    finally:
        file.seek(0)


def _codestream(file: BinaryIO) -> bytes:
    """The first bytes after the codestream's signature."""
    start = file.read(12)
    if start.startswith(MAGIC[0]):
        return start[2:]
    while True:
        head = file.read(8)
        if len(head) < 8:
            raise ValueError("it ends before the image begins (truncated)")
        length, kind, used = int.from_bytes(head[:4], "big"), head[4:], 8
        if length == 1:
            length, used = int.from_bytes(file.read(8), "big"), 16
        if kind in (b"jxlc", b"jxlp"):
            content = file.read(16)[4 if kind == b"jxlp" else 0 :]
            if not content.startswith(MAGIC[0]):
                raise ValueError("its codestream has no signature")
            return content[2:]
        if length < used:
            raise ValueError("a box in it has no length")
        file.seek(length - used, 1)


def _size(data: bytes) -> tuple[int, int]:
    bits = int.from_bytes(data, "little")
    place = 0

    def take(count: int) -> int:
        nonlocal place
        if place + count > 8 * len(data):
            raise ValueError("its size header is truncated")
        value = bits >> place & ((1 << count) - 1)
        place += count
        return value

    small = take(1) == 1

    def side() -> int:
        return 8 * (take(5) + 1) if small else take(_SIDE_BITS[take(2)]) + 1

    height = side()
    ratio = take(3)
    if ratio == 0:
        return side(), height
    across, down = _RATIOS[ratio]
    return height * across // down, height
