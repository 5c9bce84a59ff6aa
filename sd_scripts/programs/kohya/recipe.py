"""What kohya's optimizers, schedules, noise and training times become."""

from __future__ import annotations

import math
import shlex

from sd_scripts.schema import kohya_words as words
from sd_scripts.schema.optimizer import SCHEDULE_FREE, ZOO
from sd_scripts.schema.sheet import is_empty, is_off, unless_empty, unless_off

from ..table import DIFFUSERS_LINE, nearest_optimizer, size_shift, takes
from .sheet import KohyaSheet, Table, rules

RECIPE: Table = {}
rule = rules(RECIPE)


# --- optimizer and schedule -----------------------------------------------------------------------------------------

_NESTEROV = ("sgdnesterov", "sgdnesterov8bit")
"""SGD, of which Nesterov's momentum is an argument."""


def _optimizer(name: str) -> tuple[str, str]:
    """Our optimizer for one of kohya's, and what it is the nearest to; an empty text when it is the same."""
    short = words.bare_name(name)
    if short in words.OPTIMIZERS_BY_NAME or short in _NESTEROV:
        return words.OPTIMIZERS_BY_NAME.get(short, "SGD"), ""
    return nearest_optimizer(short)


@rule("optimizer", "optimizer_type")
def _optimizer_type(sheet: KohyaSheet, key: str) -> None:
    name = sheet.value(key)
    if is_empty(name):
        sheet.skip(key, "it is empty, which means AdamW")
        return
    ours, why = _optimizer(str(name))
    if not why:
        sheet.take(key, "optimizer_type", ours)
        if "nesterov" in str(name).lower():
            sheet.put("optimizer_args", ["momentum=0.9", "nesterov=True"], key)
        return
    sheet.put("optimizer_type", ours, key)
    sheet.lose(key, f"{name} is not built in; optimizer_type = {ours} was put, {why}. Check the learning rate")


@rule("use_8bit_adam", "use_lion_optimizer")
@unless_off
def _old_optimizer(sheet: KohyaSheet, key: str) -> None:
    if not is_empty(sheet.first("optimizer", "optimizer_type")):
        sheet.skip(key, "the optimizer is named as well")
    else:
        sheet.take(key, "optimizer_type", words.SWITCHES[key]["optimizer_type"])


def arguments(value: object) -> list[str]:
    """key=value texts from a list or a line, quotes removed."""
    if isinstance(value, list):
        return [str(item).strip().strip("\"'") for item in value if str(item).strip()]
    try:
        return shlex.split(str(value))
    except ValueError:
        return str(value).replace('"', "").split()


@rule("optimizer_args")
def _optimizer_args(sheet: KohyaSheet, key: str) -> None:
    name = str(sheet.first("optimizer", "optimizer_type") or "AdamW")
    ours, why = _optimizer(name)
    given = arguments(sheet.value(key)) if not is_empty(sheet.value(key)) else []
    if not given:
        sheet.skip(key, "it is empty")
    elif why:
        sheet.lose(key, f"they are arguments of {name}; {ours} has its own, and got none")
    elif ours in ZOO:
        renamed = [f"weight_{item}" if item.startswith("decouple=") else item for item in given]
        kept = [item for item in renamed if takes(ours, item.partition("=")[0].strip())]
        if kept:
            sheet.take(key, "optimizer_args", kept, "" if kept == given else f"what {ours} has of it")
        else:
            sheet.lose(key, f"{ours} has its own arguments, and got none")
    elif ours == "Adafactor":
        kept = [item for item in given if item.partition("=")[0].strip() not in ("relative_step", "warmup_init", "scale_parameter")]
        own = "its own rate is not used here, learning_rate is: check it"
        note = own if sheet.sets_its_own_rate else "without what it does here anyway"
        if kept or sheet.sets_its_own_rate:
            sheet.take(key, "optimizer_args", kept, note if kept != given else "")
        else:
            sheet.skip(key, "it is what Adafactor does here anyway")
    else:
        sheet.take(key, "optimizer_args", given)


@rule("lr_scheduler")
def _schedule(sheet: KohyaSheet, key: str) -> None:
    if not is_empty(sheet.value("lr_scheduler_type")):
        sheet.skip(key, "lr_scheduler_type replaces it")
    elif _optimizer(str(sheet.first("optimizer", "optimizer_type") or "AdamW"))[0] in SCHEDULE_FREE:
        sheet.take(key, "lr_scheduler", "constant", "such an optimizer has no schedule")
    elif sheet.value(key) == "adafactor":
        sheet.take(key, "lr_scheduler", "constant", "Adafactor's own schedule is not used")
    else:
        sheet.plain(key)


