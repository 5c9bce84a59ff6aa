"""Files of other trainers as our options: every key has its row, what means something else is converted, what nobody knows is unknown.

Every text here is written anew. What the public examples of these programs become was measured beside them, with a script.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import Any

import pytest
import toml
import yaml

from kohya_like import form, importers
from kohya_like.importers import Imported
from sd_scripts import programs
from sd_scripts.families import FACTS, RUNS
from sd_scripts.programs import ai_toolkit, table
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError


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


# --- ai-toolkit -------------------------------------------------------------------------------------------------------

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


def test_a_job_of_ai_toolkit_becomes_the_same_run() -> None:
    found = job()
    options = builds(found)
    assert found.run is RUNS["zimage", "network"]
    wanted = {
        "pretrained_model_name_or_path": "some/model",
        "output_dir": "out",
        "output_name": "mine",
        "instance_prompt": "zwx",
        "network_dim": 32,
        "network_alpha": 16.0,
        "exclude_modules": (r"proj_out", "refiner"),
        "save_precision": "bf16",
        "save_every_n_steps": 200,
        "save_last_n_steps": 600,
        "train_data_dir": "a",
        "dataset_repeats": 2,
        "resolution": (768, 768),
        "additional_resolutions": (512,),
        "flip_aug": True,
        "train_batch_size": 2,
        "max_train_steps": 900,
        "gradient_accumulation_steps": 4,
        "learning_rate": 2e-4,
        "optimizer_type": "AdamW8bit",
        "optimizer_args": ("weight_decay=0.0001", "betas=(0.9,0.99)"),
        "timestep_sampling": "uniform",
        "lr_scheduler": "constant",
        "lr_warmup_steps": 0,
        "gradient_checkpointing": True,
        "mixed_precision": "bf16",
        "use_ema": True,
        "ema_decay": 0.99,
        "sample_at_first": False,
        "transformer_quantization": "qfloat8",
        "training_adapter": "undo.safetensors",
        "sample_size": (768, 512),
        "sample_steps": 9,
        "sample_cfg_scale": 5.0,
        "sample_prompts": "a zwx dog --d 7\na cat --w 640 --d 5",
    }
    assert {name: options[name] for name in wanted} == wanted
    assert not [row for row in found.rows if row.verdict in ("not supported", "unknown")]
    assert any("trigger_word" in text for text in found.conflicts)
    assert job(name="job.json").values == found.values


def test_what_a_job_leaves_out_is_what_that_program_takes() -> None:
    def less(process: dict[str, Any]) -> None:
        process["train"] = {"steps": 10}
        process["network"] = {"type": "lora"}
        process["datasets"] = [{"folder_path": "a"}]

    options = builds(job(less))
    wanted = {"network_dim": 4, "network_alpha": 1.0, "learning_rate": 1e-6, "resolution": (512, 512), "timestep_sampling": "sigmoid"}
    assert {name: options[name] for name in wanted} == wanted and options["mixed_precision"] == "no"


def test_several_folders_become_one_dataset_config_that_the_data_set_reads(tmp_path: Any) -> None:
    from PIL import Image

    from sd_scripts.dataset.config import subsets_of

    for name in ("a", "b", "reg"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (64, 64)).save(tmp_path / name / "x.png")

    def more(process: dict[str, Any]) -> None:
        process["datasets"] = [
            {"folder_path": str(tmp_path / "a"), "num_repeats": 3, "resolution": 512, "caption_ext": "cap", "caption_dropout_rate": 0.1},
            {"folder_path": str(tmp_path / "b"), "resolution": [256, 512], "shuffle_tokens": True},
            {"folder_path": str(tmp_path / "reg"), "is_reg": True},
        ]

    found = job(more)
    options = flat.build(found.run, found.values)
    subsets = subsets_of(options.dataset, tmp_path).items
    assert [subset.folder.name for subset in subsets] == ["a", "b", "reg"]
    assert [subset.is_reg for subset in subsets] == [False, False, True] and subsets[0].repeats == 3
    assert (subsets[0].options.caption_extension, subsets[0].options.caption_dropout_rate) == (".cap", 0.1)
    assert subsets[1].options.additional_resolutions == (256,) and subsets[1].options.shuffle_caption
    assert "dataset_config" in said(found, "datasets[1].folder_path")[1]


def test_what_decides_the_result_of_a_job_and_is_not_here_stands_above_the_form() -> None:
    changes: list[tuple[str, str, Any]] = [
        ("train", "timestep_type", "weighted"),
        ("train", "content_or_style", "style"),
        ("train", "optimizer", "automagic"),
        ("train", "diff_output_preservation", True),
        ("train", "do_differential_guidance", True),
        ("model", "qtype", "uint3|some/file.safetensors"),
        ("model", "layer_offloading", True),
        ("network", "type", "lorm"),
    ]
    for section, key, value in changes:
        found = job(lambda process: process[section].update({key: value}))  # noqa: B023
        builds(found)
        assert said(found, f"{section}.{key}")[0] == "not supported", key
        assert any(text.startswith(f"{section}.{key} = ") for text in found.conflicts), key


def test_shifted_times_of_a_job_are_those_of_its_sampler() -> None:
    """The line through 0.5 at 256 tokens and 1.15 at 4096, at 1024 x 1024 pixels, is the family's own factor."""
    found = job(
        lambda process: (
            process["model"].update(arch="flux"),
            process["train"].update(timestep_type="flux_shift"),
            process["datasets"][0].update(resolution=1024),
        )
    )
    options = builds(found)
    assert found.run is RUNS["flux", "network"] and options["timestep_sampling"] == "sigma"
    assert options["discrete_flow_shift"] == pytest.approx(3.1582, abs=1e-3)


