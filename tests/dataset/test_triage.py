"""Duplicates and blur in piles of images that were made so that it is known what is in them."""

from __future__ import annotations

import io
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter
from scipy import fft, ndimage

from sd_scripts.dataset import triage

VARIATIONS = ("jpeg", "smaller", "brighter", "cropped", "flatter", "copied")


def scene(rng: np.random.Generator, ground: int, side: int) -> Image.Image:
    """Things on a ground of soft colours; images of one ground are of one series, and not the same."""
    own = np.random.default_rng(ground)
    width, height = side, int(side * own.choice([0.67, 0.75, 1, 1.33]))
    soft = Image.fromarray(own.integers(0, 256, (4, 5, 3), dtype=np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    image = Image.fromarray(np.clip(np.asarray(soft) + own.normal(0, 6, (height, width, 3)), 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(4, 9))):
        x, y, size = int(rng.integers(width)), int(rng.integers(height)), int(rng.integers(side // 16, side // 6))
        color = tuple(int(value) for value in rng.integers(0, 256, 3))
        (draw.ellipse if rng.random() < 0.5 else draw.rectangle)((x - size, y - size, x + size, y + size), fill=color)
        draw.line((x, y, int(rng.integers(width)), int(rng.integers(height))), fill=color, width=2)
    return image


def varied(image: Image.Image, how: str, rng: np.random.Generator) -> Image.Image:
    width, height = image.size
    if how == "jpeg":
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=int(rng.integers(35, 80)))
        return Image.open(stream).convert("RGB")
    if how == "smaller":
        return image.resize((width * 5 // 8, height * 5 // 8), Image.Resampling.LANCZOS)
    if how == "brighter":
        return ImageEnhance.Brightness(image).enhance(float(rng.choice([0.8, 1.2])))
    if how == "cropped":
        return image.crop((width // 70, height // 70, width - width // 70, height - height // 70))
    return ImageEnhance.Contrast(image).enhance(0.8) if how == "flatter" else image


def pile(folder: Path, count: int, side: int) -> tuple[list[triage.Signs], list[int]]:
    """Signs of so many images, three tenths of them made from others, and of which each is."""
    rng = np.random.default_rng(7)
    originals = [scene(rng, number // 2 if number < count // 5 else number, side) for number in range(count * 7 // 10)]
    of = list(range(len(originals)))
    images = list(originals)
    for number in rng.choice(len(originals), count - len(originals), replace=False):
        images.append(varied(originals[number], VARIATIONS[len(images) % len(VARIATIONS)], rng))
        of.append(int(number))
    signs = []
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png")
        signs.append(triage.signs_of(folder / f"{number}.png"))
    return signs, of


def pairs(groups: list[list[int]]) -> set[tuple[int, int]]:
    return {pair for group in groups for pair in combinations(sorted(group), 2)}


@pytest.mark.parametrize(("count", "side"), [(60, 128), pytest.param(1000, 256, marks=pytest.mark.long)])
def test_duplicates_are_found_and_images_of_one_series_are_not_taken_for_them(count: int, side: int, tmp_path: Path) -> None:
    signs, of = pile(tmp_path, count, side)
    same, near = triage.groups_of(signs)
    found = pairs(same) | pairs(near)
    true = {pair for pair in combinations(range(count), 2) if of[pair[0]] == of[pair[1]]}
    right = len(found & true)
    assert right >= 0.95 * len(true) and right >= 0.95 * len(found), (right, len(true), len(found))
    assert pairs(same) == {(number, place) for place, number in enumerate(of) if number != place and VARIATIONS[place % 6] == "copied"}
    # The first of a group is the one to keep.
    for group in near:
        assert signs[group[0]].width * signs[group[0]].height == max(signs[place].width * signs[place].height for place in group)


def test_blurred_images_are_told_from_sharp_ones(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    for number in range(12):
        image = scene(rng, number, 256)
        image.filter(ImageFilter.GaussianBlur(4)).save(tmp_path / f"{number}.png")
        assert triage.signs_of(tmp_path / f"{number}.png").blur >= triage.BLURRED
        image.save(tmp_path / "sharp.png")
        assert triage.signs_of(tmp_path / "sharp.png").blur < 0.8 * triage.BLURRED


def test_borders_are_told_from_even_backgrounds(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    for number in range(12):
        image = scene(rng, number, 256)
        width, height = image.size
        along = (0, int(rng.integers(12, 40))) if number % 3 else (int(rng.integers(12, 40)),) * 2
        along = along[:: 1 if number % 2 else -1]
        framed = Image.new("RGB", (width + 2 * along[0], height + 2 * along[1]), ["black", "white", "teal"][number % 3])
        framed.paste(image, along)
        for ending, options in (("png", {}), ("jpg", {"quality": 85})):
            framed.save(tmp_path / f"framed.{ending}", **options)
            border = triage.signs_of(tmp_path / f"framed.{ending}").border
            assert border == pytest.approx(max(along[0] / framed.width, along[1] / framed.height), abs=0.03), (number, ending)
        image.save(tmp_path / "plain.png")
        assert triage.signs_of(tmp_path / "plain.png").border < triage.FRAMED
        # A thing on a white ground, as shops show it.
        alone = Image.new("RGB", (256, 256), "white")
        ImageDraw.Draw(alone).ellipse((60, 50, 190, 200), fill="teal")
        alone.save(tmp_path / "alone.png")
        assert triage.signs_of(tmp_path / "alone.png").border == 0


def test_the_hash_and_the_blur_are_those_of_their_papers() -> None:
    rng = np.random.default_rng(5)
    for size in (8, triage.SIDE):
        values = rng.normal(size=(size, size))
        assert np.allclose(triage.cosines(size) @ values @ triage.cosines(size).T, fft.dctn(values, norm="ortho"))
    for _ in range(10):
        grey = rng.integers(0, 256, (triage.SIDE, triage.SIDE), dtype=np.uint8)
        low = fft.dctn(grey.astype(float), norm="ortho")[:8, :8].ravel()
        bits = "".join("01"[int(value > np.median(low[1:]))] for value in low)
        assert triage.hash_of(grey) == int(bits, 2)
        image = rng.normal(100, 40, (int(rng.integers(25, 60)), int(rng.integers(25, 60)))).astype(np.float32)
        along = []
        for axis in (0, 1):
            smooth = ndimage.uniform_filter1d(image.astype(np.float64), 11, axis=axis, mode="nearest")
            sharp, again = np.abs(np.diff(image, axis=axis)), np.abs(np.diff(smooth, axis=axis))
            along.append(1 - np.maximum(sharp - again, 0).sum() / sharp.sum())
        assert triage.blur_of(image) == pytest.approx(max(along), rel=1e-4)
    assert triage.blur_of(np.zeros((50, 50), np.float32)) == triage.blur_of(np.ones((9, 12), np.float32)) == 0.0
    assert triage.groups_of([]) == ([], [])
