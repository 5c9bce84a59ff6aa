"""Configurations of OneTrainer as our options."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import pytest
import torch

from kohya_like import importers
from sd_scripts.families import RUNS
from sd_scripts.library.train.optim import key_values, make_optimizer
from sd_scripts.runs.schedules import factor_at
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.optimizer import OptimizerOptions
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
            at = time / (2 - time) if kind == "SIGMOID" else time  # Its shift of 2 is taken off twice there.
            sums.append(sums[-1] + training._CURVES[kind](at, weight, bias + 0.5))
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


RATES = ("learning_rate_scheduler", "learning_rate_cycles", "learning_rate_min_factor", "learning_rate_warmup_steps")


@pytest.mark.parametrize("floor", [0.0, 0.15])
@pytest.mark.parametrize(
    ("name", "curve"),
    [
        ("COSINE", lambda p, n: 0.5 + 0.5 * math.cos(math.pi * p)),
        ("COSINE_WITH_RESTARTS", lambda p, n: 0.5 + 0.5 * math.cos(2 * math.pi * n * p)),
        ("COSINE_WITH_HARD_RESTARTS", lambda p, n: 0.5 + 0.5 * math.cos(math.pi * (n * p % 1))),
        ("CONSTANT", lambda p, n: 1.0),
        ("LINEAR", lambda p, n: 1 - p),
    ],
)
def test_rates_of_onetrainer_fall_as_there(name: str, curve: Callable[[float, float], float], floor: float) -> None:
    """Its restarts are whole waves, and its hard ones what others call restarts."""
    found = one(**dict(zip(RATES, (name, 3.0, floor, 40.0), strict=True)), gradient_accumulation_steps=2)
    told = [row.text for row in found.rows if row.key == RATES[2] and row.verdict == "not supported"]
    floor = 0.0 if told else floor
    assert not told or name in ("LINEAR", "COSINE_WITH_HARD_RESTARTS")
    options: Any = flat.build(found.run, {**found.values, "output_dir": "o"})
    ours = factor_at(options.optimizer, 500)
    for step in range(500):
        theirs = step / 20 if step < 20 else floor + (1 - floor) * curve((step - 20) / 480, 3.0)
        assert ours(step) == pytest.approx(theirs if name != "CONSTANT" or step < 20 else 1.0, abs=1e-9), step


def test_the_average_of_onetrainer_forgets_as_fast_here() -> None:
    """It moves the average in every fifth step, where the file says nothing else."""
    for given, interval, decay in (
        ({}, 5, 0.999),
        ({"ema_decay": 0.98}, 5, 0.98),
        ({"ema_update_step_interval": 3, "ema_decay": 0.9}, 3, 0.9),
    ):
        options = builds(one(ema="GPU", **given))
        assert options["use_ema"] and options["ema_decay"] ** (interval * 40) == pytest.approx(decay**40, abs=1e-4)
    assert builds(one(ema="GPU", ema_update_step_interval=1, ema_decay=0.97))["ema_decay"] == 0.97


def test_what_onetrainer_takes_where_the_file_says_nothing() -> None:
    bare = {
        "training_method": "LORA",
        "model_type": "STABLE_DIFFUSION_XL_10_BASE",
        "base_model_name": "a/b",
        "gradient_accumulation_steps": 8,
    }
    text = {"enable_tag_shuffling": True, "tag_delimiter": ";"}
    found = importers.read("x.json", json.dumps({**bare, "masked_training": True, "concepts": [{"path": "a", "text": text}]}).encode())
    options = builds(found)
    wanted = {"lr_warmup_steps": 25, "masked_loss_outside_weight": 0.1, "keep_tokens": 1, "shuffle_caption": True, "random_crop": True}
    assert {name: options[name] for name in wanted} == wanted and options["caption_separator"] == ";"
    assert said(found, "concepts[0].text.enable_tag_shuffling")[1].startswith("shuffle_caption")
    assert any(text.startswith("masked_training: ") for text in found.conflicts)
    assert not any(text.startswith("masked_training") for text in one(masked_training=True, unmasked_probability=0.0).conflicts)


@pytest.mark.parametrize(
    ("mode", "kept", "option", "told"),
    [
        ("FULL", 0, "caption_dropout_rate", False),
        ("FULL", 2, "caption_tag_dropout_rate", True),
        (None, None, "caption_tag_dropout_rate", True),
        ("RANDOM", 0, "caption_tag_dropout_rate", False),
        ("RANDOM WEIGHTED", 1, "caption_tag_dropout_rate", True),
    ],
)
def test_tags_that_onetrainer_drops_are_dropped_here_or_the_difference_is_said(
    mode: str | None, kept: int | None, option: str, told: bool
) -> None:
    """FULL drops all tags behind those that are kept, RANDOM each by itself."""
    text = {"tag_dropout_enable": True, "tag_dropout_mode": mode, "tag_dropout_probability": 0.3, "keep_tags_count": kept}
    concept = {"path": "a", "text": {name: value for name, value in text.items() if value is not None}}
    found = one(concepts=[concept])
    options = builds(found)
    rates = {name: options[name] for name in ("caption_dropout_rate", "caption_tag_dropout_rate")}
    assert rates == {**dict.fromkeys(rates, 0.0), option: 0.3} and options["keep_tokens"] == (1 if kept is None else kept)
    assert any("tag_dropout_probability" in text for text in found.conflicts) is told


def test_losses_and_noise_of_onetrainer_that_are_others_here_say_so() -> None:
    kind = {"model_type": "STABLE_DIFFUSION_XL_10_BASE"}
    debiased = one(**kind, loss_weight_fn="DEBIASED_ESTIMATION", force_v_prediction=True)
    assert builds(debiased)["debiased_estimation_loss"] and any("SNR + 1" in text for text in debiased.conflicts)
    assert not any("SNR + 1" in text for text in one(**kind, loss_weight_fn="DEBIASED_ESTIMATION").conflicts)
    noisy = one(**kind, perturbation_noise_weight=0.1)
    assert builds(noisy)["ip_noise_gamma"] == 0.1 and any("perturbation_noise_weight" in text for text in noisy.conflicts)
    assert "without the factor 2" in said(one(mse_strength=2.0), "mse_strength")[1]
    assert "twice as large" in said(one(mse_strength=0.0, huber_strength=1.0), "mse_strength")[1]
    shifted = one(**kind, timestep_distribution="UNIFORM", timestep_shift=3.0)
    assert builds(shifted)["timestep_sampling"] == "uniform" and any("shift of 3" in text for text in shifted.conflicts)


BEGIN = {
    "ADAM": {"weight_decay": 0.0},
    "ADAM_8BIT": {"weight_decay": 0.0},
    "ADAMW": {},
    "ADAFACTOR": {},
    "AdEMAMix": {"weight_decay": 0.01},
    "CAME": {"weight_decay": 0.01},
    "DADAPT_ADAN": {"weight_decay": 0.02},
    "LAMB": {"eps": 1e-8},
    "LARS": {"momentum": 0.0},
    "LION": {},
    "LION_8BIT": {"betas": (0.9, 0.999)},
    "SCHEDULE_FREE_ADAMW": {"weight_decay": 0.01},
    "SCHEDULE_FREE_SGD": {"weight_decay": 0.01},
}
"""What its optimizers take where a file says nothing and ours take something else."""


@pytest.mark.parametrize("name", BEGIN)
def test_what_the_file_leaves_out_of_its_optimizer_is_that_of_onetrainer(name: str) -> None:
    def arguments(**given: float) -> dict[str, Any]:
        found = builds(one(optimizer={"optimizer": name, **given}))
        made = OptimizerOptions(**{option: found[option] for option in ("optimizer_type", "optimizer_args")}, learning_rate=1e-3)
        if not made.optimizer_type.endswith("8bit"):
            make_optimizer(made, [{"params": [torch.nn.Parameter(torch.ones(2, 2))], "lr": 1e-3}])
        return key_values("optimizer_args", made.optimizer_args or ())

    assert arguments() == BEGIN[name]
    assert arguments(weight_decay=0.03) == {**BEGIN[name], "weight_decay": 0.03}
    if "betas" in BEGIN[name]:
        assert arguments(beta1=0.8, beta2=0.7)["betas"] == (0.8, 0.7)


def test_adafactor_of_onetrainer_keeps_its_numbers() -> None:
    numbers = {"scale_parameter": True, "clip_threshold": 0.8, "decay_rate": -0.7, "weight_decay": 0.01}
    found = one(optimizer={"optimizer": "ADAFACTOR", **numbers, "relative_step": False, "warmup_init": False})
    assert set(builds(found)["optimizer_args"]) == {f"{name}={value}" for name, value in numbers.items()}
    assert not any("Adafactor" in text for text in found.conflicts)
    own = one(optimizer={"optimizer": "ADAFACTOR", "relative_step": True})
    assert any(text.startswith("optimizer.relative_step = ") for text in own.conflicts) and builds(own)


@pytest.mark.parametrize("shift", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("weight", [2.0, 5.0, 10.0])
def test_a_sigmoid_of_times_with_a_shift_is_onetrainers_or_is_said_to_be_another(weight: float, shift: float) -> None:
    """It weights a shifted time by the curve at the time from which the shift has been taken off twice."""
    found = one(timestep_distribution="SIGMOID", noising_weight=weight, noising_bias=0.0, timestep_shift=shift)
    options = builds(found)
    if any("SIGMOID" in text for text in found.conflicts):
        return
    t = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    once = t / (shift - (shift - 1) * t)
    twice = once / (shift - (shift - 1) * once)
    density = torch.sigmoid(weight * (twice - 0.5)) * shift / (shift - (shift - 1) * t) ** 2
    theirs = density.cumsum(0) / density.sum()
    ours = torch.special.ndtr((torch.logit(t) - options["logit_mean"]) / options["logit_std"])
    assert options["timestep_sampling"] == "logit_normal" and float((ours - theirs).abs().max()) < 0.032


@pytest.mark.parametrize(
    ("kind", "given", "wanted"),
    [
        ("FLUX_DEV_1", {}, {"t5xxl_max_token_length": 77}),
        ("FLUX_DEV_1", {"text_encoder_2_sequence_length": 256}, {"t5xxl_max_token_length": 256}),
        # All that its tokenizer takes, 512, as here.
        ("FLUX_DEV_1", {"text_encoder_2_sequence_length": None}, {"t5xxl_max_token_length": None}),
        ("FLUX_2", {"base_model_name": "x/klein", "text_encoder_sequence_length": 128}, {"max_token_length": 128}),
        ("CHROMA_1", {"text_encoder_2_sequence_length": 77}, {"t5xxl_max_token_length": None}),
    ],
)
def test_as_much_of_a_caption_is_read_as_in_onetrainer(kind: str, given: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = builds(one(model_type=kind, **given))
    assert {name: found[name] for name in wanted} == wanted
