"""A configuration of the AC-RF trainer for Z-Image Turbo (the TOML that its page writes for the script, or the JSON that the page keeps).

Facts about the other program are those of its commit 324acd6 (2025-12), and of its later script train_zimage_v2.py (2026-02), whose loss
has switches in place of modes, read in its code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from sd_scripts.programs.table import ForeignSheet, each, to, unneeded
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported, Importer
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.sheet import MISSING, is_off, number, switch, unless_empty

from .options import ZImageFull, ZImageNetwork

PROGRAM = "the AC-RF trainer"
ORIGIN = "configuration of the AC-RF trainer for Z-Image"
_RUNS: dict[str, type[RunOptions]] = {"lora": ZImageNetwork, "finetune": ZImageFull}
"""By its training_type."""
_SOURCES = ("dataset.sources", "dataset.datasets")
_DEFAULTS = {"turbo_steps": 10, "network_dim": 8, "network_alpha": 4.0, "lr_scheduler": "constant", "lr_warmup_steps": 0}
"""That program's own, where they are not ours."""
_LATER_DEFAULTS = {**_DEFAULTS, "network_dim": 16, "network_alpha": 16.0, "lr_scheduler": "cosine_with_restarts", "lr_warmup_steps": 100}
"""Those of its later script."""

# Weights of the loss: the modes that use each, and what is measured differently here.
_STANDARD, _FREQUENCY, _STYLE = ("standard",), ("frequency", "unified"), ("style", "unified")
_ON_SPECTRUM = "on the complex spectrum of the error, there on the logarithm of its amplitudes"
_ON_VELOCITY = "of the velocity's error; there of the image's, which is that times the noise level"
_ON_COLOURS = "on latents mapped to RGB, there on their first channels"
TERMS = {
    "lambda_fft": (_STANDARD, _ON_SPECTRUM),
    "lambda_cosine": (_STANDARD, ""),
    "alpha_hf": (_FREQUENCY, _ON_VELOCITY),
    "beta_lf": (_FREQUENCY, ""),
    "lf_magnitude_weight": (_FREQUENCY, ""),
    "downsample_factor": (_FREQUENCY, ""),
    "lambda_struct": (_STYLE, _ON_COLOURS),
    "lambda_light": (_STYLE, _ON_COLOURS),
    "lambda_color": (_STYLE, _ON_COLOURS),
    "lambda_tex": (_STYLE, _ON_COLOURS),
}
_UNSCALED = ("downsample_factor", "lf_magnitude_weight")


def looks_like(given: Mapping[str, object]) -> bool:
    """Whether a file's tables are those of that program: it alone has one named acrf, or one with settings of attention only; its shortest
    files name the transformer and count epochs its way."""
    tables = {name: entries for name, entries in given.items() if isinstance(entries, Mapping)}
    shortest = "dit" in tables.get("model", {}) and ("num_train_epochs" in tables.get("training", {}) or "optimization" in tables)
    return "acrf" in tables or shortest or "sdpa_optimize_level" in tables.get("sdpa", {})


def read(name: str, given: Mapping[str, Any]) -> Imported:
    """The settings in the tables of such a file, with a row for each key, named `table.key`. Raises OptionError for a file that trains
    something else than Z-Image from text, and for one without a run."""
    if not {"acrf", "model", "training"} & given.keys():
        raise OptionError(f"{name} holds settings of attention for {PROGRAM}, not a run; give the file of the run")
    kind = _kind(given)
    if kind not in _RUNS:
        raise OptionError(f"{name} is a file of {PROGRAM} that trains {kind}, which is not trained here; LoRA and whole models are")
    sheet = AcrfSheet(given, _RUNS[kind])
    for key in sheet.given:
        RULES.get(key.rpartition(".")[2], _plain)(sheet, key)
    sheet.assume_defaults()
    return sheet.settle(f"{ORIGIN}: {sheet.run.label}", MISSING)


def _kind(given: Mapping[str, Any]) -> str:
    """lora, finetune, or what else a file trains: its page says it, a file written by hand has a table of that name."""
    general = given.get("general")
    said = {**given, **(general if isinstance(general, Mapping) else {})}
    condition, trained = said.get("condition_mode", "text2img"), said.get("training_type")
    if trained is None:
        condition = next((mode for mode in ("omni", "img2img") if mode in given), condition)
        trained = next((kind for kind in ("controlnet", "finetune") if kind in given), "lora")
    if trained == "controlnet" or said.get("model_type", "zimage") != "zimage":
        return "a ControlNet" if trained == "controlnet" else str(said["model_type"])
    return str(trained) if condition == "text2img" else f"with images as conditions ({condition})"


