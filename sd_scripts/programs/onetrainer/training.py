"""What a configuration of OneTrainer says of the training."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import accumulate
from statistics import NormalDist

from sd_scripts.schema.objective import SizeShift
from sd_scripts.schema.sheet import is_empty, is_off, shown, switch

from ..table import (
    ForeignSheet,
    Rule,
    Table,
    among,
    each,
    line_of,
    more_than_zero,
    only,
    optimizer,
    optimizer_of,
    released,
    shifted,
    size_shift,
    sizes,
    switch_to,
    take_arguments,
    times,
    times_by_size,
    to,
    unneeded,
    where,
)


def _accumulation(sheet: ForeignSheet) -> int:
    return max(1, int(sheet.number("gradient_accumulation_steps") or 1))


def _after(option: str, amount: str) -> Rule:
    """An interval: a number and its unit. Steps are batches there."""

    def rule(sheet: ForeignSheet, key: str) -> None:
        count, unit = sheet.number(amount) or 0, str(sheet.value(f"{amount}_unit") or _UNITS[amount])
        if key != amount and amount in sheet.given:
            sheet.skip(key, f"{amount} says it")
        elif unit == "NEVER" or count <= 0:
            sheet.skip(key, "it is off")
        elif unit == "EPOCH":
            sheet.take(key, f"{option}_epochs", max(1, int(count)))
        elif unit == "STEP":
            steps = max(1, round(count / _accumulation(sheet)))
            sheet.take(key, f"{option}_steps", steps, "steps there are batches" if _accumulation(sheet) > 1 else "")
        else:
            sheet.refuse(key, f"intervals are counted in steps or epochs here, not in {unit.lower()}s; give {option}_steps")

    return rule


_UNITS = {"save_every": "NEVER", "sample_after": "MINUTE", "backup_after": "MINUTE", "validate_after": "EPOCH"}


def _backup(sheet: ForeignSheet, key: str) -> None:
    unit = str(sheet.value("backup_after_unit") or "MINUTE")
    if key == "backup_after" and unit == "STEP":
        sheet.take(key, "save_state_every_n_steps", max(1, round((sheet.number(key) or 1) / _accumulation(sheet))))
    else:
        sheet.skip(key, "training states are kept with each saved file and at the end; save_state_every_n_steps keeps more of them")


def _rate(sheet: ForeignSheet, key: str) -> None:
    """There the root of the number of samples may multiply it."""
    kind, rate = str(sheet.value("learning_rate_scaler") or "NONE"), sheet.number(key)
    samples = 1.0
    samples *= (sheet.number("batch_size") or 1) if "BATCH" in kind or "BOTH" in kind else 1
    samples *= _accumulation(sheet) if "ACCUMULATION" in kind or "BOTH" in kind else 1
    if rate is None or samples <= 1:
        to("learning_rate")(sheet, key)
    else:
        sheet.take(key, "learning_rate", rate * math.sqrt(samples), f"times the root of {samples:g}, as learning_rate_scaler has it there")


def _warmup(sheet: ForeignSheet, key: str) -> None:
    steps = sheet.number(key) or 0
    if steps > 1:
        note = "steps there are batches" if _accumulation(sheet) > 1 else ""
        sheet.take(key, "lr_warmup_steps", max(1, int(steps / _accumulation(sheet))), note)
    else:
        sheet.take(key, "lr_warmup_steps", min(steps, 0.999), f"{steps:g} of the run" if steps else "")


def _schedule(sheet: ForeignSheet, key: str) -> None:
    value = str(sheet.value(key))
    names = {"CONSTANT": "constant_with_warmup", "LINEAR": "linear", "ADAFACTOR": "constant"}
    floor = sheet.number("learning_rate_min_factor") or 0
    if value == "CONSTANT":
        warm = sheet.number("learning_rate_warmup_steps")
        sheet.take(key, "lr_scheduler", "constant_with_warmup" if warm is None or warm > 0 else "constant")
    elif value in _WAVES:
        if floor > 0:
            sheet.put("lr_scheduler_min_lr_ratio", min(floor, 0.999), key)
        if value == "COSINE_WITH_RESTARTS":
            sheet.put("lr_scheduler_args", [f"num_cycles={_num_cycles(sheet):g}"], key)
        told = [f"lr_scheduler_min_lr_ratio = {floor:g}"] if floor > 0 else []
        told += [f"{_num_cycles(sheet):g} waves, down and up again, as that name means there"] if value == "COSINE_WITH_RESTARTS" else []
        sheet.take(key, "lr_scheduler", "cosine_with_min_lr" if floor > 0 else "cosine", f"with {' and '.join(told)}" if told else "")
    elif value in names:
        sheet.take(key, "lr_scheduler", names[value])
    elif value == "COSINE_WITH_HARD_RESTARTS":
        sheet.take(key, "lr_scheduler", "cosine_with_restarts")
    else:
        sheet.put("lr_scheduler", "cosine", key)
        sheet.lose(key, "this schedule is not here; lr_scheduler = cosine was put")


_WAVES = ("COSINE", "COSINE_WITH_RESTARTS")


def _num_cycles(sheet: ForeignSheet) -> float:
    cycles = sheet.number("learning_rate_cycles")
    return 1.0 if cycles is None else cycles


def _cycles(sheet: ForeignSheet, key: str) -> None:
    schedule, whole = str(sheet.value("learning_rate_scheduler")), max(1, round(_num_cycles(sheet)))
    if schedule == "COSINE_WITH_HARD_RESTARTS":
        sheet.take(key, "lr_scheduler_num_cycles", whole, "whole numbers" if whole != _num_cycles(sheet) else "")
    elif schedule == "COSINE_WITH_RESTARTS":
        sheet.skip(key, "lr_scheduler_args hold it")
    else:
        sheet.skip(key, "it is for schedules with restarts")


def _floor(sheet: ForeignSheet, key: str) -> None:
    schedule = str(sheet.value("learning_rate_scheduler") or "CONSTANT")
    if is_off(sheet.value(key)) or schedule in (*_WAVES, "CONSTANT"):
        why = "a constant rate has no floor" if schedule == "CONSTANT" else "learning_rate_scheduler holds it"
        sheet.skip(key, "it is off" if is_off(sheet.value(key)) else why)
    else:
        sheet.refuse(key, "only cosine_with_min_lr and warmup_stable_decay have a floor, lr_scheduler_min_lr_ratio")


def _resolution(sheet: ForeignSheet, key: str) -> None:
    text = str(sheet.value(key) or "")
    pair = re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", text)
    found = sizes(text)
    if pair:
        sheet.take(key, "resolution", [int(pair[1]), int(pair[2])])
    elif found is None:
        sheet.refuse(key, f"{shown(text)} is no side in pixels, nor a list of them; give resolution")
    else:
        side, others = found
        if others:
            sheet.put("additional_resolutions", others, key)
        note = f"with additional_resolutions = {shown(others)}: each image at all of them; there at one that is drawn" if others else ""
        sheet.take(key, "resolution", [side, side], note)


def _line(sheet: ForeignSheet) -> SizeShift | None:
    """The line along which this file's times are shifted by the image's size; None where they have one shift."""
    return line_of(sheet) if sheet.on("dynamic_timestep_shifting") else None


def _side(sheet: ForeignSheet) -> int:
    found = sizes(str(sheet.value("resolution") or "512"))
    return found[0] if found else 512


def _shift(sheet: ForeignSheet) -> float:
    line = _line(sheet)
    return (size_shift(line, _side(sheet)) if line else sheet.number("timestep_shift")) or 1.0


_CURVES: dict[str, Callable[[float, float, float], float]] = {
    "COS_MAP": lambda x, weight, middle: 1 / (1 - 2 * x + 2 * x * x),
    "SIGMOID": lambda x, weight, middle: 1 / (1 + math.exp(min(-weight * (x - middle), 700.0))),
    "INVERTED_PARABOLA": lambda x, weight, middle: max(2 - weight * (x - middle) ** 2, 0.0),
}
"""Densities of the times there, before the shift."""
_POINTS = 1000
_NEAR = 0.03
"""The part of the draws that may lie elsewhere without a word above the form."""


def _nearest(sheet: ForeignSheet, kind: str, weight: float, bias: float, shift: float) -> tuple[float, float, float] | None:
    """Mean and deviation of the normal logit that has a curve's quartiles, and the part of the draws that lie elsewhere; None where that is
    too much, or more than with even times."""
    if kind not in _CURVES or not sheet.has("timestep_sampling", "logit_normal"):
        return None
    middles = [(index + 0.5) / _POINTS for index in range(_POINTS)]
    # Of SIGMOID that program takes the shift off a time twice.
    back = 1 / shift if kind == "SIGMOID" else 1.0
    sums = list(accumulate(_CURVES[kind](shifted(time, back), weight, bias + 0.5) for time in middles))
    parts = [value / (sums[-1] or 1.0) for value in sums]
    logits = [math.log(time / (1 - time)) for time in middles]
    low, high = (next((logit for logit, part in zip(logits, parts, strict=True) if part >= quarter), 0.0) for quarter in (0.25, 0.75))
    if high <= low:
        return None
    normal = NormalDist((low + high) / 2, (high - low) / (2 * NormalDist().inv_cdf(0.75)))
    elsewhere = max(abs(normal.cdf(logit) - part) for logit, part in zip(logits, parts, strict=True))
    even = max(abs(time - part) for time, part in zip(middles, parts, strict=True))
    return (normal.mean, normal.stdev, elsewhere) if elsewhere <= min(_NEAR, even) else None


def _times(sheet: ForeignSheet, key: str) -> None:
    """A distribution, then a shift s by t' = s t / (1 + (s - 1) t), which adds ln s to the logit of t."""
    kind = str(sheet.value("timestep_distribution") or "UNIFORM")
    weight, bias = sheet.number("noising_weight") or 0.0, sheet.number("noising_bias") or 0.0
    line, shift = _line(sheet), _shift(sheet)
    even = kind == "UNIFORM" or (kind == "SIGMOID" and weight == 0)
    flow = "model_prediction_type" in sheet.known
    if (even or (kind == "LOGIT_NORMAL" and bias == 0)) and line and flow:
        times_by_size(sheet, key, _side(sheet), line, even=even, scale=1 + weight if not even else 1.0)
    elif even:
        if shift == 1 or flow:
            times(sheet, key, "sigma", discrete_flow_shift=round(shift, 6)) if shift != 1 else times(sheet, key, "uniform")
        else:
            times(sheet, key, "uniform")
            sheet.lose(key, f"even times with a shift of {shift:g} are not here for models with a noise schedule; they stay even")
    elif kind == "LOGIT_NORMAL" and bias == 0 and shift == 1:
        times(sheet, key, "sigmoid", sigmoid_scale=1 + weight)
    elif kind == "LOGIT_NORMAL" and bias == 0:
        times(sheet, key, "shift", sigmoid_scale=1 + weight, discrete_flow_shift=shift)
    elif kind == "LOGIT_NORMAL":
        held = f"logit_mean holds the shift, ln {shift:g}" if shift != 1 else ""
        note = f"{held}, of images of {_side(sheet)} px; there each size has a shift of its own" if line else held
        times(sheet, key, "logit_normal", note, logit_mean=round(bias + math.log(shift), 6), logit_std=1 + weight)
    elif kind == "HEAVY_TAIL" and shift == 1:
        times(sheet, key, "mode", mode_scale=weight)
    elif (near := _nearest(sheet, kind, weight, bias, shift)) is not None:
        mean, deviation, elsewhere = near
        note = f"the nearest density: {elsewhere:.0%} of the draws lie elsewhere"
        times(sheet, key, "logit_normal", note, logit_mean=round(mean + math.log(shift), 4) + 0.0, logit_std=round(deviation, 4))
    else:
        if flow and shift != 1:
            times(sheet, key, "sigma", discrete_flow_shift=round(shift, 6))
        else:
            times(sheet, key, "uniform")
        put = sheet.values.get("timestep_sampling", sheet.known["timestep_sampling"].default)
        sheet.lose(key, f"{kind} with these numbers is not here; timestep_sampling = {put} was put")


