"""Importing the AC-RF trainer's TOML and JSON: every key gets one row, everything that fits is taken, and the result builds."""

from __future__ import annotations

import json
import math

import pytest
import toml

from kohya_like import form, importers
from kohya_like.importers import Imported
from sd_scripts.families.zimage.importer import TERMS
from sd_scripts.families.zimage.options import ZImageNetwork
from sd_scripts.schema import flat

SOURCE = {"cache_directory": "D:/images/size_1024", "num_repeats": 10, "resolution_limit": 768}
TOML = {
    "model": {"dit": "D:\\models\\zimage\\transformer", "output_dir": "out"},
    "acrf": {"turbo_steps": 8, "shift": 3.0, "jitter_scale": 0.02, "snr_gamma": 5.0, "snr_floor": 0.1},
    "lora": {"network_dim": 16, "network_alpha": 8.0},
    "training": {
        "output_name": "girl",
        "optimizer_type": "AdamW8bit",
        "learning_rate": 0.00005,
        "weight_decay": 0.01,
        "lr_scheduler": "cosine_with_restarts",
        "lr_warmup_steps": 100,
        "lr_num_cycles": 2,
        "lambda_fft": 0.1,
        "lambda_cosine": 0.1,
        "loss_mode": "standard",
        "alpha_hf": 1.0,
        "beta_lf": 0.2,
        "lambda_struct": 1.0,
        "lambda_light": 0.5,
        "lambda_color": 0.3,
        "lambda_tex": 0.5,
        "num_train_epochs": 12,
        "save_every_n_epochs": 2,
        "gradient_accumulation_steps": 4,
        "mixed_precision": "bf16",
        "seed": 42,
    },
    "advanced": {"max_grad_norm": 1.0, "gradient_checkpointing": True},
    "optimization": {"auto_optimize": True},
    "dataset": {"batch_size": 2, "shuffle": True, "enable_bucket": True, "sources": [SOURCE]},
}


def read(given: object, name: str = "current_training.toml") -> Imported:
    text = json.dumps(given) if name.endswith(".json") else toml.dumps(given)
    return importers.read(name, text.encode())


def changed(**tables: dict[str, object]) -> Imported:
    return read({**TOML, **{table: {**TOML.get(table, {}), **entries} for table, entries in tables.items()}})


def row(imported: Imported, key: str) -> tuple[str, str]:
    (found,) = [row for row in imported.rows if row.key == key]
    return found.verdict, found.text


def built(imported: Imported) -> ZImageNetwork:
    named = {sentence.partition(":")[0] for sentence in imported.missing}
    form.texts(imported.run, imported.values)
    options = flat.build(imported.run, {**dict.fromkeys(named, "given"), **imported.values})
    assert isinstance(options, ZImageNetwork)
    return options


def test_what_its_page_writes_is_taken_key_by_key() -> None:
    imported = read(TOML)
    keys = [f"{table}.{key}" for table, entries in TOML.items() for key in entries]
    # The objective is what that program always trains, and not what is the default here.
    assert sorted(found.key for found in imported.rows) == sorted([*keys, "objective"])
    assert imported.missing == [] and imported.count("not supported") == 0
    options = built(imported)
    assert options.model.pretrained_model_name_or_path == "D:/models/zimage" and options.model.scheduler_shift == 3.0
    assert (options.network.network_dim, options.network.network_alpha) == (16, 8.0)
    assert (options.optimizer.optimizer_type, options.optimizer.optimizer_args) == ("AdamW8bit", ("weight_decay=0.01",))
    assert (options.optimizer.lr_scheduler, options.optimizer.lr_warmup_steps) == ("cosine_with_restarts", 100)
    assert options.optimizer.lr_scheduler_num_cycles == 2
    assert (options.training.max_train_epochs, options.training.gradient_accumulation_steps) == (12, 4)
    assert (options.dataset.train_batch_size, options.dataset.dataset_repeats, options.dataset.resolution) == (2, 10, (768, 768))
    assert (options.dataset.train_data_dir, options.output.output_name) == ("D:/images/size_1024", "girl")
    objective = options.objective
    assert (objective.objective, objective.turbo_steps, objective.loss_type) == ("acrf", 8, "charbonnier")
    assert (objective.anchor_weighting, objective.snr_gamma, objective.snr_floor) == ("vp_min_snr", 5.0, 0.1)
    assert (objective.lambda_fft, objective.lambda_cosine) == (0.1, 0.1)
    assert {getattr(objective, name) for name in TERMS if name not in ("lambda_fft", "lambda_cosine", "downsample_factor")} == {0.0}