class AcrfSheet(ForeignSheet):
    """Settings of that program by `table.key`, as one kind of run."""

    def __init__(self, given: Mapping[str, Any], run: type[RunOptions]) -> None:
        opened: dict[str, object] = {}
        for table, entries in given.items():
            opened |= {f"{table}.{key}": value for key, value in entries.items()} if isinstance(entries, Mapping) else {table: entries}
        super().__init__(PROGRAM, run, opened)
        self._by_name = {key.rpartition(".")[2]: key for key in opened}

    def said(self, name: str) -> object:
        """What the file says under this name, whatever table it stands in; None without it."""
        return self.given.get(self._by_name.get(name, ""))

    @property
    def loss_mode(self) -> str:
        return str(self.said("loss_mode") or ("style" if any(key.startswith("style_loss.") for key in self.given) else "standard"))

    @property
    def is_later(self) -> bool:
        """Whether the file is for the later script: a distance by itself, terms with switches, and free noise levels beside the anchors."""
        return any(self.said(name) is not None for name in ("lambda_l1", "enable_freq", "enable_style", "raft_mode"))

    def share_of(self, switch_name: str, weight: str) -> float:
        """The weight of a group of terms of the later script beside the distance's; both switches are on where the file says nothing."""
        on = self.said(switch_name) is None or not is_off(self.said(switch_name))
        given, main = number(self.said(weight)), number(self.said("lambda_l1"))
        return (0.3 if given is None else given) / (main or 1.0) if on else 0.0

    @property
    def free_share(self) -> float:
        """The share of free noise levels at the start of a run of the later script."""
        initial, share = number(self.said("l2_initial_ratio")), number(self.said("free_stream_ratio"))
        found = initial if initial is not None else 0.3 if share is None else share
        # Without a distance at anchors free levels are all that is trained.
        found = 1.0 if number(self.said("lambda_l1")) == 0 else found
        return min(1.0, found) if switch(self.said("raft_mode")) and share != 0 else 0.0

    @property
    def is_weighted(self) -> bool:
        """Whether anchors are weighted by their signal-to-noise ratio, which is that program's default."""
        return number(self.said("snr_gamma")) != 0

    @property
    def sources(self) -> list[Mapping[str, Any]]:
        found = next((self.given[key] for key in _SOURCES if key in self.given), [])
        return [source for source in found if isinstance(source, Mapping)] if isinstance(found, list) else []

    def assume_defaults(self) -> None:
        """What the file leaves at that program's defaults, where those are not ours."""
        names = {key.rpartition(".")[2] for key in self.given}
        names |= {f"network_{name}" for name in ("dim", "alpha") if f"network.{name}" in self.given}
        for option, value in (_LATER_DEFAULTS if self.is_later else _DEFAULTS).items():
            if option not in names and option in self.known:
                self.assume(option, value, PROGRAM)
        if "enable_turbo" not in names:
            self.assume("objective", "acrf", PROGRAM)
        if "snr_gamma" not in names:
            self.assume("anchor_weighting", "vp_min_snr", PROGRAM)
        if self.is_later:
            self._assume_terms(names)
        elif "loss_mode" not in names and self.loss_mode == "standard":
            self.assume("loss_type", "charbonnier", PROGRAM)
        if "jitter_scale" not in names:
            self.assume("jitter_scale", _share_of_gap(0.02, self.said("turbo_steps")), PROGRAM)

    def _assume_terms(self, names: set[str]) -> None:
        if "lambda_l1" not in names:
            self.assume("loss_type", "l1", PROGRAM)
        if "latent_jitter_scale" not in names:
            self.assume("latent_jitter", 0.01, PROGRAM)
        if switch(self.said("cfg_training")) and "cfg_training_ratio" not in names:
            self.assume("cfg_training_ratio", 0.5, PROGRAM)
        if not {"use_dynamic_shift", "use_dynamic_shifting"} & names:
            self.conflicts.append(f"use_dynamic_shift, which is on where the file says nothing: {_ONE_SHIFT}")
        for name, (group, weight, default) in LATER_TERMS.items():
            value = default * self.share_of(group, weight) if group else 0.0
            if name not in names and value:
                self.assume(name, value, PROGRAM)


