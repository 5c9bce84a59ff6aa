"""The photographs in drawn styles: test crops show the same in every style, styles differ, and the built-in VAE can show them."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from PIL import Image

from sd_scripts.families.lgt.evaluation import correlation, edges
from sd_scripts.toy import drawn_photographs, worlds
from sd_scripts.toy.autoencoder import to_pixels
from sd_scripts.toy.build import BASES
from sd_scripts.toy.datasets import ToyDataset, write_dataset
from sd_scripts.toy.drawn_photographs import SIDE, STYLES, TESTED, TRAINED
from sd_scripts.toy.photograph_vae import errors
from sd_scripts.toy.sharing import load_vae
from tests.style_quality import opened


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> ToyDataset:
    return write_dataset("photographs", tmp_path_factory.mktemp("toy") / "photographs")


def names(folder: Path) -> set[str]:
    """Of the photographs that a folder's images are crops of."""
    return {path.stem.partition("_")[2].partition("-")[0] for path in folder.iterdir()}


def test_every_style_learns_from_other_crops_and_the_photograph_for_tests_is_in_none(written: ToyDataset) -> None:
    assert written.test_data_dir is not None and written.reg_data_dir is None
    for folder, num, shown in (
        (written.train_data_dir, drawn_photographs.TRAIN_IMAGES, set(TRAINED)),
        (written.test_data_dir, drawn_photographs.TEST_IMAGES, {TESTED}),
    ):
        assert sorted(path.name for path in folder.iterdir()) == sorted(STYLES)
        for style in STYLES:
            images = opened(folder / style)
            assert len({image.tobytes() for image in images}) == len(images) == num and names(folder / style) == shown
            assert {image.size for image in images} == {(SIDE, SIDE)}
    first = {style: edges(to_pixels(opened(written.train_data_dir / style, 12))) for style in STYLES}
    alike = [correlation(one, two) for left, right in combinations(STYLES, 2) for one in first[left] for two in first[right]]
    assert max(alike) <= 0.6, "no crop is learned from in two styles"


def test_test_images_show_the_same_in_every_style(written: ToyDataset) -> None:
    assert written.test_data_dir is not None
    shown: dict[str, dict[str, Image.Image]] = {}
    for style in STYLES:
        paths = sorted((written.test_data_dir / style).iterdir())
        shown[style] = {path.stem.partition("_")[2]: image for path, image in zip(paths, opened(paths[0].parent), strict=True)}
    assert len({next(iter(images)) for images in shown.values()}) == len(STYLES), "first ones are of other crops"
    photographs = shown["photo"]
    for style in set(STYLES) - {"photo"}:
        own, other = [], []
        for one, two in ((one, two) for one in photographs for two in shown[style]):
            alike = correlation(*edges(to_pixels([photographs[one], shown[style][two]])))
            (own if one == two else other).append(alike)
        # The dots of a print are edges too.
        assert fmean(own) >= fmean(other) + 0.15, style


@pytest.mark.parametrize("name", [*TRAINED, TESTED])
def test_styles_are_what_they_are_called(name: str) -> None:
    image = drawn_photographs.crop(name, worlds.rng_for(3))
    found = {style: np.asarray(drawn_photographs.draw(image, style, worlds.rng_for(4)), dtype=np.float64) for style in STYLES}
    colorful = {style: (pixels.max(axis=2) - pixels.min(axis=2)).mean() for style, pixels in found.items()}
    assert np.array_equal(found["photo"], np.asarray(image))
    assert colorful["pencil"] <= 15 < colorful["photo"]
    assert found["night"].mean() <= 0.75 * found["photo"].mean() and found["pastel"].min() >= 80
    # Dots at each eighth pixel along both diagonals.
    spectrum = np.abs(np.fft.fft2(found["halftone"].mean(axis=2)))
    dots = spectrum[SIDE // 8, SIDE // 8]
    assert dots >= 5 * np.median(spectrum[SIDE // 8 - 3 : SIDE // 8 + 4, SIDE // 8 - 3 : SIDE // 8 + 4])


def test_the_built_in_vae_shows_a_photograph_that_it_never_saw() -> None:
    found = errors(load_vae(BASES / "photographs" / "vae"), num=3)
    assert found.keys() == STYLES.keys() and max(found.values()) <= 18, found
    assert max(found["photo"], found["pastel"]) <= 10, "colours are lost first"
