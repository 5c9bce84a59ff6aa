"""Edit pairs on disk: every layout gives the same pairs, and everything that is wrong with one is said by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sd_scripts.dataset import scan as scanning
from sd_scripts.dataset.config import subsets_of
from sd_scripts.dataset.metadata import read_metadata
from sd_scripts.dataset.plan import make_plan
from sd_scripts.dataset.records import Dataset, ImageInfo
from sd_scripts.dataset.scan import identity_of, read_dataset, scan
from sd_scripts.families.qwen_edit.options import QwenImageDatasetOptions, QwenImageModelOptions
from sd_scripts.families.sd.options import SdDatasetOptions
from sd_scripts.families.sdxl.options import SdxlModelOptions
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.model import Controls

MODEL = "edit-2509"


def image(path: Path, size: tuple[int, int] = (48, 32), caption: str | None = None) -> Path:
    """An image whose content follows from its path, so that no two are equal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = sum(map(ord, str(path)))
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def options_of(root: Path, **values: object) -> QwenImageDatasetOptions:
    given = {} if "dataset_config" in values else {"train_data_dir": str(root / "data")}
    return QwenImageDatasetOptions(**{**given, "resolution": (64, 64), "min_bucket_reso": 32, **values})


def read(root: Path, controls: tuple[int, int] = (1, 3), **values: object) -> Dataset:
    return read_dataset(options_of(root, **values), root / "cache", controls=Controls(*controls, MODEL))


def refusal(root: Path, controls: tuple[int, int] = (1, 3), **values: object) -> str:
    with pytest.raises(OptionError) as caught:
        read(root, controls, **values)
    return str(caught.value)


def pairs(dataset: Dataset) -> dict[str, tuple[str, list[str]]]:
    """Name of the target -> its instruction and the names of its control images with their folder."""
    return {
        item.name: (item.caption, [f"{Path(control.path).parent.name}/{Path(control.path).name}" for control in item.controls])
        for item in dataset.images
    }


def two_pairs(root: Path, target: str = "target", control: str = "control") -> Path:
    for name in ("a", "b"):
        image(root / target / f"{name}.png", caption=f"change {name}")
        image(root / control / f"{name}.jpg")
    return root


@pytest.mark.parametrize("target", ["target", "targets", "target_images", "images", "training_images"])
@pytest.mark.parametrize("control", ["control", "controls", "control_images", "condition_images"])
def test_folders_of_pairs_are_known_by_their_names(tmp_path: Path, target: str, control: str) -> None:
    two_pairs(tmp_path / "data", target, control)
    assert pairs(read(tmp_path)) == {"a.png": ("change a", [f"{control}/a.jpg"]), "b.png": ("change b", [f"{control}/b.jpg"])}


