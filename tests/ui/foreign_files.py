"""Files of other trainers, written anew, and what their reports say."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import yaml

from kohya_like import form, importers
from kohya_like.importers import Imported
from sd_scripts.schema import flat


def said(found: Imported, key: str) -> tuple[str, str]:
    (row,) = [row for row in found.rows if row.key == key]
    return row.verdict, row.text


def builds(found: Imported) -> dict[str, Any]:
    """The options once the person has given what is missing, which the form can show as well."""
    named = {sentence.partition(":")[0] for sentence in found.missing}
    options = flat.build(found.run, {**dict.fromkeys(named, "given"), **found.values})
    form.texts(found.run, found.values)
    keys = [row.key for row in found.rows]
    assert len(keys) == len(set(keys)) and all(row.text for row in found.rows)
    return flat.flatten(options)


JOB: dict[str, Any] = {
    "job": "extension",
    "config": {
        "name": "mine",
        "process": [
            {
                "type": "diffusion_trainer",
                "training_folder": "out",
                "device": "cuda:0",
                "trigger_word": "zwx",
                "network": {
                    "type": "lora",
                    "linear": 32,
                    "linear_alpha": 16,
                    "network_kwargs": {"ignore_if_contains": ["transformer.proj_out"]},
                },
                "save": {"dtype": "bf16", "save_every": 200, "max_step_saves_to_keep": 3, "push_to_hub": False},
                "datasets": [{"folder_path": "a", "caption_ext": "txt", "resolution": [512, 768], "num_repeats": 2, "flip_x": True}],
                "train": {
                    "batch_size": 2,
                    "steps": 900,
                    "gradient_accumulation": 4,
                    "lr": "2e-4",
                    "optimizer": "adamw8bit",
                    "optimizer_params": {"weight_decay": 1e-4, "betas": [0.9, 0.99]},
                    "timestep_type": "linear",
                    "noise_scheduler": "flowmatch",
                    "dtype": "bf16",
                    "ema_config": {"use_ema": True, "ema_decay": 0.99},
                    "skip_first_sample": True,
                },
                "model": {
                    "name_or_path": "some/model",
                    "arch": "zimage:turbo",
                    "quantize": True,
                    "assistant_lora_path": "undo.safetensors",
                },
                "sample": {
                    "sample_every": 50,
                    "width": 768,
                    "height": 512,
                    "samples": [{"prompt": "a [trigger] dog"}, {"prompt": "a cat", "seed": 5, "width": 640}],
                    "seed": 7,
                    "walk_seed": True,
                    "guidance_scale": 4,
                    "sample_steps": 9,
                },
            }
        ],
    },
    "meta": {"version": "1.0"},
}


def job(change: Callable[[dict[str, Any]], object] = lambda process: None, name: str = "job.yaml") -> Imported:
    given = copy.deepcopy(JOB)
    change(given["config"]["process"][0])
    text = yaml.safe_dump(given, sort_keys=False) if name.endswith(".yaml") else json.dumps(given)
    return importers.read(name, text.encode())


MUSUBI = """dit = "models/qwen_image_edit_2509.safetensors"
vae = "vae.safetensors"
text_encoder = "te.safetensors"
model_version = "edit-2509"
dataset_config = "set.toml"
network_module = "networks.lora_qwen_image"
network_dim = 16
network_args = ["loraplus_lr_ratio=4", "exclude_patterns=[r'.*img_mlp.*']"]
learning_rate = 5e-5
optimizer_type = "adamw8bit"
timestep_sampling = "qwen_shift"
weighting_scheme = "none"
mixed_precision = "bf16"
fp8_base = true
fp8_scaled = true
fp8_vl = true
blocks_to_swap = 16
sdpa = true
max_train_epochs = 8
output_dir = "out"
output_name = "mine"
"""


def musubi(more: str = "", **replaced: str) -> Imported:
    lines = [line for line in MUSUBI.splitlines() if line.partition(" =")[0] not in replaced]
    return importers.read("run.toml", "\n".join([*lines, *(f"{key} = {value}" for key, value in replaced.items()), more]).encode())


ONE: dict[str, Any] = {
    "__version": 10,
    "training_method": "LORA",
    "model_type": "FLUX_DEV_1",
    "base_model_name": "org/flux",
    "output_model_destination": "models/mine.safetensors",
    "output_model_format": "COMFY_LORA",
    "output_dtype": "BFLOAT_16",
    "train_dtype": "BFLOAT_16",
    "resolution": "512,768",
    "batch_size": 2,
    "gradient_accumulation_steps": 4,
    "epochs": 12,
    "learning_rate": 1e-4,
    "learning_rate_scaler": "BOTH",
    "learning_rate_scheduler": "COSINE",
    "learning_rate_warmup_steps": 400,
    "timestep_distribution": "LOGIT_NORMAL",
    "noising_bias": 0.5,
    "noising_weight": 0.25,
    "timestep_shift": 3.0,
    "peft_type": "LORA",
    "lora_rank": 8,
    "lora_alpha": 4.0,
    "layer_filter": "attn,ff.net",
    "layer_filter_preset": "attn-mlp",
    "transformer": {"train": True, "weight_dtype": "NFLOAT_4", "guidance_scale": 1.0},
    "text_encoder": {"train": False},
    "vae": {"weight_dtype": "FLOAT_32"},
    "optimizer": {"optimizer": "ADAMW_8BIT", "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.02, "eps": 1e-8, "stochastic_rounding": True},
    "masked_training": True,
    "unmasked_weight": 0.2,
    "save_every": 100,
    "save_every_unit": "STEP",
    "sample_after": 1,
    "sample_after_unit": "EPOCH",
    "secrets": {"huggingface_token": "hf_not_to_be_seen"},
    "concepts": [
        {
            "path": "images",
            "balancing": 3.0,
            "type": "STANDARD",
            "image": {"enable_random_flip": True, "enable_crop_jitter": False},
            "text": {"prompt_source": "sample", "enable_tag_shuffling": True, "keep_tags_count": 2, "tag_delimiter": ","},
        },
        {"path": "class", "type": "PRIOR_PREDICTION", "loss_weight": 0.5},
        {"path": "not this", "enabled": False},
    ],
    "samples": [{"prompt": "a dog", "seed": 3, "width": 512, "height": 768, "cfg_scale": 3.5, "diffusion_steps": 20}],
}


def one(**changes: Any) -> Imported:
    return importers.read("preset.json", json.dumps({**ONE, **changes}).encode())


PIPE = """output_dir = "out"
dataset = "set.toml"
epochs = 40
micro_batch_size_per_gpu = 2
gradient_accumulation_steps = 4
gradient_clipping = 0.5
warmup_steps = 20
blocks_to_swap = 8
save_every_n_examples = 800
activation_checkpointing = "unsloth"
save_dtype = "bfloat16"
[model]
type = "flux"
diffusers_path = "models/flux"
transformer_path = "mine.safetensors"
dtype = "bfloat16"
transformer_dtype = "float8"
flux_shift = true
sigmoid_scale = 1.3
[adapter]
type = "lora"
rank = 24
dtype = "bfloat16"
[optimizer]
type = "adamw_optimi"
lr = 3e-5
betas = [0.9, 0.99]
weight_decay = 0.01
[monitoring]
enable_wandb = true
wandb_api_key = "not to be seen"
wandb_tracker_name = "project"
wandb_run_name = "run"
"""


def pipe(old: str = "", new: str = "") -> Imported:
    assert old in PIPE
    return importers.read("main.toml", PIPE.replace(old, new).encode())


SIMPLE: dict[str, Any] = {
    "--model_family": "z_image",
    "--model_flavour": "base",
    "--model_type": "lora",
    "--lora_type": "standard",
    "--lora_rank": 32,
    "--base_model_precision": "int8-quanto",
    "--data_backend_config": "data.json",
    "--learning_rate": "2e-4",
    "--optimizer": "bnb-adamw8bit",
    "--lr_scheduler": "polynomial",
    "--lr_warmup_steps": 10,
    "--max_train_steps": 700,
    "--num_train_epochs": 0,
    "--train_batch_size": 3,
    "--flow_schedule_shift": 2,
    "--max_grad_norm": 0.5,
    "--grad_clip_method": "norm",
    "--checkpoint_step_interval": 50,
    "--checkpoints_total_limit": 3,
    "--resolution": 1.0,
    "--resolution_type": "area",
    "--validation_prompt": "a dog",
    "--validation_seed": 3,
    "--validation_resolution": "768x512",
    "--validation_step_interval": 25,
}


def simple(**changes: Any) -> Imported:
    return importers.read("config.json", json.dumps({**SIMPLE, **{f"--{name}": value for name, value in changes.items()}}).encode())
