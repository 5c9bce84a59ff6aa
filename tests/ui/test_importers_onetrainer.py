"""Configurations of OneTrainer as our options."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest

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