def test_a_control_image_has_its_size_and_its_hash(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6
    target = image(tmp_path / "data/target/a.png", (40, 20), "turn it")
    control = tmp_path / "data/control/a.jpg"
    control.parent.mkdir()
    Image.new("RGB", (60, 30), "red").save(control, exif=exif)
    (item,) = read(tmp_path).images
    (seen,) = item.controls
    assert (seen.width, seen.height) == (30, 60)
    assert (seen.num_bytes, seen.mtime_ns) == (control.stat().st_size, control.stat().st_mtime_ns)
    assert (seen.identity, item.identity) == (identity_of(control), identity_of(target))


def test_numbered_folders_are_further_control_images_and_samples_may_have_fewer(tmp_path: Path) -> None:
    root = two_pairs(tmp_path / "data")
    image(root / "target/c.png", caption="change c")
    for name in ("control/c.png", "control_2/a.png", "control_1/a.png", "control_1/b.webp"):
        image(root / name)
    dataset = read(tmp_path)
    assert {name: controls for name, (_, controls) in pairs(dataset).items()} == {
        "a.png": ["control/a.jpg", "control_1/a.png", "control_2/a.png"],
        "b.png": ["control/b.jpg", "control_1/b.webp"],
        "c.png": ["control/c.png"],
    }
    told = "\n".join(dataset.warnings)
    assert "1 image in" in told and "no partner in" in told and "c.*" in told and "control_1" in told
    assert "2 images in" in told and "b.*, c.*" in told and "control_2" in told


def test_numbered_folders_alone_are_enough(tmp_path: Path) -> None:
    image(tmp_path / "data/target/a.png", caption="x")
    image(tmp_path / "data/control_1/a.png")
    image(tmp_path / "data/control_0/a.png")
    assert pairs(read(tmp_path))["a.png"][1] == ["control_0/a.png", "control_1/a.png"]


def test_extra_control_images_lie_beside_the_first(tmp_path: Path) -> None:
    root = two_pairs(tmp_path / "data")
    for name in ("a_control_2.png", "a_control_1.png", "b_control_1.jpg"):
        image(root / "control" / name)
    found = pairs(read(tmp_path))
    assert found["a.png"][1] == ["control/a.jpg", "control/a_control_1.png", "control/a_control_2.png"]
    assert found["b.png"][1] == ["control/b.jpg", "control/b_control_1.jpg"]


def test_numbered_files_in_the_control_folder_are_taken_where_none_has_the_plain_name(tmp_path: Path) -> None:
    """musubi-tuner's names: x_0, x_1 or x_0000, x_0001. A target called x_0 keeps its own."""
    for name in ("x", "y", "y_0"):
        image(tmp_path / f"data/target/{name}.png", caption=name)
    for name in ("x_0001", "x_0000", "y", "y_0"):
        image(tmp_path / f"data/control/{name}.png")
    found = pairs(read(tmp_path))
    assert [found[name][1] for name in ("x.png", "y.png", "y_0.png")] == [
        ["control/x_0000.png", "control/x_0001.png"],
        ["control/y.png"],
        ["control/y_0.png"],
    ]


def test_control_images_beside_their_target_are_no_targets(tmp_path: Path) -> None:
    image(tmp_path / "data/a.png", caption="change a")
    image(tmp_path / "data/a_control_1.png")
    image(tmp_path / "data/a_control_2.jpg")
    image(tmp_path / "data/sub/b.png", caption="change b")
    image(tmp_path / "data/sub/b_control.png")
    assert {name: controls for name, (_, controls) in pairs(read(tmp_path)).items()} == {
        "a.png": ["data/a_control_1.png", "data/a_control_2.jpg"],
        "sub/b.png": ["sub/b_control.png"],
    }


def test_an_image_with_a_caption_of_its_own_is_a_target_whatever_it_is_called(tmp_path: Path) -> None:
    for name in ("ship", "ship_control_1"):
        image(tmp_path / f"data/{name}.png", caption=name)
    dataset = read_dataset(SdDatasetOptions(train_data_dir=str(tmp_path / "data")), tmp_path / "cache")
    assert [item.name for item in dataset.images] == ["ship.png", "ship_control_1.png"] and dataset.warnings == ()


def test_folders_with_repeats_hold_pairs_of_their_own(tmp_path: Path) -> None:
    two_pairs(tmp_path / "data/3_red border")
    image(tmp_path / "data/2_other/target/c.png")
    image(tmp_path / "data/2_other/control/c.png")
    dataset = read(tmp_path)
    assert [(item.name, item.caption, len(item.controls)) for item in dataset.images] == [
        ("c.png", "other", 1),
        ("a.png", "change a", 1),
        ("b.png", "change b", 1),
    ]
    assert [subset.repeats for subset in dataset.subsets] == [2, 3] and dataset.warnings == ()


def test_folders_with_repeats_may_lie_inside_target_and_control(tmp_path: Path) -> None:
    for name in ("3_border/a.png", "1_frame/a.png"):
        image(tmp_path / "data/target" / name)
        image(tmp_path / "data/control" / name)
    dataset = read(tmp_path)
    assert [(item.caption, os.path.relpath(item.controls[0].path, tmp_path / "data/control")) for item in dataset.images] == [
        ("frame", "1_frame/a.png"),
        ("border", "3_border/a.png"),
    ]


def test_control_folders_may_be_named_by_the_options(tmp_path: Path) -> None:
    image(tmp_path / "data/a.png", caption="change a")
    image(tmp_path / "data/deep/b.png", caption="change b")
    # One of them lies inside train_data_dir; what is in it is no target.
    for name in ("data/before/a.jpg", "data/before/deep/b.png", "second/a.png", "second/b.png"):
        image(tmp_path / name)
    dataset = read(tmp_path, control_data_dir=(str(tmp_path / "data/before"), str(tmp_path / "second")))
    assert pairs(dataset) == {
        "a.png": ("change a", ["before/a.jpg", "second/a.png"]),
        "deep/b.png": ("change b", ["deep/b.png", "second/b.png"]),
    }


def test_control_folders_of_the_options_serve_folders_with_repeats(tmp_path: Path) -> None:
    image(tmp_path / "data/3_one/a.png")
    image(tmp_path / "data/1_two/a.png")
    image(tmp_path / "data/1_two/c.png")
    for name in ("before/3_one/a.png", "before/1_two/a.png", "before/c.png"):
        image(tmp_path / name)
    dataset = read(tmp_path, control_data_dir=(str(tmp_path / "before"),))
    assert [Path(item.controls[0].path).parent.name for item in dataset.images] == ["1_two", "before", "3_one"]


def test_the_instruction_may_lie_beside_the_control_image(tmp_path: Path) -> None:
    root = two_pairs(tmp_path / "data")
    (root / "target/a.txt").unlink()
    (root / "control/a.txt").write_text("from the control folder")
    (root / "control/b.txt").write_text("not this one")
    assert {name: text for name, (text, _) in pairs(read(tmp_path)).items()} == {"a.png": "from the control folder", "b.png": "change b"}


def test_masks_lie_in_a_folder_beside_target_or_beside_the_image(tmp_path: Path) -> None:
    root = two_pairs(tmp_path / "data")
    image(root / "target/c.png", caption="c")
    image(root / "control/c.png")
    image(root / "mask/a.png")
    image(root / "target/b_mask.png")
    dataset = read(tmp_path, masked_loss=True)
    assert [(item.name, Path(item.mask).name, bool(item.mask_identity)) for item in dataset.images] == [
        ("a.png", "a.png", True),
        ("b.png", "b_mask.png", True),
        ("c.png", "", False),
    ]
    assert any("1 image in" in text and "have no mask" in text for text in dataset.warnings)
    assert [item.mask for item in read(tmp_path).images] == ["", "", ""]


def write_lines(path: Path, rows: list[dict[str, object]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_json_lines_name_targets_and_control_images(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("t/a.png", "t/b.png", "t/c.png", "t/d.png", "s/1.png", "s/2.png", "s/3.png", "m/a.png", "unused.png"):
        image(data / name)
    rows: list[dict[str, object]] = [
        {"file_name": "t/a.png", "control_path": "s/1.png", "caption": "A", "mask": "m/a.png"},
        {"image_path": str(data / "t/b.png"), "control_path_1": "s/2.png", "control_path_0": str(data / "s/1.png"), "text": "B"},
        {"target": "t/c.png", "controls": ["s/3.png", "s/2.png", "s/1.png"], "prompt": "C"},
        {"file_name": "t/d.png", "control_images": ["s/1.png"], "caption": "D"},
    ]
    listing = write_lines(tmp_path / "pairs.jsonl", rows)
    dataset = read(tmp_path, in_json=listing, masked_loss=True)
    assert pairs(dataset) == {
        "t/a.png": ("A", ["s/1.png"]),
        "t/b.png": ("B", ["s/1.png", "s/2.png"]),
        "t/c.png": ("C", ["s/3.png", "s/2.png", "s/1.png"]),
        "t/d.png": ("D", ["s/1.png"]),
    }
    assert Path(dataset.images[0].mask) == data / "m/a.png"


def test_a_metadata_file_in_the_folder_itself_lists_pairs(tmp_path: Path) -> None:
    for name in ("one.png", "two.png"):
        image(tmp_path / "data" / name)
    write_lines(tmp_path / "data/metadata.jsonl", [{"file_name": "two.png", "control_path": "one.png", "text": "after"}])
    assert pairs(read(tmp_path)) == {"two.png": ("after", ["data/one.png"])}
    (tmp_path / "data/metadata.jsonl").unlink()
    (tmp_path / "data/metadata.csv").write_text("path_target,path_control,prompt\ntwo.png,one.png,in a table\n")
    assert pairs(read(tmp_path)) == {"two.png": ("in a table", ["data/one.png"])}


def test_listed_files_may_lie_beside_the_list(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    image(tmp_path / "lists/after/a.png")
    image(tmp_path / "lists/before/a.png")
    listing = write_lines(tmp_path / "lists/pairs.jsonl", [{"image_path": "after/a.png", "control_path": "before/a.png", "caption": "x"}])
    assert pairs(read(tmp_path, in_json=listing)) == {"after/a.png": ("x", ["before/a.png"])}


def test_a_list_without_control_images_takes_them_from_the_folders(tmp_path: Path) -> None:
    two_pairs(tmp_path / "data")
    listing = write_lines(tmp_path / "list.jsonl", [{"file_name": "target/a.png", "caption": "A"}, {"file_name": "b.png", "caption": "B"}])
    assert pairs(read(tmp_path, in_json=listing)) == {"b.png": ("B", ["control/b.jpg"]), "target/a.png": ("A", ["control/a.jpg"])}


def test_a_table_names_targets_control_images_and_masks(tmp_path: Path) -> None:
    for name in ("data/t/a.png", "data/t/b.png", "tables/s/a.png", "tables/s/b.png", "tables/s/b2.png", "tables/m/b.png"):
        image(tmp_path / name)
    table = tmp_path / "tables/pairs.csv"
    table.write_text(
        "prompt,path_control_2,path_target,path_control_1,path_mask\n"
        '"make it red, please",,../data/t/a.png,s/a.png,\n'
        f'say ""no"",s/b2.png,{tmp_path / "data/t/b.png"},s/b.png,m/b.png\n',
        encoding="utf-8-sig",
    )
    dataset = read(tmp_path, in_json=str(table), masked_loss=True)
    found = pairs(dataset)
    assert found["t/a.png"] == ("make it red, please", ["s/a.png"])
    assert found["t/b.png"][1] == ["s/b.png", "s/b2.png"]
    assert [Path(item.mask).parent.name for item in dataset.images] == ["", "m"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("path_control,prompt\na.png,x\n", ["no column path_target", "path_control, prompt"]),
        ("path_target;path_control;prompt\na;b;c\n", ["no column path_target", "no column prompt", "separated by commas"]),
        ("", ["no column path_target", "its first line has nothing"]),
        ("path_target,path_control,prompt\n,b.png,x\n", ["pairs.csv, line 2", "wanted are file_name"]),
        ("path_target,path_control,prompt\na.png,b.png,red, blue\n", ["line 2 has more cells", "in quotes"]),
        ('path_target,path_control,prompt\na.png,b.png,"red\n', ["pairs.csv, line", "not valid CSV"]),
    ],
)
def test_a_broken_table_is_named_with_its_place(tmp_path: Path, text: str, wanted: list[str]) -> None:
    image(tmp_path / "data/a.png")
    (tmp_path / "pairs.csv").write_text(text)
    told = refusal(tmp_path, in_json=str(tmp_path / "pairs.csv"))
    assert all(part in told for part in wanted), told


def test_a_line_whose_control_path_is_no_text_is_named(tmp_path: Path) -> None:
    image(tmp_path / "data/a.png")
    rows: list[dict[str, object]] = [{"file_name": "a.png", "control_path": 5, "caption": "x"}, {"file_name": "a.png", "controls": [""]}]
    told = refusal(tmp_path, in_json=write_lines(tmp_path / "l.jsonl", rows))
    assert "line 1" in told and "line 2" in told and "control_path" in told


TOML = """
[[datasets]]
[[datasets.subsets]]
image_dir = "{root}/after"
{key} = {value}
"""


@pytest.mark.parametrize("key", ["control_data_dir", "control_directory", "control_dir"])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_dataset_file_names_control_folders(tmp_path: Path, key: str, as_list: bool) -> None:
    two_pairs(tmp_path, "after", "before")
    value = json.dumps([str(tmp_path / "before")] if as_list else str(tmp_path / "before"))
    (tmp_path / "data.toml").write_text(TOML.format(root=tmp_path, key=key, value=value))
    assert pairs(read(tmp_path, dataset_config=str(tmp_path / "data.toml")))["a.png"] == ("change a", ["before/a.jpg"])


def test_a_dataset_file_of_musubi_tuner_is_read(tmp_path: Path) -> None:
    two_pairs(tmp_path, "after", "before")
    image(tmp_path / "more/x.png")
    image(tmp_path / "more/y.png")
    write_lines(tmp_path / "more/list.jsonl", [{"image_path": "y.png", "control_path_0": "x.png", "caption": "Y"}])
    (tmp_path / "data.toml").write_text(
        f"""
        [general]
        caption_extension = ".txt"
        batch_size = 1
        [[datasets]]
        image_directory = "{tmp_path}/after"
        control_directory = "{tmp_path}/before"
        cache_directory = "{tmp_path}/somewhere"
        num_repeats = 3
        [[datasets]]
        image_jsonl_file = "{tmp_path}/more/list.jsonl"
        """
    )
    dataset = read(tmp_path, dataset_config=str(tmp_path / "data.toml"))
    assert pairs(dataset) == {
        "a.png": ("change a", ["before/a.jpg"]),
        "b.png": ("change b", ["before/b.jpg"]),
        "y.png": ("Y", ["more/x.png"]),
    }
    assert [subset.repeats for subset in dataset.subsets] == [3, 1]
    assert any("cache_directory" in text and "is not needed" in text for text in dataset.warnings)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('control_dir = "{root}/none"', ["the folder", "none is not there"]),
        ("control_dir = 5", ["control_data_dir", "5 is not allowed"]),
        ("no_resize_control = true", ["no_resize_control (line 5)", "is not supported"]),
        ("control_resolution = 1024", ["control_resolution (line 5)", "options of the run"]),
        ("control_dirs = true", ["did you mean control_dir"]),
    ],
)
def test_a_wrong_key_about_control_images_is_answered(tmp_path: Path, text: str, wanted: list[str]) -> None:
    two_pairs(tmp_path, "after", "before")
    (tmp_path / "data.toml").write_text(
        f'[[datasets]]\n\n[[datasets.subsets]]\nimage_dir = "{tmp_path}/after"\n{text}\n'.replace("{root}", str(tmp_path))
    )
    told = refusal(tmp_path, dataset_config=str(tmp_path / "data.toml"))
    assert all(part in told for part in wanted), told


def test_a_dataset_file_with_control_folders_is_refused_for_models_that_do_not_edit(tmp_path: Path) -> None:
    two_pairs(tmp_path, "after", "before")
    (tmp_path / "data.toml").write_text(TOML.format(root=tmp_path, key="control_dir", value=f'"{tmp_path}/before"'))
    with pytest.raises(OptionError, match=r"control_dir.*names control images, which this model does not take"):
        read_dataset(DatasetOptions(dataset_config=str(tmp_path / "data.toml")), tmp_path / "cache")


def test_masks_of_folders_with_repeats_are_found_under_their_names(tmp_path: Path) -> None:
    for folder in ("target/3_one", "target/1_two", "control/3_one", "control/1_two", "mask/3_one"):
        image(tmp_path / "data" / folder / "a.png")
    found = {item.caption: Path(item.mask).parent.name for item in read(tmp_path, masked_loss=True).images}
    assert found == {"one": "3_one", "two": ""}


def test_linked_folders_and_odd_names_are_paired(tmp_path: Path) -> None:
    names = ("a.b.png", "größe 1.png", "x (2).PNG", "_control.png", "_mask.png", "c_mask.png")
    for name in names:
        image(tmp_path / "elsewhere/after" / name)
        image(tmp_path / "elsewhere/before" / name)
        image(tmp_path / "data/target" / name)
        image(tmp_path / "data/control" / name)
    (tmp_path / "data/target/linked").symlink_to(tmp_path / "elsewhere/after", target_is_directory=True)
    (tmp_path / "data/control/linked").symlink_to(tmp_path / "elsewhere/before", target_is_directory=True)
    dataset = read(tmp_path)
    assert {item.name for item in dataset.images} == {*names, *(f"linked/{name}" for name in names)}
    root = tmp_path / "data/control"
    assert all(os.path.relpath(item.controls[0].path, root) == item.name and len(item.controls) == 1 for item in dataset.images)
    assert dataset.warnings == () and len({item.controls[0].identity for item in dataset.images}) == 12


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6), lambda inner: st.lists(inner, max_size=3), max_leaves=4
)
keys = st.sampled_from(
    ["file_name", "image_path", "target", "caption", "prompt", "tags", "control_path", "control_path_3", "controls", "mask"]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.dictionaries(keys, json_values, max_size=5) | json_values, max_size=4))
