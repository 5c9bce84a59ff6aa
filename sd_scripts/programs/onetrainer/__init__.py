"""OneTrainer's presets and saved configurations (JSON), as a kind of run, values and a report.

Facts about the other program are those of its commit 23df383 (2026-08), read in its code. A step is a batch there, whatever is accumulated,
so numbers of steps are divided by the accumulation here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported, Importer
from sd_scripts.schema.runs import RunOptions

from ..table import (
    DIFFUSERS_LINE,
    DataFile,
    ForeignSheet,
    NamedModel,
    Rule,
    Table,
    each,
    fill,
    kind_of_run,
    only,
    opened,
    to,
    unneeded,
    version_of,
    where,
)
from . import data, export, model, training
from .export import sample
from .former import of_today

__all__ = ["IMPORTER", "MODELS", "PROGRAM", "TABLE", "layers_of", "looks_like", "name_of", "read", "said_otherwise", "sample"]

PROGRAM = "OneTrainer"

_UNET = {"attn-mlp": {}, "attn-only": {"target_modules": ["attn"]}}
_DOUBLE = {"attn-mlp": {"target_modules": ["attn", r"ff\.net", "proj_mlp"]}, "attn-only": {"target_modules": ["attn"]}, "blocks": {}}
_QWEN = {"attn-mlp": {}, "attn-only": {"target_modules": ["attn"]}, "blocks": {"lora_targets": "all_with_modulation"}}
_Z_IMAGE = {
    "attn-mlp": {},
    "attn-only": {"target_modules": [r"^layers\.\d+\.attention"]},
    "blocks": {"lora_targets": "all", "exclude_modules": ["refiner"]},
}
_KREA = {"attn-mlp": {"target_modules": ["attn", "ff"]}, "attn-only": {"target_modules": ["attn"]}, "blocks": {}}
"""Its presets of layers by name, each as options; the empty one is what an adapter has here."""

_NAMED: Mapping[str, NamedModel] = {
    "STABLE_DIFFUSION_15": NamedModel("sd", "Stable Diffusion 1.5", layers=_UNET),
    "STABLE_DIFFUSION_20": NamedModel("sd", "Stable Diffusion 2", layers=_UNET),
    "STABLE_DIFFUSION_20_BASE": NamedModel("sd", "Stable Diffusion 2", layers=_UNET),
    "STABLE_DIFFUSION_21": NamedModel("sd", "Stable Diffusion 2", layers=_UNET),
    "STABLE_DIFFUSION_21_BASE": NamedModel("sd", "Stable Diffusion 2", layers=_UNET),
    "STABLE_DIFFUSION_XL_10_BASE": NamedModel("sdxl", "SDXL", layers=_UNET),
    "FLUX_DEV_1": NamedModel("flux", "FLUX.1", layers=_DOUBLE),
    "FLUX_2": NamedModel("flux2_dev", "FLUX.2 dev", by_size=DIFFUSERS_LINE, layers={"blocks": {}}),
    "FLUX_2_KLEIN": NamedModel("flux2", "FLUX.2 Klein", by_size=DIFFUSERS_LINE, layers={"blocks": {}}),
    "CHROMA_1": NamedModel("chroma", "Chroma", by_size=None, layers=_DOUBLE),
    "KREA_2": NamedModel("krea2", "Krea 2", layers=_KREA),
    "ANIMA": NamedModel("anima", "Anima"),
    "QWEN": NamedModel("qwen_edit", "Qwen-Image", {"model_version": "image"}, layers=_QWEN),
    "Z_IMAGE": NamedModel("zimage", "Z-Image", by_size=DIFFUSERS_LINE, layers=_Z_IMAGE),
    **{
        name: NamedModel("", label)
        for name, label in {
            "STABLE_DIFFUSION_15_INPAINTING": "inpainting with Stable Diffusion 1.5",
            "STABLE_DIFFUSION_20_INPAINTING": "inpainting with Stable Diffusion 2",
            "STABLE_DIFFUSION_20_DEPTH": "Stable Diffusion 2 with depth",
            "STABLE_DIFFUSION_XL_10_BASE_INPAINTING": "inpainting with SDXL",
            "STABLE_DIFFUSION_3": "Stable Diffusion 3",
            "STABLE_DIFFUSION_35": "Stable Diffusion 3.5",
            "WUERSTCHEN_2": "Wuerstchen",
            "STABLE_CASCADE_1": "Stable Cascade",
            "PIXART_ALPHA": "PixArt Alpha",
            "PIXART_SIGMA": "PixArt Sigma",
            "FLUX_FILL_DEV_1": "FLUX.1 Fill",
            "SANA": "Sana",
            "HUNYUAN_VIDEO": "HunyuanVideo",
            "HI_DREAM_FULL": "HiDream-I1",
            "ERNIE": "ERNIE-Image",
            "IDEOGRAM_4": "Ideogram 4",
        }.items()
    },
}

_ENCODERS = {"STABLE_DIFFUSION_XL_10_BASE": ("text_encoder", "text_encoder_2"), "FLUX_DEV_1": ("text_encoder", "text_encoder_2")}
"""The text encoders of models that have several."""
_TRAINS_TEXTS = ("STABLE_DIFFUSION", "FLUX_DEV_1", "CHROMA_1", "QWEN")
MODELS: Mapping[str, NamedModel] = {
    name: replace(
        one,
        parts=(model.backbone_of(name), *_ENCODERS.get(name, ("text_encoder",)), "vae"),
        trains_texts=name.startswith(_TRAINS_TEXTS),
    )
    for name, one in _NAMED.items()
}

_BY_NAME = {"FLUX_2": "klein"}
"""Types of models of which the name of the base model says which it is."""
_METHODS = {"LORA": "network", "FINE_TUNE": "full"}
_LENGTHS = {
    "FLUX_DEV_1": ("text_encoder_2_sequence_length", "t5xxl_max_token_length", 77),
    "FLUX_2": ("text_encoder_sequence_length", "max_token_length", 512),
}
"""Types of models of which that program asks how much of a caption is read: its key, our option, what it takes where it is not told."""

_DEFAULTS: dict[str, object] = {
    "learning_rate": 3e-6,
    "lr_scheduler": "constant_with_warmup",
    "lr_warmup_steps": 200,
    "max_train_epochs": 100,
    "resolution": [512, 512],
    "mixed_precision": "fp16",
    "save_precision": "float",
    "gradient_checkpointing": True,
    "bucket_no_upscale": False,
    "timestep_sampling": "uniform",
    "network_alpha": 1.0,
    "network_dim": 16,
    "output_dir": "models",
}
"""That program's own, where they may not be ours."""


