"""A configuration of the AC-RF trainer for Z-Image Turbo (the TOML that its page writes for the script, or the JSON that the page keeps).

Facts about the other program are those of its commit 324acd6 (2025-12), read in its code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported, Importer
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.sheet import MISSING, Sheet, is_empty, is_off, number, switch

from .options import ZImageFull, ZImageNetwork

PROGRAM = "the AC-RF trainer"
ORIGIN = "configuration of the AC-RF trainer for Z-Image"
_RUNS: dict[str, type[RunOptions]] = {"lora": ZImageNetwork, "finetune": ZImageFull}
"""By its training_type."""
_SOURCES = ("dataset.sources", "dataset.datasets")
_DEFAULTS = {"turbo_steps": 10, "network_dim": 8, "network_alpha": 4.0, "lr_scheduler": "constant", "lr_warmup_steps": 0}
"""That program's own, where they are not ours."""

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


class AcrfSheet(Sheet):
    """Settings of that program by `table.key`, as one kind of run."""

    def __init__(self, given: Mapping[str, Any], run: type[RunOptions]) -> None:
        opened: dict[str, object] = {}
        for table, entries in given.items():
            opened |= {f"{table}.{key}": value for key, value in entries.items()} if isinstance(entries, Mapping) else {table: entries}
        super().__init__(run, opened)
        self._by_name = {key.rpartition(".")[2]: key for key in opened}

    def said(self, name: str) -> object:
        """What the file says under this name, whatever table it stands in; None without it."""
        return self.given.get(self._by_name.get(name, ""))

    @property
    def loss_mode(self) -> str:
        return str(self.said("loss_mode") or ("style" if any(key.startswith("style_loss.") for key in self.given) else "standard"))

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
        for option, value in _DEFAULTS.items():
            if option not in names and option in self.known:
                self.assume(option, value, PROGRAM)
        if "enable_turbo" not in names:
            self.assume("objective", "acrf", PROGRAM)
        if "snr_gamma" not in names:
            self.assume("anchor_weighting", "vp_min_snr", PROGRAM)
        if "loss_mode" not in names and self.loss_mode == "standard":
            self.assume("loss_type", "charbonnier", PROGRAM)
        if "jitter_scale" not in names:
            self.assume("jitter_scale", _share_of_gap(0.02, self.said("turbo_steps")), PROGRAM)


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


def _plain(sheet: AcrfSheet, key: str) -> None:
    name, value = key.rpartition(".")[2], sheet.value(key)
    if is_empty(value):
        sheet.skip(key, "it is empty")
    elif name in sheet.known:
        sheet.take(key, name, value)
    elif is_off(value):
        sheet.skip(key, "it is off")
    else:
        sheet.without_rule(key, name, PROGRAM)


def _renamed(*pairs: tuple[str, str]) -> None:
    for name, option in pairs:

        def rule(sheet: AcrfSheet, key: str, option: str = option) -> None:
            sheet.take(key, option, sheet.value(key))

        _rule(name)(rule)


_renamed(
    ("shift", "scheduler_shift"),
    ("dim", "network_dim"),
    ("alpha", "network_alpha"),
    ("type", "optimizer_type"),
    ("lr_num_cycles", "lr_scheduler_num_cycles"),
    ("num_train_epochs", "max_train_epochs"),
    ("batch_size", "train_batch_size"),
)


@_rule("dit")
def _base(sheet: AcrfSheet, key: str) -> None:
    path = PurePosixPath(str(sheet.value(key)).replace("\\", "/"))
    if is_empty(sheet.value(key)):
        sheet.skip(key, "it is empty")
    elif path.name == "transformer":
        sheet.take(key, "pretrained_model_name_or_path", str(path.parent), "the folder of the whole model")
    else:
        sheet.take(key, "pretrained_model_name_or_path", str(path))


@_rule("enable_turbo")
def _objective(sheet: AcrfSheet, key: str) -> None:
    sheet.take(key, "objective", "flow" if is_off(sheet.value(key)) else "acrf")


@_rule("turbo_steps")
def _steps(sheet: AcrfSheet, key: str) -> None:
    sheet.take(key, "turbo_steps", sheet.value(key), "their noise levels are the sampler's own; make images with this many steps")


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


@_rule("lambda_base")
def _main_term(sheet: AcrfSheet, key: str) -> None:
    if number(sheet.value(key)) == 1:
        sheet.skip(key, "1 is what the distance between velocities always counts")
    else:
        sheet.refuse(key, "the distance between velocities always counts 1; divide the other weights by this number instead")


@_rule("sources", "datasets")
def _folders(sheet: AcrfSheet, key: str) -> None:
    if not sheet.sources:
        sheet.skip(key, "it names no folder")
    elif len(sheet.sources) > 1:
        sheet.refuse(key, f"{len(sheet.sources)} folders go into a dataset_config, one [[datasets.subsets]] each, with num_repeats")
    else:
        source = sheet.sources[0]
        sheet.take(key, "train_data_dir", str(source.get("cache_directory") or ""), "its caches are not read, they are made anew")
        sheet.put("dataset_repeats", int(number(source.get("num_repeats")) or 1), key)
        side = int(number(source.get("resolution_limit")) or 1024)
        sheet.put("resolution", [side, side], key)


@_rule("shuffle")
def _shuffle(sheet: AcrfSheet, key: str) -> None:
    sheet.skip(key, "the order of the images is drawn anew in every epoch, there as well, whatever this says")


@_rule("auto_optimize", "gpu_tier", "gpu_memory_gb")
def _hardware(sheet: AcrfSheet, key: str) -> None:
    sheet.skip(
        key, "there it replaces mixed_precision and gradient_accumulation_steps by the card's size; here what is written is what happens"
    )


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


@_rule("weight", "ratio", "adafactor_relative_step")
def _of_something_off(sheet: AcrfSheet, key: str) -> None:
    if is_off(sheet.value(key if key.endswith("step") else "reg_dataset.enabled")):
        sheet.skip(key, "it is off")
    elif key.endswith("step"):
        sheet.refuse(key, "Adafactor has no steps of its own here; learning_rate is taken at its word")
    else:
        sheet.refuse(key, "as many regularisation images are shown as others; prior_loss_weight weights them")


@_rule("use_anchor", "num_workers", "cache_arch", "control_types", "conditioning_scale", "learning_rate_str", "base_weight")
def _unused(sheet: AcrfSheet, key: str) -> None:
    sheet.skip(key, "no training of this kind reads it there")


@_rule("name", "created", "modified")
def _of_the_page(sheet: AcrfSheet, key: str) -> None:
    sheet.skip(key, "it belongs to that program's page, not to the training")


IMPORTER = Importer("one of the AC-RF trainer (.toml or .json)", (".toml", ".json"), looks_like, read)