def test_a_jitter_that_was_a_deviation_becomes_the_share_of_the_gap_with_that_deviation() -> None:
    share = built(read(TOML)).objective.jitter_scale
    # A uniform draw over `share` of a gap of 1/8 has the deviation share / 8 / sqrt(12).
    assert share / 8 / math.sqrt(12) == pytest.approx(0.02, rel=2e-3)
    assert built(changed(acrf={"jitter_scale": 0.0})).objective.jitter_scale == 0.0
    assert built(changed(acrf={"jitter_scale": 0.4})).objective.jitter_scale == 1.0


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("standard", {"lambda_fft": 0.1, "lambda_cosine": 0.1}),
        ("frequency", {"alpha_hf": 1.0, "beta_lf": 0.2}),
        ("style", {"lambda_struct": 1.0, "lambda_light": 0.5, "lambda_color": 0.3, "lambda_tex": 0.5}),
        (
            "unified",
            {"alpha_hf": 0.5, "beta_lf": 0.1, "lambda_struct": 0.5, "lambda_light": 0.25, "lambda_color": 0.15, "lambda_tex": 0.25},
        ),
    ],
)
def test_each_mode_of_the_loss_takes_its_own_terms(mode: str, wanted: dict[str, float]) -> None:
    imported = changed(training={"loss_mode": mode})
    objective = built(imported).objective
    assert {name: getattr(objective, name) for name in TERMS if getattr(objective, name) and name != "downsample_factor"} == wanted
    assert objective.loss_type == ("charbonnier" if mode == "standard" else "l2")
    unused = [name for name in TERMS if f"training.{name}" in {found.key for found in imported.rows} and name not in wanted]
    assert all(row(imported, f"training.{name}")[0] == "not needed" for name in unused)


LATER: dict[str, dict[str, object]] = {
    "acrf": {
        "raft_mode": True,
        "free_stream_ratio": 0.3,
        "l2_schedule_mode": "linear_increase",
        "l2_initial_ratio": 0.2,
        "l2_final_ratio": 0.6,
        "enable_curvature": True,
        "lambda_curvature": 0.07,
        "curvature_interval": 5,
        "curvature_start_epoch": 0,
        "cfg_training": True,
        "cfg_scale": 5.0,
        "cfg_training_ratio": 0.25,
        "drop_text_ratio": 0.1,
        "latent_jitter_scale": 0.01,
        "use_dynamic_shift": False,
        "enable_timestep_aware_loss": False,
        "timestep_high_threshold": 0.7,
    },
    "training": {
        "lambda_l1": 0.5,
        "lambda_cosine": 0.1,
        "enable_freq": True,
        "lambda_freq": 0.3,
        "enable_style": True,
        "lambda_style": 0.2,
    },
}


