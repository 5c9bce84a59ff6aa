"""One image file: its size from the header, its pixels as plain RGB, and how it is resized, cut, mirrored and tinted.

What comes out is always 8-bit RGB, upright, first frame only:
- EXIF (or XMP) orientation is applied.
- Transparency is composited on white; when the alpha channel is the loss mask, the colours under it stay as they are.
- 16-bit samples are scaled (v / 257), not clipped. CMYK, YCbCr, palettes and greyscale are converted; colour profiles are not applied.

JPEG XL needs the package pillow-jxl-plugin; its header cannot be read apart from the pixels, so scanning it is slower. HEIC, which
telephones write, needs pillow-heif.
"""

from __future__ import annotations

import importlib
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sd_scripts.schema.dataset import Interpolation

from . import jxl
from .draws import fraction_for

Pixels = NDArray[np.uint8]
"""(H, W, 3) or, for masks, (H, W)."""

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".jxl", ".heic", ".heif")
"""Endings of files that are taken for images; what they are is then read from their content."""

MAX_PIXELS = 178_956_970
"""Larger images are refused: twice Pillow's own warning level, where a decoded image takes more than 500 MB."""

# Only these decoders are ever asked, so an odd file cannot reach an odd decoder.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
_HEIC = re.compile(rb"....ftyp(heic|heix|heim|heis|hevc|hevx|mif1|msf1)", re.DOTALL)
"""The beginning of a HEIF image (ISO/IEC 23008-12): a box that names its brand."""
_ORIENTATION_TAG = 274
_TRANSPOSED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_FILTERS = {
    "lanczos": Image.Resampling.LANCZOS,
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "area": Image.Resampling.BOX,
    "nearest": Image.Resampling.NEAREST,
}
# What decoders raise on broken files.
_BROKEN = (
    *(OSError, SyntaxError, ValueError, LookupError, TypeError, AttributeError, OverflowError, EOFError, RuntimeError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)


class BadImage(ValueError):
    """An image that cannot be used; the message is the reason, without the file's name."""


class Unreachable(BadImage):
    """The fault is not in the file's content: it is missing, may not be read, does not fit into memory, or its decoder is not installed."""


@dataclass(frozen=True)
class Decoded:
    """An image in memory: rgb (H, W, 3), and alpha (H, W) when it was asked for and the file has one."""

    rgb: Pixels
    alpha: Pixels | None


@cache
def has_jxl() -> bool:
    """Whether a JPEG XL decoder is installed; the first call loads it."""
    try:
        importlib.import_module("pillow_jxl")
    except ImportError:
        return False
    return True


@cache
def has_heif() -> bool:
    """Whether a HEIC decoder is installed; the first call loads it."""
    try:
        importlib.import_module("pillow_heif").register_heif_opener()
    except ImportError:
        return False
    return True


@cache
def _decoders() -> dict[str, tuple[Any, Any]]:
    Image.preinit()
    Image.init()
    return {name: Image.OPEN[name] for name in _FORMATS if name in Image.OPEN}


@contextmanager
def opened(path: str | Path) -> Iterator[Image.Image]:
    """The image with its header read and its pixels still in the file. Raises BadImage, also for errors inside the block."""
    try:
        with open(path, "rb") as file:
            image = _identify(file)
            _check_size(*image.size)
            yield image
    except BadImage:
        raise
    except FileNotFoundError:
        raise Unreachable("is not there") from None
    except PermissionError:
        raise Unreachable("may not be read (permissions)") from None
    except MemoryError as err:
        raise Unreachable("does not fit into memory") from err
    except _BROKEN as err:
        raise BadImage(_reason(err)) from err


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise BadImage(f"has no pixels ({width}x{height})")
    if width * height > MAX_PIXELS:
        raise BadImage(
            f"is {width}x{height} ({width * height / 1e6:.0f} megapixels); "
            f"more than {MAX_PIXELS / 1e6:.0f} are refused as a decompression bomb"
        )


def _reason(err: BaseException) -> str:
    # Decoders speak English, and of their own parts; whoever looks for the fault finds their words in the cause.
    text = str(err).lower()
    truncated = any(word in text for word in ("truncated", "end of file", "premature", "unexpected end", "incomplete"))
    return "is truncated or damaged" if truncated else "is damaged"


def _identify(file: BinaryIO) -> Image.Image:
    # Pillow's own open() warns about large images through process-wide filters and tries every decoder it has.
    prefix = file.read(16)
    if not prefix:
        raise BadImage("is empty (0 bytes)")
    file.seek(0)
    decoders = _decoders()
    if prefix.startswith(jxl.MAGIC):
        if not has_jxl():
            raise Unreachable("is JPEG XL, and no decoder is installed; run pip install pillow-jxl-plugin, or convert it to PNG")
        # This decoder makes all pixels when it opens a file, so the limit must be checked before.
        _check_size(*jxl.stored_size(file))
        decoders = {"JXL": Image.OPEN["JXL"]}
    if _HEIC.match(prefix):
        if not has_heif():
            raise Unreachable("is HEIC, and no decoder is installed; run pip install pillow-heif, or convert it to JPEG")
        decoders = {"HEIF": Image.OPEN["HEIF"]}
    for format_name, (factory, accept) in decoders.items():
        accepted = accept(prefix) if accept else False
        if isinstance(accepted, str):
            raise Unreachable(f"needs a decoder that is not installed ({accepted})")
        if accepted:
            # Without its name: a file that Pillow knows by name it maps into memory, and then turns TIFF's rows and columns wrongly.
            image = factory(file, "")
            if not isinstance(image, Image.Image):
                raise BadImage(f"is a broken {format_name} file")
            return image
    raise BadImage("is not an image (its content is none of JPEG, PNG, WebP, BMP, GIF, TIFF, AVIF, JPEG XL, HEIC)")


def _orientation(image: Image.Image) -> int:
    # PNG's own getexif() decodes the whole image to find data behind it; the base class reads the header only. Decoding
    # uses this same function, so scanned size and decoded size cannot differ.
    if image.format in ("JXL", "TIFF", "HEIF"):
        return 1  # their decoders have turned it already
    if not {"exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"} & image.info.keys():
        return 1
    try:
        value = Image.Image.getexif(image).get(_ORIENTATION_TAG, 1)
    except _BROKEN:
        return 1  # a broken tag is not a broken image
    return value if isinstance(value, int) and value in _TRANSPOSED else 1


def read_size(path: str | Path) -> tuple[int, int]:
    """(width, height) in pixels of the upright image, from its header. Raises BadImage."""
    with opened(path) as image:
        width, height = image.size
        return (height, width) if _orientation(image) >= 5 else (width, height)


def read_orientation(path: str | Path) -> int:
    """How the stored pixels are turned, 1 (upright) to 8 as EXIF counts, from the header. Raises BadImage."""
    with opened(path) as image:
        return _orientation(image)


def decode(path: str | Path, keep_alpha: bool = False) -> Decoded:
    """The upright image as 8-bit RGB. Raises BadImage.

    Transparency is composited on white; with keep_alpha the colours stay as they are and the alpha channel comes along.
    """
    with opened(path) as image:
        turn = _TRANSPOSED.get(_orientation(image))
        image.load()
        rgb, alpha = _to_rgb(image)
        if turn is not None:
            rgb = rgb.transpose(turn)
            alpha = alpha.transpose(turn) if alpha is not None else None
        pixels = np.asarray(rgb)
        if alpha is None:
            return Decoded(pixels, None)
        opacity = np.asarray(alpha)
        return Decoded(pixels, opacity) if keep_alpha else Decoded(on_white(pixels, opacity), None)


def _to_rgb(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    if image.mode.startswith("I") or image.mode == "F":
        return _from_wide(image).convert("RGB"), None
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return rgba.convert("RGB"), rgba.getchannel("A")
    return image.convert("RGB"), None


def _from_wide(image: Image.Image) -> Image.Image:
    # 16-bit samples (or floats in [0, 1]) to 8 bits; Pillow's own convert() clips everything above 255.
    values = np.asarray(image).astype(np.float64)
    scaled = values * 255 if image.mode == "F" else values / 257
    return Image.fromarray(np.clip(np.rint(scaled), 0, 255).astype(np.uint8))


def on_white(rgb: Pixels, alpha: Pixels) -> Pixels:
    """rgb (H, W, 3) with opacity alpha (H, W) in 0 ... 255 over a white ground, rounded to the nearest value."""
    opacity = alpha.astype(np.uint16)[..., None]
    return ((rgb * opacity + 255 * (255 - opacity) + 127) // 255).astype(np.uint8)


def decode_mask(path: str | Path) -> Pixels:
    """A mask image as (H, W), 0 does not count and 255 counts fully. Raises BadImage."""
    return np.asarray(Image.fromarray(decode(path).rgb).convert("L"))


def resize(pixels: Pixels, size: tuple[int, int], interpolation: Interpolation = "auto") -> Pixels:
    """pixels (H, W[, 3]) at another size (width, height); auto is area for shrinking and lanczos for enlarging."""
    height, width = pixels.shape[:2]
    if (width, height) == size:
        return pixels
    if interpolation == "auto":
        interpolation = "area" if size[0] <= width and size[1] <= height else "lanczos"
    return np.asarray(Image.fromarray(pixels).resize(size, _FILTERS[interpolation]))


def crop(pixels: Pixels, place: tuple[int, int], size: tuple[int, int]) -> Pixels:
    """The rectangle of size (width, height) whose corner is at place (left, top)."""
    (left, top), (width, height) = place, size
    assert left >= 0 and top >= 0 and left + width <= pixels.shape[1] and top + height <= pixels.shape[0]
    return pixels[top : top + height, left : left + width]


def mirror(pixels: Pixels) -> Pixels:
    """Left and right exchanged."""
    return np.ascontiguousarray(pixels[:, ::-1])


def tint(pixels: Pixels, seed: int, number: int) -> Pixels:
    """A small random change of hue (at most 3 % of the circle) and of gamma (0.95 to 1.05), for color_aug."""
    turn = round((2 * fraction_for(seed, number, "color_aug/hue") - 1) * 0.03 * 255)
    gamma = 0.95 + 0.1 * fraction_for(seed, number, "color_aug/gamma")
    hue, saturation, value = Image.fromarray(pixels).convert("HSV").split()
    hue = hue.point([(index + turn) % 256 for index in range(256)])
    value = value.point([round(255 * (index / 255) ** gamma) for index in range(256)])
    return np.asarray(Image.merge("HSV", (hue, saturation, value)).convert("RGB"))
