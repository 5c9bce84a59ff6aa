"""Settings of musubi-tuner: the TOML of a run, and its command lines, as a kind of run, values and a report.

It grew out of sd-scripts, so most names are kohya's and have kohya's rules; here stands what means something else. Facts about the other
program are those of its commit 30c658c (2026-06), read in its code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported, Importer
from sd_scripts.schema.objective import SizeShift
from sd_scripts.schema.sheet import is_empty, is_off, number, shown, unless_empty, unless_off

from .command_lines import Command
from .kohya.dataset_config import DEFAULTS as DATA_DEFAULTS
from .kohya.network import ADAPTER, RATES
from .kohya.reading import TABLE as KOHYA_TABLE
from .kohya.reading import fill, lines, opened, rule_of, told_of_files
from .kohya.sheet import KohyaSheet, Table, rules
from .table import DIFFUSERS_LINE, FILE_PRECISIONS, NamedModel, kind_of_run, size_shift

PROGRAM = "musubi-tuner"
MODELS: Mapping[str, NamedModel] = {
    "zimage": NamedModel("zimage", "Z-Image"),
    "qwen_image": NamedModel("qwen_edit", "Qwen-Image", {"model_version": "image"}),
    "flux_2_klein": NamedModel("flux2", "FLUX.2 Klein"),
    "krea2": NamedModel("krea2", "Krea 2"),
    "flux_2": NamedModel("flux2_dev", "FLUX.2 dev"),
    "flux_kontext": NamedModel("kontext", "FLUX.1 Kontext"),
    "framepack": NamedModel("", "FramePack, a model of videos"),
    "fpack": NamedModel("", "FramePack, a model of videos"),
    "hv": NamedModel("", "HunyuanVideo"),
    "hv_1_5": NamedModel("", "HunyuanVideo 1.5"),
    "wan": NamedModel("", "Wan, a model of videos"),
    "kandinsky": NamedModel("", "Kandinsky 5"),
    "kandinsky5": NamedModel("", "Kandinsky 5"),
    "hidream_o1": NamedModel("", "HiDream-O1"),
    "ideogram4": NamedModel("", "Ideogram 4"),
}
"""By the end of the network module, or the beginning of the script."""
MODULES = {"networks.lora": "hv", "networks.lora_flux": "flux_kontext"}
"""Modules of adapters that are not called after their model."""
FILES = {"vae": ("vae", "ae"), "text_encoder": ("text_encoder",), "text_encoder1": ("t5xxl",), "text_encoder2": ("clip_l",)}
"""Networks beside the transformer, with our names of them."""
_PIECES = {
    "zimage": ("z_image", "z-image", "zimage"),
    "krea2": ("krea2", "krea_2", "krea-2"),
    "qwen_image": ("qwen",),
    "wan": ("wan2",),
    "flux_2_klein": ("klein",),
}
"""Pieces of the names of weights, for files that say nothing else."""
_DEFAULTS: dict[str, object] = {
    "network_dim": 4,
    "network_alpha": 1.0,
    "learning_rate": 2e-6,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "lr_decay_steps": 0,
    "timestep_sampling": "sigma",
    "discrete_flow_shift": 1.0,
    "save_precision": "float",
    "sample_at_first": False,
    "save_model_as": "kohya",
    **DATA_DEFAULTS,
}
"""That program's own, where they may not be ours."""


def looks_like(given: Mapping[str, object]) -> bool:
    """Whether these are settings of a run of that program: it alone calls the transformer `dit` beside a dataset file or an adapter."""
    flat_ones = _flat(given)
    module = str(flat_ones.get("network_module") or "")
    if {"acrf", "num_train_epochs"} & {*given, *flat_ones}:
        return False  # Another program has these, and counts epochs by another name.
    return (
        ("dit" in flat_ones and bool({"dataset_config", "network_module"} & flat_ones.keys()))
        or "dit_high_noise" in flat_ones
        or (module.removeprefix("networks.lora_") in MODELS and module not in MODULES)
    )


def read(name: str, given: Mapping[str, Any]) -> Imported:
    """The settings in the TOML of a run. Raises OptionError for a model that is not trained here, or that the file does not name."""
    return _imported(name, _flat(given), "", "settings of " + PROGRAM)


def of_line(name: str, command: Command) -> Imported | None:
    """The settings of a command line of that program; None for another program's."""
    script = re.fullmatch(r"(\w+?)_train(_network)?(_self_flow)?\.py", command.name)
    if script is None or script[1] not in MODELS or not ("musubi" in command.script or "dit" in command.options):
        return None
    return _imported(name, lines(command, RULES)[0], script[1], f"command line of {PROGRAM}", "network" if script[2] else "full", command)