def test_sides_that_the_model_does_not_take_are_rounded_and_said() -> None:
    found = job(lambda process: process["datasets"][0].update(resolution=[650, 330]))
    options = builds(found)
    assert (options["resolution"], options["additional_resolutions"]) == ((640, 640), (320,))
    assert "multiples of 16" in said(found, "datasets[0].resolution")[1]


def test_models_of_ai_toolkit_that_are_not_trained_are_refused_by_their_names() -> None:
    for name, model in ai_toolkit.models.MODELS.items():
        change = lambda process: process["model"].update(arch=name)  # noqa: B023, E731
        if model.family in FACTS:
            builds(job(change))
        else:
            with pytest.raises(OptionError, match="which this version does not train"):
                job(change)
    with pytest.raises(OptionError, match="for tomorrows, which this version does not know"):
        job(lambda process: process["model"].update(arch="tomorrows"))


# --- musubi-tuner -----------------------------------------------------------------------------------------------------

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


def test_a_run_of_musubi_tuner_becomes_the_same_run() -> None:
    found = musubi()
    options = builds(found)
    assert found.run is RUNS["qwen_edit", "network"] and not found.missing
    wanted = {
        "pretrained_model_name_or_path": "models/qwen_image_edit_2509.safetensors",
        "vae": "vae.safetensors",
        "text_encoder": "te.safetensors",
        "model_version": "edit-2509",
        "dataset_config": "set.toml",
        "network_dim": 16,
        "network_alpha": 1.0,
        "loraplus_lr_ratio": 4.0,
        "exclude_modules": (".*img_mlp.*",),
        "optimizer_type": "AdamW8bit",
        "timestep_sampling": "qwen_shift",
        "transformer_quantization": "qfloat8",
        "text_encoder_quantization": "qfloat8",
        "blocks_to_swap": 16,
        "lr_scheduler": "constant",
        "enable_bucket": False,
        "resolution": (960, 544),
        "save_precision": "float",
    }
    assert {name: options[name] for name in wanted} == wanted
    assert not [row for row in found.rows if row.verdict in ("not supported", "unknown")]
    line = "accelerate launch --mixed_precision bf16 src/musubi_tuner/qwen_image_train_network.py "
    line += " ".join(f"--{key} {value}" for key, value in options.items() if key in ("vae", "text_encoder", "learning_rate", "network_dim"))
    line += " --dit m --edit_plus --network_module networks.lora_qwen_image --dataset_config=set.toml"
    assert builds(importers.read("train.bat", line.encode()))["model_version"] == "edit-2509"


def test_an_alpha_that_equals_the_rank_stays_that_alpha() -> None:
    options = builds(musubi(network_alpha="16"))
    assert options["network_dim"] == 16 and options["network_alpha"] in (None, 16.0)


def test_times_of_musubi_tuner_are_the_same_density_here() -> None:
    """logSNR = 2 ln((1 - t) / t) is normal there: 40,000 draws of each, by quantiles."""
    import torch

    from sd_scripts.library.objectives import times as densities

    found = musubi(timestep_sampling='"logsnr"', logit_mean="-6.0", logit_std="2.0")
    options = builds(found)
    assert options["timestep_sampling"] == "logit_normal"
    u = (torch.arange(40_000, dtype=torch.float64) + 0.5) / 40_000
    theirs = torch.sigmoid(-(-6.0 + 2.0 * 2**0.5 * torch.erfinv(2 * u - 1)) / 2).sort().values
    ours = densities.logit_normal(options["logit_mean"], options["logit_std"]).quantile(u).sort().values
    assert torch.allclose(theirs, ours, atol=1e-6)
    assert builds(musubi(timestep_sampling='"sigma"'))["discrete_flow_shift"] == 1.0
    assert builds(musubi(weighting_scheme='"cosmap"'))["weighting_scheme"] == "cosmap"
    lines = {"dit": '"klein.safetensors"', "network_module": '"networks.lora_flux_2"', "model_version": '"klein-base-4b"'}
    other = musubi(timestep_sampling='"flux2_shift"', **lines)
    assert other.run is RUNS["flux2", "network"] and builds(other)["timestep_sampling"] == "shift"
    assert any(text.startswith("timestep_sampling") for text in other.conflicts)
    lost = musubi(timestep_sampling='"qinglong_qwen"')
    assert said(lost, "timestep_sampling")[0] == "not supported" and any("qinglong_qwen" in text for text in lost.conflicts)


