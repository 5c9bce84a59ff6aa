"""Image files without what they tell about the place, the camera and the person; pixels, colour profile and the way they are turned stay.

JPEG, PNG and WebP keep their compressed pixels byte for byte. BMP tells nothing. Any other kind becomes a PNG of what training reads of it.
Sources: ITU-T T.81 annex B for JPEG's segments, the W3C's PNG specification (third edition) for chunks, Google's WebP container
specification for RIFF chunks, TIFF 6.0 for the orientation.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from pathlib import Path

from PIL import Image

from . import images

_AFTER_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""The next marker behind compressed pixels, in which FF is followed by 00 or by a restart marker."""
_KEPT_SEGMENTS = {0xE0: b"JFIF\0", 0xE2: b"ICC_PROFILE\0", 0xEE: b"Adobe"}
"""Of a JPEG's application segments those without which its colours would be others, and how they begin."""
_KEPT_CHUNKS = frozenset(b"tRNS gAMA cHRM sRGB iCCP sBIT bKGD pHYs hIST sPLT cICP mDCV cLLI acTL fcTL fdAT".split())
_KEPT_RIFF = frozenset((b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"ANIM", b"ANMF", b"ICCP"))
_TELLS = 0x0C
"""Flags of a WebP with EXIF (8) and XMP (4)."""


def stripped(path: Path) -> tuple[bytes, str]:
    """The whole file without what it tells, and its ending, with the dot and in lower case. Raises BadImage."""
    turn = images.read_orientation(path)
    data = path.read_bytes()
    ending = path.suffix.lower()
    try:
        if data.startswith(b"\xff\xd8"):
            return _jpeg(data, turn), ending
        if data.startswith(b"\x89PNG"):
            return _png(data, turn), ending
        if data.startswith(b"RIFF"):
            return _webp(data, turn), ending
        if data.startswith(b"BM"):
            return data, ending
    except (ValueError, struct.error, IndexError):
        # Not as the specification says, and perhaps readable all the same: then its pixels are written anew.
        return _anew(path), ".png"
    return _anew(path), ".png"


def _turned(turn: int) -> bytes:
    """EXIF that says the orientation and nothing else."""
    return b"MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 274, 3, 1, turn, 0, 0)


def _jpeg(data: bytes, turn: int) -> bytes:
    segments: list[bytes] = []
    place = 2
    while data[place + 1] != 0xD9:
        if data[place] != 0xFF:
            raise ValueError("no marker where one must be")
        marker = data[place + 1]
        if marker == 0xFF:
            place += 1
            continue
        if marker == 1 or 0xD0 <= marker <= 0xD7:
            place += 2
            continue
        end = place + 2 + struct.unpack_from(">H", data, place + 2)[0]
        if marker == 0xDA:
            after = _AFTER_SCAN.search(data, end)
            if after is None:
                raise ValueError("no end of the pixels")
            end = after.start()
        is_told = 0xE0 <= marker <= 0xEF or marker == 0xFE
        if not is_told or (marker in _KEPT_SEGMENTS and data.startswith(_KEPT_SEGMENTS[marker], place + 4)):
            segments.append(data[place:end])
        place = end
    if turn != 1:
        exif = b"Exif\0\0" + _turned(turn)
        segments.insert(int(segments[0].startswith(b"\xff\xe0")), b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif)
    # What comes behind the end may be a film, or a second image with a place of its own.
    return b"\xff\xd8" + b"".join(segments) + b"\xff\xd9"


def _png(data: bytes, turn: int) -> bytes:
    kept = [data[:8]]
    place, kind = 8, b""
    while kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, place)
        chunk = data[place : place + 12 + length]
        if len(chunk) != 12 + length:
            raise ValueError("ends in a chunk")
        place += len(chunk)
        if kind == b"IDAT" and turn != 1:
            exif = b"eXIf" + _turned(turn)
            kept.append(struct.pack(">I", len(exif) - 4) + exif + struct.pack(">I", zlib.crc32(exif)))
            turn = 1
        # A kind that begins with a capital is needed to read the image.
        if kind[:1].isupper() or kind in _KEPT_CHUNKS:
            kept.append(chunk)
    return b"".join(kept)


def _webp(data: bytes, turn: int) -> bytes:
    kept: list[bytes] = []
    place, end = 12, 8 + struct.unpack_from("<I", data, 4)[0]
    if len(data) < end:
        raise ValueError("ends too early")
    while place < end:
        kind, length = struct.unpack_from("<4sI", data, place)
        chunk = data[place : place + 8 + length + length % 2]
        place += len(chunk)
        if kind == b"VP8X":
            chunk = chunk[:8] + bytes([chunk[8] & ~_TELLS | (8 if turn != 1 else 0)]) + chunk[9:]
        if kind in _KEPT_RIFF:
            kept.append(chunk)
    if turn != 1:
        exif = _turned(turn)
        kept.append(b"EXIF" + struct.pack("<I", len(exif)) + exif)
    body = b"WEBP" + b"".join(kept)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _anew(path: Path) -> bytes:
    decoded = images.decode(path, keep_alpha=True)
    image = Image.fromarray(decoded.rgb)
    if decoded.alpha is not None:
        image.putalpha(Image.fromarray(decoded.alpha))
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()