@rule("lr_scheduler_type")
def _schedule_class(sheet: KohyaSheet, key: str) -> None:
    name = str(sheet.value(key) or "")
    if is_empty(name):
        sheet.skip(key, "it is empty")
    elif name.endswith("CosineAnnealingLR"):
        sheet.take(key, "lr_scheduler", "cosine", "over the whole run")
    else:
        sheet.lose(key, "it runs other people's code and needs --allow_custom_modules on the command line; choose lr_scheduler")


@rule("lr_scheduler_args")
@unless_empty
def _schedule_args(sheet: KohyaSheet, key: str) -> None:
    if not is_empty(sheet.value("lr_scheduler_type")):
        sheet.lose(key, "they are arguments of a class that is not used; see lr_scheduler_min_lr_ratio for a floor")
    else:
        sheet.take(key, key, arguments(sheet.value(key)))


_WITH_CYCLES = ("cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay")


@rule("lr_scheduler_num_cycles")
def _cycles(sheet: KohyaSheet, key: str) -> None:
    epochs = sheet.number("epoch")
    if sheet.value("lr_scheduler") not in _WITH_CYCLES:
        sheet.skip(key, f"it is for {', '.join(_WITH_CYCLES)}")
    elif is_off(sheet.value(key)) and epochs:
        sheet.take(key, key, epochs, "empty means one for each epoch")
    else:
        sheet.plain(key)


@rule("lr_warmup", "lr_warmup_steps")
def _warm_up(sheet: KohyaSheet, key: str) -> None:
    steps, percent = sheet.number("lr_warmup_steps") or 0, sheet.number("lr_warmup") or 0
    if sheet.value("lr_scheduler") == "constant" and is_empty(sheet.value("lr_scheduler_type")):
        sheet.skip(key, "a constant rate has no warm-up")
    elif key == "lr_warmup_steps":
        if sheet.page and not steps:
            sheet.skip(key, "it is 0, so lr_warmup decides")
        else:
            sheet.take(key, key, steps)
    elif steps:
        sheet.skip(key, "lr_warmup_steps is given, which wins")
    else:
        # In percent there; below 1 means a part of the run here, and 1 would be one step.
        sheet.take(key, "lr_warmup_steps", min(percent / 100, 0.999), f"{percent:g} % of the run" if percent else "none")


# --- noise and times ------------------------------------------------------------------------------------------------


@rule("noise_offset_type")
def _noise_type(sheet: KohyaSheet, key: str) -> None:
    sheet.skip(key, "noise_offset and multires_noise_iterations say it")


@rule("noise_offset", "noise_offset_random_strength", "adaptive_noise_scale", "multires_noise_iterations", "multires_noise_discount")
def _noise(sheet: KohyaSheet, key: str) -> None:
    pyramid = key.startswith("multires")
    kind = str(sheet.value("noise_offset_type") or "").lower()
    offset, levels = sheet.number("noise_offset") or 0, sheet.number("multires_noise_iterations") or 0
    if key not in sheet.known:
        sheet.skip(key, "noise_offset and pyramid noise are for noise schedules; kohya's scripts for flow matching ignore them too")
    elif sheet.page and kind and pyramid != (kind == "multires"):
        sheet.skip(key, f"noise_offset_type is {sheet.value('noise_offset_type')}, so it was not used")
    elif pyramid and offset and not kind:
        sheet.skip(key, "noise_offset does the same job and is given, too")
    elif key not in ("noise_offset", "multires_noise_iterations") and not (levels if pyramid else offset):
        sheet.skip(key, "it has no effect while " + ("multires_noise_iterations" if pyramid else "noise_offset") + " is 0")
    elif key == "multires_noise_discount" and sheet.number(key) == 0:
        sheet.take(key, key, 0.0)
    else:
        sheet.plain(key)


@rule("ip_noise_gamma_random_strength")
def _perturbation(sheet: KohyaSheet, key: str) -> None:
    if sheet.number("ip_noise_gamma"):
        sheet.plain(key)
    else:
        sheet.skip(key, "it has no effect while ip_noise_gamma is 0")


@rule("min_timestep", "max_timestep")
def _bounds(sheet: KohyaSheet, key: str) -> None:
    """Scripts of models with flow matching take them, and look at them for validation alone."""
    if sheet.flows and not is_off(sheet.value(key)):
        sheet.skip(key, f"training of such a model takes no notice of it there; set {key} here if it is meant")
    else:
        _zero_is_none(sheet, key)


@rule(
    *("min_snr_gamma", "scale_weight_norms", "max_validation_steps", "vae_batch_size", "caption_dropout_rate", "rank_dropout"),
    *("module_dropout", "network_dropout", "loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio"),
)
def _zero_is_none(sheet: KohyaSheet, key: str) -> None:
    if is_off(sheet.value(key)):
        sheet.skip(key, "0 is off")
    else:
        sheet.plain(key)