def _flat(given: Mapping[str, object]) -> dict[str, object]:
    """Values by name; tables are only for the eye there."""
    found: dict[str, object] = {}
    for key, value in given.items():
        found |= {str(inner): item for inner, item in value.items()} if isinstance(value, Mapping) else {str(key): value}
    return found


def _imported(
    name: str, given: Mapping[str, object], model: str, origin: str, method: str = "", command: Command | None = None
) -> Imported:
    method = method or ("network" if "network_module" in given or "network_dim" in given else "full")
    if not model:
        model = _model(given)
        if not model:
            raise OptionError(f"{name} is a file of {PROGRAM} that does not say which model it trains; give the line with its script")
    if model == "flux_2" and "klein" in f"{given.get('model_version')} {given.get('dit')}".lower():
        model = "flux_2_klein"
    if str(given.get("model_version")).lower() == "layered":
        raise OptionError(f"{name} is a file of {PROGRAM} for Qwen-Image-Layered, which this version does not train")
    run, found = kind_of_run(PROGRAM, name, MODELS, model, method)
    merged, split = opened(given)
    sheet = KohyaSheet(run, merged, page=False, tab="lora" if method == "network" else "finetune", program=PROGRAM, usual_shift=1.0)
    for option, value in found.options.items():
        sheet.put(option, value)
    table, unclear = KOHYA_TABLE | ADAPTER | RATES | RULES, lines(command, RULES)[1] if command is not None else {}
    fill(sheet, split, table)
    said = {*sheet.given, *unclear, *(name for name in _DEFAULTS if method == "full" and name.startswith("network_"))}
    for option, default in _DEFAULTS.items() if command is None or not command.lacks_its_file else ():
        if option not in said and sheet.has(option, default) and option not in flat.asleep(run, {**sheet.values, option: default}):
            sheet.assume_if_other(option, default, PROGRAM)
    if command is not None:
        sheet.ask(unclear, rule_of(sheet, table))
        told_of_files(sheet, command)
    return sheet.settle(f"{origin}: {run.label}")


def _model(given: Mapping[str, object]) -> str:
    """The model of a file without a script: by its network module, options of one model, or the names of weights."""
    module = str(given.get("network_module") or "")
    if module in MODULES and "dit" in given:
        return MODULES[module]
    if module.removeprefix("networks.lora_") in MODELS:
        return module.removeprefix("networks.lora_")
    if "dit_high_noise" in given:
        return "wan"
    if {"edit", "edit_plus", "fp8_vl"} & given.keys() or str(given.get("model_version")) in _VERSIONS:
        return "qwen_image"
    names = " ".join(str(given.get(key) or "") for key in ("dit", "text_encoder", "vae")).lower()
    return next((model for model, pieces in _PIECES.items() if any(piece in names for piece in pieces)), "")


_LINES = {
    "flux_shift": DIFFUSERS_LINE,
    "flux2_shift": DIFFUSERS_LINE,
    "qwen_shift": SizeShift((256, 0.5), (8192, 0.9)),
    "krea2_shift": SizeShift((256, 0.5), (6400, 1.15)),
}
"""The lines by which that program shifts times with the image's size."""
RULES: Table = {}
rule = rules(RULES)
_VERSIONS = {"original": "image", "edit": "edit", "edit-2509": "edit-2509", "edit-2511": "edit-2511"}


@rule("dit")
@unless_empty
def _transformer(sheet: KohyaSheet, key: str) -> None:
    sheet.take(key, "pretrained_model_name_or_path", sheet.value(key), "the transformer alone, with vae and text_encoder beside it")


@rule(*FILES)
@unless_empty
def _parts(sheet: KohyaSheet, key: str) -> None:
    option = next((name for name in FILES[key] if name in sheet.known), key)
    sheet.take(key, option, sheet.value(key))


@rule("vae_dtype")
def _vae_dtype(sheet: KohyaSheet, key: str) -> None:
    value = str(sheet.value(key) or "")
    if is_empty(value):
        sheet.skip(key, "it is empty")
    else:
        sheet.take(key, key, FILE_PRECISIONS.get(value.lower(), value))


@rule("model_version")
def _version(sheet: KohyaSheet, key: str) -> None:
    name = str(sheet.value(key) or "").lower()
    if key not in sheet.known:
        sheet.skip(key, f"the kind of run says it: {sheet.run.label}")
    elif name in _VERSIONS:
        sheet.take(key, key, _VERSIONS[name])
    else:
        sheet.lose(key, f"it is not one of {', '.join(_VERSIONS)}")