def test_models_of_musubi_tuner_that_are_not_trained_are_refused_by_their_names() -> None:
    for module, named in {"networks.lora_wan": "Wan", "networks.lora_ideogram4": "Ideogram 4", "networks.lora": "HunyuanVideo"}.items():
        with pytest.raises(OptionError, match=f"for {named}.*does not train"):
            musubi(network_module=f'"{module}"')
    with pytest.raises(OptionError, match="Layered"):
        musubi(model_version='"layered"')
    with pytest.raises(OptionError, match="does not say which model"):
        importers.read("x.toml", b'dit = "m"\nvae = "v"\nnetwork_module = "networks.loha"\n')


# --- OneTrainer -------------------------------------------------------------------------------------------------------

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


def test_a_configuration_of_onetrainer_becomes_the_same_run() -> None:
    found = one()
    options = builds(found)
    assert found.run is RUNS["flux", "network"] and not found.missing
    wanted = {
        "pretrained_model_name_or_path": "org/flux",
        "output_dir": "models",
        "output_name": "mine",
        "save_model_as": "comfyui",
        "save_precision": "bf16",
        "mixed_precision": "bf16",
        "resolution": (768, 768),
        "additional_resolutions": (512,),
        "train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_train_epochs": 12,
        "learning_rate": pytest.approx(1e-4 * 8**0.5),
        "lr_scheduler": "cosine",
        "lr_warmup_steps": 100,
        "timestep_sampling": "logit_normal",
        "logit_mean": pytest.approx(0.5 + math.log(3), abs=1e-5),
        "logit_std": 1.25,
        "network_dim": 8,
        "network_alpha": 4.0,
        "transformer_quantization": "nf4",
        "optimizer_type": "AdamW8bit",
        "optimizer_args": ("betas=(0.9,0.99)", "weight_decay=0.02", "eps=1e-08"),
        "masked_loss": True,
        "masked_loss_outside_weight": 0.2,
        "save_every_n_steps": 25,
        "sample_every_n_epochs": 1,
        "train_data_dir": "images",
        "reg_data_dir": "class",
        "base_prior_weight": 0.5,
        "dataset_repeats": 3,
        "flip_aug": True,
        "random_crop": False,
        "shuffle_caption": True,
        "keep_tokens": 2,
        "sample_prompts": "a dog --w 512 --h 768 --d 3 --g 3.5 --s 20",
    }
    assert {name: options[name] for name in wanted} == wanted
    assert not [row for row in found.rows if row.verdict in ("not supported", "unknown")]
    assert "hf_not_to_be_seen" not in repr(found) and "masklabel" in said(found, "masked_training")[1]


def test_times_of_onetrainer_are_the_same_density_here() -> None:
    """Drawn as that program draws them, and by our quantiles."""
    import torch

    from sd_scripts.library.objectives import times as densities

    options = builds(one())
    torch.manual_seed(0)
    t = torch.normal(0.5, 1.25, (200_000,), dtype=torch.float64).sigmoid()
    theirs = (3 * t / (2 * t + 1)).sort().values[500::1000]
    u = (torch.arange(200, dtype=torch.float64) * 1000 + 500) / 200_000
    assert torch.allclose(theirs, densities.logit_normal(options["logit_mean"], options["logit_std"]).quantile(u), atol=0.01)
    u = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    heavy = 1 - u - 0.8 * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u)
    mode = builds(one(timestep_distribution="HEAVY_TAIL", noising_weight=0.8, timestep_shift=1.0))
    assert mode["timestep_sampling"] == "mode"
    assert torch.allclose(heavy.sort().values, densities.mode(mode["mode_scale"]).quantile(u).sort().values, atol=1e-9)
    dynamic = builds(one(noising_bias=0.0, dynamic_timestep_shifting=True))
    assert (dynamic["timestep_sampling"], dynamic["sigmoid_scale"]) == ("flux_shift", 1.25)
    assert said(one(timestep_distribution="BETA"), "timestep_distribution")[0] == "not supported"


def test_a_whole_model_of_onetrainer_keeps_what_decides_whether_it_fits() -> None:
    adafactor = {"ADAFACTOR": {"optimizer": "ADAFACTOR", "fused_back_pass": True, "weight_decay": 0.0}}
    found = one(
        training_method="FINE_TUNE",
        transformer={"train": True, "weight_dtype": "BFLOAT_16", "offload_fraction": 0.4},
        optimizer={"optimizer": "ADAFACTOR"},
        optimizer_defaults=adafactor,
        gradient_accumulation_steps=1,
        concepts=[],
    )
    options = builds(found)
    assert found.run is RUNS["flux", "full"] and options["full_bf16"] and options["fused_backward_pass"] and options["max_grad_norm"] == 0
    assert options["blocks_to_swap"] == 23, "0.4 of 57 blocks"
    assert said(found, "transformer.offload_fraction")[0] == "renamed"


def test_models_and_methods_of_onetrainer_that_are_not_trained_are_refused_by_their_names() -> None:
    for model, named in {"SANA": "Sana", "STABLE_DIFFUSION_XL_10_BASE_INPAINTING": "inpainting with SDXL"}.items():
        with pytest.raises(OptionError, match=f"for {named}, which this version does not train"):
            one(model_type=model)
    with pytest.raises(OptionError, match="trains an embedding"):
        one(training_method="EMBEDDING")
    with pytest.raises(OptionError, match="trains the whole model of Qwen-Image"):
        one(training_method="FINE_TUNE", model_type="QWEN")