@rule("huber_schedule", "huber_c", "huber_scale")
def _huber(sheet: KohyaSheet, key: str) -> None:
    if sheet.value("loss_type") in ("huber", "smooth_l1"):
        sheet.plain(key)
    else:
        sheet.skip(key, "it is for loss_type huber and smooth_l1")


_FLOW = "timestep_sampling discrete_flow_shift sigmoid_scale model_prediction_type weighting_scheme logit_mean logit_std mode_scale".split()


@rule(*_FLOW)
def _flow(sheet: KohyaSheet, key: str) -> None:
    """kohya's densities are two options: with timestep_sampling = sigma, weighting_scheme chooses the density of the steps, which are then
    shifted; otherwise it is only a loss weight, and counts with model_prediction_type = sigma_scaled alone."""
    if not sheet.flows:
        sheet.skip(key, "it is for flow matching; this run has a noise schedule")
        return
    if key not in sheet.known:
        sheet.plain(key)
        return
    # The page writes these for SD3 only.
    unused = ("weighting_scheme", "logit_mean", "logit_std", "mode_scale") if sheet.page else ()
    if key in unused:
        sheet.skip(key, "kohya_ss gives it to Stable Diffusion 3 only, so this run never had it")
        return
    by_size = sheet.value("timestep_sampling") == words.BY_SIZE and not sheet.has("timestep_sampling", words.BY_SIZE)
    if by_size and key in ("timestep_sampling", "discrete_flow_shift"):
        _one_shift(sheet, key)
        return
    scheme = "none" if sheet.page else str(sheet.value("weighting_scheme") or "uniform").lower()
    if sheet.value("timestep_sampling") in (None, "sigma") and scheme in ("logit_normal", "mode"):
        _density_of_scheme(sheet, key, scheme)
    elif key == "weighting_scheme":
        _loss_weight(sheet, key, scheme)
    elif key in ("logit_mean", "logit_std", "mode_scale"):
        sheet.skip(key, "it belongs to timestep_sampling = sigma with weighting_scheme logit_normal or mode")
    else:
        sheet.plain(key)


def _one_shift(sheet: KohyaSheet, key: str) -> None:
    """A line through the images' sizes that a family has not becomes the shift of one size."""
    shift = round(size_shift(DIFFUSERS_LINE, 1024), 4)
    if key == "discrete_flow_shift":
        sheet.skip(key, f"timestep_sampling = {words.BY_SIZE} does not use it")
        return
    sheet.put("discrete_flow_shift", shift, key)
    sheet.take(key, key, "shift")
    there = "what images of 1024 px have there"
    sheet.lose(key, f"it is not here; timestep_sampling = shift was put with discrete_flow_shift = {shift:g}, {there}")


def _density_of_scheme(sheet: KohyaSheet, key: str, scheme: str) -> None:
    """sigma with logit_normal: steps are drawn at u = sigmoid(mean + std N) from noisy to clean, so t = 1 - u, then shifted by s. A shift
    adds ln s to the logit of t, so together that is logit_normal with the mean ln s - mean."""
    given = sheet.number("discrete_flow_shift")
    shift = given if given is not None and given > 0 else sheet.usual_shift
    if key in ("model_prediction_type", "sigmoid_scale"):
        sheet.plain(key)
    elif scheme == "mode":
        note = f"without the shift of the steps by {shift:g} that is added there" if shift != 1 else ""
        if key == "mode_scale":
            sheet.plain(key)
        elif key == "weighting_scheme":
            sheet.take(key, "timestep_sampling", "mode", note)
            sheet.conflicts += [f"{key} = mode: timestep_sampling = mode was put, {note}"] if note else []
        else:
            sheet.skip(key, "weighting_scheme = mode became timestep_sampling = mode")
    elif key == "weighting_scheme":
        mean = math.log(shift) - (sheet.number("logit_mean") or 0)
        sheet.put("logit_mean", round(mean, 6), key)
        sheet.take(key, "timestep_sampling", "logit_normal", f"with logit_mean = {mean:.4g}, which holds the shift of the steps")
    elif key == "logit_std":
        sheet.plain(key)
    else:
        sheet.skip(key, "weighting_scheme = logit_normal became timestep_sampling = logit_normal, whose logit_mean holds it")


def _loss_weight(sheet: KohyaSheet, key: str, scheme: str) -> None:
    scaled = sheet.value("model_prediction_type") in (None, "sigma_scaled")
    if scheme in ("sigma_sqrt", "cosmap") and scaled:
        sheet.take(key, key, scheme)
    else:
        sheet.skip(key, f"{scheme} weights nothing" if scaled else "kohya's scripts use it with model_prediction_type = sigma_scaled only")
