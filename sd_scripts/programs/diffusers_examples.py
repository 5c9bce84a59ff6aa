"""Command lines of the training scripts in diffusers' `examples`: DreamBooth and text to image, as a kind of run, values and a report.

Facts about the scripts are those of diffusers' commit 58eb52c (2026-08), read in their code. SimpleTuner grew out of them: where a name
means the same in both, its rule is the one there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported
from sd_scripts.schema.sheet import is_empty

from . import simpletuner
from .command_lines import Command, clear
from .table import (
    ForeignSheet,
    NamedModel,
    Rule,
    Table,
    assume_layers,
    each,
    ends_of_names,
    fill,
    kind_of_run,
    line_of_prompt,
    more_than_zero,
    only,
    optimizer_of,
    rule_of,
    switch_to,
    take_arguments,
    times,
    to,
    unneeded,
    where,
)

PROGRAM = "diffusers' examples"
_ATTENTION = ends_of_names(("to_k", "to_q", "to_v", "to_out.0"))
_OF_FLUX = ends_of_names(
    [f"attn.{name}" for name in ("to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")]
    + [f"{name}.net.{layer}" for name in ("ff", "ff_context") for layer in ("0.proj", "2")]
)
_OF_FLUX_2 = [*_ATTENTION, *ends_of_names(["to_qkv_mlp_proj"]), r"single_transformer_blocks\.\d+\.attn\.to_out$"]
_OF_KREA = [*_ATTENTION, *ends_of_names(["to_gate", "ff.up", "ff.down"])]


@dataclass(frozen=True)
class _Script:
    """One of the scripts: what it trains, and its own defaults where they are not those of the others."""

    model: str
    method: str
    layers: Sequence[str] = ()
    """Expressions for the layers that its adapter has."""
    decay: float = 1e-4
    """Weight decay of its optimizer."""
    defaults: Mapping[str, object] = field(default_factory=dict)


_LARGE: dict[str, object] = {"resolution": [1024, 1024]}
_MANY: dict[str, object] = {"train_batch_size": 16, "max_train_epochs": 100, "sample_every_n_epochs": 1}
_FOUR: dict[str, object] = {"network_alpha": 4.0}
"""The scale of scripts with --lora_alpha; without it, alpha is the rank."""
_TEXTS: dict[str, object] = {"text_encoder_lr": [5e-6]}
_FLUX = _Script("flux", "network", _OF_FLUX, defaults={**_FOUR, **_TEXTS})
_SDXL = _Script("sdxl", "network", _ATTENTION, defaults={**_LARGE, **_TEXTS})
MODELS: Mapping[str, _Script] = {
    "text_to_image": _Script("sd", "full", decay=1e-2, defaults={**_MANY, "sample_every_n_epochs": 5}),
    "text_to_image_lora": _Script("sd", "network", _ATTENTION, 1e-2, _MANY),
    "text_to_image_sdxl": _Script("sdxl", "full", decay=1e-2, defaults={**_LARGE, **_MANY}),
    "text_to_image_lora_sdxl": _Script("sdxl", "network", _ATTENTION, 1e-2, {**_LARGE, **_MANY}),
    "dreambooth": _Script("sd", "full", decay=1e-2, defaults={"learning_rate": 5e-6}),
    "dreambooth_lora": _Script("sd", "network", _ATTENTION, 1e-2, {"learning_rate": 5e-4}),
    "dreambooth_lora_sd15_advanced": _Script("sd", "network", _ATTENTION, defaults=_TEXTS),
    "dreambooth_lora_sdxl": _SDXL,
    "dreambooth_lora_sdxl_advanced": _SDXL,
    "dreambooth_flux": _Script("flux", "full", defaults={"t5xxl_max_token_length": 77}),
    "dreambooth_lora_flux": _FLUX,
    "dreambooth_lora_flux_advanced": _FLUX,
    "dreambooth_lora_flux_kontext": _Script("kontext", "network", [*_OF_FLUX, *ends_of_names(["proj_mlp"])], defaults=_FOUR),
    "dreambooth_lora_flux2": _Script("flux2_dev", "network", _OF_FLUX_2, defaults=_FOUR),
    "dreambooth_lora_flux2_img2img": _Script("flux2_dev", "network", _OF_FLUX_2, defaults=_FOUR),
    "dreambooth_lora_flux2_klein": _Script("flux2", "network", _OF_FLUX_2, defaults=_FOUR),
    "dreambooth_lora_flux2_klein_img2img": _Script("flux2", "network", _OF_FLUX_2, defaults=_FOUR),
    "dreambooth_lora_qwen_image": _Script("qwen_edit", "network", _ATTENTION, defaults=_FOUR),
    "dreambooth_lora_z_image": _Script("zimage", "network", _ATTENTION, defaults=_FOUR),
    "dreambooth_lora_krea2": _Script(
        "krea2", "network", _OF_KREA, defaults={"network_dim": 32, "network_alpha": 32.0, "learning_rate": 3e-4, "sample_steps": 8}
    ),
}
"""By the script's name without `train_`."""
_OTHERS = {
    "dreambooth_sd3": "Stable Diffusion 3",
    "dreambooth_lora_sd3": "Stable Diffusion 3",
    "dreambooth_lora_hidream": "HiDream-I1",
    "dreambooth_lora_lumina2": "Lumina 2",
    "dreambooth_lora_sana": "Sana",
    "dreambooth_lora_ideogram4": "Ideogram 4",
    "dreambooth_flax": "Stable Diffusion in Flax",
    "text_to_image_flax": "Stable Diffusion in Flax",
    "controlnet": "a ControlNet",
    "control_": "a control model of FLUX.1",
    "instruct_pix2pix": "InstructPix2Pix",
    "t2i_adapter": "a T2I-Adapter",
    "lcm_distill": "a consistency model",
    "custom_diffusion": "Custom Diffusion",
    "unconditional": "a model without captions",
    "cogvideox": "CogVideoX, a model of videos",
}
"""What scripts train whose names begin so, without `train_`."""
_DEFAULTS: dict[str, object] = {
    "learning_rate": 1e-4,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "train_batch_size": 4,
    "enable_bucket": False,
    "network_dim": 4,
    "save_model_as": "diffusers",
    "save_every_n_steps": 500,
    "guidance_scale": 3.5,
    "resolution": [512, 512],
}
"""Those that most scripts have, where they may not be ours."""
_BEYOND = {"krea2": "img_in, final_layer, text_fusion, txt_in, time_embed and time_mod_proj"}