def _part_of_times(sheet: ForeignSheet, key: str) -> None:
    if "timestep_distribution" in sheet.given:
        sheet.skip(key, "timestep_sampling and its numbers hold it")
    elif is_off(sheet.value(key)) or sheet.number(key) == 1:
        sheet.skip(key, "it is off")
    else:
        _times(sheet, key)


def _strength(option: str, usual: float) -> Rule:
    """Bounds of the noise, as parts of 1, before the shift there."""

    def rule(sheet: ForeignSheet, key: str) -> None:
        value = sheet.number(key)
        if value is None or value == usual:
            sheet.skip(key, f"{usual:g} is all of them")
            return
        moved = _shift(sheet) if "model_prediction_type" in sheet.known else 1.0
        even = str(sheet.value("timestep_distribution") or "UNIFORM") == "UNIFORM"
        squeezed = "" if even else "the density is cut here, and squeezed into the range there"
        note = "; ".join(text for text in (f"shifted by {moved:g}, as times are there" if moved != 1 else "", squeezed) if text)
        sheet.take(key, option, round(shifted(min(max(value, 0.0), 1.0), moved) * 1000), note)
        if squeezed:
            sheet.conflicts.append(f"{key} = {shown(value)}: {squeezed}")

    return rule


def _loss(sheet: ForeignSheet, key: str) -> None:
    strengths = {name: sheet.number(f"{name}_strength") for name in ("mse", "mae", "log_cosh", "huber")}
    strengths["mse"] = 1.0 if strengths["mse"] is None else strengths["mse"]
    used = [name for name, value in strengths.items() if value]
    factor = strengths[used[0]] if len(used) == 1 else None
    note = f"without the factor {factor:g} there" if factor not in (None, 1.0) else ""
    if key != next(name for name in sheet.given if name in [f"{one}_strength" for one in strengths]):
        sheet.skip(key, "loss_type holds it")
    elif used == ["mse"]:
        sheet.take(key, "loss_type", "l2", note)
    elif used == ["mae"]:
        sheet.take(key, "loss_type", "l1", note)
    elif used == ["huber"]:
        sheet.put("huber_c", sheet.number("huber_delta") or 1.0, key)
        sheet.put("huber_schedule", "constant", key)
        told = "the smooth one, with huber_c = huber_delta, and twice as large as there"
        sheet.take(key, "loss_type", "huber", f"{told}; {note}" if note else told)
    else:
        sheet.lose(key, f"a sum of {', '.join(used) or 'nothing'} is not here; loss_type = l2 stays")