def looks_like(given: Mapping[str, object]) -> bool:
    """Whether these are settings of that program: it alone calls these so."""
    return ("training_method" in given and "model_type" in given) or {"output_model_format", "base_model_name"} <= given.keys()


def read(name: str, given: Mapping[str, Any]) -> Imported:
    """The settings of a configuration, with a row for each key, named by its path. Raises OptionError for what is not trained here."""
    method = str(given.get("training_method") or "FINE_TUNE")
    if method not in _METHODS:
        what = {"EMBEDDING": "an embedding", "FINE_TUNE_VAE": "a VAE"}.get(method, method)
        raise OptionError(f"{name} is a file of {PROGRAM} that trains {what}, which is not trained here")
    kind = str(given.get("model_type") or "STABLE_DIFFUSION_15")
    if kind in _BY_NAME and _BY_NAME[kind] in str(given.get("base_model_name")).lower():
        kind = f"{kind}_{_BY_NAME[kind].upper()}"
    run, found = kind_of_run(PROGRAM, name, MODELS, kind, _METHODS[method])
    today, called = of_today(given)
    sheet = ForeignSheet(PROGRAM, run, opened(_with_defaults_of_optimizer(today)), found)
    sheet.called |= {path: name for path, name in called.items() if path in sheet.given}
    for option, value in found.options.items():
        sheet.put(option, value, "model_type" if "model_type" in sheet.given else "")
    fill(sheet, TABLE)
    model.assumed_precision(sheet)
    if run.method == "network" and not {"layer_filter", "layer_filter_preset"} & sheet.given.keys():
        model.every_layer(sheet, "layer_filter_preset")
    without = ("network_",) if run.method == "full" else ()
    defaults = {option: value for option, value in _DEFAULTS.items() if not option.startswith(without or ("-",))}
    if str(sheet.value("learning_rate_scheduler") or "CONSTANT") != "CONSTANT":
        del defaults["lr_scheduler"]
    defaults["lr_warmup_steps"] = int(200 / max(1, int(sheet.number("gradient_accumulation_steps") or 1)))
    if (pairs := training.begun_with(sheet)) and not sheet.decided("optimizer_args"):
        defaults["optimizer_args"] = pairs
    if sheet.values.get("use_ema"):
        defaults["ema_decay"] = round(training.ema_decay(sheet), 7)
    if sheet.values.get("masked_loss"):
        defaults["masked_loss_outside_weight"] = 0.1
    if (length := _LENGTHS.get(str(given.get("model_type")))) and length[0] not in sheet.given:
        defaults[length[1]] = length[2]
    if sheet.decided("max_train_steps") or "timestep_distribution" in sheet.given:
        defaults.pop("timestep_sampling", None)
    return sheet.finish(f"configuration of {PROGRAM}", defaults)


