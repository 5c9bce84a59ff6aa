"""Switches that are off: what depends on them is left out with a sentence, and refuses nothing, wherever it was given."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from sd_scripts.families import RUNS, TOOLS
from sd_scripts.families.ddpm.options import Ddpm
from sd_scripts.families.lgt.options import Lgt
from sd_scripts.families.sdxl.options import SdxlNetwork
from sd_scripts.families.zimage.options import ZImageNetwork
from sd_scripts.schema.command_line import parse_cli
from sd_scripts.schema.flat import asleep, build, fields, flatten
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.toml_files import to_toml
from tests.schema.test_flat import NEEDED, example

TYPES = [*RUNS.values(), *TOOLS.values()]


def base_of(run: type[RunOptions]) -> dict[str, Any]:
    return {name: value for name, value in NEEDED.items() if not (run is Ddpm and name == "pretrained_model_name_or_path")}


@pytest.mark.parametrize("run", RUNS.values(), ids=lambda run: run.__name__)
def test_whatever_sleeps_is_left_out_of_the_run_and_of_its_file_and_is_told_once(run: type[RunOptions], tmp_path: Path) -> None:
    known, base = fields(run), base_of(run)
    off = {name for need in known.values() for name in [one.name for one in need.show.conditions] if _is_switch(run, name)} - {"train_unet"}
    off_values = dict.fromkeys(off, False)
    given = {name: example(field) for name, field in known.items() if field.show.needs and name not in off}
    sleeping = {name: value for name, value in given.items() if name in asleep(run, base | off_values | {name: value})}
    assert len(sleeping) > 20 and {"ema_decay", "compile_mode", "gradient_checkpointing_share", "num_gpus"} <= sleeping.keys()
    plain, options = build(run, base | off_values), build(run, base | off_values | sleeping)
    assert options == plain
    assert not sleeping.keys() & {name for table in tomllib.loads(to_toml(options)).values() for name in table}
    file = tmp_path / "run.toml"
    file.write_text(to_toml(plain) + "".join(f"\n[kept_{name}]\n{name} = {_toml(value)}" for name, value in sleeping.items()))
    asked = parse_cli(run, ["--config_file", str(file)])
    assert asked.options == plain
    told = [name for note in asked.notes for name in note.partition(":")[0].split(", ")]
    assert sorted(told) == sorted(sleeping) and len(asked.notes) < len(sleeping)
    assert not parse_cli(run, [f"--config_file={_written(tmp_path, to_toml(options))}"]).notes, "our own file has nothing without effect"


def _is_switch(run: type[RunOptions], name: str) -> bool:
    return name in fields(run) and fields(run)[name].type is bool


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(list(value) if isinstance(value, tuple) else value)


def _written(folder: Path, text: str) -> Path:
    (folder / "own.toml").write_text(text)
    return folder / "own.toml"


def test_the_condition_of_every_field_can_be_met_and_missed() -> None:
    for run in TYPES:
        known = fields(run)
        for field in known.values():
            assert bool(field.show.needs) == bool(field.show.conditions), field.name
            for need in field.show.conditions:
                elsewhere = [other for other in TYPES if need.name in fields(other)]
                assert elsewhere, f"{field.name} needs {need.name}, which no run has"
                if need.name in known and known[need.name].choices:
                    assert set(need.values) < set(map(str, known[need.name].choices)), field.name


def test_another_objective_over_a_file_with_options_of_the_first_takes_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "preset.toml"
    file.write_text('pretrained_model_name_or_path = "toy"\ntrain_data_dir = "toy:star"\njitter_scale = 0.5\nturbo_steps = 4\n')
    asked = parse_cli(ZImageNetwork, ["--config_file", str(file), "--objective", "flow", "--timestep_sampling", "shift"])
    assert asked.notes == ("jitter_scale, turbo_steps: no effect until objective is acrf; left out",)
    assert asked.options.objective.timestep_sampling == "shift"  # type: ignore[union-attr]


def test_one_option_given_alone_is_answered_with_that_option() -> None:
    said = {
        "conditioning_data_dir": ("masks", "conditioning_data_dir: no effect until masked_loss is on; left out"),
        "save_last_n_epochs": (
            "3",
            "save_last_n_epochs: no effect until save_every_n_epochs is given or save_n_epoch_ratio is given; left out",
        ),
        "machine_rank": ("1", "machine_rank: no effect until multi_gpu is on; left out"),
        "compile_mode": ("max-autotune", "compile_mode: no effect until compile is on; left out"),
    }
    for name, (value, note) in said.items():
        asked = parse_cli(SdxlNetwork, [*(f"--{key}={text}" for key, text in NEEDED.items()), f"--{name}", value])
        assert asked.notes == (note,)
        assert flatten(asked.options) == flatten(build(SdxlNetwork, NEEDED))


def test_the_rank_of_convolutions_sleeps_where_a_merged_file_keeps_its_own_rank() -> None:
    merge = TOOLS["merge_lora"]
    assert "new_conv_rank" in asleep(merge, {"new_conv_rank": 4}) and "new_conv_rank" not in asleep(
        merge, {"new_conv_rank": 4, "new_rank": 8}
    )


def test_what_is_on_by_default_wakes_what_needs_it_and_zero_versions_are_the_default() -> None:
    # The default of w_low is not 0 and that of use_ema is on here: a field is not asleep because its switch stands at its default.
    lgt = build(Lgt, {"train_data_dir": "toy:styles", "vae": "toy", "low_pass_size": 9, "ema_decay": 0.9})
    assert (lgt.objective.low_pass_size, lgt.training.ema_decay) == (9, 0.9)  # type: ignore[union-attr]
    assert build(SdxlNetwork, NEEDED | {"compile": True, "compile_cache_size_limit": 0}).compile.compile_cache_size_limit == 0


def test_steps_on_the_command_line_win_over_epochs_of_a_file(tmp_path: Path) -> None:
    needed = ["--pretrained_model_name_or_path=a", "--train_data_dir=b"]
    file = tmp_path / "epochs.toml"
    file.write_text("max_train_epochs = 100\nmax_train_steps = 50\n")
    run = SdxlNetwork
    asked = parse_cli(run, ["--config_file", str(file), *needed, "--max_train_steps=8"])
    assert (asked.options.training.max_train_steps, asked.options.training.max_train_epochs) == (8, None)
    assert any("max_train_epochs = 100 in epochs.toml gave way" in note for note in asked.notes)
    # Whoever names epochs as well means them, and a file alone means its epochs.
    both = parse_cli(run, ["--config_file", str(file), *needed, "--max_train_steps=8", "--max_train_epochs=3"])
    assert both.options.training.max_train_epochs == 3 and any("max_train_steps: no effect until" in note for note in both.notes)
    alone = parse_cli(run, ["--config_file", str(file), *needed])
    assert alone.options.training.max_train_epochs == 100 and "max_train_steps" not in to_toml(alone.options)
