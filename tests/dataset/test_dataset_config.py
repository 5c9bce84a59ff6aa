"""kohya's folders and dataset files: good ones give subsets, bad ones give sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sd_scripts.dataset.config import Subset, Subsets, evaluated_folders, images_below, read_config, subsets_of
from sd_scripts.dataset.plan import make_plan
from sd_scripts.dataset.scan import read_dataset
from sd_scripts.families.lgt.options import LgtDatasetOptions
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError

GOOD = """
[general]
shuffle_caption = true
caption_extension = ".tags"
keep_tokens = 1
enable_bucket = true

[[datasets]]
resolution = 768
batch_size = 2
keep_tokens = 2

  [[datasets.subsets]]
  image_dir = "{root}/one"
  num_repeats = 10
  class_tokens = "sks dog"
  keep_tokens = 0

  [[datasets.subsets]]
  image_dir = "{root}/reg"
  is_reg = true

[[datasets]]
resolution = [512, 640]

  [[datasets.subsets]]
  image_dir = "{root}/two"
  shuffle_caption = false
  flip_aug = true
"""


ONE = '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "{root}/one"\n'
"""A dataset of one folder; further keys of the subset may follow, from line 4 on."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("one", "two", "reg"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (800, 600), "red" if name == "one" else "blue").save(tmp_path / name / "a.png")
    return tmp_path


def options_of(**values: object) -> DatasetOptions:
    return DatasetOptions(**{"dataset_config": "data.toml", "train_batch_size": 2, **values})


def read(root: Path, text: str, options: DatasetOptions | None = None, name: str = "data.toml") -> Subsets:
    (root / name).write_text(text.replace("{root}", root.as_posix()), encoding="utf-8")
    return read_config(root / name, options or options_of())


def refusal(root: Path, text: str, options: DatasetOptions | None = None, name: str = "data.toml") -> str:
    with pytest.raises(OptionError) as caught:
        read(root, text, options, name)
    return str(caught.value)


def test_each_key_falls_through_to_the_next_level(root: Path) -> None:
    one, reg, two = read(root, GOOD, options_of(caption_prefix="from options,", resolution=(1024, 1024))).items
    assert (one.repeats, one.class_tokens, one.is_reg, reg.is_reg, reg.repeats) == (10, "sks dog", False, True, 1)
    assert [item.options.keep_tokens for item in (one, reg, two)] == [0, 2, 1]
    assert [item.options.shuffle_caption for item in (one, reg, two)] == [True, True, False]
    assert [item.options.resolution for item in (one, reg, two)] == [(768, 768), (768, 768), (512, 640)]
    assert {item.options.caption_extension for item in (one, reg, two)} == {".tags"}
    assert {item.options.caption_prefix for item in (one, reg, two)} == {"from options,"}
    assert two.options.flip_aug and not one.options.flip_aug


def test_zero_and_false_do_not_fall_through(root: Path) -> None:
    text = f"[general]\nkeep_tokens = 3\nflip_aug = true\n{ONE}keep_tokens = 0\nflip_aug = false"
    (subset,) = read(root, text).items
    assert subset.options.keep_tokens == 0 and subset.options.flip_aug is False


def test_json_of_the_same_structure_is_accepted(root: Path) -> None:
    data = {"general": {"flip_aug": True}, "datasets": [{"subsets": [{"image_dir": str(root / "one"), "dataset_repeats": 3}]}]}
    (subset,) = read(root, json.dumps(data), name="data.json").items
    assert subset.repeats == 3 and subset.options.flip_aug