def _loss_weight(sheet: ForeignSheet, key: str) -> None:
    kind = str(sheet.value(key))
    if kind == "CONSTANT":
        sheet.skip(key, "all times count alike")
    elif kind == "MIN_SNR_GAMMA":
        sheet.take(key, "min_snr_gamma", sheet.number("loss_weight_strength") or 5.0)
    elif kind == "DEBIASED_ESTIMATION":
        note = "with v-prediction 1 / (SNR + 1), of which that program takes the root" if "prediction_type" in sheet.known else ""
        sheet.take(key, "debiased_estimation_loss", True, note)
        if sheet.on("force_v_prediction"):
            sheet.conflicts.append(f"loss_weight_fn = {kind}: {note}")
    else:
        sheet.lose(key, "this weight of a time is not here; all count alike")


def _optimizer_argument(sheet: ForeignSheet, key: str) -> None:
    """What optimizer_args have of it; the first key carries them all."""
    name = key.rpartition(".")[2]
    ours, why = optimizer_of(str(sheet.value("optimizer.optimizer") or "ADAMW"))
    value = sheet.value(key)
    if name == "fused_back_pass":
        released(sheet, key)
    elif is_empty(value):
        sheet.skip(key, "it is empty")
    elif why:
        sheet.skip(key, f"it belongs to an optimizer that {ours} replaces")
    elif ours == "Adafactor" and name in ("relative_step", "warmup_init") and switch(value):
        sheet.lose(key, "Adafactor follows learning_rate and lr_scheduler here")
    elif name in (*_OF_ALL_OPTIMIZERS, *_OF_OPTIMIZER.get(ours, ())):
        _arguments(sheet, key, ours)
    else:
        sheet.skip(key, f"{ours} does it its own way, or has no such thing")


