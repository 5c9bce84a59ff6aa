"""Check data set: what the page is told about edit pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from kohya_like.dataset_view import View, look_at
from sd_scripts.families import RUNS
from sd_scripts.families.qwen_edit.options import QwenImageNetwork
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError


def options_of(root: Path, version: str, **dataset: object) -> QwenImageNetwork:
    return QwenImageNetwork(
        model={"pretrained_model_name_or_path": "toy", "model_version": version, "control_resolution": 256},
        dataset={"train_data_dir": str(root / "data"), "resolution": 512, "cache_dir": str(root / "cache"), **dataset},
        output={"output_dir": str(root / "out")},
    )


def seen(root: Path, version: str) -> View:
    (*_, view) = look_at(options_of(root, version), root / "out")
    assert isinstance(view, View)
    return view


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for index, size in enumerate([(512, 512), (512, 512), (1000, 400)]):
        for folder, side in (("target", (512, 512)), ("control", size)):
            path = tmp_path / "data" / folder / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", side, (index, 2, 3)).save(path)
        (tmp_path / "data/target" / f"{index}.txt").write_text(f"change {index}")
    Image.new("RGB", (512, 512)).save(tmp_path / "data/control/0_control_1.png")
    return tmp_path


@pytest.mark.parametrize("version", ["auto", "edit-2509"])
def test_pairs_are_shown_with_the_sizes_of_their_control_images(root: Path, version: str) -> None:
    page = seen(root, version).as_page()
    assert dict(page["facts"])["Edit pairs"] == "2 with 1 control image, 1 with 2 control images"
    buckets = page["tables"][0]
    assert buckets["head"] == ["Size", "Control images", "Images", "Samples an epoch"]
    assert sorted(row[:3] for row in buckets["rows"]) == [
        ["512 x 512", "416 x 160", "1"],
        ["512 x 512", "512 x 512", "1"],
        ["512 x 512", "512 x 512, 512 x 512", "1"],
    ]


def test_pairs_that_do_not_fit_the_model_are_named(root: Path) -> None:
    page = seen(root, "edit").as_page()
    assert any("has 2 control images, edit takes at most 1" in note for note in page["notes"])


def test_a_model_that_makes_images_from_text_sees_the_targets_only(root: Path) -> None:
    page = seen(root, "image").as_page()
    assert dict(page["facts"])["Images"].startswith("3 to train on") and "Edit pairs" not in dict(page["facts"])
    assert page["tables"][0]["head"] == ["Size", "Images", "Samples an epoch"]
    assert any("does not take" in note for note in page["notes"])


def test_a_folder_without_pairs_is_answered_with_the_layouts(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    Image.new("RGB", (512, 512)).save(tmp_path / "data/a.png")
    with pytest.raises(OptionError, match=r"data/control/a\.png"):
        seen(tmp_path, "edit-2511")


def test_the_built_in_pairs_can_be_looked_at(tmp_path: Path) -> None:
    options = options_of(tmp_path, "auto", train_data_dir="toy:edit_border", resolution=64, min_bucket_reso=64)
    (*_, view) = look_at(options, tmp_path / "out")
    assert isinstance(view, View) and not view.bad
    assert view.plan.images and all(len(image.controls) >= 1 and image.caption for image in view.plan.images)


def test_a_data_set_of_styles_is_shown_with_the_number_of_images_of_each(tmp_path: Path) -> None:
    for style, count in (("monet", 3), ("photo", 5)):
        for index in range(count):
            path = tmp_path / "data" / style / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (128, 128), (index, 2, 3)).save(path)
    options = flat.build(
        RUNS["lgt", "scratch"],
        {"train_data_dir": str(tmp_path / "data"), "resolution": 128, "train_batch_size": 2, "output_dir": str(tmp_path / "out")},
    )
    (*_, view) = look_at(options, tmp_path / "out")
    assert isinstance(view, View)
    page = view.as_page()
    facts = dict(page["facts"])
    assert (facts["Images"], facts["Styles"]) == ("8 to train on", "2") and "Captions" not in facts
    styles, _buckets, samples = page["tables"]
    assert styles["rows"] == [["monet", "3"], ["photo", "5"]]
    assert samples["head"] == ["Image", "Style"] and {row[1] for row in samples["rows"]} <= {"monet", "photo", ""}


def test_epochs_are_counted_by_samples_not_by_what_fits_into_the_first(tmp_path: Path) -> None:
    """Buckets give whole batches only: 20 images in 8 buckets of which 6 have an odd number give 7 batches of 2 in the first epoch."""
    sizes = [(256 + 64 * column, 256) for column in range(8)]
    for number in range(20):
        path = tmp_path / "data" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", sizes[min(number, 7) if number < 8 else 7 if number < 15 else 6]).save(path)
    given = {"pretrained_model_name_or_path": "toy", "train_data_dir": str(tmp_path / "data"), "cache_dir": str(tmp_path / "cache")}
    options = flat.build(RUNS["sdxl", "network"], {**given, "resolution": 1024, "train_batch_size": 2, "max_train_steps": 2000})
    (*_, view) = look_at(options, tmp_path / "out")
    assert isinstance(view, View)
    assert len(view.plan.table()) == 8 and view.plan.steps_of_epochs(1) == 7 and view.plan.steps_of_epochs(200) == 2000
    facts = dict(view.as_page()["facts"])
    assert facts["The run"] == "2000 steps, 200 epochs" and facts["One epoch"] == "20 samples, 10 steps of 2"
