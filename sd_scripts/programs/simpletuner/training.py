"""How long SimpleTuner trains and in which steps: optimizer, schedules, times, noise, loss, saves, processes."""

from __future__ import annotations

from sd_scripts.schema.sheet import is_off

from ..table import (
    DIFFUSERS_LINE,
    SCHEDULES,
    ForeignSheet,
    Table,
    each,
    line_of,
    more_than_zero,
    only,
    optimizer,
    released,
    take_arguments,
    times,
    times_by_size,
    to,
    unneeded,
    where,
    words,
)
from . import data


def _length(sheet: ForeignSheet, key: str) -> None:
    epochs, steps = sheet.number("num_train_epochs") or 0, sheet.number("max_train_steps") or 0
    if is_off(sheet.value(key)):
        sheet.skip(key, "0 means that the other one says it")
    elif key == "max_train_steps":
        sheet.take(key, key, sheet.value(key))
    elif steps > 0:
        sheet.skip(key, "max_train_steps decides how long the run is")
    else:
        sheet.take(key, "max_train_epochs", epochs)


def _kept(sheet: ForeignSheet, key: str) -> None:
    kept, every = sheet.number(key) or 0, sheet.number("checkpoint_step_interval", "checkpointing_steps") or 500
    if kept <= 0:
        sheet.skip(key, "it keeps all")
    else:
        sheet.take(key, "save_last_n_steps", int(kept * every), "as many files; here they are counted in steps")


def _times(sheet: ForeignSheet, key: str) -> None:
    """sigmoid(scale N), or uniform, then a shift s by t' = s t / (1 + (s - 1) t)."""
    if "model_prediction_type" not in sheet.known:
        sheet.skip(key, "it is for flow matching; this run has a noise schedule")
        return
    if key != next(name for name in sheet.given if name in _OF_TIMES):
        sheet.skip(key, "timestep_sampling and its numbers hold it")
        return
    uniform, scale = sheet.on("flow_use_uniform_schedule"), sheet.number("flow_sigmoid_scale") or 1.0
    given, by_size = sheet.number("flow_schedule_shift"), sheet.on("flow_schedule_auto_shift")
    shift = 3.0 if given is None else given
    spread: dict[str, float] = {} if uniform or scale == 1 else {"sigmoid_scale": scale}
    if by_size:
        times_by_size(sheet, key, _side(sheet), line_of(sheet) or DIFFUSERS_LINE, even=uniform, scale=1.0 if uniform else scale)
    elif shift > 0 and shift != 1:
        times(sheet, key, "sigma" if uniform else "shift", "", discrete_flow_shift=shift, **spread)
    else:
        times(sheet, key, "uniform" if uniform else "sigmoid", "", **spread)
    if sheet.on("flow_use_beta_schedule"):
        put = sheet.values.get("timestep_sampling", sheet.known["timestep_sampling"].default)
        sheet.lose("flow_use_beta_schedule", f"times are not drawn from a beta density; timestep_sampling = {put} was put")


def _side(sheet: ForeignSheet) -> int:
    """The side of the images that are trained, of the run or of its first data set that has one."""
    named = [name for name in sheet.given if name.endswith("].resolution")]
    value = next((number for name in ("resolution", *named) if (number := sheet.number(name))), 1024.0)
    return data.side_of(value, str(sheet.value("resolution_type") or "pixel_area"))[0]


_OF_TIMES = ("flow_schedule_shift", "flow_schedule_auto_shift", "flow_sigmoid_scale", "flow_use_uniform_schedule", "flow_use_beta_schedule")


