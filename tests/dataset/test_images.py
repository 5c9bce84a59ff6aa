"""Pixels of every odd kind of file against their known content; no image is clipped, turned or tinted by accident."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pillow_jxl  # noqa: F401  (writes the JPEG XL file of the test)
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sd_scripts.dataset import jxl
from sd_scripts.dataset.images import BadImage, crop, decode, decode_mask, mirror, on_white, read_size, resize, tint

RNG = np.random.default_rng(20)


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def saved(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


@pytest.mark.parametrize("ending", ["png", "bmp", "webp", "gif", "jpg", "avif", "jxl"])
def test_every_format_gives_its_pixels(tmp_path: Path, ending: str) -> None:
    smooth = np.asarray(Image.fromarray(noise(4, 5)).resize((50, 40), Image.Resampling.BICUBIC))
    options = {"webp": {"lossless": True}, "jpg": {"quality": 98}, "avif": {"quality": 98}, "jxl": {"lossless": True}}.get(ending, {})
    path = saved(tmp_path / f"a.{ending}", Image.fromarray(smooth), **options)
    assert read_size(path) == (50, 40)
    difference = np.abs(decode(path).rgb.astype(int) - smooth)
    assert difference.mean() <= {"jpg": 2, "avif": 3, "gif": 12}.get(ending, 0)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["jpg", "png", "webp"])
def test_exif_rotation_is_applied_to_size_and_pixels(tmp_path: Path, ending: str, orientation: int) -> None:
    upright = np.zeros((24, 40, 3), np.uint8)
    upright[:12, :20] = (255, 0, 0)
    upright[:12, 20:] = (0, 255, 0)
    upright[12:, :20] = (0, 0, 255)
    # What the camera stored, so that turning it as the tag says gives `upright` again.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright),
        7: np.rot90(upright, 2).transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[274] = orientation
    options = {"webp": {"lossless": True}, "jpg": {"quality": 98, "subsampling": 0}}.get(ending, {})
    path = saved(tmp_path / f"a.{ending}", Image.fromarray(np.ascontiguousarray(stored)), exif=exif, **options)
    assert read_size(path) == (40, 24)
    assert np.abs(decode(path).rgb.astype(int) - upright).mean() < 3


def test_transparency_is_composited_on_white_unless_it_is_the_mask(tmp_path: Path) -> None:
    rgba = noise(9, 7, 4)
    path = saved(tmp_path / "a.png", Image.fromarray(rgba))
    alpha = rgba[..., 3:].astype(float) / 255
    expected = rgba[..., :3] * alpha + 255 * (1 - alpha)
    assert np.abs(decode(path).rgb - expected).max() <= 0.5 + 1e-9
    kept = decode(path, keep_alpha=True)
    assert (kept.rgb == rgba[..., :3]).all()
    assert kept.alpha is not None and (kept.alpha == rgba[..., 3]).all()


@given(st.integers(0, 255), st.integers(0, 255))
def test_compositing_rounds_to_the_nearest_value(value: int, alpha: int) -> None:
    got = on_white(np.full((1, 1, 3), value, np.uint8), np.full((1, 1), alpha, np.uint8))[0, 0, 0]
    assert abs(got - (value * alpha + 255 * (255 - alpha)) / 255) <= 0.5


def test_alpha_is_turned_with_its_image(tmp_path: Path) -> None:
    rgba = noise(6, 10, 4)
    exif = Image.Exif()
    exif[274] = 6
    kept = decode(saved(tmp_path / "a.png", Image.fromarray(rgba), exif=exif), keep_alpha=True)
    assert kept.alpha is not None and (kept.alpha == np.rot90(rgba[..., 3], -1)).all()


def test_palettes_with_transparency_are_composited(tmp_path: Path) -> None:
    image = Image.new("P", (4, 2))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putdata([0, 1] * 4)
    rgb = decode(saved(tmp_path / "a.png", image, transparency=0)).rgb
    assert (rgb[:, 0::2] == 255).all() and (rgb[:, 1::2] == (0, 255, 0)).all()


def test_grey_with_alpha_and_bilevel_images_become_rgb(tmp_path: Path) -> None:
    grey = decode(saved(tmp_path / "la.png", Image.merge("LA", (Image.new("L", (3, 3), 0), Image.new("L", (3, 3), 128))))).rgb
    assert (grey == 127).all()
    assert (decode(saved(tmp_path / "one.png", Image.new("1", (3, 3), 1))).rgb == 255).all()
    assert (decode(saved(tmp_path / "l.png", Image.new("L", (3, 3), 77))).rgb == 77).all()


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 64 * 4).astype(np.uint16).reshape(4, 64)
    rgb = decode(saved(tmp_path / "a.png", Image.fromarray(values))).rgb
    assert np.abs(rgb[..., 0] - values / 257).max() <= 0.5
    assert (rgb[..., 0] == rgb[..., 2]).all()


def test_sixteen_bit_colour_is_scaled(tmp_path: Path) -> None:
    values = RNG.integers(0, 65536, (5, 6, 3), dtype=np.uint16)
    rows = b"".join(b"\x00" + row.astype(">u2").tobytes() for row in values)
    path = tmp_path / "a.png"
    path.write_bytes(png_of(6, 5, 16, 2, rows))
    assert np.abs(decode(path).rgb - values / 257).max() <= 1


def png_of(width: int, height: int, bits: int, colour_type: int, rows: bytes) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jpg", Image.new("CMYK", (16, 16), (0, 255, 255, 0)), quality=98)
    assert np.abs(decode(path).rgb.astype(int) - (255, 0, 0)).max() < 8


@pytest.mark.parametrize("ending", ["gif", "webp", "png"])
def test_animated_files_show_their_first_frame(tmp_path: Path, ending: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue", "lime")]
    options = {"lossless": True} if ending == "webp" else {}
    path = saved(tmp_path / f"a.{ending}", frames[0], save_all=True, append_images=frames[1:], duration=50, **options)
    assert read_size(path) == (8, 6)
    assert (decode(path).rgb == (255, 0, 0)).all()


def test_the_content_decides_and_not_the_ending(tmp_path: Path) -> None:
    content = noise(5, 5)
    Image.fromarray(content).save(tmp_path / "a.png")
    path = (tmp_path / "a.png").rename(tmp_path / "a.jpg")
    assert (decode(path).rgb == content).all()


def test_bad_files_say_what_is_wrong(tmp_path: Path) -> None:
    files = {
        "empty.png": (b"", "is empty (0 bytes)"),
        "text.png": (b"a caption, not an image", "is not an image"),
        "short.png": (b"\x89PNG\r\n\x1a\n", "is "),
        "bomb.png": (png_of(60_000, 60_000, 8, 2, b"\0" * 60_000), "60000x60000 (3600 megapixels)"),
        "none.png": (png_of(0, 5, 8, 2, b""), ""),
    }
    for name, (content, reason) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadImage) as caught:
            read_size(tmp_path / name)
        assert reason in str(caught.value)
    with pytest.raises(BadImage, match="is not there"):
        read_size(tmp_path / "nothing.png")


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (256, 256), (257, 300), (640, 480), (1920, 1080), (3, 5000), (400, 320)])
@pytest.mark.parametrize("container", [False, True])
def test_the_size_of_a_jpeg_xl_file_is_read_from_its_header(tmp_path: Path, size: tuple[int, int], container: bool) -> None:
    path = saved(tmp_path / "a.jxl", Image.new("RGB", size, "red"), effort=1, use_container=container)
    with path.open("rb") as file:
        assert jxl.stored_size(file) == size
        assert file.tell() == 0


def test_a_jpeg_xl_bomb_is_refused_before_its_decoder_sees_it(tmp_path: Path) -> None:
    # Not small, height 2^30 in 30 bits, ratio 1:1; there is no image behind it.
    bits = 0 | 3 << 1 | (2**30 - 1) << 3 | 1 << 33
    path = tmp_path / "a.jxl"
    path.write_bytes(b"\xff\x0a" + bits.to_bytes(8, "little"))
    with pytest.raises(BadImage, match="decompression bomb"):
        read_size(path)
    for broken in (b"\xff\x0a", b"\x00\x00\x00\x0cJXL \x0d\x0a\x87\x0a", b"\x00\x00\x00\x0cJXL \x0d\x0a\x87\x0a" + b"\0\0\0\0abcd"):
        path.write_bytes(broken)
        with pytest.raises(BadImage):
            read_size(path)


@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "bmp", "gif", "avif", "jxl"])
def test_truncated_files_are_found_when_decoded(tmp_path: Path, ending: str) -> None:
    path = saved(tmp_path / f"a.{ending}", Image.fromarray(noise(200, 200)))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    # The decoder's own words, which nobody translates, are its cause.
    with pytest.raises(BadImage, match=r"^is (truncated or )?damaged$") as caught:
        decode(path)
    assert str(caught.value.__cause__)


@given(
    st.binary(max_size=200), st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM", b"RIFF\x20\0\0\0WEBPVP8 "])
)
def test_arbitrary_bytes_give_a_reason_and_never_another_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, start: bytes
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "a.png"
    path.write_bytes(start + content)
    try:
        assert decode(path).rgb.shape[2] == 3
    except BadImage as err:
        assert str(err)


def test_large_photographs_below_the_limit_are_taken_without_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png_of(12_000, 10_000, 1, 0, (b"\0" * 1501) * 10_000))
    assert read_size(path) == (12_000, 10_000)


def test_shrinking_by_area_keeps_the_mean_and_enlarging_keeps_the_edges() -> None:
    pixels = noise(96, 64)
    small = resize(pixels, (16, 24))
    # Pillow rounds twice, once in each direction.
    assert np.abs(small.astype(float) - pixels.reshape(24, 4, 16, 4, 3).mean(axis=(1, 3))).max() <= 1
    assert resize(pixels, (128, 192)).shape == (192, 128, 3)
    assert resize(pixels, (64, 96)) is pixels


def test_the_filters_differ() -> None:
    pixels = noise(32, 32)
    results = [resize(pixels, (20, 20), name).tobytes() for name in ("lanczos", "bicubic", "bilinear", "area", "nearest")]
    assert len(set(results)) == 5


def test_cropping_mirroring_and_masks(tmp_path: Path) -> None:
    pixels = noise(10, 12)
    assert (crop(pixels, (3, 2), (4, 5)) == pixels[2:7, 3:7]).all()
    assert (mirror(pixels) == pixels[:, ::-1]).all()
    path = saved(tmp_path / "m.png", Image.fromarray(noise(4, 4, 1)))
    assert decode_mask(path).shape == (4, 4)


def test_tinting_is_small_and_follows_from_its_numbers() -> None:
    pixels = np.asarray(Image.fromarray(noise(4, 4)).resize((64, 64), Image.Resampling.BICUBIC))
    again, other = tint(pixels, 1, 2), tint(pixels, 1, 3)
    assert (tint(pixels, 1, 2) == again).all() and (again != other).any()
    assert 0 < np.abs(again.astype(int) - pixels).mean() < 25