def test_switches_of_the_later_script_become_weights_of_the_same_terms() -> None:
    training = {name: value for name, value in TOML["training"].items() if name not in ("loss_mode", "lambda_fft", "lambda_struct")}
    imported = read({**TOML, "acrf": {**TOML["acrf"], **LATER["acrf"]}, "training": {**training, **LATER["training"]}})
    assert imported.count("not supported") == imported.count("unknown") == 0 and not imported.conflicts
    options = built(imported)
    objective, got = options.objective, {name: getattr(options.objective, name) for name in TERMS if name != "downsample_factor"}
    # Its loss is l1 * L1 + cosine * C + freq * (hf, lf) + style * (...); here the distance counts 1.
    assert objective.loss_type == "l1" and {name: value for name, value in got.items() if value} == pytest.approx(
        {
            "lambda_cosine": 0.1 / 0.5,
            "alpha_hf": 0.3 * 1.0 / 0.5,
            "beta_lf": 0.3 * 0.2 / 0.5,
            "lambda_struct": 0.2 * 1.0 / 0.5,  # not in the file
            "lambda_light": 0.2 * 0.5 / 0.5,
            "lambda_color": 0.2 * 0.3 / 0.5,
            "lambda_tex": 0.2 * 0.5 / 0.5,
        }
    )
    assert (objective.free_stream_ratio, objective.free_stream_final_ratio) == (0.2, 0.6)
    assert (objective.curvature_weight, objective.curvature_interval) == (0.07, 5)
    assert (objective.cfg_training_scale, objective.cfg_training_ratio, objective.latent_jitter) == (5.0, 0.25, 0.01)
    assert options.dataset.caption_dropout_rate == 0.1


def test_what_the_later_script_has_off_does_not_happen_here() -> None:
    off = dict.fromkeys(("raft_mode", "enable_curvature", "cfg_training"), False)
    imported = changed(acrf={**LATER["acrf"], **off}, training={**LATER["training"], "enable_freq": False, "enable_style": False})
    objective = built(imported).objective
    assert (objective.free_stream_ratio, objective.free_stream_final_ratio, objective.curvature_weight) == (0.0, None, 0.0)
    assert (objective.cfg_training_scale, objective.alpha_hf, objective.beta_lf, objective.lambda_struct) == (1.0, 0.0, 0.0, 0.0)
    # A file that says nothing of them has both groups on.
    training = {name: value for name, value in TOML["training"].items() if name == "output_name"}
    left = built(read({**TOML, "training": {**training, "lambda_l1": 1.0}})).objective
    assert (left.alpha_hf, left.beta_lf, left.lambda_struct) == pytest.approx((0.3, 0.06, 0.3))
    alone = changed(acrf=LATER["acrf"], training={"lambda_l1": 0, "enable_freq": False, "enable_style": False, "lambda_cosine": 0})
    assert (built(alone).objective.loss_type, built(alone).objective.free_stream_ratio) == ("l2", 1.0)
    # What such a file leaves out is on in that script, or another number than here.
    short = changed(acrf={"raft_mode": True, "cfg_training": True}, training={"lambda_l1": 1.0, "lambda_fft": 0.2})
    objective = built(short).objective
    assert (objective.free_stream_ratio, objective.latent_jitter, objective.cfg_training_scale, objective.cfg_training_ratio) == (
        0.3,
        0.01,
        7.0,
        0.5,
    )
    bare = built(read({"acrf": {"raft_mode": True}, "model": {"dit": "x.safetensors"}}))
    assert (bare.network.network_dim, bare.network.network_alpha, bare.optimizer.lr_warmup_steps) == (16, 16.0, 100)
    assert objective.lambda_fft == 0.0 and any(text.startswith("use_dynamic_shift") for text in short.conflicts)
    assert row(alone, "acrf.raft_mode")[1].startswith("free_stream_ratio = 1")
    shifted = changed(acrf={"raft_mode": False, "use_dynamic_shift": True, "l2_anchor_ratio": 0.3})
    assert [text.partition(" =")[0] for text in shifted.conflicts] == ["acrf.use_dynamic_shift"]


def test_regularisation_images_and_parts_of_a_whole_model_are_taken() -> None:
    regular = {"enabled": True, "weight": 1.0, "ratio": 0.5, "datasets": [{"cache_directory": "reg"}]}
    assert built(changed(reg_dataset=regular)).dataset.reg_data_dir == "reg"
    assert built(changed(reg_dataset={**regular, "enabled": False})).dataset.reg_data_dir is None
    assert row(changed(reg_dataset={**regular, "datasets": []}), "reg_dataset.datasets")[0] == "not needed"
    assert row(changed(reg_dataset={**regular, "datasets": [SOURCE, SOURCE]}), "reg_dataset.datasets")[0] == "not supported"
    whole = {**TOML, "lora": {}, "finetune": {"trainable_modules": "attention", "freeze_embeddings": True}}
    assert read(whole).values["target_modules"] == ("attention",)
    whole["finetune"] = {"trainable_modules": "all", "freeze_embeddings": True}
    assert read(whole).values["exclude_modules"] == ("embed",)