def test_a_dataset_file_trains_as_it_says(root: Path) -> None:
    (root / "data.toml").write_text(GOOD.replace("{root}", root.as_posix()))
    options = options_of(dataset_config=str(root / "data.toml"))
    plan = make_plan(read_dataset(options, root / "cache"), options, seed=1, grid=8)
    assert plan.samples_per_epoch == 10 + 11 + 1
    assert {plan.images[index].caption for index in plan.trained_images()} == {"sks dog", ""}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[general\n", ["data.toml is not valid TOML", "line 1"]),
        ("", ["has no [[datasets]]"]),
        ("[[datasets]]\nresolution = 512", ["[[datasets]] number 1", "has no [[datasets.subsets]]"]),
        ("[[datasets]]\n[[datasets.subsets]]\nkeep_tokens = 1", ["subset 1", "has no image_dir"]),
        ('[[datasets]]\n[[datasets.subsets]]\nimage_dir = "{root}/none"', ["the folder", "none is not there", "(line 3)"]),
        ('[[datasets]]\n[[datasets.subsets]]\nimage_dir = 5', ["image_dir (line 3): 5 is not a folder name"]),
        (ONE + 'shufle_caption = true', ["shufle_caption (line 4)", "did you mean shuffle_caption?"]),
        (ONE + 'keep_tokens = "two"', ["keep_tokens (line 4)", "'two' is not allowed"]),
        (ONE + 'num_repeats = 0', ["num_repeats (line 4)", "0 is not allowed"]),
        (ONE + 'resolution = 512', ["resolution (line 4)", "belongs into [[datasets]]"]),
        ('[general]\nimage_dir = "x"\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = "{root}/one"', ["belongs into [[datasets.subsets]]"]),
        (ONE.replace("]\n", "]\nbatch_size = 5\n", 1), ["batch_size (line 2)", "train_batch_size = 2", "set train_batch_size = 5"]),
        (ONE.replace("]\n", "]\nnetwork_multiplier = 0.5\n", 1), ["network_multiplier (line 2)", "is not supported"]),
        (ONE + 'face_crop_aug_range = [1, 2]', ["face_crop_aug_range", "not supported"]),
        (ONE + 'is_reg = "yes"', ["is_reg (line 4)", "true or false"]),
        (ONE + 'is_reg = true', ["only regularisation subsets"]),
        (ONE + 'metadata_file = "none.json"', ["metadata_file (line 4)", "none.json is not there"]),
        (ONE + 'color_aug = true', ["color_aug changes the images", "cache_latents"]),
        ('[datasets]\nresolution = 512', ["must be a list of tables", "[[datasets]]"]),
        ('[[datasets]]\n[datasets.subsets]\nimage_dir = "x"', ["[[datasets.subsets]] with two brackets"]),
        ('[[dataset]]\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = "{root}/one"', ["dataset", "did you mean datasets?"]),
        ("general = 5", ["[general]", "must be a table"]),
    ],
)  # fmt: skip
def test_a_wrong_file_gives_sentences_with_its_place(root: Path, text: str, wanted: list[str]) -> None:
    told = refusal(root, text)
    assert all(part in told for part in wanted), told
    assert "data.toml" in told


def test_all_problems_are_told_at_once(root: Path) -> None:
    text = '[general]\nfoo = 1\n[[datasets]]\nmin_bucket_reso = "a"\n[[datasets.subsets]]\nimage_dir = "nowhere"\nkeep_tokens = -1'
    told = refusal(root, text)
    assert all(part in told for part in ("foo", "nowhere", "min_bucket_reso", "keep_tokens"))


def test_what_is_not_needed_is_told_and_not_refused(root: Path) -> None:
    found = read(root, ONE + "cache_info = true")
    assert len(found.items) == 1 and "cache_info (line 4) is not needed" in found.warnings[0]


def test_subsets_with_and_without_metadata_are_not_mixed_in_one_dataset(root: Path) -> None:
    (root / "m.json").write_text("{}")
    text = ONE + '[[datasets.subsets]]\nimage_dir = "{root}/two"\nmetadata_file = "{root}/m.json"'
    assert "mixes subsets with and without metadata_file" in refusal(root, text)


def test_masked_loss_may_have_its_masks_beside_the_images(root: Path) -> None:
    """Whether there are any is seen where the images are read, see scan."""
    text = ONE
    assert not read(root, text, options_of(masked_loss=True)).items[0].options.alpha_mask
    assert read(root, text + "alpha_mask = true", options_of(masked_loss=True)).items[0].options.alpha_mask
    asleep = read(root, text + "alpha_mask = true")
    assert not asleep.items[0].options.alpha_mask and "alpha_mask: no effect until masked_loss is on" in asleep.warnings[0]


def test_a_missing_file_and_a_binary_file_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is not there"):
        read_config(tmp_path / "none.toml", options_of())
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="cannot be read as UTF-8"):
        read_config(tmp_path / "b.toml", options_of())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
keys = st.sampled_from(
    ["image_dir", "keep_tokens", "resolution", "is_reg", "subsets", "batch_size", "caption_prefix", "num_repeats", "metadata_file", "zzz"]
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(keys, values), st.dictionaries(keys, values), values | st.lists(st.dictionaries(keys, values), max_size=3))
def test_no_wrong_value_gives_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, general: object, dataset: dict[str, object], subsets: object
) -> None:
    path = tmp_path_factory.mktemp("config") / "d.json"
    path.write_text(json.dumps({"general": general, "datasets": [{**dataset, "subsets": subsets}]}))
    with pytest.raises(OptionError):
        read_config(path, options_of())


# Folders without a dataset file.


def found(options: DatasetOptions, tmp_path: Path) -> tuple[tuple[Subset, ...], str]:
    subsets = subsets_of(options, tmp_path / "cache")
    return subsets.items, "\n".join(subsets.warnings)