# --- diffusion-pipe and SimpleTuner -----------------------------------------------------------------------------------

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


def test_a_main_file_of_diffusion_pipe_becomes_the_same_run() -> None:
    found = pipe()
    options = builds(found)
    assert found.run is RUNS["flux", "network"]
    wanted = {
        "pretrained_model_name_or_path": "mine.safetensors",
        "ae": "models/flux",
        "t5xxl": "models/flux",
        "max_train_epochs": 40,
        "train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_grad_norm": 0.5,
        "lr_scheduler": "constant_with_warmup",
        "lr_warmup_steps": 20,
        "blocks_to_swap": 8,
        "save_every_n_steps": 100,
        "gradient_checkpointing_cpu_offload": True,
        "save_precision": "bf16",
        "transformer_quantization": "fp8",
        "timestep_sampling": "flux_shift",
        "sigmoid_scale": 1.3,
        "network_dim": 24,
        "network_alpha": None,
        "optimizer_type": "AdamW",
        "optimizer_args": ("betas=(0.9,0.99)", "weight_decay=0.01"),
        "learning_rate": 3e-5,
        "log_with": "wandb",
        "log_tracker_name": "project",
    }
    assert {name: options[name] for name in wanted} == wanted and "not to be seen" not in repr(found)
    assert any(text.startswith("dataset = ") for text in found.conflicts) and len(found.missing) == 1
    shifted = builds(pipe("flux_shift = true", "shift = 2.5"))
    assert (shifted["timestep_sampling"], shifted["discrete_flow_shift"]) == ("shift", 2.5)
    assert builds(pipe("flux_shift = true", 'timestep_sample_method = "uniform"'))["timestep_sampling"] == "uniform"
    assert "pipeline_stages" in " ".join(pipe("epochs = 40", "epochs = 40\npipeline_stages = 2").conflicts)
    with pytest.raises(OptionError, match="for Wan"):
        pipe('type = "flux"', 'type = "wan"')


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


def test_a_configuration_of_simpletuner_becomes_the_same_run() -> None:
    found = simple()
    options = builds(found)
    assert found.run is RUNS["zimage", "network"]
    wanted = {
        "pretrained_model_name_or_path": "Tongyi-MAI/Z-Image",
        "network_dim": 32,
        "network_alpha": None,
        "network_dropout": 0.1,
        "transformer_quantization": "qint8",
        "learning_rate": 2e-4,
        "optimizer_type": "AdamW8bit",
        "lr_scheduler": "polynomial",
        "max_train_steps": 700,
        "max_train_epochs": None,
        "train_batch_size": 3,
        "timestep_sampling": "shift",
        "discrete_flow_shift": 2.0,
        "max_grad_norm": 0.5,
        "save_every_n_steps": 50,
        "save_last_n_steps": 150,
        "resolution": (1024, 1024),
        "caption_dropout_rate": 0.1,
        "sample_prompts": "a dog --d 3 --w 768 --h 512",
        "sample_every_n_steps": 25,
    }
    assert {name: options[name] for name in wanted} == wanted
    assert [text.partition(" = ")[0] for text in found.conflicts] == ["data_backend_config"]
    assert "value by value" in said(simple(grad_clip_method="value"), "max_grad_norm")[1]
    flat_times = builds(simple(flow_use_uniform_schedule=True))
    assert (flat_times["timestep_sampling"], flat_times["discrete_flow_shift"]) == ("sigma", 2.0)
    with pytest.raises(OptionError, match="trains a ControlNet"):
        simple(controlnet=True)
    with pytest.raises(OptionError, match=r"FLUX\.2 dev"):
        simple(model_family="flux2", model_flavour="dev")


# --- all of them ------------------------------------------------------------------------------------------------------

FILES: dict[str, bytes] = {
    "job.yaml": yaml.safe_dump(JOB, sort_keys=False).encode(),
    "run.toml": MUSUBI.encode(),
    "one.json": json.dumps(ONE, indent=1).encode(),
    "main.toml": PIPE.encode(),
    "config.json": json.dumps(SIMPLE, indent=1).encode(),
}
ADDED: dict[str, tuple[str, Any, Callable[[Any], bytes]]] = {
    "ai-toolkit": ("job.yaml", JOB, lambda given: yaml.safe_dump(given, sort_keys=False).encode()),
    "diffusion-pipe": ("main.toml", toml.loads(PIPE), lambda given: toml.dumps(given).encode()),
    "SimpleTuner": ("config.json", SIMPLE, lambda given: json.dumps(given).encode()),
    "OneTrainer": ("preset.json", ONE, lambda given: json.dumps(given).encode()),
    "musubi-tuner": ("run.toml", toml.loads(MUSUBI), lambda given: toml.dumps(given).encode()),
}
"""A file of each program, and how it is written."""


