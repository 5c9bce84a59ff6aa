"""A run rebuilt from the header of the file it made: our own settings exactly, kohya's `ss_*` texts as far as they go."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from sd_scripts.families import RUNS
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.runs import RunOptions

from .kohya_network import who_is_trained
from .kohya_sheet import KohyaSheet
from .kohya_ss import MISSING, fill, opened
from .report import Imported, Row
from .safetensors_header import Header, read_header
from .sheet import Sheet, is_empty

CONFIG = "kohya_like.config"
"""Header key of the settings that this program writes into its files."""
OWN_ORIGIN = "file made by this program"
KOHYA_ORIGIN = "LoRA with kohya's training metadata"
BARE_ORIGIN = "LoRA without training metadata"
_LONGEST_SHOWN = 300


def read(name: str, data: bytes) -> Imported:
    """The run that a .safetensors file came from; the header alone is enough.

    Raises OptionError for a damaged file, one that is no adapter and does not hold our settings, and adapters of other families.
    """
    header = read_header(name, data)
    if CONFIG in header.texts:
        return _of_ours(name, header)
    if not any(_adapter_key(key) for key in header.shapes):
        raise OptionError(f"{name} holds no adapter (LoRA, LoHa, LoKr, OFT) and no settings of this program, so no run can be told from it")
    return _of_kohya(name, header)


# --- family ---------------------------------------------------------------------------------------------------------

_ADAPTER = re.compile(r"\.(lora_(down|up|A|B)\b|lora\.(down|up)\.|hada_w|lokr_w|oft_|lora_linear_layer)|_lora\.(down|up)\.")
_VERSIONS = {
    "sdxl": "sdxl",
    "stable-diffusion-xl": "sdxl",
    "flux": "flux",
    "sd_v1": "sd",
    "sd_v2": "sd",
    "stable-diffusion-v1": "sd",
    "stable-diffusion-v2": "sd",
    "qwen_image": "qwen_edit",
    "qwen-image": "qwen_edit",
    "z_image": "zimage",
    "z-image": "zimage",
}
"""How ss_base_model_version and modelspec.architecture start."""
_LAYERS = (
    (re.compile(r"transformer_blocks[._]\d+[._](img|txt)_(mlp|mod)"), "qwen_edit"),
    (re.compile(r"(^|[._])(layers|(noise|context)_refiner)[._]\d+[._](attention|feed_forward|adaLN)"), "zimage"),
    (re.compile(r"double_blocks|single_blocks|single_transformer_blocks|lora_te3_"), "flux"),
    (re.compile(r"lora_te2_|text_encoder_2|^lora_te1_.*|conditioner_embedders"), "sdxl"),
    (re.compile(r"^lora_te_"), "sd"),
)
_CONTEXT = re.compile(r"attn2[._]to_[kv]\.(lora_down|lora_A)")
_CONTEXT_WIDTHS = {768: "sd", 1024: "sd", 2048: "sdxl"}


def _adapter_key(key: str) -> bool:
    return _ADAPTER.search(key) is not None


def told_family(name: str, header: Header) -> str | None:
    """The family that a file was made for, by its texts or its layers; None where neither says it.

    Raises OptionError for a family that is not trained here, and for settings of ours that are damaged.
    """
    texts = header.texts
    if CONFIG in texts and (run := _by_script(_settings_of(name, header))) is not None:
        return run.family
    for said in (texts.get("ss_base_model_version", ""), texts.get("modelspec.architecture", "")):
        found = next((family for mark, family in _VERSIONS.items() if said.lower().startswith(mark)), None)
        if found is not None:
            return found
        if said and said != "None":
            raise OptionError(f"{name} was made for {said}, a model family that is not trained here")
    for key, shape in header.shapes.items():
        # Text is 768 numbers wide in SD 1.x, 1024 in 2.x, 2048 in SDXL.
        if _CONTEXT.search(key) and len(shape) >= 2 and shape[1] in _CONTEXT_WIDTHS:
            return _CONTEXT_WIDTHS[shape[1]]
    return next((family for pattern, family in _LAYERS if any(pattern.search(key) for key in header.shapes)), None)


def told_base(name: str, header: Header) -> str:
    """The base model that a file of ours was trained on, where its name leads to it; else an empty text."""
    base = str(_settings_of(name, header).get("pretrained_model_name_or_path") or "") if CONFIG in header.texts else ""
    return base if _can_be_found(base) else ""


def _family(name: str, header: Header) -> str:
    """As `told_family`. Raises OptionError where nothing says it."""
    found = told_family(name, header)
    if found is None:
        raise OptionError(f"{name}: neither its texts nor its layers are those of a model family that is trained here")
    return found


# --- our own files --------------------------------------------------------------------------------------------------


def _settings_of(name: str, header: Header) -> dict[str, object]:
    """The settings in the header of a file of ours. Raises OptionError for damaged ones."""
    try:
        settings = json_of(header.texts[CONFIG])
    except ValueError as err:
        raise OptionError(f"{name}: the settings in its header are damaged; export it again") from err
    if not isinstance(settings, dict):
        raise OptionError(f"{name}: the settings in its header are not a table; export it again")
    return settings


def _of_ours(name: str, header: Header) -> Imported:
    settings = _settings_of(name, header)
    run = _run_of(settings, name, header)
    sheet = Sheet(run, settings)
    base = str(settings.get("pretrained_model_name_or_path") or "")
    for key, value in settings.items():
        if key in ("script", "schema_version"):
            sheet.skip(key, f"it says that the run is for {run.label}")
        elif key == "pretrained_model_name_or_path" and not _can_be_found(base):
            sheet.skip(key, f"the header holds the base model's name alone, without its folder: {base}")
        elif key in sheet.known:
            sheet.take(key, key, value)
        else:
            sheet.refuse(key, sheet.advice(key, value))
    missing = _missing_of_ours(settings, base)
    if not base and not sheet.known["pretrained_model_name_or_path"].required:
        # A model from nothing has no base.
        del missing["pretrained_model_name_or_path"]
    found = sheet.settle(f"{OWN_ORIGIN}: {run.label}", missing)
    rows = [Row(CONFIG, "…", "taken", f"{len(settings)} settings, which follow")]
    others = [_fact(key, text) for key, text in header.texts.items() if key != CONFIG]
    return replace(found, rows=rows + found.rows + others)


def _by_script(settings: Mapping[str, object]) -> type[RunOptions] | None:
    return next((run for run in RUNS.values() if run.script == settings.get("script")), None)


def _run_of(settings: Mapping[str, object], name: str, header: Header) -> type[RunOptions]:
    return _by_script(settings) or RUNS[_family(name, header), "network" if "network_type" in settings else "full"]


def _can_be_found(base: str) -> bool:
    """Whether a base model's name leads to it: a hub id or the built-in one."""
    return base == "toy" or re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None


