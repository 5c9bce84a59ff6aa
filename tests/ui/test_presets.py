"""Presets: every file is right, says what it is for, and changes only what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kohya_like import form, presets
from sd_scripts.families import RUNS
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError

FILES = sorted(presets.BUILT_IN.glob("*/*.toml"))
RUN = RUNS["sdxl", "network"]
PLACES = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_built_in_preset_is_a_set_of_differences_with_a_title_and_a_purpose(path: Path) -> None:
    preset = presets.read(path, own=False)
    assert path.parent.name == Path(preset.run.script).stem
    assert preset.title and len(preset.about) > 40
    options = flat.build(preset.run, {**PLACES, **preset.values}, path.name)
    given = {name: value for name, value in flat.flatten(options).items() if name in preset.values}
    defaults = {name: field.default for name, field in flat.fields(preset.run).items()}
    same = [name for name, value in given.items() if value == defaults[name] and name not in ("resolution", "train_batch_size")]
    # Rates and schedules may be named although they are the default: they are what people look for in a recipe.
    assert set(same) <= {"learning_rate", "lr_scheduler", "network_dim", "vae_batch_size", "sample_steps"}, same


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_preset_with_a_card_in_its_name_says_so_in_its_title_and_whether_it_was_measured(path: Path) -> None:
    preset = presets.read(path, own=False)
    card = re.search(r"(\d+)gb$", path.stem)
    if card:
        assert f"{card[1]} GB" in preset.title
        assert "Not measured on a card yet; chosen from" in preset.about or "Measured on" in preset.about


def test_every_preset_has_a_name_of_its_own() -> None:
    assert len({path.stem for path in FILES}) == len(FILES)


def test_the_demo_is_there_and_needs_no_file_of_the_persons_own(tmp_path: Path) -> None:
    preset = presets.find(presets.DEMO, tmp_path, own=False)
    options = flat.build(preset.run, preset.values)
    values = flat.flatten(options)
    assert (values["pretrained_model_name_or_path"], values["train_data_dir"]) == ("toy", "toy:star")
    assert values["sample_prompts"].strip()


def test_using_a_preset_depends_on_the_form_only_in_places_and_names(tmp_path: Path) -> None:
    preset = presets.find("style-24gb", tmp_path)
    now = form.texts(RUN, {"train_data_dir": "mine", "sample_prompts": "a cat", "learning_rate": 0.5, "flip_aug": False, "huber_c": 0.7})
    after = presets.applied(preset, now)
    fresh = presets.applied(preset, form.texts(RUN, {}))
    assert after["train_data_dir"] == "mine" and after["sample_prompts"] == "a cat"
    assert after["huber_c"] == "0.1" and after["learning_rate"] == "5e-05" and after["flip_aug"] is True
    assert {name for name in after if after[name] != fresh[name]} == {"train_data_dir", "sample_prompts"}


def test_the_difference_names_what_changes_and_nothing_else(tmp_path: Path) -> None:
    before = form.texts(RUN, {"train_data_dir": "mine"}) | {"learning_rate": "1.0e-4", "network_dim": "16"}
    after = dict(before) | {"learning_rate": "0.0001", "network_dim": "32", "flip_aug": True}
    changes = presets.difference(RUN, before, after)
    assert [(change.label, change.before, change.after) for change in changes] == [
        ("Flip augmentation", "off", "on"),
        ("Network rank", "16", "32"),
    ]


def test_keeping_and_reading_a_preset_gives_the_same_recipe(tmp_path: Path) -> None:
    values = {
        **PLACES,
        "network_dim": 77,
        "caption_separator": '"; \\',
        "optimizer_args": ["a=1", "b='x y'"],
        "max_grad_norm": 0.0,
        "output_name": "mine",
    }
    options = flat.build(RUN, values)
    kept = presets.keep("My best", options, tmp_path)
    assert kept.title == "My best" and kept.own
    again = flat.build(RUN, {**PLACES, **kept.values, "output_name": "mine"})
    assert again == options
    assert not {"train_data_dir", "pretrained_model_name_or_path", "output_name", "output_dir"} & set(kept.values)
    assert presets.find("My best", tmp_path).values == kept.values


def test_a_name_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    options = flat.build(RUN, PLACES)
    presets.keep("../../../evil", options, tmp_path / "runs")
    assert [path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*.toml")] == [("runs", ".presets")]
    with pytest.raises(OptionError):
        presets.keep("///", options, tmp_path / "runs")


def test_a_damaged_preset_is_named_and_hides_no_other(tmp_path: Path) -> None:
    folder = tmp_path / presets.OWN_FOLDER / "sdxl_train_network"
    folder.mkdir(parents=True)
    (folder / "broken.toml").write_text("network_dim = = 3")
    (folder / "evil.toml").write_text('script = "sdxl_train_network.py"\nallow_custom_modules = true\n')
    found, broken = presets.available(tmp_path)
    assert len(found) == len(FILES)
    assert len(broken) == 2 and "broken.toml" in broken[0] and "allow_custom_modules" in broken[1]


def test_a_resolution_of_one_number_in_a_persons_preset_is_shown_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / presets.OWN_FOLDER / "sdxl_train_network" / "square.toml"
    path.parent.mkdir(parents=True)
    path.write_text('# Square\n[kohya_like]\nscript = "sdxl_train_network.py"\nschema_version = 2\n[dataset]\nresolution = 768\n')
    assert presets.applied(presets.find("square", tmp_path), {})["resolution"] == "768"


def test_every_published_base_model_is_asked_for_among_the_first_fields() -> None:
    """A class of options beside BaseModelOptions once gave its own optional field to three families, which then hid the base model."""
    for run in RUNS.values():
        if run.method != "scratch":
            field = form.shown_fields(run)["pretrained_model_name_or_path"]
            assert field.show.basic and field.type is str, run.script