def tables_of(given: Any) -> Iterator[dict[str, Any]]:
    """Every table of a file, the file itself first."""
    if isinstance(given, dict):
        yield given
    for value in given.values() if isinstance(given, dict) else given if isinstance(given, list) else ():
        yield from tables_of(value)


# --- Models that several programs have ----------------------------------------------------------------------------------

KREA_LINE = """accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src/musubi_tuner/krea2_train_network.py \\
    --dit raw.safetensors --vae qwen_image_vae --dataset_config set.toml --sdpa --mixed_precision bf16 \\
    --timestep_sampling krea2_shift --weighting_scheme none --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing \\
    --network_module networks.lora_krea2 --network_dim 32 --network_alpha 32 --max_train_epochs 16 --seed 42 --output_name mine
"""
KREA_PRESET = {
    "base_model_name": "krea/Krea-2-Raw",
    "model_type": "KREA_2",
    "training_method": "LORA",
    "resolution": "512",
    "learning_rate": 3e-4,
    "timestep_distribution": "LOGIT_NORMAL",
    "output_model_format": "DIFFUSERS_LORA",
    "transformer": {"train": True, "weight_dtype": "INT_W8A8"},
    "text_encoder": {"train": False, "weight_dtype": "FLOAT_8"},
}
KREA_PIPE = """micro_batch_size_per_gpu = 1
epochs = 10
output_dir = "out"
dataset = "set.toml"
[model]
type = "krea2"
diffusion_model = "krea2_raw.safetensors"
vae = "qwen_image_vae.safetensors"
text_encoders = [{path = "qwen3vl_4b_bf16.safetensors", type = "krea2"}]
dtype = "bfloat16"
timestep_sample_method = "logit_normal"
[adapter]
type = "lora"
rank = 32
dtype = "bfloat16"
[optimizer]
type = "adamw_optimi"
lr = 2e-5
"""


def test_a_network_that_simpletuner_compiles_is_compiled() -> None:
    names = ("compile", "compile_backend", "compile_scope", "compile_mode")
    for given, wanted in (("inductor", (True, "inductor", "blocks", "reduce-overhead")), ("no", (False, "inductor", "auto", "default"))):
        found = builds(simple(dynamo_backend=given, dynamo_mode="reduce-overhead", dynamo_use_regional_compilation=True))
        assert tuple(map(found.get, names)) == wanted
    lost = simple(dynamo_backend="onnxrt", dynamo_mode="default")
    assert said(lost, "dynamo_backend")[0] == "not supported" and builds(lost)["compile"] is False


LYCORIS = {
    "bypass_mode": True,
    "algo": "lokr",
    "multiplier": 1.0,
    "linear_dim": 10000,
    "linear_alpha": 1,
    "factor": 12,
    "apply_preset": {"target_module": ["Attention"], "module_algo_map": {"Attention": {"factor": 12}, "FeedForward": {"factor": 6}}},
}


def test_the_file_of_lycoris_that_simpletuner_names_is_read_with_it_and_alone(tmp_path: Any) -> None:
    (tmp_path / "config" / "mine").mkdir(parents=True)
    (tmp_path / "config" / "mine" / "lycoris_config.json").write_text(json.dumps(LYCORIS))
    given = {**SIMPLE, "--lora_type": "lycoris", "--lycoris_config": "config/mine/lycoris_config.json"}
    main = tmp_path / "config" / "mine" / "config.json"
    main.write_text(json.dumps(given))
    found = importers.read("config.json", main.read_bytes(), importers.Opened(path=main))
    options = builds(found)
    assert (options["network_type"], options["network_dim"], options["network_alpha"], options["lokr_factor"]) == ("lokr", 4096, None, 12)
    assert said(found, "lycoris_config.apply_preset.module_algo_map.Attention.factor")[0] == "not needed"
    assert said(found, "lycoris_config.apply_preset.module_algo_map.FeedForward.factor")[0] == "not supported"
    assert not [row for row in found.rows if row.verdict == "unknown"]
    alone = importers.read("lycoris_config.json", json.dumps(LYCORIS).encode(), importers.Opened(found.run))
    assert alone.adds and alone.values["network_type"] == "lokr" and alone.values["lokr_factor"] == 12
    absent = builds(simple(lora_type="lycoris", lycoris_config="elsewhere.json"))
    assert absent["network_type"] == "lora"


def test_a_library_of_prompts_that_simpletuner_names_becomes_previews(tmp_path: Any) -> None:
    library = {"portrait": "a woman with blue hair", "place": "a cafe in the morning"}
    (tmp_path / "library.json").write_text(json.dumps(library))
    main = tmp_path / "config.json"
    main.write_text(json.dumps({**SIMPLE, "--user_prompt_library": "library.json"}))
    found = importers.read("config.json", main.read_bytes(), importers.Opened(path=main))
    texts = [SIMPLE["--validation_prompt"], *library.values()]
    assert builds(found)["sample_prompts"].splitlines() == [f"{text} --d 3 --w 768 --h 512" for text in texts]
    alone = importers.read("library.json", json.dumps(library).encode(), importers.Opened(found.run))
    assert alone.adds and alone.values["sample_prompts"].splitlines() == list(library.values())
    assert said(simple(user_prompt_library="elsewhere.json"), "user_prompt_library")[0] == "not supported"