_OF_OPTIMIZERS = """adam_w_mode alpha amsgrad beta1 beta2 beta3 bias_correction block_wise capturable centered clip_threshold d0
    d_coef dampening decay_rate decouple differentiable eps eps2 foreach fsdp_in_use fused fused_back_pass
    growth_rate initial_accumulator_value initial_accumulator is_paged log_every lr_decay max_unorm maximize
    min_8bit_size quant_block_size momentum nesterov no_prox optim_bits percentile_clipping r relative_step
    safeguard_warmup scale_parameter stochastic_rounding use_bias_correction use_triton warmup_init weight_decay
    weight_lr_power decoupled_decay fixed_decay weight_decouple rectify degenerated_to_sgd k xi n_sma_threshold
    ams_bound adanorm adam_debias slice_p cautious weight_decay_by_lr prodigy_steps use_speed split_groups
    split_groups_mean factored factored_fp32 use_stableadamw use_cautious use_grams use_adopt d_limiter
    use_schedulefree use_orthograd nnmf_factor orthogonal_gradient use_atan2 use_AdEMAMix beta3_ema alpha_grad
    beta1_warmup min_beta1 Simplified_AdEMAMix kourkoutas_beta schedulefree_c ns_steps MuonWithAuxAdam
    muon_hidden_layers muon_adam_regex muon_adam_lr muon_te1_adam_lr muon_te2_adam_lr muon_adam_config
    rms_rescaling normuon_variant beta2_normuon low_rank_ortho ortho_rank accelerated_ns cautious_wd approx_mars
    auto_kappa_p compile"""
