"""Importing qwen-image-finetune's YAML of both schemas: every key gets one row, everything that fits is taken, and the result builds."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from kohya_like import form, importers
from kohya_like.importers import Imported
from sd_scripts.dataset import buckets
from sd_scripts.families import RUNS
from sd_scripts.families.qwen_edit.options import QwenImageNetwork
from sd_scripts.programs.qwen_image_finetune import configuration
from sd_scripts.runs.layers import layers_of
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.prompts import Defaults, read_prompts

HEAD_KEYS: dict[str, Any] = {
    "trainer": "QwenImageEditPlus",
    "mode": "fit",
    "resume": None,
    "model": {
        "pretrained_model_name_or_path": "Qwen/Qwen-Image-Edit-2509",
        "pretrained_embeddings": None,
        "quantize": True,
        "use_vlm_prompt_enhancer": False,
        "lora": {
            "r": 32,
            "lora_alpha": 16,
            "init_lora_weights": "gaussian",
            "target_modules": ["to_k", "to_q", "to_v", "to_out.0"],
            "pretrained_weight": None,
            "adapter_name": "default",
        },
    },
    "data": {
        "class_path": "qflux.data.dataset.ImageDataset",
        "batch_size": 2,
        "num_workers": 4,
        "shuffle": True,
        "init_args": {
            "dataset_path": "pairs",
            "caption_dropout_rate": 0.1,
            "prompt_image_dropout_rate": 0.1,
            "use_edit_mask": True,
            "cache_dir": "${cache.cache_dir}",
            "use_cache": "${cache.use_cache}",
            "prompt_empty_drop_keys": ["empty_prompt_embeds"],
            "selected_control_indexes": None,
            "processor": {
                "class_path": "qflux.data.preprocess.ImageProcessor",
                "init_args": {
                    "process_type": "center_crop",
                    "resize_mode": "bilinear",
                    "target_size": [832, 576],
                    "controls_size": [[832, 576]],
                    "max_aspect_ratio": 3.0,
                    "resize_controls_mask_to_image": True,
                },
            },
        },
    },
    "optimizer": {"class_path": "bitsandbytes.optim.Adam8bit", "init_args": {"lr": "1e-4", "betas": [0.9, 0.999], "weight_decay": 0.01}},
    "lr_scheduler": {"scheduler_type": "cosine", "warmup_steps": 50, "num_cycles": 0.5, "power": 1.0},
    "train": {
        "gradient_accumulation_steps": 2,
        "max_train_steps": 6000,
        "num_epochs": 100,
        "train_batch_size": 1,
        "checkpointing_steps": 100,
        "checkpoints_total_limit": 20,
        "max_grad_norm": 1.0,
        "mixed_precision": "bf16",
        "gradient_checkpointing": True,
        "low_memory": True,
        "fit_device": None,
    },
    "cache": {
        "use_cache": True,
        "cache_dir": "caches",
        "devices": {"vae": "cuda:0", "text_encoder": "cuda:1", "text_encoder_2": None, "dit": None, "prompt_enhancer": None},
        "prompt_empty_drop_keys": ["empty_prompt_embeds"],
    },
    "predict": {"devices": {"vae": "cuda:1", "text_encoder": "cuda:2", "dit": "cuda:3"}},
    "validation": {
        "enabled": True,
        "steps": 200,
        "max_samples": 2,
        "seed": 7,
        "dataset": None,
        "samples": [
            {"prompt": "make it\nred", "images": ["a.png", "b.png"], "height": 832, "width": 576, "guidance_scale": 4.0},
            {"prompt": "", "images": ["c.png"]},
            {"prompt": "make it blue", "images": "c.png"},
            {"prompt": "one too many", "images": ["d.png"]},
        ],
    },
    "loss": {"mask_loss": False, "forground_weight": 2.0, "background_weight": 1.0},
    "logging": {"output_dir": "runs", "report_to": "wandb", "tracker_project_name": "face/seg", "tags": ["a"], "notes": "second try"},
}

SEED_KEYS: dict[str, Any] = {
    "model": {
        "pretrained_model_name_or_path": "Qwen/Qwen-Image-Edit",
        "rank": 16,
        "quantize": True,
        "lora": {"r": 8, "lora_alpha": 8, "target_modules": ["to_q"]},
    },
    "data": {"init_args": {"dataset_path": ["pairs"], "image_size": [576, 832], "cache_drop_rate": 0.1}, "batch_size": 2},
    "train": {"max_train_steps": 100, "checkpointing_steps": 10, "checkpoints_total_limit": 3},
    "cache": {"vae_encoder_device": "cuda:1", "text_encoder_device": "cpu"},
    "predict": {"devices": {"transformer": "cuda:7", "vae": "cuda:5", "text_encoder": "cuda:6"}},
    "logging": {"output_dir": "out", "logging_dir": "logs", "report_to": "tensorboard"},
}


def read(given: object) -> Imported:
    return importers.read("config.yaml", yaml.safe_dump(given).encode())


def row(imported: Imported, key: str) -> tuple[str, str]:
    (found,) = [row for row in imported.rows if row.key == key]
    return found.verdict, found.text


def built(imported: Imported) -> QwenImageNetwork:
    named = {sentence.partition(":")[0] for sentence in imported.missing}
    form.texts(imported.run, imported.values)
    options = flat.build(imported.run, {**dict.fromkeys(named, "given"), **imported.values})
    assert isinstance(options, QwenImageNetwork)
    return options


def keys_of(given: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in given.items():
        key = f"{prefix}{name}"
        found += keys_of(value, f"{key}.") if isinstance(value, dict) and value else [key]
    return found


def test_every_key_of_the_later_schema_has_one_row_and_nothing_is_missing() -> None:
    imported = read(HEAD_KEYS)
    assert imported.missing == [] and imported.run is QwenImageNetwork
    rows = [row.key for row in imported.rows]
    assert set(keys_of(HEAD_KEYS)) <= set(rows) and len(rows) == len(set(rows))
    assert [row.key for row in imported.rows if row.verdict == "not supported"] == []


def test_the_later_schema_becomes_a_run() -> None:
    options = built(read(HEAD_KEYS))
    assert options.model.model_version == "edit-2509" and options.model.transformer_quantization == "qint8"
    assert options.model.vae_device == "cuda:0" and options.model.text_encoder_device == "cuda:1"
    assert (options.network.network_dim, options.network.network_alpha) == (32, 16.0) and options.network.lora_targets == "image_attention"
    assert (
        options.dataset.resolution == (576, 832)
        and not options.dataset.enable_bucket
        and options.dataset.resize_interpolation == "bilinear"
    )
    assert options.model.control_resolution == 688
    assert options.optimizer.optimizer_type == "AdamW8bit" and options.optimizer.learning_rate == 1e-4
    assert options.optimizer.optimizer_args == ("betas=(0.9,0.999)", "weight_decay=0.01")
    assert (
        options.training.max_train_steps == 6000 and options.output.save_every_n_steps == 100 and options.output.save_last_n_steps is None
    )
    assert options.output.output_name == "face-seg" and options.output.log_tracker_name == "face/seg"
    assert options.objective.timestep_sampling == "uniform"


def test_validation_samples_become_prompts_with_their_control_images(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.png" for name in "abc"]
    for file in files:
        Image.new("RGB", (16, 16)).save(file)
    samples = [dict(one) for one in HEAD_KEYS["validation"]["samples"]]
    samples[0]["images"], samples[2]["images"] = [str(file) for file in files[:2]], str(files[2])
    options = built(read({**HEAD_KEYS, "validation": {**HEAD_KEYS["validation"], "samples": samples}}))
    assert options.samples.sample_every_n_steps == 200
    prompts = read_prompts(Defaults(options.samples, (1024, 1024), 16, 1))
    assert [(one.prompt, [Path(file) for file in one.controls], one.seed) for one in prompts] == [
        ("make it red", files[:2], 7), ("make it blue", files[2:], 7),
    ]  # fmt: skip
    assert (prompts[0].width, prompts[0].height, prompts[0].cfg_scale) == (576, 832, 4.0)


def test_pefts_word_for_every_linear_layer_is_no_expression() -> None:
    keys = {**SEED_KEYS, "model": {**SEED_KEYS["model"], "lora": {**SEED_KEYS["model"]["lora"], "target_modules": "all-linear"}}}
    network = built(read(keys)).network
    assert network.lora_targets == "all_with_modulation" and network.target_modules == ()


def test_the_first_schema_becomes_a_run() -> None:
    imported = read(SEED_KEYS)
    options = built(imported)
    assert (options.network.network_dim, options.network.network_alpha) == (16, 16.0)
    assert row(imported, "model.lora.r") == ("not needed", "model.rank is used in its place")
    assert options.network.target_modules == (r"(^|\.)to_q$",) and options.network.lora_targets == "all_with_modulation"
    assert options.model.transformer_quantization == "qfloat8" and options.dataset.caption_dropout_rate == 0.1
    assert options.dataset.resolution == (576, 832) and options.output.save_last_n_steps == 30
    assert (options.model.vae_device, options.model.text_encoder_device) == ("cuda:1", "cpu")


def test_what_that_program_does_where_the_file_says_nothing_is_said() -> None:
    imported = read({"model": {"lora": {"r": 4}}, "data": {"init_args": {"dataset_path": "x"}}})
    options = built(imported)
    assert options.training.gradient_accumulation_steps == 4 and options.memory.gradient_checkpointing
    assert options.optimizer.lr_scheduler == "constant" and options.training.max_train_steps == 1000
    assert options.model.pretrained_model_name_or_path == "Qwen/Qwen-Image-Edit"
    assert row(imported, "timestep_sampling") == ("taken", "not in the file: timestep_sampling = uniform is qwen-image-finetune's default")


@pytest.mark.parametrize("mode", ["center_crop", "fixed_pixels"])
def test_sizes_are_put_on_the_models_grid_as_that_program_puts_them_for_the_page_and_for_its_scripts(mode: str) -> None:
    processor = {"init_args": {"process_type": mode, "target_size": [830, 570]}}
    keys = {**HEAD_KEYS, "data": {**HEAD_KEYS["data"], "init_args": {"dataset_path": "pairs", "processor": processor}}}
    options, _devices = configuration.run_of(keys, QwenImageNetwork)
    assert built(read(keys)).dataset.resolution == options.dataset.resolution == (560, 816)
    assert buckets.problems_of(options.dataset, options.model.grid) == []


def test_a_trainer_that_nobody_knows_is_told_and_its_file_read_as_the_first_one() -> None:
    imported = read({**HEAD_KEYS, "trainer": "SomethingNew"})
    verdict, text = row(imported, "trainer")
    assert verdict == "not supported" and "SomethingNew" in text and "qwenimageedit" in text
    assert imported.run is QwenImageNetwork and built(imported).model.model_version == "edit"
    assert imported.conflicts == [f"trainer = SomethingNew: {text}"]
    with pytest.raises(OptionError, match="SomethingNew"):
        configuration.run_of({**HEAD_KEYS, "trainer": "SomethingNew"}, QwenImageNetwork)


def test_devices_of_prediction_are_kept_for_who_predicts() -> None:
    found = configuration.translate(SEED_KEYS)
    assert configuration.predict_devices(found) == {"transformer_device": "cuda:7", "vae_device": "cuda:5", "text_encoder_device": "cuda:6"}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"resume": "out/v0"}, "resume", "network_weights"),
        ({"model": {"pretrained_model_name_or_path": "x/Qwen-Edit-4bit"}}, "model.pretrained_model_name_or_path", "quantised already"),
        ({"model": {"lora": {"init_lora_weights": "zero"}}}, "model.lora.init_lora_weights", "is not there"),
        ({"model": {"lora": {"pretrained_weight": "someone/lora"}}}, "model.lora.pretrained_weight", "download it"),
        ({"data": {"init_args": {"dataset_path": [{"repo_id": "a/b", "split": "train"}]}}}, "data.init_args.dataset_path", "hub"),
        ({"data": {"init_args": {"dataset_path": ["a", "b"]}}}, "data.init_args.dataset_path", "dataset_config"),
        ({"data": {"init_args": {"selected_control_indexes": [1]}}}, "data.init_args.selected_control_indexes", "control_data_dir"),
        ({"optimizer": {"class_path": "lion_pytorch.Lionx"}}, "optimizer.class_path", "not built in"),
        ({"logging": {"report_to": "swanlab"}}, "logging.report_to", "tensorboard or wandb"),
        ({"train": {"max_train_stepz": 1}}, "train.max_train_stepz", "Did you mean train.max_train_steps?"),
        ({"train": {"max_train_steps": -1}}, "train.max_train_steps", "out of range"),
        ({"lr_scheduler": {"scheduler_type": "wavy"}}, "lr_scheduler.scheduler_type", "not one of"),
    ],
)
def test_what_cannot_be_taken_says_what_to_do(changes: dict[str, Any], key: str, words: str) -> None:
    imported = read({"model": {"rank": 4}, "data": {"batch_size": 1}, **changes})
    verdict, text = row(imported, key)
    assert verdict == ("unknown" if key.endswith("stepz") else "not supported") and words in text
    built(imported)


def test_a_configuration_for_another_model_is_never_put_on_this_one() -> None:
    with pytest.raises(OptionError, match="for DreamOmni2, which this version does not train"):
        read({"trainer": "DreamOmni2", "model": {"rank": 4}, "data": {"batch_size": 1}})


def test_its_other_models_are_runs_of_their_own() -> None:
    model = {
        "pretrained_model_name_or_path": "owner/FLUX.1-Kontext-dev",
        "pretrained_embeddings": {"vae": "a/vae", "text_encoder_2": "a/t5"},
        "lora": {"r": 8, "lora_alpha": 8},
    }
    sample = {"prompt": "make it red", "images": ["a.png"], "guidance_scale": 3.5, "num_inference_steps": 20}
    given = {
        "trainer": "FluxKontext",
        "model": model,
        "data": {"batch_size": 2, "init_args": {"dataset_path": "pairs"}},
        "cache": {"devices": {"vae": "cuda:1", "text_encoder_2": "cuda:1"}},
        "validation": {"enabled": True, "steps": 50, "samples": [sample]},
    }
    found = read(given)
    options = flat.flatten(flat.build(found.run, found.values))
    assert found.run is RUNS["kontext", "network"] and found.count("not supported") == found.count("unknown") == 0
    assert (options["ae"], options["clip_l"], options["t5xxl"]) == ("a/vae", None, "a/t5")
    assert (options["timestep_sampling"], options["guidance_scale"], options["network_alpha"]) == ("uniform", 1.0, 8)
    # Where the file names no layers: the attention of the image's stream and of the single blocks.
    layers = layers_of("kontext")
    assert layers is not None and all(layers.finds(text) for text in options["target_modules"])
    chosen = {
        path for path in ("attn.to_q", "attn.to_out.0", "attn.add_q_proj") for text in options["target_modules"] if re.search(text, path)
    }
    assert chosen == {"attn.to_q", "attn.to_out.0"}
    assert options["sample_prompts"] == "make it red --ci a.png --s 20 --g 3.5 --d 42"
    everything = read({**given, "model": {**model, "lora": {"r": 8, "target_modules": "all-linear"}}})
    assert "target_modules" not in everything.values and row(everything, "model.lora.target_modules")[0] == "not needed"
    klein = read({"trainer": "Flux2Klein", "model": {"pretrained_model_name_or_path": "a/klein"}, "data": {"batch_size": 1}})
    assert klein.run is RUNS["flux2", "network"] and len(klein.values["target_modules"]) == 4


def test_a_table_of_pairs_becomes_a_list_of_images() -> None:
    options = built(read({"model": {"rank": 4}, "data": {"init_args": {"dataset_path": "lists/pairs.csv"}}}))
    assert options.dataset.in_json == "lists/pairs.csv" and options.dataset.train_data_dir == "lists"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("just text", "holds no settings"),
        ("a: [1", "not valid YAML"),
        ("a: &x [1]\nb: *x", "anchors"),
        ("name: x\nversion: 2", "has none of the sections"),
        ("model: {rank: '${data.batch}'}\ndata: {a: 1}", "is not in the file"),
        ("model: {rank: '${data.a}'}\ndata: {a: '${model.rank}'}", "refers to itself"),
        ("model: !!python/object/apply:os.system [ls]\ndata: {}", "not valid YAML"),
    ],
)
def test_a_file_of_another_kind_is_a_sentence(text: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        importers.read("config.yml", text.encode())


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5000),
    st.floats(allow_nan=True),
    st.text(max_size=12),
    st.lists(st.integers(0, 99), max_size=3),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_value_at_any_key_gives_rows_and_a_run(data: st.DataObject) -> None:
    changed = dict(HEAD_KEYS)
    for key in data.draw(st.lists(st.sampled_from(keys_of(HEAD_KEYS)), min_size=1, max_size=4, unique=True)):
        changed = _with(changed, key.split("."), data.draw(VALUES))
    try:
        imported = read(changed)
    except OptionError:
        return
    built(imported)


def _with(given: dict[str, Any], path: list[str], value: object) -> dict[str, Any]:
    first, *rest = path
    below = given.get(first)
    return {**given, first: _with(below if isinstance(below, dict) else {}, rest, value) if rest else value}


def test_the_order_of_the_keys_does_not_matter() -> None:
    items = list(HEAD_KEYS.items())
    random.shuffle(items)
    assert read(dict(items)).values == read(HEAD_KEYS).values