def test_weights_that_are_off_stay_off() -> None:
    imported = changed(acrf={"snr_gamma": 0})
    assert built(imported).objective.anchor_weighting == "uniform"
    assert row(imported, "acrf.snr_floor")[0] == "not needed"


def test_the_json_of_its_page_gives_gpus_and_says_that_its_states_are_not_read() -> None:
    given = {
        "name": "mine",
        "acrf": TOML["acrf"],
        "network": {"dim": 8, "alpha": 4},
        "optimizer": {"type": "Adafactor"},
        "training": {"output_name": "girl", "learning_rate": 0.0001},
        "dataset": {"batch_size": 1, "datasets": [SOURCE]},
        "advanced": {"resume": True, "multi_gpu": True, "num_gpus": 2, "num_train_epochs": 3},
    }
    imported = read(given, "mine.json")
    options = built(imported)
    assert (options.distributed.multi_gpu, options.distributed.num_gpus) == (True, 2)
    assert (options.network.network_dim, options.optimizer.optimizer_type) == (8, "Adafactor")
    assert row(imported, "advanced.resume") == (
        "not supported",
        "states of that program are not read; give its last saved file as network_weights to go on from it",
    )
    assert [sentence.partition(":")[0] for sentence in imported.missing] == ["pretrained_model_name_or_path"]
    alone = read({**given, "advanced": {"multi_gpu": False, "num_gpus": 2, "resume": False}}, "mine.json")
    assert not built(alone).distributed.multi_gpu
    assert {row(alone, f"advanced.{key}")[0] for key in ("num_gpus", "resume")} == {"not needed"}


def test_what_a_short_file_leaves_out_is_that_programs_default() -> None:
    imported = read({"acrf": {"shift": 3.0}, "model": {"dit": "x.safetensors"}})
    options = built(imported)
    assert options.objective.objective == "acrf"
    assert built(read({"acrf": {"enable_turbo": False}, "model": {"dit": "x.safetensors"}})).objective.objective == "flow"
    assert (options.objective.turbo_steps, options.objective.anchor_weighting, options.objective.loss_type) == (
        10,
        "vp_min_snr",
        "charbonnier",
    )
    assert (options.network.network_dim, options.network.network_alpha, options.optimizer.lr_warmup_steps) == (8, 4.0, 0.0)
    assert options.objective.jitter_scale == pytest.approx(0.693)
    assert sum(found.text.startswith("not in the file") for found in imported.rows) == 9


def test_several_folders_and_what_is_unknown_are_said() -> None:
    imported = changed(dataset={"sources": [SOURCE, SOURCE]}, degradation={"enable_degradation": True, "degradation_strength": "medium"})
    assert row(imported, "dataset.sources")[0] == "not supported" and "dataset_config" in row(imported, "dataset.sources")[1]
    assert row(imported, "degradation.enable_degradation")[0] == "not supported"
    assert [sentence.partition(":")[0] for sentence in imported.missing] == ["train_data_dir"]
    own = changed(training={"loss_scope": "per_dataset"}, dataset={"sources": [{**SOURCE, "lambda_fft": 0.7}]})
    assert built(own).objective.lambda_fft == 0.7


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [("acrf", "jitter_scale", "much"), ("acrf", "turbo_steps", 0), ("training", "lambda_fft", "x"), ("training", "seed", -1)],
)
def test_a_value_that_cannot_be_becomes_a_row_and_the_rest_builds(table: str, key: str, value: object) -> None:
    imported = changed(**{table: {key: value}})
    assert row(imported, f"{table}.{key}")[0] == "not supported"
    built(imported)