def of_line(name: str, command: Command) -> Imported | None:
    """The settings of a command line of such a script; None for another program's. Raises OptionError for what is not trained here."""
    stem = command.name.removeprefix("train_").removesuffix(".py")
    if not command.name.startswith("train_") or not _SIGNS & command.options.keys():
        return None
    script = MODELS.get(stem)
    if script is None:
        what = next((what for start, what in _OTHERS.items() if stem.startswith(start)), None)
        if what is None:
            return None
        raise OptionError(f"{name} is a command line of {PROGRAM} for {what}, which is not trained here")
    known, unclear = clear({**command.launcher, **command.options})
    layers = {"target_modules": list(script.layers)}
    model = NamedModel(script.model, stem, by_size=None, layers=layers, beyond=_BEYOND.get(script.model, ""))
    run, model = kind_of_run(PROGRAM, name, {stem: model}, stem, script.method)
    if "deepfloyd" in str(known.get("pretrained_model_name_or_path")).lower():
        raise OptionError(f"{name} is a command line of {PROGRAM} for DeepFloyd IF, which is not trained here")
    sheet = ForeignSheet("the diffusers script", run, known, model)
    if "model_version" in sheet.known:
        sheet.put("model_version", "image")
    table = {**OF_ACCELERATE, **TABLE, **each("", _OF_OPTIMIZERS, _arguments(script.decay))}
    fill(sheet, table)
    assume_layers(sheet)
    sheet.ask(unclear, rule_of(table))
    return sheet.finish(f"command line of {PROGRAM}", _defaults(sheet, script))


_SIGNS = {"instance_data_dir", "dataset_name", "train_data_dir"}