"""What one of its optimizers or another has."""
_OF_ALL_OPTIMIZERS = ("beta1", "beta2", "weight_decay", "eps")

_OF_PRODIGY = ("d_coef", "d0", "decouple", "safeguard_warmup", "use_bias_correction", "beta3", "growth_rate")

_OF_OPTIMIZER = {"Prodigy": _OF_PRODIGY, "SGD": ("momentum",), "Adafactor": ("scale_parameter", "clip_threshold", "decay_rate")}


_BEGIN = {
    **{name: {"weight_decay": "0.0"} for name in ("ADAM", "ADAM_8BIT")},
    **{name: {"weight_decay": "0.01"} for name in ("CAME", "AdEMAMix", "SCHEDULE_FREE_ADAMW", "SCHEDULE_FREE_SGD")},
    "DADAPT_ADAN": {"weight_decay": "0.02"},
    "LION_8BIT": {"betas": "(0.9,0.999)"},
    "LAMB": {"eps": "1e-8"},
    "LARS": {"momentum": "0.0"},
}
"""What its optimizers take where the file says nothing and ours take something else (modules/util/optimizer_util.py)."""


def begun_with(sheet: ForeignSheet) -> list[str]:
    """Arguments of that program's optimizer that its file leaves out."""
    given = {name for name, value in sheet.given.items() if not is_empty(value)}
    of_betas = {"betas": ("optimizer.beta1", "optimizer.beta2")}
    begin = _BEGIN.get(str(sheet.value("optimizer.optimizer")), {})
    return [f"{name}={value}" for name, value in begin.items() if given.isdisjoint(of_betas.get(name, (f"optimizer.{name}",)))]


def _arguments(sheet: ForeignSheet, key: str, ours: str) -> None:
    given = {name.rpartition(".")[2]: value for name, value in sheet.given.items() if name.startswith("optimizer.") and not is_empty(value)}
    pairs = []
    if ours != "Adafactor" and ours != "SGD" and "beta1" in given and "beta2" in given:
        pairs.append(f"betas=({given['beta1']},{given['beta2']})")
    names = ("weight_decay", *(("eps",) if ours not in ("Adafactor", "Lion", "Lion8bit", "SGD") else ()))
    pairs += [f"{name}={given[name]}" for name in names if name in given]
    pairs += [f"{name}={given[name]}" for name in _OF_OPTIMIZER.get(ours, ()) if name in given]
    pairs += begun_with(sheet)
    name = key.rpartition(".")[2]
    if not any(name in pair for pair in pairs) and not (name in ("beta1", "beta2") and any("betas" in pair for pair in pairs)):
        sheet.skip(key, f"{ours} has no such thing")
    else:
        take_arguments(sheet, key, pairs)


def _ema(sheet: ForeignSheet, key: str) -> None:
    if str(sheet.value(key)) == "OFF":
        sheet.skip(key, "it is off")
    else:
        sheet.take(key, "use_ema", True)


def ema_decay(sheet: ForeignSheet) -> float:
    """The decay of each step that forgets as fast as that program's, which moves the average in every so many steps."""
    decay, interval = sheet.number("ema_decay"), sheet.number("ema_update_step_interval")
    return float((0.999 if decay is None else decay) ** (1 / max(1.0, 5.0 if interval is None else interval)))


