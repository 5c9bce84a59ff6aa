"""Configurations of OneTrainer as our options."""

from __future__ import annotations

import json
import math
from statistics import NormalDist

import pytest

from kohya_like import importers
from sd_scripts.families import RUNS
from sd_scripts.schema.errors import OptionError
from tests.ui.foreign_files import builds, one, said


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


_PART = {"__version": 0, "model_name": "", "train": True, "stop_training_after": 30, "stop_training_after_unit": "EPOCH"}
_PART |= {"learning_rate": 5e-6, "weight_dtype": "INT_8", "gradient_checkpointing": False, "offload_fraction": 0.5}


def test_parts_of_other_models_in_a_saved_configuration_of_onetrainer_say_nothing() -> None:
    """It saves tables for the parts of all models, with their defaults, on among them."""
    own = {"train": False, "weight_dtype": "FLOAT_16", "stop_training_after_unit": "NEVER"}
    file = {
        "__version": 10,
        "training_method": "LORA",
        "model_type": "STABLE_DIFFUSION_XL_10_BASE",
        "base_model_name": "m",
        "learning_rate": 1e-4,
        "unet": {"__version": 0, "train": True, "weight_dtype": "FLOAT_16", "gradient_checkpointing": True},
        "transformer": _PART,
        "text_encoder": own,
        "text_encoder_2": own,
        "text_encoder_3": _PART,
        "text_encoder_4": _PART,
        "vae": {**_PART, "weight_dtype": "FLOAT_32"},
        "optimizer": {"__version": 0, "optimizer": "ADAMW"},
        "concepts": [{"__version": 2, "path": "a", "image": {"__version": 0}, "text": {"__version": 0}}],
        "layer_filter": "",
        "layer_filter_preset": "full",
    }
    found = importers.read("x.json", json.dumps(file).encode())
    options = builds(found)
    assert not options["train_text_encoder"] and options["gradient_checkpointing"] and options["unet_lr"] is None
    assert not options["blocks_to_swap"] if "blocks_to_swap" in options else True
    assert not [row for row in found.rows if row.verdict == "unknown"]
    (conflict,) = found.conflicts
    assert conflict.startswith("layer_filter_preset")
    assert said(found, "text_encoder_3.train")[1] == "it is for another model's parts"
    file |= {"model_type": "Z_IMAGE", "text_encoder": _PART, "transformer": {**own, "train": True}}
    found = importers.read("x.json", json.dumps(file).encode())
    assert [text.partition(" ")[0] for text in found.conflicts] == ["layer_filter_preset"], "it trains no text encoder of Z-Image"
    assert builds(found)["text_encoder_quantization"] != "none"
    file |= {"model_type": "STABLE_DIFFUSION_15", "text_encoder": _PART, "epochs": 100}
    conflicts = importers.read("x.json", json.dumps(file).encode()).conflicts
    assert [text.partition(" ")[0] for text in conflicts] == ["text_encoder.stop_training_after_unit", "layer_filter_preset"]
    assert len(importers.read("x.json", json.dumps({**file, "epochs": 30}).encode()).conflicts) == 1, "the run ends before"


def test_adapters_in_a_configuration_for_a_whole_model_are_not_needed() -> None:
    file = {"training_method": "FINE_TUNE", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "base_model_name": "m", "peft_type": "LORA"}
    file |= {
        "lora_rank": 16,
        "lora_alpha": 1.0,
        "lora_decompose": False,
        "lora_model_name": "",
        "transformer": {"weight_dtype": "BFLOAT_16"},
    }
    found = importers.read("x.json", json.dumps({**file, "unet": {"weight_dtype": "FLOAT_32"}}).encode())
    assert {said(found, key)[0] for key in ("peft_type", "lora_rank", "lora_alpha", "lora_decompose")} == {"not needed"}
    assert not builds(found)["full_bf16"], "it is the transformer's, which SDXL has not"


def test_configurations_of_earlier_versions_of_onetrainer_are_brought_up_to_date() -> None:
    file = {
        "training_method": "LORA",
        "model_type": "FLUX_DEV_1",
        "base_model_name": "org/flux",
        "prior": {"train": True, "weight_dtype": "NFLOAT_4"},
        "text_encoder_2_weight_dtype": "INT_8",
        "train_text_encoder": False,
        "lora_layers": "attn",
        "lora_layer_preset": None,
        "save_after": 5,
        "save_after_unit": "EPOCH",
        "optimizer": "ADAFACTOR",
        "optimizer_weight_decay": 0.02,
        "align_prop": False,
        "align_prop_steps": 20,
        "concepts": [{"path": "a", "include_subdirectories": False, "repeats": 4, "validation_concept": False}],
    }
    found = importers.read("x.json", json.dumps(file).encode())
    options = builds(found)
    wanted = {"transformer_quantization": "nf4", "text_encoder_quantization": "qint8", "train_text_encoder": False}
    wanted |= {"save_every_n_epochs": 5, "optimizer_type": "Adafactor", "dataset_repeats": 4}
    assert {name: options[name] for name in wanted} == wanted and "weight_decay=0.02" in options["optimizer_args"]
    keys = {row.key for row in found.rows}
    assert {"prior.weight_dtype", "lora_layers", "save_after", "optimizer_weight_decay", "concepts[0].repeats"} <= keys
    assert not [row for row in found.rows if row.verdict == "unknown"]
    sdxl = {"training_method": "FINE_TUNE", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "base_model_name": "m", "min_snr_gamma": 5.0}
    sdxl |= {"unet_learning_rate": 1e-5, "train_text_encoder": True, "text_encoder_learning_rate": 3e-6}
    found = importers.read("x.json", json.dumps({**sdxl, "train_text_encoder_epochs": 3}).encode())
    options = builds(found)
    assert (options["min_snr_gamma"], options["unet_lr"], options["text_encoder_lr"]) == (5.0, 1e-5, (3e-6,))
    assert [text for text in found.conflicts if "trained to the end" in text]
