"""Toy datasets: kohya's layout, always the same bytes, complete or absent."""

import functools
import hashlib
import json
import threading

import pytest
from PIL import Image

from sd_scripts.toy import datasets, edits, measure, worlds
from sd_scripts.toy.datasets import write_dataset
from sd_scripts.toy.worlds import Scene


def _bytes_below(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A set by its name, written when it is first asked for; tests leave it as it is."""
    return functools.cache(lambda name: write_dataset(name, tmp_path_factory.mktemp(name) / name))


def _load(folder, every=1):
    # Scenes and images, of one file in so many.
    scenes, images = [], []
    for path in sorted(folder.rglob("*.png"))[::every]:
        with Image.open(path) as image:
            images.append(image.convert("RGB"))
        captions = path.with_suffix(".txt")
        _, color, shape = path.stem.split("_")
        scenes.append(worlds.scene_of(captions.read_text()) if captions.exists() else Scene(shape, color, worlds.read(images[-1]).place))
    return scenes, images


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in ("subject", "edits", "styles"))) for name in datasets.DATASETS]
)
def test_two_writings_have_the_same_bytes(name, written, tmp_path):
    write_dataset(name, tmp_path / "two")
    one = written(name).train_data_dir.parent
    assert _bytes_below(one) == _bytes_below(tmp_path / "two")
    assert {path.name for path in tmp_path.iterdir()} == {"two"} and {path.name for path in one.parent.iterdir()} == {name}


EDIT_SETS = ("edit_border", "large_edit_border", "edits")
IMAGE_SETS = [name for name in datasets.DATASETS if name not in (*EDIT_SETS, "styles", "photographs")]
"""Sets of images as the bases draw them; styles have tests of their own."""


def _pairs(folder, every=1):
    # (instruction, image to edit, edited image), by name, of one pair in so many.
    for captions in sorted((folder / "target").glob("*.txt"))[::every]:
        with (
            Image.open(folder / "control" / f"{captions.stem}.png") as control,
            Image.open(captions.with_suffix(".png")) as target,
        ):
            yield captions.read_text().strip(), control.convert("RGB"), target.convert("RGB")


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *((name, 11 if name == "shapes" else 3) for name in IMAGE_SETS),
        *(pytest.param(name, 1, marks=pytest.mark.long) for name in IMAGE_SETS),
    ],
)
def test_captions_or_file_names_say_what_the_images_show(name, every, written):
    for folder in filter(None, (written(name).train_data_dir, written(name).reg_data_dir)):
        assert measure.score(*_load(folder, every)).all >= 0.97


def test_stars_come_in_all_colours_and_places_and_regularisation_has_none(written):
    star = written("star")
    stars, images = _load(star.train_data_dir / "3_star")
    assert len(set(stars)) == len(stars) == 24
    assert {scene.shape for scene in stars} == {"star"}
    assert {scene.color for scene in stars} == set(worlds.COLORS)
    assert {scene.place for scene in stars} == set(worlds.PLACES)
    assert len({round(image.width / image.height, 2) for image in images}) == 3
    old, _ = _load(star.reg_data_dir / "1_shape")
    assert len(old) == 60
    assert {scene.shape for scene in old} == set(worlds.BASE_SHAPES)


@pytest.mark.parametrize("name", ["stars", "large_stars"])
def test_many_stars_leave_a_third_of_the_combinations_unseen(written, name):
    stars, images = _load(written(name).train_data_dir / "1_star")
    assert name == "stars" or {image.size for image in images} == set(worlds.LARGE_SIZES)
    assert len(stars) == len({image.tobytes() for image in images}) == 96
    assert {scene.shape for scene in stars} == {"star"}
    assert {scene.color for scene in stars} == set(worlds.COLORS) and {scene.place for scene in stars} == set(worlds.PLACES)
    assert len(set(stars)) == 36 == len(worlds.scenes(("star",))) * 2 // 3
    old, _ = _load(written(name).reg_data_dir / "1_shape")
    assert len(old) == 96 and {scene.shape for scene in old} == set(worlds.BASE_SHAPES)


def test_teal_comes_in_all_shapes_and_places_and_regularisation_has_none(written):
    folder = written("teal").train_data_dir
    teal, _ = _load(folder / "3_teal")
    assert len(set(teal)) == len(teal) == 24
    assert {scene.color for scene in teal} == {"teal"}
    assert {scene.shape for scene in teal} == set(worlds.BASE_SHAPES)
    assert {scene.place for scene in teal} == set(worlds.PLACES)
    assert all("teal" in path.read_text() for path in folder.rglob("*.txt"))
    old, _ = _load(written("teal").reg_data_dir / "1_shape")
    assert len(old) == 60
    assert {scene.color for scene in old} == set(worlds.KNOWN_COLORS)


def test_the_subject_is_one_thing_at_many_places_named_by_its_folder_beside_its_class(written):
    subject_set = written("subject")
    assert not list(subject_set.train_data_dir.rglob("*.txt")), "the folder's name is the prompt"
    assert [path.name for path in subject_set.train_data_dir.iterdir()] == ["4_zwx circle"]
    subject, images = _load(subject_set.train_data_dir / "4_zwx circle")
    assert len(subject) == 12
    assert {(scene.shape, scene.color) for scene in subject} == {("circle", "teal")}
    assert len({scene.place for scene in subject}) == 8
    assert len({image.tobytes() for image in images}) == 12
    others, _ = _load(subject_set.reg_data_dir / "1_circle")
    assert {scene.shape for scene in others} == {"circle"}
    assert {scene.color for scene in others} == set(worlds.KNOWN_COLORS)
    assert len(list(subject_set.reg_data_dir.rglob("*.txt"))) == len(others) / 2, "half keep the class prompt, half its colours and places"
    assert len(others) <= 4 * len(subject), "with fewer repeats some class images would never be used"


def test_a_set_of_edits_has_the_image_to_edit_beside_each_edited_one(written):
    border = written("edit_border")
    assert border.reg_data_dir is not None
    folders = {path.name: path for part in (border.train_data_dir, border.reg_data_dir) for path in part.iterdir()}
    assert sorted(folders) == ["1_keep", "1_old", "20_border"] and folders["20_border"].parent == border.train_data_dir
    for name, num in (("20_border", 24), ("1_old", 420), ("1_keep", 60)):
        folder = folders[name]
        pairs = list(_pairs(folder))
        names = {path.stem for path in (folder / "target").glob("*.png")}
        assert len(pairs) == len(names) == num
        assert names == {path.stem for path in (folder / "control").iterdir()}
        for instruction, control, target in pairs:
            assert control.size == target.size
            assert ("border" in instruction) == edits.has_border(target) == (name == "20_border")
            assert not edits.has_border(control)
    assert len({instruction for instruction, _, _ in _pairs(border.train_data_dir / "20_border")}) == 4
    assert len({round(control.width / control.height, 2) for _, control, _ in _pairs(border.train_data_dir / "20_border")}) == 3


@pytest.mark.parametrize("every", [pytest.param(5, id="each fifth"), pytest.param(1, id="all", marks=pytest.mark.long)])
def test_old_instructions_change_what_they_name_and_no_set_of_edits_shows_what_is_held_out(every, written):
    for name in EDIT_SETS:
        made = written(name)
        for folder in [path for part in (made.train_data_dir, made.reg_data_dir) if part is not None for path in part.iterdir()]:
            kinds = {path.stem.split("_")[1] for path in (folder / "target").iterdir()}
            assert kinds == {"20_border": {"border"}, "1_keep": {"keep"}}.get(folder.name, set(edits.OLD_KINDS))
            for _, control, target in _pairs(folder, every):
                readings = worlds.read_all(control) + (() if edits.has_border(target) else worlds.read_all(target))
                assert worlds.HELD_OUT.isdisjoint(Scene(reading.shape, reading.color, reading.place) for reading in readings)
                assert (control.tobytes() == target.tobytes()) == (folder.name == "1_keep")


def test_no_dataset_shows_a_held_out_scene(written):
    for name in IMAGE_SETS:
        folder = written(name).train_data_dir.parent
        captions = [worlds.scene_of(path.read_text()) for path in folder.rglob("*.txt")]
        # Where an image has no caption, its name and its pixels say it; of shapes every one has.
        scenes = captions if name == "shapes" else _load(folder)[0]
        assert scenes and worlds.HELD_OUT.isdisjoint(scenes), name


def test_a_written_dataset_is_left_alone(tmp_path):
    written = write_dataset("edits", tmp_path / "edits")
    assert written.reg_data_dir is None
    cache = written.train_data_dir / "1_edit" / "cache.safetensors"
    cache.write_bytes(b"latents")
    assert write_dataset("edits", tmp_path / "edits") == written
    assert cache.read_bytes() == b"latents"


def test_a_written_dataset_is_known_by_its_record_and_not_drawn_again(tmp_path):
    folder = tmp_path / "subject"
    write_dataset("subject", folder)
    record = json.loads((folder / "dataset.json").read_text())
    first = next(iter(record["files"]))
    (folder / first).write_bytes(b"another drawing")
    record["files"][first] = hashlib.sha256(b"another drawing").hexdigest()
    (folder / "dataset.json").write_text(json.dumps(record, indent=2) + "\n")
    write_dataset("subject", folder)
    assert (folder / first).read_bytes() == b"another drawing"


@pytest.mark.parametrize(
    "record", ['{"toy_dataset": "subject", "recipe_version": 9}', '{"toy_dataset": "subject", "files": 3}', '{"toy_dataset": "sub']
)
def test_a_dataset_with_the_record_of_an_older_version_or_half_of_one_is_written_again(record, written, tmp_path):
    folder = tmp_path / "subject"
    write_dataset("subject", folder)
    (folder / "dataset.json").write_text(record)
    write_dataset("subject", folder)
    assert _bytes_below(folder) == _bytes_below(written("subject").train_data_dir.parent)


def test_a_damaged_image_of_a_written_dataset_is_written_again(tmp_path):
    folder = tmp_path / "star"
    write_dataset("star", folder)
    whole = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    first, second, *_ = [path for path in sorted(whole) if path.suffix == ".png"]
    first.write_bytes(whole[first][:100])
    second.unlink()
    write_dataset("star", folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == whole


def test_another_toy_dataset_in_the_folder_is_replaced_whole(written, tmp_path):
    write_dataset("teal", tmp_path / "data")
    write_dataset("star", tmp_path / "data")
    assert _bytes_below(tmp_path / "data") == _bytes_below(written("star").train_data_dir.parent)
    assert json.loads((tmp_path / "data" / "dataset.json").read_text())["toy_dataset"] == "star"


@pytest.mark.parametrize("file_name", ["photo.png", "dataset.json"])
def test_a_folder_with_other_files_is_refused_and_kept(file_name, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / file_name).write_bytes(b"mine")
    with pytest.raises(ValueError, match="holds other files"):
        write_dataset("star", tmp_path / "mine")
    assert _bytes_below(tmp_path / "mine") == {file_name: b"mine"}


def test_an_unknown_name_is_answered_with_the_nearest_and_all_names(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"'starr' is unknown; the datasets are star, stars, large_stars, teal, large_teal, subject, edit_border, "
        r"large_edit_border, edits, shapes, photographs, styles; did you mean 'star'\?",
    ):
        write_dataset("starr", tmp_path / "stars")
    assert not (tmp_path / "stars").exists()


def test_writers_at_the_same_time_do_not_disturb_each_other(written, tmp_path):
    failures = []

    def write():
        try:
            write_dataset("teal", tmp_path / "shared")
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert _bytes_below(tmp_path / "shared") == _bytes_below(written("teal").train_data_dir.parent)
    assert {path.name for path in tmp_path.iterdir()} == {"shared"}