def _defaults(sheet: ForeignSheet, script: _Script) -> dict[str, object]:
    """What the script takes where the line says nothing."""
    found = {**_DEFAULTS, "max_train_epochs": 1, **script.defaults}
    found["learning_rate"] = float(str(found["learning_rate"])) * _samples_of_a_step(sheet)
    if sheet.decided("max_train_steps"):
        del found["max_train_epochs"]
    if not sheet.on("train_text_encoder"):
        found.pop("text_encoder_lr", None)
    if sheet.value("lr_scheduler") not in (None, "constant"):
        found["lr_warmup_steps"] = 500
    found |= {"optimizer_args": _pairs(sheet, script.decay), "random_crop": True}
    if "timestep_sampling" in sheet.known and not sheet.decided("timestep_sampling"):
        shift = _shift(sheet)
        found |= {"timestep_sampling": "uniform"} if shift == 1 else {"timestep_sampling": "sigma", "discrete_flow_shift": shift}
    if sheet.decided("sample_prompts"):
        found = {"sample_every_n_epochs": 50, **found}
    else:
        found = {option: value for option, value in found.items() if not option.startswith("sample_")}
    if sheet.on("with_prior_preservation"):
        found |= {"num_class_images": 100, "prior_loss_weight": 1.0}
    return found


# --- rules ------------------------------------------------------------------------------------------------------------


def _shift(sheet: ForeignSheet) -> float:
    """The factor by which the scheduler shifts the times of training. Most schedulers shift by the size of what is drawn, and do not in
    training."""
    if "scheduler_shift" not in sheet.known:
        return 1.0
    return 3.0 if "turbo" in str(sheet.value("pretrained_model_name_or_path")).lower() else 6.0


def _times(sheet: ForeignSheet, key: str) -> None:
    """A density of u, by which one of the scheduler's steps is chosen, from noise to image: t = 1 - u, shifted by the scheduler."""
    scheme, shift = str(sheet.value("weighting_scheme") or "none"), _shift(sheet)
    if "timestep_sampling" not in sheet.known or scheme not in ("logit_normal", "mode"):
        if key == "weighting_scheme" and scheme in ("sigma_sqrt", "cosmap"):
            sheet.take(key, key, scheme)
        else:
            sheet.skip(key, "times are even" if key == "weighting_scheme" else "it belongs to weighting_scheme logit_normal or mode")
    elif key != "weighting_scheme":
        sheet.skip(key, "timestep_sampling and its numbers hold it")
    elif scheme == "logit_normal":
        mean, deviation = sheet.number("logit_mean") or 0.0, sheet.number("logit_std")
        # logit(1 - u) = -logit(u), and a shift by s adds ln s to the logit.
        spread = 1.0 if deviation is None else deviation
        times(sheet, key, "logit_normal", "the same density", logit_mean=round(math.log(shift) - mean, 6), logit_std=spread)
    else:
        scale = sheet.number("mode_scale")
        times(sheet, key, "mode", "" if shift == 1 else "without the scheduler's shift", mode_scale=1.29 if scale is None else scale)


def _rate(sheet: ForeignSheet, key: str) -> None:
    """The learning rate, multiplied where the script does it."""
    value, factor = sheet.number(key), _samples_of_a_step(sheet)
    if factor == 1 or value is None:
        sheet.take(key, key, sheet.value(key))
    else:
        sheet.take(key, key, value * factor, f"times {factor}, the samples of a step, because scale_lr is on")


def _samples_of_a_step(sheet: ForeignSheet) -> int:
    """By which scale_lr multiplies the learning rate; 1 where it is off."""
    if not sheet.on("scale_lr"):
        return 1
    batch = 16 if sheet.model.label.startswith("text_to_image") else 4
    return math.prod(
        int(sheet.number(name) or usual)
        for name, usual in (("gradient_accumulation_steps", 1), ("train_batch_size", batch), ("num_processes", 1))
    )


