"""What is taken out of image files that people add: place, time and camera go, pixels and the way they are turned stay."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo

from sd_scripts.dataset.images import BadImage, decode, read_orientation
from sd_scripts.dataset.stripping import stripped

SECRET = b"Nikon of Ada"
PLACE = b"47.3769"


def exif(turn: int) -> Image.Exif:
    """Of a camera that knows where it is."""
    made = Image.Exif()
    made[274] = turn
    made[271] = SECRET.decode()
    made.get_ifd(0x8825)[1] = "N"
    made.get_ifd(0x8825)[2] = (47.0, 22.0, 36.0)
    made.get_ifd(0x8825)[29] = PLACE.decode()
    return made


def drawn(seed: int, mode: str = "RGB") -> Image.Image:
    shape = (41, 57, {"RGB": 3, "RGBA": 4, "CMYK": 4, "L": 1}[mode])
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8).squeeze(), mode)


def same(before: Path, after: Path) -> bool:
    old, new = decode(before, keep_alpha=True), decode(after, keep_alpha=True)
    alphas = (old.alpha is None and new.alpha is None) or np.array_equal(old.alpha, new.alpha)
    return np.array_equal(old.rgb, new.rgb) and alphas


@pytest.mark.parametrize("turn", [1, 3, 6, 7])
@pytest.mark.parametrize(
    ("ending", "mode", "options"),
    [
        ("jpg", "RGB", {"quality": 92}),
        ("jpg", "RGB", {"progressive": True, "restart_marker_rows": 1}),
        ("jpg", "CMYK", {}),
        ("jpg", "L", {}),
        ("png", "RGBA", {}),
        ("webp", "RGB", {"lossless": True}),
        ("webp", "RGBA", {"quality": 60}),
        ("tif", "RGB", {}),
        ("avif", "RGB", {}),
    ],
)
def test_nothing_but_pixels_and_their_turn_is_left(tmp_path: Path, turn: int, ending: str, mode: str, options: dict[str, object]) -> None:
    path = tmp_path / f"a.{ending}"
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    drawn(turn, mode).save(path, exif=exif(turn), icc_profile=profile, **options)
    # Pillow writes no place into a TIFF.
    assert SECRET in path.read_bytes() and (PLACE in path.read_bytes() or ending == "tif")
    if ending == "jpg":
        # A film behind the image, as telephones write it.
        path.write_bytes(path.read_bytes() + b"ftypmp42" + PLACE)
    data, kind = stripped(path)
    after = tmp_path / f"b{kind}"
    after.write_bytes(data)
    assert SECRET not in data and PLACE not in data
    assert same(path, after)
    with Image.open(after) as image:
        assert dict(image.getexif()) in ({}, {274: turn})
        kept = ending in ("jpg", "png", "webp")
        assert kept == (image.info.get("icc_profile") == profile) and (kind == path.suffix) == kept
    if ending in ("jpg", "png", "webp"):
        assert read_orientation(after) == turn


def test_words_in_a_png_and_xmp_are_taken_out(tmp_path: Path) -> None:
    info = PngInfo()
    info.add_text("parameters", SECRET.decode())
    info.add_itxt("XML:com.adobe.xmp", PLACE.decode(), zip=True)
    drawn(1, "RGBA").save(tmp_path / "a.png", pnginfo=info)
    drawn(2).save(tmp_path / "a.webp", xmp=PLACE, exif=exif(1))
    drawn(3).save(tmp_path / "a.jpg", xmp=PLACE, comment=SECRET)
    for path in tmp_path.iterdir():
        data, _ = stripped(path)
        after = path.with_stem("b")
        after.write_bytes(data)
        assert SECRET not in data and PLACE not in data and same(path, after)
        with Image.open(after) as image:
            assert not {"parameters", "xmp", "comment", "exif"} & image.info.keys()


def test_a_file_that_breaks_off_is_read_anew_or_refused(tmp_path: Path) -> None:
    drawn(1).save(tmp_path / "a.jpg")
    whole = (tmp_path / "a.jpg").read_bytes()
    # A length that leads behind the end: what follows it is lost, and no pixel can be read.
    (tmp_path / "b.jpg").write_bytes(whole[:2] + b"\xff\xe1" + struct.pack(">H", 65535) + whole[2:])
    (tmp_path / "c.jpg").write_bytes(whole[: len(whole) // 2])
    for name in ("b.jpg", "c.jpg"):
        with pytest.raises(BadImage):
            stripped(tmp_path / name)
    drawn(1).save(tmp_path / "d.png")
    (tmp_path / "d.png").write_bytes((tmp_path / "d.png").read_bytes()[:-12])
    data, kind = stripped(tmp_path / "d.png")
    assert kind == ".png" and data.endswith(b"IEND\xaeB`\x82")
