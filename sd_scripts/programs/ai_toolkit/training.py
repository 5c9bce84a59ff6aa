"""What a job of ai-toolkit says of the training, its files and its curves."""

from __future__ import annotations

import math
from statistics import NormalDist

from sd_scripts.schema.sheet import is_empty, is_off, number, shown, unless_off

from ..table import (
    ARGUMENT_NAMES,
    FILE_PRECISIONS,
    NOT_HERE,
    PRECISIONS,
    ForeignSheet,
    Table,
    among,
    each,
    line_of,
    literal,
    more_than_zero,
    only,
    optimizer,
    optimizer_of,
    shifted,
    size_shift,
    switch_to,
    takes,
    times,
    times_by_size,
    to,
    unneeded,
    words,
)
from .models import SHIFTS


def is_flow(sheet: ForeignSheet) -> bool:
    return "model_prediction_type" in sheet.known or sheet.value("train.noise_scheduler") == "flowmatch"


def _kept_files(sheet: ForeignSheet, key: str) -> None:
    kept, every = number(sheet.value(key)), number(sheet.value("save.save_every")) or 1000
    if not kept:
        sheet.skip(key, "0 keeps all, there as well")
    else:
        sheet.take(key, "save_last_n_steps", int(kept * every), "as many files; here they are counted in steps")


def _hub(sheet: ForeignSheet, key: str) -> None:
    if is_off(sheet.value("save.push_to_hub")) or is_empty(sheet.value("save.hf_repo_id")):
        sheet.skip(key, "nothing is uploaded")
    elif key == "save.hf_repo_id":
        sheet.take(key, "huggingface_repo_id", sheet.value(key))
    elif key == "save.hf_private":
        sheet.take(key, "huggingface_repo_visibility", "private" if sheet.on(key) else "public")
    else:
        sheet.skip(key, "huggingface_repo_id says it")


def _file_format(sheet: ForeignSheet, key: str) -> None:
    if sheet.run.method == "full" and sheet.value(key) == "diffusers":
        sheet.take(key, "save_model_as", "diffusers")
    elif sheet.run.method == "full":
        sheet.take(key, "save_model_as", "safetensors")
    else:
        sheet.skip(key, "save_model_as says which names are in the .safetensors file; see its help for who reads them")


def _accumulated(sheet: ForeignSheet, key: str) -> None:
    """gradient_accumulation sums within that program's batch, gradient_accumulation_steps waits for further ones; both divide alike."""
    both = [number(sheet.value(f"train.{name}")) or 1 for name in ("gradient_accumulation", "gradient_accumulation_steps")]
    steps = int(both[0] * both[1])
    if key.endswith("_steps") and both[0] > 1:
        sheet.skip(key, f"together with gradient_accumulation it is gradient_accumulation_steps = {steps}")
    else:
        sheet.take(key, "gradient_accumulation_steps", steps)


def _times(sheet: ForeignSheet, key: str) -> None:
    kind = str(sheet.value(key))
    if not is_flow(sheet):
        sheet.skip(key, "it is for flow matching; this run has a noise schedule, whose times are uniform")
    elif kind == "sigmoid":
        times(sheet, key, "sigmoid")
    elif kind == "linear":
        times(sheet, key, "uniform")
    elif kind == "weighted":
        times(sheet, key, "uniform", "and without its weights")
        sheet.lose(key, "its table of weights, measured on Flex.1, is not here; times are uniform and count alike")
    elif kind in SHIFTS:
        line = line_of(sheet)
        if line is None:
            times(sheet, key, "sigma", discrete_flow_shift=3.0)
        else:
            times_by_size(sheet, key, _side(sheet), line, even=True)
    else:
        times(sheet, key, "sigmoid")
        sheet.lose(key, f"{kind} is not here; timestep_sampling = sigmoid was put")


def _side(sheet: ForeignSheet) -> int:
    """The largest side that is trained."""
    found = [value for key, value in sheet.given.items() if key.endswith("].resolution")]
    sides = [number(side) for value in found for side in (value if isinstance(value, list) else [value])]
    return int(max((side for side in sides if side), default=512))


def _bound(sheet: ForeignSheet, key: str) -> None:
    """Places in the list of times, which begins with the most noise there: 300 leaves out the noisiest 300 of 1000."""
    option, usual = ("max_timestep", 0) if key.endswith("min_denoising_steps") else ("min_timestep", 999)
    place = sheet.number(key)
    if place is None or place == usual:
        sheet.skip(key, "it leaves no time out" if place is not None else "it is empty")
        return
    share, kind = min(max(1 - place / 1000, 0.0), 1.0), str(sheet.value("train.timestep_type") or "sigmoid")
    if is_flow(sheet) and kind == "sigmoid" and 0 < share < 1:
        share = 1 / (1 + math.exp(-NormalDist().inv_cdf(share)))
    elif is_flow(sheet) and kind in SHIFTS:
        line = line_of(sheet)
        share = shifted(share, size_shift(line, _side(sheet), sheet.model.token) if line else 3.0)
    sheet.take(key, option, round(share * 1000), "steps count from the noisiest time down there")