def _decay(sheet: ForeignSheet, key: str) -> None:
    decay = ema_decay(sheet)
    note = (
        "the root of that program's, which moves the average in every ema_update_step_interval-th step"
        if decay != sheet.number(key)
        else ""
    )
    sheet.take(key, key, round(decay, 7), note)


def _perturbed(sheet: ForeignSheet, key: str) -> None:
    why = "of the input alone; there what is to be predicted has it as well"
    if is_off(sheet.value(key)):
        sheet.skip(key, "it is off")
    else:
        sheet.take(key, "ip_noise_gamma", sheet.value(key), why)
        if "ip_noise_gamma" in sheet.known:
            sheet.conflicts.append(f"{key} = {shown(sheet.value(key))}: ip_noise_gamma is noise {why}")


def _devices(sheet: ForeignSheet, key: str) -> None:
    if is_off(sheet.value("multi_gpu")):
        sheet.skip(key, "multi_gpu is off")
    elif key == "multi_gpu":
        sheet.take(key, key, True)
    else:
        to("gpu_ids", convert=lambda value: str(value).replace(" ", "").split(","))(sheet, key)


TABLE: Table = {
    **each("", "multi_gpu device_indexes", _devices),
    "resolution": _resolution,
    "frames": unneeded("it is for videos"),
    "batch_size": to("train_batch_size"),
    "gradient_accumulation_steps": to("gradient_accumulation_steps"),
    "epochs": to("max_train_epochs"),
    "learning_rate": _rate,
    "learning_rate_scheduler": _schedule,
    "learning_rate_warmup_steps": _warmup,
    "learning_rate_cycles": _cycles,
    "learning_rate_min_factor": _floor,
    "learning_rate_scaler": unneeded("learning_rate holds it"),
    "loss_scaler": only("NONE", "the loss is a mean over the batch and what is accumulated", banner=True),
    **each("", "custom_learning_rate_scheduler scheduler_params", only(None, "schedules of other people's code are not read")),
    "clip_grad_norm": lambda sheet, key: sheet.take(key, "max_grad_norm", 0.0 if is_empty(sheet.value(key)) else sheet.value(key)),
    "ema": _ema,
    "ema_decay": where(lambda sheet: str(sheet.value("ema") or "OFF") != "OFF", _decay, "ema is off"),
    "ema_update_step_interval": unneeded("ema_decay holds it"),
    "non_ema_sampling": unneeded("previews use the average when there is one"),
    "optimizer": unneeded("it is empty"),
    "optimizer.optimizer": optimizer(),
    "optimizer.*": among(_OF_OPTIMIZERS, _optimizer_argument),
    **each("", "mse_strength mae_strength log_cosh_strength huber_strength", _loss),
    "huber_delta": unneeded("loss_type holds it"),
    "vb_loss_strength": unneeded("it is for models that predict a variance"),
    "loss_weight_fn": _loss_weight,
    "loss_weight_strength": unneeded("loss_weight_fn holds it"),
    "dropout_probability": more_than_zero("network_dropout"),
    "offset_noise_weight": more_than_zero("noise_offset"),
    "generalized_offset_noise": only(False, "noise_offset is the same at all times"),
    "perturbation_noise_weight": _perturbed,
    "rescale_noise_scheduler_to_zero_terminal_snr": to("zero_terminal_snr"),
    "force_v_prediction": switch_to("prediction_type", "v_prediction"),
    "force_epsilon_prediction": switch_to("prediction_type", "epsilon"),
    "min_noising_strength": _strength("min_timestep", 0.0),
    "max_noising_strength": _strength("max_timestep", 1.0),
    "timestep_distribution": _times,
    **each("", "noising_weight noising_bias timestep_shift dynamic_timestep_shifting", _part_of_times),
    "validation": only(False, "validation_split holds out a part of the images", banner=False),
    **each("", "validate_after validate_after_unit", unneeded("validate_every_n_steps counts with validation_split")),
    **each("", "sample_after sample_after_unit", _after("sample_every_n", "sample_after")),
    **each("", "save_every save_every_unit", _after("save_every_n", "save_every")),
    **each("", "sample_skip_first save_skip_first", only(0, "the first ones are drawn and saved as well")),
    "backup_after": _backup,
}