def test_krea_2_of_every_program_is_a_run_on_krea_2() -> None:
    line = importers.read("train.sh", KREA_LINE.encode())
    options = builds(line)
    assert (options["timestep_sampling"], options["vae"], options["network_dim"]) == ("krea2_shift", "qwen_image_vae", 32)
    assert line.conflicts == [], "its line through the sizes is this family's"
    preset = importers.read("#krea2 LoRA.json", json.dumps(KREA_PRESET).encode())
    assert (builds(preset)["transformer_quantization"], builds(preset)["text_encoder_quantization"]) == ("qint8", "qfloat8")
    pipe = importers.read("krea.toml", KREA_PIPE.encode())
    assert (builds(pipe)["text_encoder"], builds(pipe)["timestep_sampling"]) == ("qwen3vl_4b_bf16.safetensors", "sigmoid")
    tuner = importers.read(
        "config.json",
        json.dumps({**SIMPLE, "--model_family": "krea2", "--model_flavour": "turbo", "--validation_guidance": 4.5}).encode(),
    )
    tuned = builds(tuner)
    assert (tuned["pretrained_model_name_or_path"], tuned["sample_cfg_scale"]) == ("krea/Krea-2-Turbo", 5.5)

    def turbo(process: dict[str, Any]) -> None:
        process["model"] = {"arch": "krea2:turbo", "name_or_path": "krea/Krea-2-Turbo", "assistant_lora_path": "adapter.safetensors"}

    toolkit = job(turbo)
    assert builds(toolkit)["training_adapter"] == "adapter.safetensors"
    for found in (line, preset, pipe, tuner, toolkit):
        assert found.run is RUNS["krea2", "network"] and not [row for row in found.rows if row.verdict == "unknown"]
    for change in ({"arch": "krea2:o_edit"}, {"arch": "krea2", "model_kwargs": {"edit": True, "kv_cache": True}}):
        with pytest.raises(OptionError, match="Krea 2 with control images, which this version does not train"):
            job(lambda process: process.update(model={"name_or_path": "krea/Krea-2-Raw", **change}))  # noqa: B023


KONTEXT_LINE = """accelerate launch --mixed_precision bf16 src/musubi_tuner/flux_kontext_train_network.py --dit kontext.safetensors \\
    --vae ae.safetensors --text_encoder1 t5xxl_fp16.safetensors --text_encoder2 clip_l.safetensors --dataset_config data.toml --sdpa \\
    --mixed_precision bf16 --timestep_sampling flux_shift --weighting_scheme none --fp8_t5 --network_module networks.lora_flux \\
    --network_dim 32 --max_train_epochs 16 --output_name mine
"""


def test_kontext_of_every_program_is_a_run_on_kontext() -> None:
    line = importers.read("train.sh", KONTEXT_LINE.encode())
    options = builds(line)
    assert [options[name] for name in ("ae", "t5xxl", "clip_l")] == ["ae.safetensors", "t5xxl_fp16.safetensors", "clip_l.safetensors"]
    assert (options["timestep_sampling"], options["text_encoder_quantization"]) == ("flux_shift", "qfloat8")
    tuner = simple(model_family="flux", model_flavour="kontext")
    assert builds(tuner)["pretrained_model_name_or_path"] == "black-forest-labs/FLUX.1-Kontext-dev"
    toolkit = job(lambda process: process.update(model={"arch": "flux_kontext", "name_or_path": "black-forest-labs/FLUX.1-Kontext-dev"}))
    pipe = importers.read(
        "kontext.toml", KREA_PIPE.replace('type = "krea2"\ndiffusion', 'type = "flux"\ndiffusion').replace("krea2_raw", "kontext").encode()
    )
    for found in (line, tuner, toolkit, pipe):
        assert found.run is RUNS["kontext", "network"] and not [row for row in found.rows if row.verdict == "unknown"]


@pytest.mark.parametrize("program", ADDED)
def test_a_key_that_a_program_adds_tomorrow_is_unknown_in_every_table_and_not_dropped(program: str) -> None:
    name, given, written = ADDED[program]
    kept, silent = list(tables_of(given)), []
    for place, table_there in enumerate(kept):
        if "version" in table_there or any(name.endswith("_token") for name in table_there):
            continue  # A table of secrets, of which nothing is shown, and one that is written into the saved file as it is.
        changed = copy.deepcopy(given)
        list(tables_of(changed))[place]["made_up_today"] = 3
        found = importers.read(name, written(changed))
        rows = [row for row in found.rows if row.key.endswith("made_up_today")]
        if [row.verdict for row in rows] != ["unknown"] or program not in rows[0].text:
            silent.append((list(table_there)[:3], [(row.key, row.verdict, row.text) for row in rows]))
    assert silent == []
    builds(found)


def test_a_setting_of_simpletuner_that_begins_as_others_do_is_unknown() -> None:
    assert {said(simple(**{name: 3}), name)[0] for name in ("validation_made_up", "vae_enable_made_up", "accelerate_made_up")} == {
        "unknown"
    }