def _missing_of_ours(settings: Mapping[str, object], base: str) -> dict[str, str]:
    missing = _base_and_pictures(base, "")
    if settings.get("masked_loss") and not settings.get("alpha_mask"):
        missing["conditioning_data_dir"] = "the folder of the masks"
    if settings.get("dim_from_weights"):
        missing["network_weights"] = "the LoRA file that the run started from"
    if settings.get("base_weights_multiplier"):
        missing["base_weights"] = "the LoRA files that were merged into the base model"
    return missing


def _base_and_pictures(base: str, folders: str) -> dict[str, str]:
    missing = dict(MISSING)
    if base and base != "None":
        missing["pretrained_model_name_or_path"] += f"; it was {base}"
    missing["train_data_dir"] += f"; {folders}" if folders else "; its name is not kept in the file"
    return missing


# --- kohya's files --------------------------------------------------------------------------------------------------

_OTHER_NAMES = {
    "ss_batch_size_per_device": "train_batch_size",
    "ss_debiased_estimation": "debiased_estimation_loss",
    "ss_sd_model_name": "pretrained_model_name_or_path",
    "ss_optimizer": "optimizer_type",
    "modelspec.author": "metadata_author",
    "modelspec.description": "metadata_description",
    "modelspec.license": "metadata_license",
    "modelspec.tags": "metadata_tags",
    "modelspec.trigger_phrase": "metadata_trigger_phrase",
    "modelspec.usage_hint": "metadata_usage_hint",
    "modelspec.title": "metadata_title",
}
_FACTS = set(
    """ss_session_id ss_training_started_at ss_training_finished_at ss_num_train_images ss_num_validation_images ss_num_reg_images
    ss_num_batches_per_epoch ss_num_epochs ss_epoch ss_steps ss_total_batch_size ss_base_model_version ss_sd_scripts_commit_hash
    ss_sd_model_hash ss_new_sd_model_hash ss_vae_hash ss_new_vae_hash ss_tag_frequency ss_bucket_info ss_dataset_dirs
    ss_reg_dataset_dirs ss_datasets ss_vae_name ss_lowram ss_v2""".split()
)
_OF_A_DATASET = ("resolution", "batch_size_per_device", "enable_bucket", "bucket_no_upscale", "min_bucket_reso", "max_bucket_reso")
_OF_A_SUBSET = """shuffle_caption keep_tokens color_aug flip_aug random_crop caption_dropout_rate caption_dropout_every_n_epochs
    caption_tag_dropout_rate caption_prefix caption_suffix enable_wildcard secondary_separator keep_tokens_separator""".split()