@rule("edit", "edit_plus")
def _editing(sheet: KohyaSheet, key: str) -> None:
    if is_off(sheet.value(key)) or not is_empty(sheet.value("model_version")):
        sheet.skip(key, "it is off" if is_off(sheet.value(key)) else "model_version says it")
    else:
        sheet.take(key, "model_version", "edit" if key == "edit" else "edit-2509")


@rule("fp8_vl", "fp8_llm", "fp8_text_encoder", "fp8_t5")
@unless_off
def _encoder_bits(sheet: KohyaSheet, key: str) -> None:
    sheet.take(key, "text_encoder_quantization", "qfloat8", "with a scale for each row")


@rule("timestep_sampling", "discrete_flow_shift", "sigmoid_scale", "logit_mean", "logit_std", "mode_scale", "weighting_scheme")
def _times(sheet: KohyaSheet, key: str) -> None:
    """Densities of the times. With sigma, weighting_scheme chooses the density of the steps (see kohya.recipe); with any other it weights
    the loss alone."""
    sampling = str(sheet.value("timestep_sampling") or "sigma")
    scheme = str(sheet.value("weighting_scheme") or "none")
    if sampling == "sigma" and scheme in ("logit_normal", "mode"):
        KOHYA_TABLE[key](sheet, key)
    elif sampling == "logsnr" and key in ("timestep_sampling", "logit_mean", "logit_std"):
        # logSNR = 2 ln((1 - t) / t), so the logit of t is -logSNR / 2.
        if key == "timestep_sampling":
            mean, deviation = (number(sheet.value(name)) for name in ("logit_mean", "logit_std"))
            sheet.put("logit_mean", -(mean or 0.0) / 2, key)
            sheet.put("logit_std", (1.0 if deviation is None else deviation) / 2, key)
            sheet.take(key, key, "logit_normal", "with half the logarithmic signal-to-noise ratio's mean, negative, and half its deviation")
        else:
            sheet.skip(key, "timestep_sampling = logit_normal holds it")
    elif key == "timestep_sampling":
        _sampling(sheet, key, sampling)
    elif key == "weighting_scheme":
        known = scheme in ("none", "sigma_sqrt", "cosmap") or not sheet.known
        sheet.take(key, key, scheme) if known else sheet.skip(key, "it weights nothing with such times, there as well")
    elif key in ("logit_mean", "logit_std", "mode_scale"):
        sheet.skip(key, "it belongs to weighting_scheme logit_normal or mode with timestep_sampling = sigma")
    elif key == "discrete_flow_shift" and sampling not in ("sigma", "shift"):
        sheet.skip(key, f"timestep_sampling = {sampling} does not use it")
    else:
        sheet.plain(key)


_MIXED = {"qinglong_flux": ("flux_shift", "79"), "qinglong_qwen": ("qwen_shift", "95")}
"""Densities that are mostly another one, with the part of the draws in percent; the rest are times of little noise or of all."""


def _sampling(sheet: KohyaSheet, key: str, sampling: str) -> None:
    if sampling in _MIXED:
        base, part = _MIXED[sampling]
        _sampling(sheet, key, base)
        put = sheet.values.get(key, sheet.known[key].default)
        sheet.lose(key, f"{part} of 100 draws are {base} there, and the others by logSNR; timestep_sampling = {put} was put for all")
        return
    line = _LINES.get(sampling)
    ours = getattr(flat.section_of(sheet.run, "objective"), "size_shifts", {}).get(sampling)
    if line is not None and (ours is None or (ours.fewest, ours.most) != (line.fewest, line.most)):
        shift = round(size_shift(line, 1024), 4)
        sheet.put("discrete_flow_shift", shift, key)
        sheet.take(key, key, "shift")
        sheet.lose(
            key,
            f"this line through the images' sizes is not here; timestep_sampling = shift with discrete_flow_shift = {shift:g} was put, the "
            "shift that images of 1024 px have there",
        )
    elif sampling in sheet.known[key].choices:
        sheet.take(key, key, sampling)
    else:
        sheet.take(key, key, "shift")
        sheet.lose(key, f"{sampling} is not here; timestep_sampling = shift was put")


@rule("guidance_scale")
def _embedded(sheet: KohyaSheet, key: str) -> None:
    sheet.plain(key) if key in sheet.known else sheet.skip(key, "it is for HunyuanVideo")


@rule("network_dim")
def _rank(sheet: KohyaSheet, key: str) -> None:
    ADAPTER[key](sheet, key)