def _tokens(kind: str) -> Rule:
    return where(lambda sheet: sheet.value("model_type") == kind, to(_LENGTHS[kind][1]), "the model says how much of a caption is read")


def said_otherwise(
    model: str, run: type[RunOptions], values: Mapping[str, Any], arguments: Mapping[str, object], layers: Mapping[str, Any]
) -> dict[str, object]:
    """See export.said_otherwise."""
    key, option, _ = _LENGTHS.get(model, ("", "", 0))
    return export.said_otherwise(model, run, values, arguments, layers) | ({key: values[option] or 512} if key else {})


def _with_defaults_of_optimizer(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings with what optimizer_defaults say of the chosen optimizer, where the optimizer's own table does not."""
    own, all_defaults = given.get("optimizer"), given.get("optimizer_defaults")
    chosen = own.get("optimizer") if isinstance(own, Mapping) else None
    defaults = all_defaults.get(chosen) if isinstance(all_defaults, Mapping) and isinstance(chosen, str) else None
    return {**given, "optimizer": {**defaults, **own}} if isinstance(defaults, Mapping) and isinstance(own, Mapping) else given


_VERSION = unneeded("it is the version of that program's tables")
_MACHINE = unneeded("it belongs to that program's page and machine, not to the training")

TABLE: Table = {
    **model.TABLE,
    **training.TABLE,
    **data.TABLE,
    **each("", "training_method model_type", unneeded("the kind of run says it")),
    **each("", "__version concepts[].__version concepts[].image.__version concepts[].text.__version optimizer.__version", _VERSION),
    **each("", f"{' '.join(f'{part}.__version' for part in model.PARTS)} cloud.__version secrets.__version", _VERSION),
    **{length[0]: _tokens(kind) for kind, length in _LENGTHS.items()},
    "align_prop": only(False, "there is no training by the taste of another network", banner=True),
    **each("", "align_prop_probability align_prop_loss align_prop_weight align_prop_steps", unneeded("align_prop says it")),
    **each("", "align_prop_truncate_steps align_prop_cfg_scale", unneeded("align_prop says it")),
    **each(
        "", "debug_mode debug_dir tensorboard tensorboard_expose tensorboard_always_on tensorboard_port offline_mode only_cache", _MACHINE
    ),
    **each("", "prevent_overwrites include_train_config huggingface_cache_dir train_device temp_device enable_autocast_cache", _MACHINE),
    **each("", "async_offloading fused_gradient_reduce async_gradient_reduce async_gradient_reduce_buffer rolling_backup", _MACHINE),
    **each("", "rolling_backup_count backup_before_save backup_after_unit samples_to_tensorboard sample_image_format", _MACHINE),
    **each("", "sample_video_format sample_audio_format gradient_reduce_precision clear_cache_before_training", _MACHINE),
    **each("", "cloud.* secrets.* secrets cloud optimizer_defaults.* optimizer_defaults workspace_dir fallback_train_dtype", _MACHINE),
    "cache_dir": unneeded("caches lie in output_dir, or where cache_dir says; those of that program are not read"),
    "continue_last_backup": only(False, "its backups are not read; give the last saved file as network_weights"),
    "save_filename_prefix": unneeded("saved files are named by output_name and the step"),
    "force_circular_padding": only(False, "seamless images are not trained", banner=True),
    "attention_mechanism": unneeded("see attention_backend; the fastest that is there is taken"),
}
"""The rule of each key, by its path."""

IMPORTER = Importer(f"a preset or configuration of {PROGRAM} (.json)", (".json",), looks_like, read)

DATA = (
    DataFile(PROGRAM, "concepts", "concept_file_name", "concepts", data.TABLE, data.are_concepts),
    DataFile(PROGRAM, "samples", "sample_definition_file_name", "samples", data.TABLE, data.are_samples, needs_images=False),
)


def layers_of(model: str) -> Mapping[str, Any]:
    """That program's presets of layers for one of its models, each as options."""
    return MODELS[model].layers


def name_of(family: str, values: Mapping[str, Any]) -> str | None:
    """That program's type for the model of a run with these options; None where it has none, or would take it for another."""
    found = next((name for name, model in MODELS.items() if model.family == family and model.options.items() <= values.items()), None)
    if found == "STABLE_DIFFUSION_15" and version_of(family, base := str(values["pretrained_model_name_or_path"])):
        plain = "base" in base.lower() if values["prediction_type"] == "auto" else values["prediction_type"] == "epsilon"
        return f"STABLE_DIFFUSION_21{'_BASE' if plain else ''}"
    kind, piece = next(((kind, piece) for kind, piece in _BY_NAME.items() if found == f"{kind}_{piece.upper()}"), (found, ""))
    return kind if piece in str(values["pretrained_model_name_or_path"]).lower() else None