def _optimizer(sheet: ForeignSheet, key: str) -> None:
    name, few = str(sheet.value("optimizer") or "AdamW"), sheet.on("use_8bit_adam")
    ours, why = optimizer_of(name)
    if key == "use_8bit_adam" and (not few or ours != "AdamW"):
        sheet.skip(key, "it is for Adam" if few else "it is off")
    elif key == "optimizer" and few and ours == "AdamW":
        sheet.skip(key, "use_8bit_adam says it")
    else:
        sheet.take(key, "optimizer_type", "AdamW8bit" if few and ours == "AdamW" else ours)
        if why:
            sheet.lose(key, f"{name} is not built in; optimizer_type = {ours} was put, {why}. Check the learning rate")


def _warmup(sheet: ForeignSheet, key: str) -> None:
    constant = sheet.value("lr_scheduler") in (None, "constant")
    sheet.take(key, key, 0 if constant else sheet.value(key), "a constant rate has none there" if constant else "")


def _tokens(sheet: ForeignSheet, key: str) -> None:
    """There with the marks of beginning and end, where CLIP reads the captions."""
    count = sheet.number(key)
    if "t5xxl_max_token_length" in sheet.known:
        sheet.take(key, "t5xxl_max_token_length", sheet.value(key))
    elif "max_token_length" not in sheet.known or count is None:
        sheet.skip(key, "the model says it")
    else:
        clip = bool(sheet.known["max_token_length"].choices)
        sheet.take(key, "max_token_length", int(count) - 2 * clip, "without the marks of beginning and end" if clip else "")


def _captions(sheet: ForeignSheet, key: str) -> None:
    name = str(sheet.value(key))
    if name in ("text", "caption", "prompt", "tags"):
        sheet.skip(key, "metadata.jsonl in the folder of the images is read")
    else:
        sheet.refuse(key, f"captions are called text, caption or prompt in a metadata.jsonl; rename {name} there")


_OF_OPTIMIZERS = """adam_beta1 adam_beta2 adam_weight_decay adam_epsilon prodigy_beta3 prodigy_decouple prodigy_use_bias_correction
    prodigy_safeguard_warmup"""
_OF_PRODIGY = ("decouple", "use_bias_correction", "safeguard_warmup")


def _pairs(sheet: ForeignSheet, decay: float) -> list[str]:
    """optimizer_args as the script gives them."""
    first, second = (sheet.value(f"adam_beta{index}") for index in (1, 2))
    given = sheet.value("adam_weight_decay")
    found = [f"weight_decay={decay if is_empty(given) else given}"]
    if not (is_empty(first) and is_empty(second)):
        found.append(f"betas=({0.9 if is_empty(first) else first},{0.999 if is_empty(second) else second})")
    if not is_empty(sheet.value("adam_epsilon")):
        found.append(f"eps={sheet.value('adam_epsilon')}")
    if optimizer_of(str(sheet.value("optimizer") or "AdamW"))[0] == "Prodigy":
        # There bool("False") is true: the scripts' flags can be given, not switched off.
        found += [f"{name}=True" for name in _OF_PRODIGY]
        found += [] if is_empty(sheet.value("prodigy_beta3")) else [f"beta3={sheet.value('prodigy_beta3')}"]
    return found


def _arguments(decay: float) -> Rule:
    """The first key carries the arguments of the optimizer, all of them."""

    def rule(sheet: ForeignSheet, key: str) -> None:
        if key.startswith("prodigy") and optimizer_of(str(sheet.value("optimizer") or "AdamW"))[0] != "Prodigy":
            sheet.skip(key, "it is for Prodigy")
        else:
            take_arguments(sheet, key, _pairs(sheet, decay))

    return rule


def _resolution(sheet: ForeignSheet, key: str) -> None:
    side = sheet.number(key)
    sheet.take(key, key, [int(side), int(side)]) if side is not None and side >= 1 else sheet.refuse(key, "it is no size; give resolution")


def _data_set(sheet: ForeignSheet, key: str) -> None:
    """A data set of the hub, or a folder with a metadata file."""
    given = sheet.value(key)
    name = str(given[0] if isinstance(given, list) else given or "")
    if re.match(r"[./~\\]|[A-Za-z]:", name) or name.count("/") > 1:
        sheet.take(key, "train_data_dir", name, "captions are those of its metadata.jsonl, under the names text, caption or prompt")
    elif name:
        sheet.lose(key, f"{name} is a data set of the hub, which is not fetched; load it into a folder, and give that as train_data_dir")
    else:
        sheet.skip(key, "it is empty")