def test_numbers_without_end_are_sentences() -> None:
    for found, key in (
        (one(transformer={"train": True, "offload_fraction": 1e308}), "transformer.offload_fraction"),
        (one(transformer={"train": True, "offload_fraction": math.inf}), "transformer.offload_fraction"),
        (simple(checkpoints_total_limit=1e200, checkpoint_step_interval=1e200), "checkpoints_total_limit"),
        (job(lambda process: process["save"].update(save_every=1e200, max_step_saves_to_keep=1e200)), "save.max_step_saves_to_keep"),
    ):
        assert said(found, key)[0] in ("not supported", "not needed"), said(found, key)
        builds(found)
    for sides in ("[inf]", "[[1e200, 1e200]]", "inf"):
        found = importers.read(
            "data.toml", f'resolutions = {sides}\n[[directory]]\npath = "a"\n'.encode(), importers.Opened(run=RUNS["flux", "network"])
        )
        assert said(found, "dataset.resolutions")[0] == "not supported", sides


def _damaged(text: bytes, rng: random.Random) -> bytes:
    """A text with some bytes, or a whole line, changed, doubled, or gone."""
    data = bytearray(text)
    for _ in range(rng.randint(1, 2)):
        place, kind = rng.randrange(len(data) or 1), rng.randrange(6)
        if kind == 0:
            data[place : place + rng.randint(1, 40)] = b""
        elif kind == 1:
            data[place:place] = rng.choice([b"\x00", b"{", b"]", b": ", b"'", b"\n", b"1e999", b"-", b"null", b"\xff", b"[[", b"&a *a"])
        elif kind == 2:
            data[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 3:
            data = data[:place]
        else:
            lines = bytes(data).split(b"\n")
            line = rng.randrange(len(lines))
            value = rng.choice([b"true", b"[]", b"{}", b"nan", b"-1", b"'x'", b"[1, [2]]", b"1e400", b"~", b'"\\ud800"', b"10" * 40])
            name = lines[line].partition(b":" if b":" in lines[line] else b"=")
            lines[line] = lines[line] * 2 if kind == 4 else name[0] + name[1] + value + (b"," if lines[line].endswith(b",") else b"")
            data = bytearray(b"\n".join(lines))
    return bytes(data)


def test_damaged_files_of_other_trainers_are_answered_with_sentences() -> None:
    assert _read_damaged(random.Random(20), 60) > 5


@pytest.mark.long
def test_500_files_damaged_today_are_answered_with_sentences() -> None:
    assert _read_damaged(random.Random(random.SystemRandom().randrange(2**32)), 500) > 50


def _read_damaged(rng: random.Random, count: int) -> int:
    """How many of so many damaged files are read. Each is read, or refused; whatever is read builds and has a row for each key."""
    read = 0
    for _ in range(count):
        name = rng.choice(list(FILES))
        data = _damaged(FILES[name], rng)
        try:
            found = importers.read(name, data)
        except OptionError as err:
            assert str(err).strip() and "Traceback" not in str(err)
            continue
        read += 1
        try:
            builds(found)
        except OptionError as err:
            raise AssertionError((name, data, found.missing)) from err
    return read


def test_paths_of_keys_are_opened_and_no_deeper_than_they_are_read() -> None:
    deep: Any = 1
    for _ in range(50):
        deep = {"a": deep}
    assert table.opened({"x": [{"y": 1}, {"y": {"z": [1, 2]}}], "e": {}, "l": []}) == {"x[0].y": 1, "x[1].y.z": [1, 2], "e": {}, "l": []}
    ((key, value),) = table.opened(deep).items()
    assert key.count("a") == table.MAX_DEPTH + 1 and isinstance(value, dict)


def test_a_file_that_two_programs_could_own_asks_and_its_name_answers() -> None:
    both = json.dumps({**ONE, **SIMPLE}).encode()
    with pytest.raises(OptionError, match=r"configuration of OneTrainer .* or a configuration of SimpleTuner .*which of them"):
        importers.read("both.json", both)
    assert "OneTrainer" in importers.read("onetrainer-both.json", both).origin
    assert "SimpleTuner" in importers.read("simpletuner-both.json", both).origin


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_program_is_a_config_file_on_the_command_line(name: str, tmp_path: Any) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    found = importers.read(name, FILES[name])
    more = {"train_data_dir": "d"} if any(text.startswith("train_data_dir") for text in found.missing) else {}
    wanted = flat.build(found.run, {**found.values, **more, "output_name": "mine"})
    argv = ["--config_file", str(path), "--output_name", "mine", *(word for key, value in more.items() for word in (f"--{key}", value))]
    asked = flat.parse_cli(found.run, argv, programs.of_config_file)
    assert asked.options == wanted
    lost = [row for row in found.rows if row.verdict in ("not supported", "unknown")]
    assert all(any(row.key in note and row.text in note for note in asked.notes) for row in lost) and found.origin in asked.notes[0]
    other = next(run for run in RUNS.values() if run is not found.run)
    with pytest.raises(OptionError, match=f"start {found.run.script}"):
        flat.parse_cli(other, argv, programs.of_config_file)


ANIMA_PIPE = (
    KREA_PIPE.replace("krea2", "anima").split("diffusion_model")[0]
    + """transformer_path = "anima-base-v1.0.safetensors"
vae_path = "qwen_image_vae.safetensors"
llm_path = "qwen_3_06b_base.safetensors"
llm_adapter_lr = 0
"""
    + KREA_PIPE[KREA_PIPE.index("dtype =") :]
)


def test_anima_of_other_programs_is_a_run_on_anima() -> None:
    pipe = importers.read("anima.toml", ANIMA_PIPE.encode())
    options = builds(pipe)
    assert options["pretrained_model_name_or_path"] == "anima-base-v1.0.safetensors"
    assert (options["vae"], options["text_encoder"]) == ("qwen_image_vae.safetensors", "qwen_3_06b_base.safetensors")
    assert said(pipe, "model.llm_adapter_lr")[0] == "not needed"
    trained = importers.read("anima.toml", ANIMA_PIPE.replace("llm_adapter_lr = 0", "llm_adapter_lr = 1e-6").encode())
    assert said(trained, "model.llm_adapter_lr")[0] == "not supported"
    preset = {**KREA_PRESET, "base_model_name": "circlestone-labs/Anima-Base-v1.0-Diffusers", "model_type": "ANIMA"}
    assert builds(importers.read("#anima LoRA.json", json.dumps(preset).encode()))["text_encoder_quantization"] == "qfloat8"


def test_flags_in_the_prompts_of_a_job_are_previews_here() -> None:
    """That program cuts a prompt wherever two dashes stand; what it reads there wins over the sample's own keys."""

    def edits(process: dict[str, Any]) -> None:
        process["model"] = {"arch": "flux_kontext", "name_or_path": "black-forest-labs/FLUX.1-Kontext-dev"}
        process["sample"] = {"prompts": ["make it smile  --ctrl_img refs/a b.jpg --w 512 --steps 9 --m 0.5", "a--d 7"], "seed": 1}

    found = job(edits)
    text = builds(found)["sample_prompts"]
    assert text.splitlines() == ["make it smile --w 512 --d 1 --s 9 --ci refs/a b.jpg", "a --d 7"]
    assert "without --m" in said(found, "sample.prompts")[1]
    assert table.line_of_prompt("a --w dog\n-- cat", n="b --h 3") == "a - w dog -- cat --n b - h 3"


def test_whole_matrices_of_lycoris_have_no_alpha(tmp_path: Any) -> None:
    """peft divides alpha by the rank whatever the factors are: an alpha of 1 would have made such a network learn 4096 times less."""
    (tmp_path / "lycoris_config.json").write_text(
        json.dumps({"algo": "lokr", "linear_dim": 10000, "linear_alpha": 1, "factor": 16}), encoding="utf-8"
    )
    main = tmp_path / "config.json"
    given = {**SIMPLE, "--lora_type": "lycoris", "--lora_alpha": 128, "--lycoris_config": "config/mine/lycoris_config.json"}
    main.write_text(json.dumps(given), encoding="utf-8")
    found = importers.read("config.json", main.read_bytes(), importers.Opened(path=main))
    options = builds(found)
    assert (options["network_type"], options["network_dim"], options["network_alpha"]) == ("lokr", 4096, None)
    assert said(found, "lora_alpha") == ("not needed", "lycoris_config says it")
    full = json.dumps({"algo": "lokr", "full_matrix": True, "linear_alpha": 1}).encode()
    alone = importers.read("lycoris_config.json", full, importers.Opened(found.run))
    assert (alone.values["network_dim"], alone.values["network_alpha"]) == (4096, None)
    kohya = b'network_module = "lycoris.kohya"\nnetwork_args = ["algo=lokr"]\nnetwork_dim = 100000\npretrained_model_name_or_path = "xl"\n'
    assert builds(importers.read("x.toml", kohya))["network_alpha"] is None


def test_curves_of_onetrainer_become_the_nearest_normal_density() -> None:
    """Shares of the draws below each time differ by no more than the row says; a uniform density differed by 9 and by 25 %."""
    for kind, weight, bias, least in (("INVERTED_PARABOLA", 7.7, 0.0, 0.015), ("SIGMOID", 5.0, 0.0, 0.03), ("COS_MAP", 0.0, 0.0, 0.03)):
        found = one(timestep_distribution=kind, noising_weight=weight, noising_bias=bias, timestep_shift=2.0)
        options = builds(found)
        assert options["timestep_sampling"] == "logit_normal" and not [text for text in found.conflicts if "timestep" in text]
        from sd_scripts.programs.onetrainer import training

        times = [(index + 0.5) / 2000 for index in range(2000)]
        sums = [0.0]
        for time in times:
            sums.append(sums[-1] + training._CURVES[kind](time, weight, bias + 0.5))
        normal = NormalDist(options["logit_mean"], options["logit_std"])
        below = [normal.cdf(math.log(2.0 * time / (1 - time))) for time in times]
        assert max(abs(one - part / sums[-1]) for one, part in zip(below, sums[1:], strict=True)) < least