def _clipping(sheet: ForeignSheet, key: str) -> None:
    """There gradients are cut value by value unless the file says norm."""
    by_value = str(sheet.value("grad_clip_method") or "value") == "value"
    limit = sheet.number("max_grad_norm")
    if key == "grad_clip_method" and limit is not None:
        sheet.skip(key, "max_grad_norm says it")
    elif by_value:
        sheet.put("max_grad_norm", 1.0, key)
        sheet.lose(key, "gradients are cut value by value there, and by their norm here; max_grad_norm = 1 was put")
    elif key == "max_grad_norm":
        sheet.take(key, key, limit)
    else:
        sheet.skip(key, "gradients are cut by their norm here as well")


def _adam(sheet: ForeignSheet, key: str) -> None:
    """Arguments of the optimizer; the first key carries them all."""
    first, second = (sheet.number(f"optimizer_beta{index}", f"adam_beta{index}") for index in (1, 2))
    pairs = [f"betas=({first:g},{second:g})"] if first is not None and second is not None else []
    pairs += [f"weight_decay={sheet.value('adam_weight_decay')}"] if sheet.number("adam_weight_decay") is not None else []
    pairs += [f"eps={sheet.value('adam_epsilon')}"] if sheet.number("adam_epsilon") is not None else []
    if "adam" not in str(sheet.value("optimizer") or "adamw_bf16"):
        sheet.skip(key, "it is for Adam")
    elif not pairs:
        sheet.skip(key, "one of two betas alone says nothing")
    else:
        take_arguments(sheet, key, pairs)


def _schedule(sheet: ForeignSheet, key: str) -> None:
    name = str(sheet.value(key))
    if name in SCHEDULES:
        sheet.take(key, key, name)
    elif name == "sine":
        sheet.put(key, "cosine", key)
        sheet.lose(key, "a rate that swings is not here; lr_scheduler = cosine was put")
    else:
        sheet.lose(key, "it is not here; choose lr_scheduler")


def _compiled(sheet: ForeignSheet, key: str) -> None:
    """torch.compile, as accelerate has it."""
    backend = str(sheet.value("dynamo_backend") or "no").lower()
    if key != "dynamo_backend":
        options = {"mode": "compile_mode", "use_regional_compilation": "compile_scope"}
        option = options.get(key[len("dynamo_") :], f"compile_{key[len('dynamo_') :]}")
        if is_off(sheet.value(key)) or not sheet.has("compile_backend", backend):
            sheet.skip(key, "it is off" if is_off(sheet.value(key)) else "nothing is compiled")
        else:
            written = {"compile_scope": "blocks", "compile_dynamic": "true"}
            sheet.take(key, option, written.get(option, sheet.value(key)))
    elif backend == "no":
        sheet.skip(key, "it is off")
    elif sheet.has("compile_backend", backend):
        sheet.put("compile", True, key)
        sheet.take(key, "compile_backend", backend, "with compile on")
    else:
        sheet.lose(key, "the network is not compiled; compile with inductor is the usual way")


def _processes(sheet: ForeignSheet, key: str) -> None:
    count = int(sheet.number(key) or 1)
    if count <= 1:
        sheet.skip(key, "one process is the default here as well")
    else:
        sheet.put("multi_gpu", True, key)
        sheet.take(key, "num_gpus", count, "with multi_gpu on")


def _offset(sheet: ForeignSheet, key: str) -> None:
    """An offset of the noise, which only a part of the samples gets there."""
    if not sheet.on("offset_noise"):
        sheet.skip(key, "offset_noise is off")
        return
    if key == "offset_noise" and "noise_offset" in sheet.given:
        sheet.skip(key, "noise_offset says it")
        return
    given, share = sheet.number("noise_offset"), sheet.number("noise_offset_probability")
    sheet.take(key, "noise_offset", 0.1 if given is None else given)
    share = 0.25 if share is None else share
    if share < 1:
        sheet.lose(key, f"every sample has it here; there {share:.0%} of them (noise_offset_probability)")