def _previews(sheet: ForeignSheet, key: str) -> None:
    """The prompt, as often as images of it are drawn there, each with a seed of its own."""
    several = sheet.value("validation_prompts")
    texts = [several] if isinstance(several, str) else list(several) if isinstance(several, list) else []
    texts = texts or [sheet.value("validation_prompt")] * int(sheet.number("num_validation_images") or 4)
    if is_empty(texts[0]):
        sheet.skip(key, "no previews are drawn")
    elif not key.startswith("validation_prompt"):
        sheet.skip(key, "it stands in sample_prompts")
    else:
        first = int(sheet.number("seed") or 0)
        image = sheet.value("validation_image") if "control_data_dir" in sheet.known else None
        lines = [line_of_prompt(text, d=first + index, ci=image) for index, text in enumerate(texts)]
        sheet.take(key, "sample_prompts", "\n".join(lines), "a prompt a line")


def _draws(sheet: ForeignSheet) -> bool:
    return not is_empty(sheet.value("validation_prompt")) or not is_empty(sheet.value("validation_prompts"))


def _of_classes(option: str) -> Rule:
    return where(lambda sheet: sheet.on("with_prior_preservation"), to(option), "with_prior_preservation is off")


_DRAWN = "images of the class are made in class_pictures, in output_dir; those that are there already are given as reg_data_dir"
OF_ACCELERATE: Table = {
    **{key: simpletuner.TABLE[key] for key in ("mixed_precision", "num_processes", "num_machines")},
    **each("", "multi_gpu", unneeded("num_processes says it")),
    **each("", "config_file", unneeded("it is accelerate's, about how processes are started; multi_gpu and num_gpus say that here")),
    **each("", "num_cpu_threads_per_process main_process_port dynamo_backend use_deepspeed", unneeded("it says how processes are started")),
    "gpu_ids": to("gpu_ids"),
}
"""What stands before the script."""
TABLE: Table = {
    **{
        key: simpletuner.TABLE[key]
        for key in """pretrained_model_name_or_path pretrained_vae_model_name_or_path revision variant output_dir seed train_batch_size
        gradient_accumulation_steps gradient_checkpointing num_train_epochs max_train_steps mixed_precision lr_num_cycles lr_power use_ema
        snr_gamma input_perturbation prediction_type checkpointing_steps checkpoints_total_limit resume_from_checkpoint
        train_text_encoder text_encoder_lr lora_dropout use_dora lr_scheduler report_to push_to_hub hub_model_id""".split()
    },
    "instance_data_dir": to("train_data_dir"),
    "train_data_dir": to("train_data_dir"),
    "dataset_name": _data_set,
    "instance_prompt": to("instance_prompt", "it is the caption of images that have none beside them"),
    "repeats": to("dataset_repeats"),
    "caption_column": _captions,
    "cond_image_column": only(None, "images to edit lie in a folder of their own, control_data_dir", banner=True),
    **each(
        "",
        "dataset_config_name image_column cache_dir max_train_samples image_interpolation_mode",
        unneeded("images and captions are files in a folder here, and all of them are used"),
    ),
    "resolution": _resolution,
    "center_crop": lambda sheet, key: sheet.take(key, "random_crop", not sheet.on(key)),
    "random_flip": switch_to("flip_aug", True),
    "use_aspect_ratio_buckets": switch_to("enable_bucket", True),
    "aspect_ratio_buckets": only(None, "buckets are made for the images' shapes here; turn enable_bucket on", banner=True),
    **each("", "caption_dropout proportion_empty_prompts", more_than_zero("caption_dropout_rate")),
    "with_prior_preservation": unneeded("class_prompt and num_class_images say it"),
    "class_prompt": _of_classes("class_prompt"),
    "num_class_images": _of_classes("num_class_images"),
    "prior_loss_weight": _of_classes("prior_loss_weight"),
    **each("", "class_data_dir sample_batch_size prior_generation_precision", unneeded(_DRAWN)),
    "rank": to("network_dim"),
    "lora_alpha": to("network_alpha"),
    "lora_layers": simpletuner.TABLE["peft_lora_target_modules"],
    "output_kohya_format": switch_to("save_model_as", "kohya"),
    "upcast_before_saving": switch_to("save_precision", "float"),
    "learning_rate": _rate,
    "scale_lr": unneeded("learning_rate holds it"),
    "lr_warmup_steps": _warmup,
    **each("", "optimizer use_8bit_adam", _optimizer),
    "adam_weight_decay_text_encoder": unneeded("one weight decay holds for all weights"),
    "max_grad_norm": to("max_grad_norm"),
    "noise_offset": more_than_zero("noise_offset"),
    "offset_noise": switch_to("noise_offset", 0.1),
    **each("", "weighting_scheme logit_mean logit_std mode_scale", _times),
    "guidance_scale": where(lambda sheet: "guidance_scale" in sheet.known, to("guidance_scale"), "this model is told no guidance"),
    **each("", "max_sequence_length tokenizer_max_length", _tokens),
    **each("", "validation_prompt validation_prompts num_validation_images validation_image", _previews),
    "validation_epochs": where(_draws, to("sample_every_n_epochs"), "no previews are drawn"),
    "validation_steps": where(_draws, to("sample_every_n_steps"), "no previews are drawn"),
    "validation_num_inference_steps": where(_draws, to("sample_steps"), "no previews are drawn"),
    "validation_guidance_scale": where(_draws, simpletuner.TABLE["validation_guidance"], "no previews are drawn"),
    "validation_model_path": only(None, "previews are drawn with the model that is trained; give them its steps and its guidance"),
    "dataloader_num_workers": to("max_data_loader_n_workers"),
    "allow_tf32": switch_to("cuda_allow_tf32", True),
    "do_fp8_training": only(False, "products are not computed in 8 bits; transformer_quantization = fp8 holds frozen weights in them"),
    "bnb_quantization_config_path": only(None, "that file says the bits; choose transformer_quantization, nf4 for 4 of them", banner=True),
    "clip_skip": only(None, "the text encoder is read as the model says"),
    "do_edm_style_training": only(False, "images get noise as the model's scheduler says", banner=True),
    "train_text_encoder_ti": only(False, "no new tokens are trained; a trigger word in the captions stands for the subject", banner=True),
    **each("", "train_text_encoder_frac train_transformer_frac", only(1.0, "what is trained is trained to the end", banner=True)),
    **each("", "use_blora dream_training class_labels_conditioning", only(False, "it is not part of this version", banner=True)),
    "lora_unet_blocks": only(None, "write the blocks as target_modules", banner=True),
    "timestep_bias_strategy": only("none", "choose the times of training with min_timestep and max_timestep", banner=True),
    "vae_encode_mode": only("mode", "images to edit are encoded to the mean of their latents"),
    "text_encoder_out_layers": unneeded("the model says it"),
    **each(
        "",
        """timestep_bias_multiplier timestep_bias_begin timestep_bias_end timestep_bias_portion dream_detail_preservation
        token_abstraction num_new_tokens_per_abstraction initializer_concept train_text_encoder_ti_frac enable_t5_ti""",
        unneeded("it belongs to something that is not part of this version"),
    ),
    **each("", "cache_latents pre_compute_text_embeddings", unneeded("latents and captions are cached by themselves")),
    **each(
        "",
        "offload fsdp_text_encoder remote_text_encoder",
        unneeded("text encoders and VAE leave the GPU once everything is encoded"),
    ),
    **each(
        "",
        "enable_xformers_memory_efficient_attention enable_npu_flash_attention",
        unneeded("see attention_backend; the fastest that is there is taken"),
    ),
    **each(
        "",
        """logging_dir tracker_project_name local_rank skip_final_inference final_validation_prompt validation_images validation_scheduler
        set_grads_to_none skip_save_text_encoder tokenizer_name text_encoder_use_attention_mask offload_ema foreach_ema non_ema_revision
        debug_loss pretrained_tokenizer_4_name_or_path pretrained_text_encoder_4_name_or_path""",
        unneeded("it says how that script works, not what is trained"),
    ),
    "hub_token": simpletuner.TABLE["push_to_hub"],
}
"""The rule of each option."""