def _scheduler(sheet: ForeignSheet, key: str) -> None:
    flow = "model_prediction_type" in sheet.known
    name = str(sheet.value(key))
    if flow and name != "flowmatch":
        sheet.lose(key, "this family is trained by flow matching, and so it is here")
    elif not flow and name == "flowmatch":
        sheet.take(key, "prediction_type", "flow")
    else:
        sheet.skip(key, f"{sheet.run.label} is trained this way")


def _schedule(sheet: ForeignSheet, key: str) -> None:
    name = str(sheet.value(key))
    ends = [sheet.number(f"train.lr_scheduler_params.{end}") for end in ("start_factor", "end_factor")]
    if name == "linear" and ends != [1.0, 0.0]:
        sheet.put("lr_scheduler", "constant", key)
        start, end = (usual if given is None else given for usual, given in zip((1 / 3, 1.0), ends, strict=True))
        sheet.lose(
            key, f"there the rate goes from {start:.2g} of lr to {end:.2g} of it over the whole run; lr_scheduler = constant was put"
        )
    elif name in ("constant", "cosine", "linear", "constant_with_warmup", "polynomial"):
        sheet.take(key, "lr_scheduler", name)
    elif name == "cosine_with_restarts":
        sheet.take(key, "lr_scheduler", "cosine", "one period over the whole run, which is what it gets there")
    else:
        sheet.lose(key, "it is not here; choose lr_scheduler")


def _schedule_numbers(sheet: ForeignSheet, key: str) -> None:
    name, schedule = key.rpartition(".")[2], sheet.value("train.lr_scheduler")
    if name in ("start_factor", "end_factor") and schedule == "linear":
        sheet.skip(key, "lr_scheduler says it")
    elif name == "num_warmup_steps" and schedule not in (None, "constant", "cosine", "linear"):
        sheet.take(key, "lr_warmup_steps", sheet.value(key))
    elif name == "eta_min" and schedule == "cosine" and number(sheet.value("train.lr")):
        sheet.put("lr_scheduler", "cosine_with_min_lr", key)
        share = (number(sheet.value(key)) or 0) / (number(sheet.value("train.lr")) or 1)
        sheet.take(key, "lr_scheduler_min_lr_ratio", min(share, 0.999), "a part of the peak here")
    elif is_off(sheet.value(key)):
        sheet.skip(key, "it is off")
    else:
        sheet.refuse(key, "it is not a number of the schedule here; see lr_scheduler_args")


_WITHOUT_DECAY = ("adam", "adam8", "adam8bit", "adamw8")


def _usual_arguments(sheet: ForeignSheet) -> list[str]:
    """What that program gives an optimizer of which the file says nothing, where ours has something else."""
    name = str(sheet.value("train.optimizer") or "adamw").lower()
    ours, _why = optimizer_of(name)
    said = {key.rpartition(".")[2] for key in sheet.given if key.startswith("train.optimizer_params.")}
    usual = {"weight_decay": "0.0"} if name in _WITHOUT_DECAY else {}
    usual |= {"eps": "1e-06"} if name.startswith(("adam", "prodigy")) and takes(ours, "eps") else {}
    return [f"{name}={value}" for name, value in usual.items() if name not in said]


def of_optimizer(sheet: ForeignSheet) -> dict[str, object]:
    """That program's arguments for the optimizer of a file that gives it none."""
    pairs = _usual_arguments(sheet)
    return {"optimizer_args": pairs} if pairs and not sheet.decided("optimizer_args") else {}


def _optimizer_argument(sheet: ForeignSheet, key: str) -> None:
    """All arguments stand in one option; the first key of them carries it."""
    prefix = "train.optimizer_params."
    ours, why = optimizer_of(str(sheet.value("train.optimizer") or "adamw"))
    own_rate = [name for name in ("relative_step", "warmup_init") if ours == "Adafactor" and sheet.on(f"{prefix}{name}")]
    given = {name.removeprefix(prefix): value for name, value in sheet.given.items() if name.startswith(prefix) and not is_empty(value)}
    pairs = [f"{name}={literal(value)}" for name, value in given.items() if name not in own_rate and takes(ours, name)]
    pairs += _usual_arguments(sheet)
    name = key.removeprefix(prefix)
    if not takes(ours, name):
        sheet.skip(key, f"it belongs to an optimizer that {ours} replaces" if why else f"{ours} has no such thing")
    elif name in own_rate:
        sheet.lose(key, "Adafactor follows learning_rate and lr_scheduler here")
    elif sheet.decided("optimizer_args"):
        sheet.skip(key, "it stands in optimizer_args together with the others")
    else:
        sheet.take(key, "optimizer_args", pairs)