def test_kohya_folders_give_repeats_and_class_tokens(root: Path, tmp_path: Path) -> None:
    train = tmp_path / "train"
    for name in ("10_sks dog", "3_old_style_car", "notes", ".cache"):
        (train / name).mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(train / "notes" / "a.png")
    Image.new("RGB", (8, 8)).save(train / "lost.png")
    items, warnings = found(DatasetOptions(train_data_dir=str(train), reg_data_dir=str(root / "reg")), tmp_path)
    assert [(item.repeats, item.class_tokens, item.is_reg) for item in items] == [
        (10, "sks dog", False),
        (3, "old_style_car", False),
        (1, "", True),
    ]
    assert "notes" in warnings and "directly in it are not used" in warnings


def test_a_plain_folder_takes_dataset_repeats(root: Path, tmp_path: Path) -> None:
    (item,), _ = found(DatasetOptions(train_data_dir=str(root / "one"), dataset_repeats=7), tmp_path)
    assert item.repeats == 7 and item.recursive and item.class_tokens == ""


def test_missing_folders_are_told_together(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        found(DatasetOptions(train_data_dir="no/train", reg_data_dir="no/reg", in_json="no.json"), tmp_path)
    assert [problem.option for problem in caught.value.problems] == ["train_data_dir", "reg_data_dir", "in_json"]


def test_a_date_before_the_underscore_is_not_a_number_of_repeats(tmp_path: Path) -> None:
    (tmp_path / "train" / "20240115_holiday").mkdir(parents=True)
    with pytest.raises(OptionError, match="20240115 times cannot be meant"):
        found(DatasetOptions(train_data_dir=str(tmp_path / "train")), tmp_path)


def test_a_toy_data_set_is_drawn_into_the_cache_folder(tmp_path: Path) -> None:
    items, _ = found(DatasetOptions(train_data_dir="toy:star"), tmp_path)
    assert [item.is_reg for item in items] == [False, True]
    assert all(item.folder.is_relative_to(tmp_path / "cache" / "toy" / "star") for item in items)
    with pytest.raises(OptionError, match="unknown"):
        found(DatasetOptions(train_data_dir="toy:starz"), tmp_path)


def styles_in(root: Path, **images: str) -> LgtDatasetOptions:
    """Options of a data set of styles, with one image for each style named."""
    for style, name in images.items():
        path = root / style / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), "red").save(path)
    return LgtDatasetOptions(train_data_dir=str(root))


def test_every_folder_is_a_style_of_its_name_whatever_texts_lie_there(tmp_path: Path) -> None:
    options = styles_in(tmp_path / "styles", monet="a.png", night="deep/inside/b.png")
    Image.new("RGB", (64, 64), "blue").save(tmp_path / "styles" / "monet" / "c.png")
    (tmp_path / "styles" / "monet" / "a.txt").write_text("a caption")
    (tmp_path / "styles" / "monet" / "metadata.jsonl").write_text('{"file_name": "c.png", "text": "another"}\n')
    (tmp_path / "styles" / ".hidden").mkdir()
    found = subsets_of(options, tmp_path / "cache").items
    assert [(subset.class_tokens, subset.is_style, subset.is_reg) for subset in found] == [("monet", True, False), ("night", True, False)]
    dataset = read_dataset(options, tmp_path / "cache")
    assert sorted((image.name, image.caption) for image in dataset.images) == [
        ("a.png", "monet"),
        ("c.png", "monet"),
        ("deep/inside/b.png", "night"),
    ]


def test_everything_that_is_wrong_with_folders_of_styles_is_told_at_once(tmp_path: Path) -> None:
    root = tmp_path / "styles"
    options = styles_in(root, monet="a.png")
    (root / "empty one").mkdir()
    (root / "and this").mkdir()
    styles_in(root, **{"a=b": "a.png"})
    Image.new("RGB", (8, 8)).save(root / "loose.png")
    with pytest.raises(OptionError) as raised:
        subsets_of(options, tmp_path / "cache")
    told = [problem.message for problem in raised.value.problems]
    assert [problem.option for problem in raised.value.problems] == ["train_data_dir"] * 3
    assert any("directly in it" in text for text in told)
    assert any("and this, empty one" in text for text in told)
    assert any("'a=b'" in text for text in told)


def test_a_folder_without_styles_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no sub-folders; make one for each style"):
        subsets_of(LgtDatasetOptions(train_data_dir=str(tmp_path)), tmp_path / "cache")


def test_built_in_styles_are_written_with_their_test_images(tmp_path: Path) -> None:
    found = subsets_of(LgtDatasetOptions(train_data_dir="toy:styles"), tmp_path).items
    tested = evaluated_folders("toy:styles", tmp_path)
    assert [subset.class_tokens for subset in found] == list(tested) and len(found) >= 3
    assert all(images_below(folder) for folder in tested.values())
    with pytest.raises(OptionError, match="toy:star has no test images"):
        evaluated_folders("toy:star", tmp_path)
