"""The toy's styles: the same scenes look different in each, an image's pixels tell its style, and nothing pairs the training images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sd_scripts.toy import styles, worlds
from sd_scripts.toy.datasets import ToyDataset, write_dataset
from sd_scripts.toy.worlds import Scene

SCENE = Scene("square", "blue", "top right")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> ToyDataset:
    return write_dataset("styles", tmp_path_factory.mktemp("toy") / "styles")


def pixels(style: str, seed: int, scene: Scene = SCENE) -> np.ndarray:
    return np.asarray(styles.draw(scene, style, worlds.rng_for(seed)), dtype=np.float64)


def images(folder: Path) -> dict[str, np.ndarray]:
    """Name -> pixels (H, W, 3), 0 to 255."""
    found = {}
    for path in sorted(folder.glob("*.png")):
        with Image.open(path) as image:
            found[path.name] = np.asarray(image.convert("RGB"), dtype=np.float64)
    return found


def paper(image: np.ndarray) -> np.ndarray:
    border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    return np.median(border, axis=0)


def box(image: np.ndarray) -> np.ndarray:
    """Left, top, right and bottom of what is there, in pixels."""
    there = np.abs(image - paper(image)).sum(axis=2) > 60
    return np.array([edge for axis in (0, 1) for edge in np.flatnonzero(there.any(axis=axis))[[0, -1]]])


def statistics(image: np.ndarray) -> np.ndarray:
    """Brightness of the paper; how colourful what is on it is; and how long its border is, for its area."""
    ground = paper(image)
    there = np.abs(image - ground).sum(axis=2) > 60
    colors = image[there]
    border = sum(np.diff(there, axis=axis).sum() for axis in (0, 1))
    return np.array([ground.mean(), (colors.max(axis=1) - colors.min(axis=1)).mean(), border / there.sum() ** 0.5])


def test_a_style_is_a_folder_and_every_style_has_as_many_images(written: ToyDataset) -> None:
    assert written.test_data_dir is not None and written.reg_data_dir is None
    for folder, num in ((written.train_data_dir, styles.TRAIN_IMAGES), (written.test_data_dir, len(worlds.HELD_OUT))):
        assert sorted(path.name for path in folder.iterdir()) == sorted(styles.STYLES)
        for style in styles.STYLES:
            found = images(folder / style)
            assert len(found) == num
            assert {image.shape for image in found.values()} == {(styles.SIDE, styles.SIDE, 3)}
            assert len({image.tobytes() for image in found.values()}) == num
    assert len(styles.STYLES) >= 3
    assert list(written.train_data_dir.rglob("*.txt")) == [], "the folder's name says all"


def test_test_images_show_the_same_in_every_style_and_training_images_do_not(written: ToyDataset) -> None:
    assert written.test_data_dir is not None
    shown = {style: images(written.test_data_dir / style) for style in styles.STYLES}
    assert len({next(iter(found)).partition("_")[2] for found in shown.values()}) == len(styles.STYLES), "first ones are of other scenes"
    boxes = {style: {name.partition("_")[2]: box(image) for name, image in found.items()} for style, found in shown.items()}
    assert all(found.keys() == boxes["flat"].keys() and len(found) == len(worlds.HELD_OUT) for found in boxes.values())
    for style in ("line", "night"):
        assert max(np.abs(edges - boxes["flat"][scene]).max() for scene, edges in boxes[style].items()) <= 1.5, style
    trained = {style: [path.name for path in sorted((written.train_data_dir / style).iterdir())] for style in styles.STYLES}
    assert len({tuple(found) for found in trained.values()}) == len(styles.STYLES)


def test_no_training_image_shows_a_scene_of_the_test(written: ToyDataset) -> None:
    """Read back from the pixels of the style that is drawn as the world's own images."""
    read = [worlds.read(Image.fromarray(np.uint8(image))) for image in images(written.train_data_dir / "flat").values()]
    clear = [reading for reading in read if None not in (reading.shape, reading.color, reading.place)]
    assert len(clear) >= 0.8 * len(read)
    shown = {(reading.shape, reading.color, reading.place) for reading in clear}
    assert len(shown) > 50
    assert not shown & {(scene.shape, scene.color, scene.place) for scene in worlds.HELD_OUT}


@pytest.mark.parametrize("style", styles.STYLES)
def test_a_seed_gives_the_same_image_and_another_seed_another_one(style: str) -> None:
    assert np.array_equal(pixels(style, 3), pixels(style, 3))
    assert not np.array_equal(pixels(style, 3), pixels(style, 4))


def test_styles_are_what_they_are_called() -> None:
    drawn = {style: pixels(style, 5) for style in styles.STYLES}
    assert paper(drawn["night"]).max() < 90 and paper(drawn["night"]).argmax() == 2
    assert all(paper(drawn[style]).min() > 220 for style in ("flat", "line"))
    share = {style: (np.abs(image - paper(image)).sum(axis=2) > 60).mean() for style, image in drawn.items()}
    assert share["line"] < 0.6 * share["flat"], "an outline"
    assert share["night"] == pytest.approx(share["flat"], rel=0.03)
    dark = drawn["line"][np.abs(drawn["line"] - paper(drawn["line"])).sum(axis=2) > 400]
    assert (dark.max(axis=1) - dark.min(axis=1)).max() < 12, "outlines have no colour"


def test_a_larger_image_is_the_same_image_larger() -> None:
    for style in styles.STYLES:
        small = styles.draw(SCENE, style, worlds.rng_for(8))
        large = styles.draw(SCENE, style, worlds.rng_for(8), side=2 * styles.SIDE).resize(small.size, Image.Resampling.BOX)
        error = np.abs(np.asarray(small, dtype=np.float64) - np.asarray(large, dtype=np.float64))
        assert error.mean() < 2.5, style


def test_the_nearest_mean_of_simple_statistics_names_every_style(written: ToyDataset) -> None:
    """Learned from the training images alone; the test images show other scenes."""
    assert written.test_data_dir is not None
    learned = {style: [statistics(image) for image in images(written.train_data_dir / style).values()] for style in styles.STYLES}
    everything = np.concatenate(list(learned.values()))
    scale = everything.std(axis=0)
    means = {style: np.mean(found, axis=0) for style, found in learned.items()}

    def named(image: np.ndarray) -> str:
        return min(means, key=lambda style: np.linalg.norm((statistics(image) - means[style]) / scale))

    wrong = [
        (style, name) for style in styles.STYLES for name, image in images(written.test_data_dir / style).items() if named(image) != style
    ]
    assert wrong == []
