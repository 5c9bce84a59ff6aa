"""Marks that were planted at one place of many images of a made set, and sets in which there are none."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from sd_scripts.dataset import watermarks
from tests.dataset.test_triage import scene


def stamped(image: Image.Image, words: str, size: int, place: tuple[float, float], shade: int, opacity: float) -> Image.Image:
    """Words over an image, at shares of the room that they leave."""
    layer = Image.new("RGBA", image.size, (shade, shade, shade, 0))
    draw, font = ImageDraw.Draw(layer), ImageFont.load_default(size)
    box = draw.textbbox((0, 0), words, font=font)
    at = tuple(share * (side - length) for share, side, length in zip(place, image.size, box[2:], strict=True))
    draw.text(at, words, font=font, fill=(shade, shade, shade, round(255 * opacity)))
    return Image.alpha_composite(image.convert("RGBA"), layer).convert("RGB")


def frames(image: Image.Image) -> Any:
    """As from a small copy that the page keeps."""
    copy, stream = image.copy(), io.BytesIO()
    copy.thumbnail((256, 256), Image.Resampling.BOX)
    copy.save(stream, "JPEG", quality=82)
    return watermarks.frames_of(np.asarray(Image.open(stream).convert("RGB")), image.size)


def found(images: list[Image.Image]) -> set[int]:
    made = [frames(image) for image in images]
    return {place for mark in watermarks.find(made.__getitem__, [image.size for image in images]) for place in mark.places}


def pile(rng: np.random.Generator, kind: str) -> tuple[list[Image.Image], set[int]]:
    """Images, and which of them carry a mark: all of one size, with a mark at a place anywhere; or of many, with one in the corner."""
    share, opacity = rng.uniform(0.5, 1), rng.uniform(0.4, 0.8)
    words = "".join(rng.choice(list("ABCDEFGHKMNPRSTUVXYZ0123456789"), int(rng.integers(5, 10))))
    place = (1.0, 1.0) if kind == "corner" else (float(rng.random()), float(rng.random()))
    count, images = int(rng.integers(48, 80)), []
    # So many, and not so many on average: of marks on fewer than half nothing is promised.
    truth = set(rng.permutation(count)[: int(np.ceil(share * count))].tolist())
    for number in range(count):
        side = int(rng.integers(300, 700)) if kind == "corner" else 384
        image = scene(rng, int(rng.integers(1e9)), side)
        if number in truth:
            size = 30 if kind == "corner" else side // 8
            image = stamped(image, words, size, place, 255, opacity)
        images.append(image)
    return images, truth


@pytest.mark.parametrize(
    ("kind", "count"),
    [("anywhere", 1), pytest.param("anywhere", 30, marks=pytest.mark.long), pytest.param("corner", 30, marks=pytest.mark.long)],
)
def test_a_mark_on_half_of_the_images_or_more_is_found_on_these_and_on_no_others(kind: str, count: int) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    for _ in range(count):
        images, truth = pile(rng, kind)
        told = found(images)
        right = len(told & truth)
        assert right >= 0.85 * len(truth) and right >= 0.95 * len(told), (right, len(truth), len(told))


def faces(rng: np.random.Generator, count: int) -> list[Image.Image]:
    """The same kind of subject in the middle of each, about alike."""
    made = []
    for _ in range(count):
        image = scene(rng, int(rng.integers(1e9)), 384)
        draw = ImageDraw.Draw(image)
        x, y, size = image.width / 2 + rng.normal(0, 8), image.height * 0.45 + rng.normal(0, 8), image.width * 0.2 + rng.normal(0, 4)
        skin = tuple(int(value) for value in rng.integers(120, 220, 3))
        draw.ellipse((x - size, y - 1.3 * size, x + size, y + 1.3 * size), fill=skin)
        for side in (-0.4, 0.4):
            draw.ellipse((x + side * size - 6, y - 0.3 * size - 4, x + side * size + 6, y - 0.3 * size + 4), fill=(20, 20, 20))
        made.append(image)
    return made


def skies(rng: np.random.Generator, count: int) -> list[Image.Image]:
    """A horizon at about one height."""
    made = []
    for _ in range(count):
        image = scene(rng, int(rng.integers(1e9)), 384)
        ImageDraw.Draw(image).rectangle(
            (0, 0, image.width, image.height * 0.4 + rng.normal(0, 12)), fill=(150, 190, int(rng.integers(200, 255)))
        )
        made.append(image)
    return made


def plain(rng: np.random.Generator, count: int) -> list[Image.Image]:
    return [scene(rng, int(rng.integers(1e9)), 384) for _ in range(count)]


@pytest.mark.long
@pytest.mark.parametrize("count", [20])
def test_what_images_have_in_common_besides_is_no_mark(count: int) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    for _ in range(count):
        for make in (plain, faces, skies):
            assert found(make(rng, int(rng.integers(20, 60)))) == set(), make.__name__


def test_of_few_images_nothing_is_said() -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    images = [stamped(image, "MARK", 48, (0.5, 0.5), 255, 0.8) for image in plain(rng, watermarks.FEWEST - 1)]
    assert found(images) == set()