def _loss(sheet: ForeignSheet, key: str) -> None:
    kinds = {"mse": "l2", "mae": "l1"}
    name = str(sheet.value(key)).lower()
    if name in kinds:
        sheet.take(key, "loss_type", kinds[name])
    elif name == "pseudo_huber":
        sheet.put("huber_c", 0.01, key)
        sheet.put("huber_schedule", "constant", key)
        sheet.take(key, "loss_type", "smooth_l1", "with huber_c = 0.01, and twice as large as there")
    else:
        sheet.lose(key, "this distance is not here; loss_type = l2 stays")


@unless_off
def _min_snr(sheet: ForeignSheet, key: str) -> None:
    why = "with v-prediction min(SNR, gamma) / (SNR + 1) here, and over SNR alone there" if sheet.on("model.is_v_pred") else ""
    sheet.take(key, "min_snr_gamma", sheet.value(key), why)
    if why and "min_snr_gamma" in sheet.known:
        sheet.conflicts.append(f"{key} = {shown(sheet.value(key))}: {why}")


def _preservation(sheet: ForeignSheet, key: str) -> None:
    on = sheet.on("train.diff_output_preservation", "train.blank_prompt_preservation")
    if not on:
        sheet.skip(key, "it is off")
    elif key.endswith("_class") and "class_prompt" in sheet.known:
        sheet.take(key, "class_prompt", sheet.value(key))
    elif key.endswith("preservation"):
        sheet.lose(
            key,
            "the base model's answer to your own images with another caption is no goal here; base_prior_weight with num_class_images and "
            "class_prompt does it on images of the class",
        )
    else:
        sheet.skip(key, "it belongs to a preservation that is not here")


@unless_off
def _text_trained(sheet: ForeignSheet, key: str) -> None:
    if "train_text_encoder" not in sheet.known:
        sheet.lose(key, "this family's text encoder stays as it is")
    else:
        sheet.take(key, "train_text_encoder", True)
        sheet.put("cache_text_encoder_outputs", False, key)


def _unet_trained(sheet: ForeignSheet, key: str) -> None:
    if not is_off(sheet.value(key)):
        sheet.skip(key, "the network is what is trained")
    elif "train_unet" in sheet.known:
        sheet.take(key, "train_unet", False)
    else:
        sheet.lose(key, "the network is always trained")


def _rate_of_text(sheet: ForeignSheet, key: str) -> None:
    if sheet.on("train.train_text_encoder") and "text_encoder_lr" in sheet.known:
        sheet.take(key, "text_encoder_lr", [str(sheet.value(key))])
    else:
        sheet.skip(key, "the text encoders are not trained")


def _rate(sheet: ForeignSheet, key: str) -> None:
    name, rate = str(sheet.value("train.optimizer") or "").lower(), number(sheet.value(key))
    finds_its_own = name.startswith(("prodigy", "dadapt"))
    if finds_its_own and rate is not None and rate < 0.1:
        sheet.take(key, "learning_rate", 1.0, f"{sheet.value('train.optimizer')} takes 1 there for anything below 0.1")
    else:
        to("learning_rate")(sheet, key)


def _ema(sheet: ForeignSheet, key: str) -> None:
    if is_off(sheet.value("train.ema_config.use_ema")):
        sheet.skip(key, "it is off" if key.endswith("use_ema") else "use_ema is off")
    else:
        sheet.take(key, key.rpartition(".")[2], sheet.value(key))


_TRAIN_OFF: dict[str, object] = {
    **dict.fromkeys(
        """train_turbo show_turbo_outputs learnable_snr_gos free_u do_signal_correction_noise do_batch_noise_correction
        do_signal_amplification match_noise_norm short_and_long_captions short_and_long_captions_encoder_split match_adapter_assist
        inverted_mask_prior standardize_latents dynamic_noise_offset do_cfg do_random_cfg correct_pred_norm t0_loss_target
        t0_velocity_equiv_weight do_fft_loss do_fft_velocity_equiv_weight do_prior_divergence linear_timesteps linear_timesteps2
        do_paramiter_swapping force_consistent_noise blended_blur_noise do_guidance_loss do_guidance_loss_cfg_zero do_differential_guidance
        do_blank_stabilization standardize_images merge_network_on_save adaptive_scaling_factor""".split(),
        False,
    ),
    **dict.fromkeys(
        """weight_jitter random_noise_multiplier random_noise_shift match_adapter_chance prompt_saturation_chance""".split(), 0.0
    ),
    **dict.fromkeys(
        """noise_multiplier target_noise_multiplier img_multiplier noisy_latent_multiplier latent_multiplier pred_scaler reg_weight
        optimal_noise_pairing_samples""".split(),
        1.0,
    ),
    **dict.fromkeys(
        """start_step adapter_assist_name_or_path negative_prompt latent_feature_extractor_path diffusion_feature_extractor_path cfg_rescale
        target_norm_std max_loss validation_config snr_gamma""".split(),
        None,
    ),
}

