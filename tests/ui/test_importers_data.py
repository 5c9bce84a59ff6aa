"""Files of other programs that describe images or previews alone: put into a form, or read along with the main file that names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toml
from PIL import Image

from kohya_like import importers
from kohya_like.importers import Imported, Opened
from sd_scripts.dataset.config import Subset, subsets_of
from sd_scripts.dataset.scan import scan
from sd_scripts.families import RUNS
from sd_scripts.programs import of_config_file
from sd_scripts.schema import flat
from sd_scripts.schema.command_line import parse_cli
from sd_scripts.schema.errors import OptionError

RUN, EDITS = RUNS["flux", "network"], RUNS["qwen_edit", "network"]
BACKENDS: list[dict[str, Any]] = [
    {
        "id": "pairs",
        "type": "local",
        "instance_data_dir": "a",
        "conditioning_data": ["refs"],
        "repeats": 2,
        "crop": True,
        "crop_aspect": "square",
        "caption_strategy": "textfile",
        "caption_shuffle": {"enable": True, "count": 2, "position_start": 1},
        "resolution": 0.25,
        "resolution_type": "area",
    },
    {"id": "refs", "type": "local", "dataset_type": "conditioning", "conditioning_type": "reference_strict", "instance_data_dir": "refs"},
    {
        "id": "class",
        "type": "local",
        "instance_data_dir": "b",
        "caption_strategy": "instanceprompt",
        "instance_prompt": "a dog",
        "is_regularisation_data": True,
        "probability": 0.5,
    },
    {"id": "off", "type": "local", "disabled": True, "instance_data_dir": "nowhere"},
    {"id": "texts", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache"},
]
PLAIN = [BACKENDS[0] | {"conditioning_data": None}]
DIRECTORIES: dict[str, Any] = {
    "resolutions": [256, 512],
    "enable_ar_bucket": True,
    "min_ar": 0.5,
    "cache_shuffle_num": 3,
    "directory": [{"path": "a", "mask_path": "masks", "num_repeats": 4}, {"path": "b", "resolutions": [[640, 384]], "caption_prefix": "x"}],
}
CONCEPTS: list[dict[str, Any]] = [
    {"path": "a", "include_subdirectories": True, "balancing": 3.0, "image": {"enable_random_flip": True}, "text": {}},
    {"path": "b", "include_subdirectories": False, "text": {"enable_tag_shuffling": True, "keep_tags_count": 2}},
]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of images, in which relative paths start."""
    for place in ("a/inside", "b", "refs", "masks"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("RGB", (64, 64)).save(tmp_path / place / "x.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(name: str, given: Any, run: Any = RUN) -> Imported:
    text = toml.dumps(given) if name.endswith(".toml") else json.dumps(given)
    return importers.read(name, text.encode(), Opened(run))


def subsets(found: Imported, folder: Path) -> tuple[Subset, ...]:
    return subsets_of(flat.build(found.run, {"pretrained_model_name_or_path": "toy", **found.values}).dataset, folder).items


def verdicts(found: Imported) -> dict[str, str]:
    return {row.key: row.verdict for row in found.rows}


def test_data_backends_become_a_data_set_with_control_images_and_say_what_is_not_done(there: Path) -> None:
    found = read("multidatabackend.json", BACKENDS, EDITS)
    pairs, others = subsets(found, there)
    assert (pairs.folder.name, [folder.name for folder in pairs.controls], pairs.repeats, pairs.recursive) == ("a", ["refs"], 3, True)
    kept = pairs.options
    assert (kept.resolution, kept.enable_bucket, kept.shuffle_caption, kept.keep_tokens) == ((512, 512), False, True, 1)
    assert (kept.caption_variants, kept.enable_wildcard) == (3, True)
    assert (others.class_tokens, others.is_reg, others.repeats) == ("a dog", True, 1)
    assert "data_backend_config[2].probability" in found.conflicts[0] and len(found.conflicts) == 1
    assert verdicts(found)["data_backend_config[3].instance_data_dir"] == "not needed" and not found.missing
    plain = read("multidatabackend.json", BACKENDS, RUN)
    assert any("takes no control images" in text for text in plain.conflicts)


def test_images_of_the_hub_are_asked_for() -> None:
    found = read("b.json", [{"id": "x", "type": "huggingface", "dataset_name": "a/b", "caption_strategy": "parquet", "resolution": 512}])
    assert [text.partition(":")[0] for text in found.missing] == ["train_data_dir"] and found.values["resolution"] == (512, 512)
    assert [text.split(" ")[0] for text in found.conflicts] == ["data_backend_config[0].type", "data_backend_config[0].caption_strategy"]


def test_a_data_set_of_diffusion_pipe_keeps_what_each_directory_says(there: Path) -> None:
    found = read("data.toml", DIRECTORIES)
    first, second = subsets(found, there)
    assert (first.folder.name, first.repeats, first.recursive, first.options.conditioning_data_dir) == ("a", 4, False, "masks")
    assert (first.options.resolution, first.options.additional_resolutions) == ((512, 512), (256,)) and found.values["masked_loss"] is True
    assert second.options.resolution == (640, 384) and second.options.additional_resolutions == ()
    assert (second.options.caption_prefix, second.options.shuffle_caption, second.options.caption_variants) == ("x", True, 3)
    assert verdicts(found)["dataset.min_ar"] == "not needed" and not found.conflicts


def test_concepts_and_samples_of_onetrainer_are_read_by_themselves(there: Path) -> None:
    first, second = subsets(read("concepts.json", CONCEPTS), there)
    assert (first.repeats, first.recursive, first.options.flip_aug) == (3, True, True)
    assert (second.recursive, second.options.shuffle_caption, second.options.keep_tokens) == (False, True, 2)
    found = read("samples.json", [{"prompt": "a dog", "width": 512, "height": 768, "seed": 7, "diffusion_steps": 20, "cfg_scale": 4}])
    assert found.values == {"sample_prompts": "a dog --w 512 --h 768 --d 7 --g 4 --s 20"} and found.adds and not found.missing


def test_one_folder_takes_the_place_of_what_a_form_says_of_images(there: Path) -> None:
    found = read("data.toml", {"resolutions": [512], "directory": [{"path": "a"}]})
    assert (
        found.values["train_data_dir"] == "a"
        and found.values["enable_bucket"] is False
        and found.values["dataset_config"] is None
        and found.values["instance_prompt"] == ""
    )


def test_a_data_set_file_of_musubi_tuner_becomes_the_text_of_dataset_config(there: Path) -> None:
    given = {"general": {"batch_size": 2}, "datasets": [{"image_directory": "a", "control_directory": "refs", "cache_directory": "c"}]}
    found = read("data.toml", given, EDITS)
    (subset,) = subsets(found, there)
    assert [folder.name for folder in subset.controls] == ["refs"] and found.values["train_batch_size"] == 2
    assert (subset.options.resolution, subset.options.enable_bucket) == ((960, 544), False)
    with pytest.raises(OptionError, match="open it on the page"):
        importers.read("data.toml", toml.dumps(given).encode())


def test_every_kind_of_run_takes_data_or_says_why_it_cannot() -> None:
    files = {"b.json": BACKENDS, "d.toml": DIRECTORIES, "c.json": CONCEPTS, "k.toml": {"datasets": [{"image_directory": "a"}]}}
    for run in RUNS.values():
        for name, given in files.items():
            try:
                found = read(name, given, run)
            except OptionError as err:
                assert "dataset_config" in str(err) and run.label in str(err)
                continue
            given_here = {option: value for option, value in found.values.items() if value is not None}
            needed = {} if run.method == "scratch" else {"pretrained_model_name_or_path": "toy"}
            flat.build(run, {**needed, **given_here})
            assert "dataset_config" in given_here or any("one folder" in text for text in found.conflicts)


@pytest.mark.parametrize(
    ("name", "main", "data", "given", "key"),
    [
        ("SimpleTuner", {"model_family": "flux", "model_type": "lora"}, "m.json", PLAIN, "data_backend_config"),
        ("diffusion-pipe", {"model": {"type": "flux"}, "adapter": {"rank": 4}}, "d.toml", DIRECTORIES, "dataset"),
        ("OneTrainer", {"model_type": "FLUX_DEV_1", "training_method": "LORA"}, "c.json", CONCEPTS, "concept_file_name"),
    ],
)
def test_a_main_file_that_lies_in_a_folder_is_read_with_the_data_that_it_names(
    name: str, main: dict[str, Any], data: str, given: Any, key: str, there: Path
) -> None:
    ending = "toml" if data.endswith("toml") else "json"
    path = there / "configs" / f"{name}.{ending}"
    path.parent.mkdir()
    path.write_text((toml if ending == "toml" else json).dumps(main | {key: f"configs/{data}"}))
    (path.parent / data).write_text((toml if ending == "toml" else json).dumps(given))
    found = importers.read(path.name, path.read_bytes(), Opened(path=path))
    assert next(subset.folder.name for subset in subsets(found, there)) in ("a", "b") and not found.adds
    report = of_config_file(path, RUN)
    assert report is not None and report[0] == found.values

    def forbidden(path: Path) -> Path:
        raise OptionError(f"{path} is outside")

    shut = importers.read(path.name, path.read_bytes(), Opened(path=path, allowed=forbidden))
    assert "train_data_dir" in {text.partition(":")[0] for text in shut.missing}
    assert any(row.key == key and "open it too" in row.text for row in shut.rows)


@pytest.mark.parametrize(
    ("name", "given", "key"),
    [
        ("b.json", [{**BACKENDS[2], "tomorrow": 1}], "data_backend_config[0].tomorrow"),
        ("d.toml", DIRECTORIES | {"tomorrow": 1}, "dataset.tomorrow"),
        ("c.json", [{**CONCEPTS[0], "tomorrow": 1}], "concepts[0].tomorrow"),
    ],
)
def test_a_key_that_is_added_to_data_tomorrow_is_unknown(name: str, given: Any, key: str) -> None:
    assert verdicts(read(name, given))[key] == "unknown"


@pytest.mark.parametrize("folders", [("b",), ("a", "b")], ids=["one concept", "two concepts"])
def test_masks_beside_the_images_of_concepts_are_found(folders: tuple[str, ...], there: Path) -> None:
    """Of several concepts a dataset_config is made, which no folder of masks is named in."""
    for name in folders:
        Image.new("RGB", (64, 64)).save(there / name / "x.png")
        Image.new("L", (64, 64)).save(there / name / "x-masklabel.png")
    given = {
        "__version": 10,
        "model_type": "FLUX_DEV_1",
        "training_method": "LORA",
        "masked_training": True,
        "unmasked_weight": 0.3,
        "concepts": [{"path": name} for name in folders],
    }
    found = importers.read("one.json", json.dumps(given).encode())
    options = flat.build(found.run, {"pretrained_model_name_or_path": "toy", **found.values})
    assert (options.dataset.masked_loss, flat.flatten(options)["masked_loss_outside_weight"]) == (True, 0.3)
    images = scan(subsets_of(options.dataset, there), there / "cache").images
    assert sorted(Path(image.mask).name for image in images) == ["x-masklabel.png"] * len(folders)


SETTINGS = {
    "sd-scripts": """
        pretrained_model_name_or_path = "base.safetensors"
        network_module = "networks.lora"
        max_train_steps = 500
        train_batch_size = 4
        resolution = 1024
        """,
    "musubi-tuner": """
        dit = "z_image.safetensors"
        network_module = "networks.lora_zimage"
        max_train_steps = 500
        """,
}
DATA_SETS = {
    "sd-scripts": """
        [general]
        enable_bucket = true
        [[datasets]]
        resolution = 768
        batch_size = 1
        [[datasets.subsets]]
        image_dir = "a"
        num_repeats = 3
        """,
    "musubi-tuner": """
        [general]
        resolution = [768, 768]
        enable_bucket = true
        batch_size = 1
        [[datasets]]
        image_directory = "a"
        num_repeats = 3
        """,
}


@pytest.mark.parametrize("program", SETTINGS)
@pytest.mark.parametrize("form", [None, RUNS["sdxl", "full"]])
def test_a_run_with_its_data_sets_in_the_same_file_becomes_both(program: str, form: Any, there: Path) -> None:
    """That program reads them from a file of their own, so that there is nothing else that they could mean."""
    found = importers.read("x.toml", (SETTINGS[program] + DATA_SETS[program]).encode(), Opened(form))
    assert not found.adds and found.run.family == {"sd-scripts": "sdxl", "musubi-tuner": "zimage"}[program]
    rows = [row.key for row in found.rows]
    assert len(rows) == len(set(rows)) and found.count("unknown") == found.count("not supported") == 0
    assert {"max_train_steps", "general.enable_bucket"} <= {*rows} and [key for key in rows if key.endswith("].num_repeats")]
    assert [text for text in found.conflicts if "[[datasets]]" in text]
    (subset,) = subsets(found, there)
    assert (subset.folder.name, subset.repeats, subset.options.resolution) == ("a", 3, (768, 768))
    options = flat.flatten(flat.build(found.run, found.values))
    assert options["max_train_steps"] == 500 and options["train_batch_size"] == 1 and subset.options.enable_bucket


@pytest.mark.parametrize("names", ['train_data_dir = "b"', 'dataset_config = "other.toml"'])
def test_data_sets_in_a_file_that_names_its_images_count_no_more_than_in_that_program(names: str) -> None:
    found = importers.read("x.toml", (names + SETTINGS["sd-scripts"] + DATA_SETS["sd-scripts"]).encode())
    option, value = toml.loads(names).popitem()
    assert found.values[option] == value and len({"train_data_dir", "dataset_config"} & found.values.keys()) == 1
    assert verdicts(found)["datasets"] == "not needed" and flat.build(found.run, found.values)


def test_a_command_line_says_where_data_sets_of_a_file_of_settings_belong(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(SETTINGS["sd-scripts"] + DATA_SETS["sd-scripts"])
    with pytest.raises(OptionError, match=r"datasets.*which dataset_config names"):
        parse_cli(RUN, [f"--config_file={tmp_path / 'x.toml'}"])


def test_a_run_that_reads_no_data_set_files_refuses_those_in_its_file() -> None:
    run = next(run for run in RUNS.values() if "dataset_config" not in flat.fields(run))
    with pytest.raises(OptionError, match=r"dataset_config, which .* has not"):
        importers.read("x.toml", DATA_SETS["sd-scripts"].encode(), Opened(run))


def test_what_musubis_data_set_files_say_of_control_images_and_videos() -> None:
    text = '[general]\nresolution = [512, 512]\n[[datasets]]\nimage_directory = "a"\ncontrol_directory = "b"\nfp_1f_target_index = 1\n'
    text += "target_frames = [1]\nqwen_image_edit_no_resize_control = false\nqwen_image_edit_control_resolution = [1024, 576]\n"
    run = RUNS["qwen_edit", "network"]
    found = importers.read("set.toml", text.encode(), importers.Opened(run))
    rows = {row.key.rpartition(".")[2]: row.verdict for row in found.rows}
    assert rows["fp_1f_target_index"] == rows["target_frames"] == rows["qwen_image_edit_no_resize_control"] == "not needed"
    assert found.values["control_resolution"] == 768 and not found.conflicts
    found = importers.read("set.toml", text.replace("control = false", "control = true").encode(), importers.Opened(run))
    assert [text for text in found.conflicts if "no_resize_control" in text]