_ONE_SHIFT = "all sizes have one shift, with which Z-Image is sampled (scheduler_shift)"
LATER_TERMS = {
    "alpha_hf": ("enable_freq", "lambda_freq", 1.0),
    "beta_lf": ("enable_freq", "lambda_freq", 0.2),
    **{
        name: ("enable_style", "lambda_style", default)
        for name, default in {"lambda_struct": 1.0, "lambda_light": 0.5, "lambda_color": 0.3, "lambda_tex": 0.5}.items()
    },
    "lambda_cosine": ("", "", 0.0),
}
"""Terms of the later script's loss: the switch and the weight of their group, and the weight within it where the file says nothing."""

Rule = Callable[[AcrfSheet, str], None]
RULES: dict[str, Rule] = {}
"""The rule of each key that has one, by its name without the table."""


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def enter(rule: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = rule
        return rule

    return enter


@unless_empty
def _plain(sheet: AcrfSheet, key: str) -> None:
    name, value = key.rpartition(".")[2], sheet.value(key)
    if name in sheet.known:
        sheet.take(key, name, value)
    elif is_off(value):
        sheet.skip(key, "it is off")
    else:
        sheet.without_rule(key, name, PROGRAM)


RULES |= {
    "shift": to("scheduler_shift"),
    "dim": to("network_dim"),
    "alpha": to("network_alpha"),
    "lr_num_cycles": to("lr_scheduler_num_cycles"),
    "num_train_epochs": to("max_train_epochs"),
    "batch_size": to("train_batch_size"),
    "max_sequence_length": to("max_token_length"),
    "resume_lora": to("network_weights"),
    "turbo_steps": to("turbo_steps", "their noise levels are the sampler's own; make images with this many steps"),
    "latent_jitter_scale": to("latent_jitter"),
    "drop_text_ratio": to("caption_dropout_rate", "the empty caption"),
    **each("", "base_shift max_shift base_seq_len max_seq_len", unneeded("it belongs to a shift by size; all sizes have one shift")),
    "shuffle": unneeded("the order of the images is drawn anew in every epoch, there as well, whatever this says"),
    **each(
        "",
        "auto_optimize gpu_tier gpu_memory_gb",
        unneeded(
            "there it replaces mixed_precision and gradient_accumulation_steps by the card's size; here what is written is what happens"
        ),
    ),
    **each(
        "",
        "use_anchor num_workers cache_arch control_types conditioning_scale learning_rate_str base_weight",
        unneeded("no training of this kind reads it there"),
    ),
    **each("", "name created modified", unneeded("it belongs to that program's page, not to the training")),
}


@_rule("dit")
@unless_empty
def _base(sheet: AcrfSheet, key: str) -> None:
    path = PurePosixPath(str(sheet.value(key)).replace("\\", "/"))
    if path.name == "transformer":
        sheet.take(key, "pretrained_model_name_or_path", str(path.parent), "the folder of the whole model")
    else:
        sheet.take(key, "pretrained_model_name_or_path", str(path))


@_rule("type", "optimizer_type")
def _optimizer(sheet: AcrfSheet, key: str) -> None:
    held = {"adamwfp8": "AdamW8bit", "adamwbf16": "AdamW8bit"}.get(str(sheet.value(key)).lower())
    if held is None:
        sheet.take(key, "optimizer_type", sheet.value(key))
    else:
        sheet.take(key, "optimizer_type", held, "the nearest there is: its state is held in 8 bits")


@_rule("enable_turbo")
def _objective(sheet: AcrfSheet, key: str) -> None:
    sheet.take(key, "objective", "flow" if is_off(sheet.value(key)) else "acrf")


@_rule("jitter_scale")
def _jitter(sheet: AcrfSheet, key: str) -> None:
    deviation = number(sheet.value(key))
    if deviation is None:
        sheet.refuse(key, "it is not a number; jitter_scale keeps its default")
        return
    share = _share_of_gap(deviation, sheet.said("turbo_steps"))
    sheet.take(key, "jitter_scale", share, "about the same spread: there it is the deviation of the noise level, here a share of the gap")


def _share_of_gap(deviation: float, steps: object) -> float:
    """The jitter_scale whose uniform jitter has this standard deviation on average, with anchors 1/steps apart."""
    return round(min(1.0, deviation * (number(steps) or 10.0) * math.sqrt(12)), 3)


@_rule("snr_gamma", "snr_floor")
def _weights(sheet: AcrfSheet, key: str) -> None:
    name = key.rpartition(".")[2]
    if not sheet.is_weighted:
        sheet.skip(key, "snr_gamma = 0 is off, and anchor_weighting = uniform is the default here")
        return
    sheet.put("anchor_weighting", "vp_min_snr", key)
    note = "with anchor_weighting = vp_min_snr, whose mean is 1 here; uniform is what suits a few-step model" if name == "snr_gamma" else ""
    sheet.take(key, name, sheet.value(key), note)


@_rule("weight_decay")
def _decay(sheet: AcrfSheet, key: str) -> None:
    sheet.take(key, "optimizer_args", [f"weight_decay={sheet.value(key)}"])


@_rule("loss_mode")
def _mode(sheet: AcrfSheet, key: str) -> None:
    mode = sheet.loss_mode
    if mode == "standard":
        sheet.take(key, "loss_type", "charbonnier", "that is what standard means there; l2 is what a sampler needs")
    elif mode in ("frequency", "style", "unified"):
        sheet.skip(key, "loss_type = l2 and the weights of the terms say it")
    else:
        sheet.refuse(key, f"{mode} is not one of its modes (standard, frequency, style, unified)")


@_rule("loss_scope")
def _scope(sheet: AcrfSheet, key: str) -> None:
    if sheet.value(key) != "per_dataset":
        sheet.skip(key, "weights hold for all images unless a dataset_config has others")
    elif len(sheet.sources) == 1:
        sheet.skip(key, "there is one data set, so its weights are those of the run")
    else:
        sheet.refuse(key, "weights of a data set of its own stand in a dataset_config, in its [[datasets.subsets]]")


@_rule(*TERMS)
def _term(sheet: AcrfSheet, key: str) -> None:
    name = key.rpartition(".")[2]
    modes, note = TERMS[name]
    if sheet.is_later and name == "lambda_fft":
        sheet.skip(key, "that script does not read it")
        return
    if sheet.is_later and name in LATER_TERMS:
        _later_term(sheet, key, note)
        return
    own = sheet.sources[0].get(name) if sheet.said("loss_scope") == "per_dataset" and len(sheet.sources) == 1 else None
    value = number(sheet.value(key) if own is None else own)
    if sheet.loss_mode not in modes:
        sheet.skip(key, f"its mode {sheet.loss_mode} does not use it")
    elif value is None:
        sheet.refuse(key, f"it is not a number; {name} keeps its default")
    elif name in _UNSCALED or sheet.loss_mode != "unified":
        sheet.take(key, name, value, note if value else "")
    else:
        sheet.take(key, name, value / 2, "; ".join(part for part in ("half, because unified is the mean of two modes", note) if part))


def _later_term(sheet: AcrfSheet, key: str, note: str) -> None:
    name, value = key.rpartition(".")[2], number(sheet.value(key))
    group, weight, _default = LATER_TERMS[name]
    share = sheet.share_of(group, weight) if group else 1 / (number(sheet.said("lambda_l1")) or 1.0)
    if value is None:
        sheet.refuse(key, f"it is not a number; {name} keeps its default")
    elif not share:
        sheet.skip(key, f"{group} is off" if sheet.said(group) is not None and is_off(sheet.said(group)) else f"{weight} is 0")
    else:
        times = f"times {share:g}" if share != 1 and value else ""
        sheet.take(key, name, value * share, "; ".join(text for text in (times, note if value else "") if text))


@_rule("enable_freq", "lambda_freq", "enable_style", "lambda_style")
def _group(sheet: AcrfSheet, key: str) -> None:
    off = is_off(sheet.value(key)) and key.rpartition(".")[2].startswith("enable")
    sheet.skip(key, "it is off" if off else "the weight of each of its terms holds it")


@_rule("lambda_l1", "lambda_mse")
def _distance(sheet: AcrfSheet, key: str) -> None:
    value = number(sheet.value(key))
    if value is None:
        sheet.refuse(key, "it is not a number; the distance between velocities counts 1")
    elif value > 0 and key.endswith("l1"):
        sheet.take(key, "loss_type", "l1", "" if value == 1 else "it counts 1, and the other weights are divided by this number")
    elif key.endswith("mse"):
        sheet.skip(key, "that script does not read it")
    elif sheet.free_share:
        sheet.take(key, "loss_type", "l2", "free noise levels alone have a distance there, which is squared")
    else:
        sheet.lose(key, "the distance between velocities always counts 1")


@_rule("raft_mode", "free_stream_ratio", "l2_initial_ratio", "l2_milestones")
def _free_share(sheet: AcrfSheet, key: str) -> None:
    if not sheet.free_share:
        sheet.skip(key, "it is off" if is_off(sheet.value(key)) else "raft_mode is off")
    elif not key.endswith("raft_mode"):
        sheet.skip(key, "raft_mode says what becomes of it")
    else:
        sheet.take(key, "free_stream_ratio", sheet.free_share, "a share of the samples; there all have both, and it weights the second")


@_rule("l2_final_ratio", "l2_schedule_mode")
def _free_schedule(sheet: AcrfSheet, key: str) -> None:
    mode = str(sheet.said("l2_schedule_mode") or "constant")
    if not sheet.free_share or mode == "constant":
        sheet.skip(key, "raft_mode is off" if not sheet.free_share else "the share stays the same")
    elif mode == "step" and key.endswith("mode"):
        sheet.lose(key, "the share changes in a straight line, not in steps")
    elif key.endswith("mode"):
        sheet.skip(key, "free_stream_final_ratio holds it")
    else:
        sheet.take(key, "free_stream_final_ratio", sheet.value(key))


@_rule("enable_curvature", "lambda_curvature", "curvature_interval", "curvature_start_epoch")
def _curvature(sheet: AcrfSheet, key: str) -> None:
    name = key.rpartition(".")[2]
    if not switch(sheet.said("enable_curvature")):
        sheet.skip(key, "enable_curvature is off")
    elif name == "enable_curvature":
        weight = number(sheet.said("lambda_curvature"))
        sheet.take(key, "curvature_weight", 0.05 if weight is None else weight)
    elif name == "lambda_curvature":
        sheet.skip(key, "curvature_weight holds it")
    elif name == "curvature_interval":
        sheet.take(key, name, sheet.value(key), "in optimizer steps")
    elif is_off(sheet.value(key)):
        sheet.skip(key, "0 is the start here as well")
    else:
        sheet.lose(key, "give the optimizer step as curvature_start")


@_rule("cfg_training", "cfg_scale", "cfg_training_ratio")
def _guided(sheet: AcrfSheet, key: str) -> None:
    name = key.rpartition(".")[2]
    if not switch(sheet.said("cfg_training")):
        sheet.skip(key, "cfg_training is off")
    elif name == "cfg_training":
        scale = number(sheet.said("cfg_scale"))
        sheet.take(key, "cfg_training_scale", 7.0 if scale is None else scale)
    elif name == "cfg_scale":
        sheet.skip(key, "cfg_training_scale holds it")
    else:
        sheet.take(key, name, sheet.value(key))


@_rule("enable_timestep_aware_loss", "timestep_high_threshold", "timestep_low_threshold")
def _by_level(sheet: AcrfSheet, key: str) -> None:
    if not switch(sheet.said("enable_timestep_aware_loss")):
        sheet.skip(key, "enable_timestep_aware_loss is off")
    else:
        sheet.lose(key, "weights by noise level are anchor_weighting; colour terms end at noise level 0.5 by themselves")


@_rule("use_dynamic_shift", "use_dynamic_shifting")
def _shift_by_size(sheet: AcrfSheet, key: str) -> None:
    if is_off(sheet.value(key)):
        sheet.skip(key, "one shift for all sizes is what is done")
    else:
        sheet.lose(key, _ONE_SHIFT)


@_rule("training_type", "condition_mode", "model_type")
def _kind_of_file(sheet: AcrfSheet, key: str) -> None:
    sheet.skip(key, f"the kind of run says it: {sheet.run.label}")


@_rule("trainable_modules", "freeze_embeddings")
def _trained(sheet: AcrfSheet, key: str) -> None:
    part = str(sheet.said("trainable_modules") or "all")
    if key.endswith("modules"):
        chosen = {"attention": ["attention"], "mlp": ["feed_forward"], "norm": ["norm"]}.get(part)
        if part == "all":
            sheet.skip(key, "all weights are trained")
        elif chosen is None:
            sheet.refuse(key, f"{part} is not one of all, attention, mlp, norm; all weights are trained")
        else:
            sheet.take(key, "target_modules", chosen, "pieces of names")
    elif part != "all" or is_off(sheet.value(key)):
        sheet.skip(key, "it is off" if is_off(sheet.value(key)) else "trainable_modules leaves them out")
    else:
        sheet.take(key, "exclude_modules", ["embed"], "pieces of names")


@_rule("lambda_base")
def _main_term(sheet: AcrfSheet, key: str) -> None:
    if number(sheet.value(key)) == 1:
        sheet.skip(key, "1 is what the distance between velocities always counts")
    else:
        sheet.refuse(key, "the distance between velocities always counts 1; divide the other weights by this number instead")


@_rule("dataset_config")
def _data_file(sheet: AcrfSheet, key: str) -> None:
    sheet.refuse(key, "that program's file of data sets is not read; give the folder of the images as train_data_dir")


@_rule("sources", "datasets")
def _folders(sheet: AcrfSheet, key: str) -> None:
    if key not in _SOURCES:
        regular = [source for source in parts if isinstance(source, Mapping)] if isinstance(parts := sheet.value(key), list) else []
        on = switch(sheet.value("reg_dataset.enabled")) is not False
        if on and len(regular) > 1:
            sheet.refuse(key, f"{len(regular)} folders go into a dataset_config, one [[datasets.subsets]] with is_reg = true each")
        elif on and regular:
            sheet.take(key, "reg_data_dir", str(regular[0].get("cache_directory") or ""), "its caches are not read, they are made anew")
        else:
            sheet.skip(key, "reg_dataset.enabled is off" if regular else "it names no folder")
    elif not sheet.sources:
        sheet.skip(key, "it names no folder")
    elif len(sheet.sources) > 1:
        sheet.refuse(key, f"{len(sheet.sources)} folders go into a dataset_config, one [[datasets.subsets]] each, with num_repeats")
    else:
        source = sheet.sources[0]
        sheet.take(key, "train_data_dir", str(source.get("cache_directory") or ""), "its caches are not read, they are made anew")
        sheet.put("dataset_repeats", int(number(source.get("num_repeats")) or 1), key)
        side = int(number(source.get("resolution_limit")) or 1024)
        sheet.put("resolution", [side, side], key)


@_rule("resume")
def _resume(sheet: AcrfSheet, key: str) -> None:
    if switch(sheet.value(key)):
        sheet.refuse(key, "states of that program are not read; give its last saved file as network_weights to go on from it")
    else:
        sheet.skip(key, "a run of the same name and settings goes on by itself; resume = none always starts a new one")


@_rule("num_gpus")
def _gpus(sheet: AcrfSheet, key: str) -> None:
    if not switch(sheet.said("multi_gpu")):
        sheet.skip(key, "multi_gpu is off")
    else:
        sheet.take(key, key.rpartition(".")[2], sheet.value(key))


@_rule("l2_include_anchor", "l2_anchor_ratio")
def _anchored_too(sheet: AcrfSheet, key: str) -> None:
    if not sheet.free_share or not switch(sheet.said("l2_include_anchor")):
        sheet.skip(key, "l2_include_anchor is off" if sheet.free_share else "raft_mode is off")
    else:
        sheet.lose(key, "free levels take the place of anchors in their share of samples")


@_rule("weight", "ratio", "adafactor_relative_step", "relative_step")
def _of_something_off(sheet: AcrfSheet, key: str) -> None:
    adafactor = "adafactor" in str(sheet.said("optimizer_type") or sheet.said("type") or "").lower()
    if key.endswith("step") and not adafactor:
        sheet.skip(key, "it is for Adafactor")
    elif is_off(sheet.value(key if key.endswith("step") else "reg_dataset.enabled")):
        sheet.skip(key, "it is off")
    elif key.endswith("step"):
        sheet.refuse(key, "Adafactor has no steps of its own here; learning_rate is taken at its word")
    else:
        sheet.refuse(key, "as many regularisation images are shown as others; prior_loss_weight weights them")


IMPORTER = Importer("one of the AC-RF trainer (.toml or .json)", (".toml", ".json"), looks_like, read)