_PART_OF_OFF = """adapter_assist_type paramiter_swapping_factor differential_guidance_scale guidance_loss_target guidance_loss_schedule
    unconditional_prompt cfg_scale max_cfg_scale signal_correction_noise_scale signal_amplification_strength batch_noise_correction_scale
    inverted_mask_prior_multiplier correct_pred_norm_multiplier latent_feature_loss_weight diffusion_feature_extractor_weight
    next_sample_timesteps max_negative_prompts target_norm_std_value merge_network_on_save_strength audio_loss_multiplier max_loss_debug
    switch_boundary_every refiner_lr embedding_lr adapter_lr train_refiner loss_target num_train_timesteps content_or_style_reg""".split()

TABLE: Table = {
    "save.dtype": words("save_precision", FILE_PRECISIONS, "choose save_precision float, fp16 or bf16"),
    "save.save_every": more_than_zero("save_every_n_steps"),
    "save.max_step_saves_to_keep": _kept_files,
    "save.save_format": _file_format,
    **each("save.", "push_to_hub hf_repo_id hf_private", _hub),
    "logging.log_every": more_than_zero("log_every_n_steps"),
    "logging.use_wandb": switch_to("log_with", "wandb"),
    "logging.project_name": to("log_tracker_name"),
    "logging.run_name": to("wandb_run_name"),
    **each("logging.", "verbose use_ui_logger", unneeded("the run's own page shows the curves")),
    "train.batch_size": to("train_batch_size"),
    "train.steps": to("max_train_steps"),
    **each("train.", "gradient_accumulation gradient_accumulation_steps", _accumulated),
    "train.train_unet": _unet_trained,
    "train.train_text_encoder": _text_trained,
    "train.gradient_checkpointing": to("gradient_checkpointing"),
    "train.noise_scheduler": _scheduler,
    "train.timestep_type": _times,
    "train.content_or_style": only(
        "balanced", "times are not favoured this way; min_timestep, max_timestep and logit_mean choose among them", banner=True
    ),
    **each("train.", "min_denoising_steps max_denoising_steps", _bound),
    "train.optimizer": optimizer(),
    "train.optimizer_params": unneeded("it is empty"),
    "train.optimizer_params.*": among(ARGUMENT_NAMES, _optimizer_argument),
    "train.lr": _rate,
    "train.unet_lr": to("unet_lr"),
    "train.text_encoder_lr": _rate_of_text,
    "train.lr_scheduler": _schedule,
    "train.lr_scheduler_params": unneeded("it is empty"),
    "train.lr_scheduler_params.*": _schedule_numbers,
    "train.max_grad_norm": to("max_grad_norm"),
    "train.dtype": words("mixed_precision", PRECISIONS, "choose mixed_precision"),
    "train.loss_type": _loss,
    "train.min_snr_gamma": _min_snr,
    "train.noise_offset": more_than_zero("noise_offset"),
    "train.prompt_dropout_prob": more_than_zero("caption_dropout_rate"),
    **each("train.ema_config.", "use_ema ema_decay", _ema),
    **each("train.ema_config.", "use_feedback param_multiplier", unneeded("it changes the average a little alone")),
    "train.ema_config": unneeded("it is empty"),
    **each(
        "train.",
        """diff_output_preservation diff_output_preservation_multiplier diff_output_preservation_class blank_prompt_preservation
        blank_prompt_preservation_multiplier""",
        _preservation,
    ),
    "train.skip_first_sample": lambda sheet, key: sheet.take(key, "sample_at_first", is_off(sheet.value(key))),
    "train.force_first_sample": unneeded("sample_at_first draws previews before the first step"),
    "train.disable_sampling": unneeded("without sample_prompts no previews are drawn"),
    "train.cache_text_embeddings": unneeded("captions are encoded once by themselves (cache_text_encoder_outputs)"),
    "train.unload_text_encoder": unneeded("text encoders leave the device once captions are encoded"),
    "train.bypass_guidance_embedding": only(False, "the embedding is told guidance_scale; 1 is the default", banner=True),
    **each("train.", "xformers sdp attention_backend", unneeded("see attention_backend; the fastest that is there is taken")),
    "train.single_item_batching": unneeded("batches have one size"),
    **{f"train.{name}": only(usual, NOT_HERE, banner=True) for name, usual in _TRAIN_OFF.items()},
    **{f"train.{name}": unneeded("it belongs to something that is not here") for name in _PART_OF_OFF},
}
