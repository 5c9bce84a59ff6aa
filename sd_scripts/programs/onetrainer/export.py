"""What a configuration of OneTrainer says otherwise than by the rules of its keys, for the way back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sd_scripts.runs.layers import layers_of
from sd_scripts.schema.prompts import PromptSpec
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.sheet import parts

from ..table import shifted
from .model import KINDS, PRECISIONS, backbone_of

_VERSION, _CONCEPT_VERSION = 11, 2
"""Those of its files at the commit; one without is migrated from the first."""
_OPTIMIZERS = {"AdamW8bit": "ADAMW_8BIT", "Lion8bit": "LION_8BIT", "PagedAdamW8bit": "ADAMW_8BIT"}
_SCHEDULES = {
    "constant": "CONSTANT",
    "constant_with_warmup": "CONSTANT",
    "linear": "LINEAR",
    "cosine": "COSINE",
    "cosine_with_min_lr": "COSINE",
    "cosine_with_restarts": "COSINE_WITH_HARD_RESTARTS",
}
_FORMATS = {"kohya": "KOHYA_LORA", "diffusers": "DIFFUSERS_LORA", "comfyui": "COMFY_LORA"}
_BITS = {"qfloat8": "FLOAT_8", "qint8": "INT_8", "nf4": "NFLOAT_4", "fp8": "FLOAT_W8A8"}


def said_otherwise(
    model: str, run: type[RunOptions], values: Mapping[str, Any], arguments: Mapping[str, object], layers: Mapping[str, Any]
) -> dict[str, object]:
    """Values of keys by path, for that program's name of a model; arguments are the optimizer's, by name."""
    return {
        "__version": _VERSION,
        "concepts[].__version": _CONCEPT_VERSION,
        "model_type": model,
        "training_method": "LORA" if run.method == "network" else "FINE_TUNE",
        "base_model_name": values["pretrained_model_name_or_path"],
        "learning_rate": values["learning_rate"],
        "ema_decay": values["ema_decay"],
        "ema_update_step_interval": 1,
        "output_model_destination": f"{values['output_dir']}/{values['output_name']}.safetensors",
        "output_model_format": _FORMATS.get(values["save_model_as"], "LEGACY_LORA") if run.method == "network" else "LEGACY_SAFETENSORS",
        "train_dtype": PRECISIONS.get(values["mixed_precision"], "BFLOAT_16"),
        "output_dtype": PRECISIONS.get(values["save_precision"], "BFLOAT_16"),
        "resolution": _resolution(values),
        **_parts(backbone_of(model), run, values),
        **_rate(values),
        **_times(values),
        **_loss(values),
        **_adapter(values, layers),
        "optimizer.optimizer": _OPTIMIZERS.get(values["optimizer_type"], values["optimizer_type"].upper()),
        **{f"optimizer.{name}": value for name, value in _without_pairs(arguments).items()},
        "optimizer.fused_back_pass": values["fused_backward_pass"] or None,
        "clip_grad_norm": values["max_grad_norm"],
        "ema": "GPU" if values["use_ema"] else "OFF",
        "masked_training": values["masked_loss"],
        "unmasked_probability": 0.0,
        "unmasked_weight": values["masked_loss_outside_weight"],
        "normalize_masked_area_loss": values["normalize_masked_loss"],
        **_every("save_every", "save_every_n", values),
        **_every("sample_after", "sample_every_n", values),
        "concepts[].path": values["train_data_dir"],
        "concepts[].name": values["instance_prompt"] or "images",
        "concepts[].include_subdirectories": True,
        "concepts[].balancing": float(values["dataset_repeats"]),
        "concepts[].image.enable_crop_jitter": bool(values["random_crop"]),
        "concepts[].text.tag_dropout_enable": bool(values["caption_tag_dropout_rate"]) or None,
        "concepts[].text.tag_dropout_mode": "RANDOM" if values["caption_tag_dropout_rate"] else None,
    }


def _resolution(values: Mapping[str, Any]) -> str:
    width, height = values["resolution"]
    return ",".join(map(str, [*values["additional_resolutions"], width])) if width == height else f"{width}x{height}"


def _parts(network: str, run: type[RunOptions], values: Mapping[str, Any]) -> dict[str, object]:
    """What is trained, in which bits it is kept, and what keeps activations small. Text encoders are trained there unless it is said."""
    bits = values["transformer_quantization"] or "none"
    own = (
        "BFLOAT_16"
        if values["full_bf16"]
        else "FLOAT_32"
        if run.method == "full"
        else PRECISIONS.get(values["mixed_precision"], "BFLOAT_16")
    )
    texts, blocks = values["text_encoder_quantization"] or "none", layers_of(run.family)
    return {
        f"{network}.train": values["train_unet"] is not False,
        f"{network}.weight_dtype": _BITS.get(bits, own),
        f"{network}.offload_fraction": values["blocks_to_swap"] / blocks.blocks if blocks and values["blocks_to_swap"] else 0.0,
        f"{network}.learning_rate": values["unet_lr"],
        f"{network}.gradient_checkpointing": values["gradient_checkpointing"],
        f"{network}.activation_offloading": values["gradient_checkpointing_cpu_offload"],
        **{f"{part}.train": bool(values["train_text_encoder"]) for part in ("text_encoder", "text_encoder_2")},
        "text_encoder.weight_dtype": _BITS.get(texts),
        "unet.dropout_probability": None,
        "unet.guidance_scale": None,
        "text_encoder.dropout_probability": values["caption_dropout_rate"],
        "vae.model_name": values["vae"] or values["ae"],
        "text_encoder.model_name": values["text_encoder"],
        "vae.weight_dtype": PRECISIONS.get(values["vae_dtype"]),
        "transformer.guidance_scale": values["guidance_scale"],
    }


def _rate(values: Mapping[str, Any]) -> dict[str, object]:
    warm, schedule = values["lr_warmup_steps"], values["lr_scheduler"]
    steps = warm * values["gradient_accumulation_steps"] if warm > 1 else warm
    return {
        "learning_rate_scheduler": _SCHEDULES.get(schedule, "COSINE"),
        "learning_rate_warmup_steps": 0 if schedule == "constant" else steps,
        "learning_rate_cycles": values["lr_scheduler_num_cycles"] if schedule == "cosine_with_restarts" else None,
        "learning_rate_min_factor": values["lr_scheduler_min_lr_ratio"] if schedule == "cosine_with_min_lr" else None,
    }


def _times(values: Mapping[str, Any]) -> dict[str, object]:
    """A density of times, as a distribution and a shift."""
    kind, shift = values["timestep_sampling"], values["discrete_flow_shift"] or 1.0
    spread = (values["sigmoid_scale"] or 1.0) - 1
    normal = {"timestep_distribution": "LOGIT_NORMAL", "noising_weight": spread}
    # Bounds come before the shift there.
    before = shift if kind in ("shift", "sigma") else 1.0
    bounds = {name: values[f"{name}_timestep"] for name in ("min", "max") if values[f"{name}_timestep"] is not None}
    cut = {f"{name}_noising_strength": round(shifted(bound / 1000, 1 / before), 6) for name, bound in bounds.items()}
    if kind == "sigmoid":
        return {**normal, **cut}
    if kind == "shift":
        return {**normal, "timestep_shift": shift, **cut}
    if str(kind).endswith("_shift"):
        return {**normal, "dynamic_timestep_shifting": True, **cut}
    if kind == "logit_normal":
        return {**normal, "noising_weight": (values["logit_std"] or 1.0) - 1, "noising_bias": values["logit_mean"] or 0.0, **cut}
    if kind == "mode":
        return {"timestep_distribution": "HEAVY_TAIL", "noising_weight": values["mode_scale"], **cut}
    return {"timestep_distribution": "UNIFORM", "timestep_shift": shift if kind == "sigma" else 1.0, **cut}


def _loss(values: Mapping[str, Any]) -> dict[str, object]:
    kind = {"l1": "mae", "huber": "huber"}.get(values["loss_type"], "mse")
    weight, strength = ("MIN_SNR_GAMMA", values["min_snr_gamma"]) if values["min_snr_gamma"] else ("CONSTANT", None)
    return {
        **{f"{name}_strength": float(name == kind) for name in ("mse", "mae", "huber")},
        "huber_delta": values["huber_c"] if kind == "huber" else None,
        "loss_weight_fn": "DEBIASED_ESTIMATION" if values["debiased_estimation_loss"] else weight,
        "loss_weight_strength": strength,
    }


def _adapter(values: Mapping[str, Any], layers: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    kind = values["network_type"]
    if kind is None:
        return {}
    whole = kind == "lokr" and values["network_dim"] >= 4096
    targets = [text for text in values["target_modules"] or () if "," not in text]
    presets = [name for name, given in layers.items() if all(parts(values[one]) == parts(value) for one, value in given.items())]
    preset = max(presets, key=lambda name: len(layers[name]), default=None)
    return {
        "peft_type": {ours: theirs for theirs, ours in KINDS.items()}.get(kind, "LORA"),
        "lora_decompose": kind == "dora" or None,
        "lokr_dim" if kind == "lokr" else "lora_rank": values["network_dim"],
        "lokr_full_matrix": whole or None,
        "lora_alpha": values["network_alpha"],
        "lokr_decompose_factor": values["lokr_factor"] if kind == "lokr" else None,
        "oft_block_size": values["oft_block_size"] if kind == "oft" else None,
        "layer_filter": ",".join(targets),
        "layer_filter_regex": bool(targets) or None,
        "layer_filter_preset": preset if not targets or (preset and layers[preset]) else "custom",
    }


def sample(spec: PromptSpec, guided: bool) -> dict[str, object]:
    """A preview; guided: the number is told to the network's embedding."""
    return {
        "enabled": True,
        "prompt": spec.prompt,
        "negative_prompt": spec.negative_prompt,
        "width": spec.width,
        "height": spec.height,
        "seed": spec.seed,
        "random_seed": False,
        "diffusion_steps": spec.steps,
        "cfg_scale": spec.guidance if guided else spec.cfg_scale,
    }


def _without_pairs(arguments: Mapping[str, Any]) -> dict[str, object]:
    """betas are two numbers there."""
    pairs = arguments.get("betas")
    betas = {"beta1": pairs[0], "beta2": pairs[1]} if isinstance(pairs, list) and len(pairs) == 2 else {}
    return {**{name: value for name, value in arguments.items() if name != "betas"}, **betas}


def _every(key: str, option: str, values: Mapping[str, Any]) -> dict[str, object]:
    """An interval. A step is a batch there."""
    steps, epochs = values[f"{option}_steps"], values[f"{option}_epochs"]
    if steps:
        return {key: steps * values["gradient_accumulation_steps"], f"{key}_unit": "STEP"}
    return {key: epochs or 0, f"{key}_unit": "EPOCH" if epochs else "NEVER"}