def _of_kohya(name: str, header: Header) -> Imported:
    texts = header.texts
    run = RUNS[_family(name, header), "network"]
    key_of = {_name(key): key for key in texts if key not in _FACTS and _is_setting(key)}
    given: dict[str, object] = {option: _value(texts[key]) for option, key in key_of.items()}
    _split_optimizer(given)
    given["network_args"] = _network_args(texts.get("ss_network_args", ""))
    from_data_sets = {key: value for key, value in _data_set(texts).items() if is_empty(given.get(key))}
    given |= from_data_sets
    base = str(given.pop("pretrained_model_name_or_path", "") or "")
    if _can_be_found(base):
        given["pretrained_model_name_or_path"] = base
    merged, split = opened(given)
    sheet = KohyaSheet(run, merged, page=False, tab="lora")
    sheet.trains_text = any(re.match(r"lora_te|text_encoder", key) for key in header.shapes)
    sheet.trains_unet = any(not re.match(r"lora_te|text_encoder", key) and _adapter_key(key) for key in header.shapes)
    fill(sheet, split)
    who_is_trained(sheet)
    if is_empty(given.get("network_dim")):
        _from_shapes(sheet, header)
    described = "ss_learning_rate" in texts
    found = sheet.settle(f"{KOHYA_ORIGIN if described else BARE_ORIGIN}: {run.label}", _base_and_pictures(base, _folders(texts)))
    return replace(found, rows=_rows(texts, key_of, found.rows), missing=found.missing + _also_missing(texts, run.family, described))


def _is_setting(key: str) -> bool:
    return key.startswith("ss_") or key in _OTHER_NAMES


def _name(key: str) -> str:
    return _OTHER_NAMES.get(key, key.removeprefix("ss_"))


def _value(text: str) -> object:
    """A text of kohya's as the value it was made from by str()."""
    if text in ("None", ""):
        return None
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return list(value) if isinstance(value, tuple) else value if isinstance(value, bool | int | float | list) else text


def _split_optimizer(given: dict[str, object]) -> None:
    """`torch.optim.adamw.AdamW(weight_decay=0.1,betas=(0.9, 0.99))` as name and arguments."""
    text = str(given.get("optimizer_type") or "")
    path, _, rest = text.partition("(")
    if text:
        given["optimizer_type"] = path.rpartition(".")[2]
    # A comma separates arguments where a name and = follow it.
    arguments = [item.strip() for item in re.split(r",\s*(?=[A-Za-z_]\w*\s*=)", rest.removesuffix(")")) if item.strip()]
    if arguments:
        given["optimizer_args"] = arguments