TABLE: Table = {
    "output_dir": to("output_dir"),
    "seed": where(lambda sheet: (sheet.number("seed") or 0) >= 0, to("seed"), "every run has a seed here"),
    "train_batch_size": to("train_batch_size"),
    "gradient_accumulation_steps": to("gradient_accumulation_steps"),
    **each("", "num_train_epochs max_train_steps", _length),
    "mixed_precision": to("mixed_precision"),
    "gradient_checkpointing": to("gradient_checkpointing"),
    "gradient_checkpointing_interval": where(
        lambda sheet: (sheet.number("gradient_checkpointing_interval") or 0) > 1,
        lambda sheet, key: sheet.take(key, "gradient_checkpointing_share", 1 / (sheet.number(key) or 1), "each so manieth block"),
        "every block is recomputed",
    ),
    "gradient_checkpointing_offload_attention": only(False, "see gradient_checkpointing_cpu_offload", banner=True),
    "learning_rate": to("learning_rate"),
    "optimizer": optimizer(),
    **each("", "adam_beta1 adam_beta2 optimizer_beta1 optimizer_beta2 adam_weight_decay adam_epsilon", _adam),
    "optimizer_config": only(None, "write them as optimizer_args, key=value", banner=True),
    "optimizer_release_gradients": released,
    "lr_scheduler": _schedule,
    "lr_warmup_steps": to("lr_warmup_steps"),
    "lr_num_cycles": where(
        lambda sheet: str(sheet.value("lr_scheduler")) == "cosine_with_restarts",
        to("lr_scheduler_num_cycles"),
        "it is for cosine_with_restarts",
    ),
    "lr_power": where(lambda sheet: str(sheet.value("lr_scheduler")) == "polynomial", to("lr_scheduler_power"), "it is for polynomial"),
    "lr_end": unneeded("a schedule ends at 0 here; cosine_with_min_lr has a floor"),
    **each("", "max_grad_norm grad_clip_method", _clipping),
    "use_ema": to("use_ema"),
    "ema_decay": where(lambda sheet: sheet.on("use_ema"), to("ema_decay"), "use_ema is off"),
    **each("", " ".join(_OF_TIMES), _times),
    **each("", "snr_gamma", more_than_zero("min_snr_gamma")),
    "prediction_type": words(
        "prediction_type", {"epsilon": "epsilon", "v_prediction": "v_prediction", "flow_matching": "flow"}, "see prediction_type"
    ),
    "rescale_betas_zero_snr": to("zero_terminal_snr"),
    "noise_offset": _offset,
    "offset_noise": _offset,
    "noise_offset_probability": unneeded("noise_offset says it"),
    "input_perturbation": more_than_zero("ip_noise_gamma"),
    "loss_type": words("loss_type", {"l2": "l2", "huber": "huber", "smooth_l1": "smooth_l1"}, "choose loss_type"),
    "huber_schedule": where(lambda sheet: sheet.value("loss_type") in ("huber", "smooth_l1"), to("huber_schedule"), "it is for huber"),
    "huber_c": where(lambda sheet: sheet.value("loss_type") in ("huber", "smooth_l1"), to("huber_c"), "it is for huber"),
    **each("", "checkpoint_step_interval checkpointing_steps", more_than_zero("save_every_n_steps")),
    "checkpoint_epoch_interval": more_than_zero("save_every_n_epochs"),
    "checkpoints_total_limit": _kept,
    "resume_from_checkpoint": only("latest", "states of that program are not read; give the last saved file as network_weights"),
    **each("dynamo_", "backend mode use_regional_compilation fullgraph dynamic", _compiled),
    "num_processes": _processes,
    "num_machines": only(1, "see num_machines, and main_process_port", banner=True),
    "disable_tf32": lambda sheet, key: sheet.take(key, "cuda_allow_tf32", is_off(sheet.value(key))),
    "gradient_checkpointing_backend": only("torch", "see gradient_checkpointing_cpu_offload", banner=True),
    "gradient_checkpointing_segment_stride": only(None, "see gradient_checkpointing_share", banner=True),
}