def test_any_list_is_read_or_answered_with_its_lines(tmp_path_factory: pytest.TempPathFactory, rows: list[object]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    try:
        listed = read_metadata(path, ",")
    except OptionError as err:
        assert all("any.jsonl" in problem.message for problem in err.problems)
    else:
        assert all(isinstance(text, str) for entry in listed.values() for text in (entry.caption, entry.mask, *entry.controls))


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet='ab,;"\n\r\t \x00é', max_size=40), st.booleans())
def test_any_table_is_read_or_answered_with_its_place(tmp_path_factory: pytest.TempPathFactory, text: str, headed: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes((("path_target,prompt,path_control\n" if headed else "") + text).encode())
    try:
        read_metadata(path, ",")
    except OptionError as err:
        assert all("any.csv" in problem.message for problem in err.problems)


# What is wrong, by name.


def test_an_entry_without_a_control_image_is_named_with_its_list(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        image(tmp_path / "data" / name)
    rows: list[dict[str, object]] = [{"file_name": "a.png", "caption": "A"}, {"file_name": "b.png", "control_path": "a.png", "text": "B"}]
    listing = write_lines(tmp_path / "l.jsonl", rows)
    assert f"a.png has no control image; looked for were a control_path in {listing}" in refusal(tmp_path, in_json=listing)


def test_every_pair_without_a_usable_control_image_is_named(tmp_path: Path) -> None:
    root = two_pairs(tmp_path / "data")
    for name in ("missing", "text", "cut", "twice", "gap"):
        image(root / f"target/{name}.png", caption=name)
    (root / "control/text.png").write_text("not an image")
    whole = image(root / "control/cut.png", (200, 200)).read_bytes()
    (root / "control/cut.png").write_bytes(whole[: len(whole) // 2])
    image(root / "control/twice.png")
    image(root / "control/twice.jpg")
    image(root / "control_1/gap.png")
    for _ in range(2):  # the second time from the index
        told = refusal(tmp_path)
        lines = {Path(line.split(" has ")[0].strip()).name: line for line in told.splitlines() if " has " in line}
        assert set(lines) == {"missing.png", "text.png", "cut.png", "twice.png", "gap.png"}, told
        assert "5 images cannot be read" in told
        assert "has no control image; looked for were" in lines["missing.png"] and str(root / "control/missing.*") in lines["missing.png"]
        assert str(root / "control/text.png") in lines["text.png"] and "is not an image" in lines["text.png"]
        assert str(root / "control/cut.png") in lines["cut.png"] and "truncated" in lines["cut.png"]
        assert "several control images of one name" in lines["twice.png"] and "twice.jpg" in lines["twice.png"]
        assert f"but none in {root / 'control'}, where gap.* was looked for" in lines["gap.png"]


def test_bad_pairs_are_left_out_when_asked_and_a_listed_control_image_may_be_lost(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "before.png"):
        image(tmp_path / "data" / name)
    rows: list[dict[str, object]] = [
        {"file_name": "a.png", "control_path": "lost.png", "caption": "A"},
        {"file_name": "b.png", "control_path": "before.png", "caption": "B"},
    ]
    dataset = read(tmp_path, in_json=write_lines(tmp_path / "l.jsonl", rows), on_bad_image="skip")
    assert list(pairs(dataset)) == ["b.png"]
    assert f"has a control image {tmp_path / 'data/lost.png'} which is not there" in dataset.bad[0].reason
    assert any("a.png" in text and "left out" in text for text in dataset.warnings)


def test_a_target_without_a_partner_is_named_also_where_the_model_is_not_known_yet(tmp_path: Path) -> None:
    root = two_pairs(tmp_path / "data")
    image(root / "target/c.png", caption="c")
    assert f"has no control image; looked for were {root / 'control/c.*'}" in refusal(tmp_path, (0, 3))


def test_the_options_say_how_many_control_images_a_sample_has() -> None:
    versions = ("auto", "edit", "edit-2509", "edit-2511", "image")
    found = [QwenImageModelOptions(pretrained_model_name_or_path="toy", model_version=version).controls for version in versions]
    assert [(item.fewest, item.most) for item in found] == [(0, 3), (1, 1), (1, 3), (1, 3), (0, 0)]
    assert [item.model for item in found[1:3]] == ["edit", "edit-2509"]
    assert SdxlModelOptions(pretrained_model_name_or_path="toy").controls == Controls()


def test_too_many_control_images_are_counted_against_the_model(tmp_path: Path) -> None:
    root = two_pairs(tmp_path / "data")
    for number in (1, 2, 3):
        image(root / f"control_{number}/a.png")
        image(root / f"control_{number}/b.png")
    assert "has 4 control images, edit-2509 takes at most 3: " in refusal(tmp_path)
    with pytest.raises(OptionError, match="has 4 control images, edit takes at most 1"):
        read_dataset(options_of(tmp_path), tmp_path / "cache", controls=Controls(1, 1, "edit"))


def test_control_images_without_a_target_are_counted_and_named(tmp_path: Path) -> None:
    root = two_pairs(tmp_path / "data")
    for index in range(7):
        image(root / f"control/spare_{index}.png")
    (told,) = read(tmp_path).warnings
    assert f"7 images in {root / 'control'} without a target" in told and "spare_0.png" in told and "and 2 more" in told


def test_a_data_set_without_any_pair_is_refused_with_the_layouts_that_are_understood(tmp_path: Path) -> None:
    image(tmp_path / "data/a.png", caption="x")
    told = refusal(tmp_path)
    wanted = ("edit-2509 edits images", "/data/target/a.png", "/data/control/a.png", "a_control_1.png", "control_data_dir", "path_target")
    assert all(part in told for part in wanted), told
    assert len(read(tmp_path, (0, 3)).images) == 1


def test_a_model_that_does_not_edit_trains_on_the_targets_and_says_so(tmp_path: Path) -> None:
    root = two_pairs(tmp_path / "data")
    (root / "control/a.jpg").write_bytes(b"nobody reads it")
    dataset = read_dataset(SdDatasetOptions(train_data_dir=str(root)), tmp_path / "cache")
    assert pairs(dataset) == {"a.png": ("change a", []), "b.png": ("change b", [])}
    assert any("2 images in" in text and "have control images, which this model does not take" in text for text in dataset.warnings)


@pytest.mark.parametrize(("first", "second"), [("target", "images"), ("control", "condition_images"), ("mask", "masks")])
def test_two_folders_of_one_meaning_are_refused(tmp_path: Path, first: str, second: str) -> None:
    root = two_pairs(tmp_path / "data")
    (root / first).mkdir(exist_ok=True)
    (root / second).mkdir(exist_ok=True)
    assert f"{first} and {second}, which mean the same" in refusal(tmp_path)


def test_wrong_control_folders_in_the_options_are_all_named(tmp_path: Path) -> None:
    image(tmp_path / "data/a.png")
    told = refusal(tmp_path, control_data_dir=tuple(str(tmp_path / name) for name in "abcdefghijk"))
    assert all(f"the folder {tmp_path / name} is not there" in told for name in "abcdefghijk")
    assert "11 folders are named" in told


def test_masked_loss_without_any_mask_is_a_sentence(tmp_path: Path) -> None:
    two_pairs(tmp_path / "data")
    assert "masked_loss needs masks, and none of the images has one" in refusal(tmp_path, masked_loss=True)


# Cost.


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts how often headers are read and files are asked for their times."""
    counts = {"header": 0, "stat": 0}

    def counting(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            counts[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(scanning, "read_size", counting("header", scanning.read_size))
    monkeypatch.setattr(scanning, "stat_of", counting("stat", scanning.stat_of))
    return counts


def test_thousands_of_pairs_are_asked_for_once_each(tmp_path: Path, calls: dict[str, int]) -> None:
    number = 3000
    content = image(tmp_path / "one.png", (8, 8)).read_bytes()
    for folder in ("target", "control"):
        (tmp_path / "data" / folder).mkdir(parents=True)
        for index in range(number):
            (tmp_path / "data" / folder / f"{index}.png").write_bytes(content)
    for index in range(number):
        (tmp_path / "data/target" / f"{index}.txt").write_text("same")
    for headers in (2 * number, 0):
        calls.update(header=0, stat=0)
        found = scan(subsets_of(options_of(tmp_path), tmp_path / "cache"), tmp_path / "cache", controls=Controls(1, 3))
        assert sum(len(item.controls) for item in found.images) == number
        assert calls == {"header": headers, "stat": 3 * number}


def test_one_control_image_may_serve_many_targets(tmp_path: Path) -> None:
    names = [f"{index}.png" for index in range(4)]
    for name in (*names, "before.png"):
        image(tmp_path / "data" / name)
    rows: list[dict[str, object]] = [{"file_name": name, "control_path": "before.png", "caption": name} for name in names]
    dataset = read(tmp_path, in_json=write_lines(tmp_path / "l.jsonl", rows))
    assert len({item.controls for item in dataset.images}) == 1 and len(dataset.images) == 4


def test_a_moved_data_set_of_pairs_keeps_its_hash(tmp_path: Path) -> None:
    two_pairs(tmp_path / "one/data")
    os.rename(tmp_path / "one", tmp_path / "kept")
    first = read(tmp_path / "kept")
    before = make_plan(first, options_of(tmp_path / "kept"), seed=1, grid=16).dataset_hash
    os.rename(tmp_path / "kept", tmp_path / "moved")
    second = read(tmp_path / "moved")
    assert make_plan(second, options_of(tmp_path / "moved"), seed=1, grid=16).dataset_hash == before
    assert all(isinstance(item, ImageInfo) for item in second.images)