def _network_args(text: str) -> list[str]:
    try:
        found = json_of(text or "{}")
    except ValueError:
        found = None
    return [f"{key}={value}" for key, value in found.items() if value is not None] if isinstance(found, dict) else []


def _data_set(texts: Mapping[str, str]) -> dict[str, object]:
    """What ss_datasets says of the first data set and its first folder; kohya writes it in place of single texts."""
    try:
        first = json_of(texts.get("ss_datasets") or "[]")[0]
        folder = first["subsets"][0]
    except (ValueError, LookupError, TypeError):
        return {}
    found = {_name(f"ss_{key}"): first[key] for key in _OF_A_DATASET if key in first}
    return found | {key: folder[key] for key in _OF_A_SUBSET if key in folder}


def _folders(texts: Mapping[str, str]) -> str:
    """The training folders and their repeats, for the sentence about what is missing."""
    try:
        folders = json_of(texts.get("ss_dataset_dirs") or "{}")
        told = [f"{name} ({entry['img_count']} pictures, {entry['n_repeats']} repeats)" for name, entry in folders.items()]
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
    return "it had " + ", ".join(told[:20]) + (f" and {len(told) - 20} more" if len(told) > 20 else "") if told else ""


def _also_missing(texts: Mapping[str, str], family: str, described: bool) -> list[str]:
    """What a person should know that no run needs."""
    told = []
    if texts.get("ss_reg_dataset_dirs", "{}") not in ("{}", "None", ""):
        told.append("reg_data_dir: the run had regularisation pictures; give their folder to repeat it")
    if texts.get("ss_vae_name", "None") not in ("None", ""):
        option = "ae" if family == "flux" else "vae"
        told.append(f"{option}: the run had a VAE of its own ({texts['ss_vae_name']})")
    if not described:
        told.append("learning_rate: the file says nothing about the training, only about the network")
    return told


def _from_shapes(sheet: KohyaSheet, header: Header) -> None:
    """Type and rank as the tensors have them."""
    types = {"hada_w": "loha", "lokr_w": "lokr", "oft_": "oft", "dora_scale": "dora", "lora_magnitude": "dora"}
    kind = next((kind for mark, kind in types.items() if any(mark in key for key in header.shapes)), "lora")
    sheet.put("network_type", kind)
    downs = [shape for key, shape in header.shapes.items() if key.endswith(("lora_down.weight", "lora_A.weight", "lora.down.weight"))]
    ranks = Counter(shape[0] for shape in downs if len(shape) == 2)
    told = f"network_type = {kind}"
    if ranks and kind in ("lora", "dora"):
        rank = ranks.most_common(1)[0][0]
        sheet.put("network_dim", rank)
        told += f", network_dim = {rank}"
    sheet.rows["(tensors)"] = Row("(tensors)", None, "taken", told + ", as the tensors have it")


# --- rows -----------------------------------------------------------------------------------------------------------


def _fact(key: str, text: str) -> Row:
    shown = text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"
    if key in ("ss_dataset_dirs", "ss_reg_dataset_dirs", "ss_datasets"):
        return Row(key, shown, "not needed", "it names folders of another computer; what is missing tells them")
    return Row(key, shown, "not needed", "it is a fact about the finished file, not a setting")


def _rows(texts: Mapping[str, str], key_of: Mapping[str, str], found: list[Row]) -> list[Row]:
    """One row for each text of the header, in its order, then those for what was opened."""
    by_name = {row.key: row for row in found}
    rows = []
    for key, text in texts.items():
        row = by_name.pop(_name(key), None) if key in key_of.values() else None
        if row is None and key == "ss_sd_model_name":
            row = Row(key, text, "not needed", "it is the base model's name alone, without its folder; see what is missing")
        rows.append(
            _fact(key, text) if row is None else Row(key, text if len(text) <= _LONGEST_SHOWN else row.value, row.verdict, row.text)
        )
    return rows + [row for key, row in by_name.items() if key not in ("network_args", "optimizer_args") or row.verdict != "not needed"]