@rule(
    "num_layers",
    "remove_first_image_from_target",
    "dit_in_channels",
    "dit_dtype",
    "text_encoder_dtype",
    "verbose",
    "conv_dim",
    "conv_alpha",
)
def _of_the_model(sheet: KohyaSheet, key: str) -> None:
    usual = {"num_layers": 60, "dit_in_channels": 16, "dit_dtype": "bfloat16"}.get(key)
    if key in sheet.known:
        ADAPTER[key](sheet, key)
    elif is_off(sheet.value(key)) or sheet.value(key) == usual or key in ("verbose", "text_encoder_dtype", "dit_dtype"):
        sheet.skip(key, "it changes nothing here")
    elif key.startswith("conv_"):
        sheet.skip(key, "the transformer has no 3x3 convolutions")
    else:
        sheet.lose(key, f"{shown(sheet.value(key))} belongs to a model that is made otherwise, which is not trained here")


@rule("min_timestep", "max_timestep")
def _bounds(sheet: KohyaSheet, key: str) -> None:
    """There another density than an even one is squeezed into the range, unless the file keeps its shape."""
    sheet.plain(key)
    sampling = str(sheet.value("timestep_sampling") or "sigma")
    if sheet.number(key) in (None, {"min": 0, "max": 1000}[key[:3]]):
        return
    if sampling == "sigma":
        why = (
            "it is a noise level here; with timestep_sampling = sigma that program counts its sampler's steps with it, from noise to image"
        )
        sheet.conflicts.append(f"{key} = {shown(sheet.value(key))}: {why}")
    elif sampling != "uniform" and not sheet.on("preserve_distribution_shape"):
        sheet.conflicts.append(f"{key} = {shown(sheet.value(key))}: the density of times is cut here, and squeezed into the range there")


@rule("preserve_distribution_shape")
def _kept_shape(sheet: KohyaSheet, key: str) -> None:
    sheet.skip(key, "min_timestep and max_timestep cut the density without changing its shape")


@rule("turbo_dit", "turbo_dit_cache")
def _model_of_previews(sheet: KohyaSheet, key: str) -> None:
    """Previews of Krea 2 are drawn there with another model than the one that is trained."""
    if is_off(sheet.value(key)) or is_empty(sheet.value("sample_prompts")):
        sheet.skip(key, "it is off" if is_off(sheet.value(key)) else "it is for previews, and there are none")
    elif key == "turbo_dit_cache":
        sheet.skip(key, "turbo_dit says it")
    else:
        sheet.refuse(
            key, "previews are drawn with the model that is trained; give them its number of steps and its guidance, not those of Turbo"
        )


@rule("flow_shift", "vae_spatial_tile_sample_min_size")
def _of_videos(sheet: KohyaSheet, key: str) -> None:
    sheet.skip(key, "it is for HunyuanVideo")


@rule("block_swap_optimizer_patch_params", "compile_cache_size_limit")
def _by_itself(sheet: KohyaSheet, key: str) -> None:
    sheet.skip(key, "it is done by itself here")


FP8_OF_TEXTS = {
    "zimage": "fp8_llm",
    "qwen_image": "fp8_vl",
    "flux_2": "fp8_text_encoder",
    "flux_2_klein": "fp8_text_encoder",
    "flux_kontext": "fp8_t5",
}
"""The switch for a text encoder in 8 bits, by the model."""


def name_of(family: str) -> str | None:
    """That program's name for the models of a family; None where it has none."""
    return next((name for name, model in MODELS.items() if model.family == family), None)


_OF_DATA = {
    "resolution": "resolution",
    "caption_extension": "caption_extension",
    "batch_size": "train_batch_size",
    "enable_bucket": "enable_bucket",
    "bucket_no_upscale": "bucket_no_upscale",
    "num_repeats": "dataset_repeats",
    "image_directory": "train_data_dir",
    "control_directory": "control_data_dir",
}
"""What that program's data set file says, with the option for it here; it takes one folder of control images."""
_OF_FOLDER = ("num_repeats", "image_directory", "control_directory")


def data_set(values: Mapping[str, Any]) -> dict[str, object]:
    """That program's data set file for the folder of a run, as tables."""
    found = {key: values[option] for key, option in _OF_DATA.items() if values[option] not in (None, ())}
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
    if "control_directory" in found:
        found["control_directory"] = found["control_directory"][0]
    folder = {key: found.pop(key) for key in _OF_FOLDER if key in found}
    return {"general": found, "datasets": [{**folder, "cache_directory": f"{values['output_dir']}/cache"}]}


def of_data_set(given: Mapping[str, Any]) -> dict[str, object]:
    """The options of a run that such a file with one folder says."""
    found = {**given["general"], **given["datasets"][0]}
    return {option: [found[key]] if key == "control_directory" else found[key] for key, option in _OF_DATA.items() if key in found}


IMPORTER = Importer(f"settings of {PROGRAM} (.toml)", (".toml",), looks_like, read)
