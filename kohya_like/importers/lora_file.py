"""A run rebuilt from the header of the file it made: our own settings exactly, kohya's `ss_*` texts as far as they go."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from sd_scripts.families import RUNS
from sd_scripts.programs.kohya.network import who_is_trained
from sd_scripts.programs.kohya.reading import fill, opened
from sd_scripts.programs.kohya.sheet import KohyaSheet
from sd_scripts.runs.safetensors_header import SafetensorsHeader, read_header
from sd_scripts.runs.told import CONFIG, adapter_key, can_be_found, is_adapter, run_by_script, settings_of, told_family
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported, Row
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.sheet import MISSING, Sheet, is_empty

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
    if not is_adapter(header):
        raise OptionError(f"{name} holds no adapter (LoRA, LoHa, LoKr, OFT) and no settings of this program, so no run can be told from it")
    return _of_kohya(name, header)


# --- family ---------------------------------------------------------------------------------------------------------


def told_base(name: str, header: SafetensorsHeader) -> str:
    """The base model that a file of ours was trained on, where its name leads to it; else an empty text."""
    base = str(settings_of(name, header).get("pretrained_model_name_or_path") or "") if CONFIG in header.texts else ""
    return base if can_be_found(base) else ""


def _family(name: str, header: SafetensorsHeader) -> str:
    """As `told_family`. Raises OptionError where nothing says it."""
    found = told_family(name, header)
    if found is None:
        raise OptionError(f"{name}: neither its texts nor its layers are those of a model family that is trained here")
    return found


# --- our own files --------------------------------------------------------------------------------------------------


def _of_ours(name: str, header: SafetensorsHeader) -> Imported:
    settings = settings_of(name, header)
    run = _run_of(settings, name, header)
    sheet = Sheet(run, settings)
    base = str(settings.get("pretrained_model_name_or_path") or "")
    for key, value in settings.items():
        if key in ("script", "schema_version"):
            sheet.skip(key, f"it says that the run is for {run.label}")
        elif key == "pretrained_model_name_or_path" and not can_be_found(base):
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


def _run_of(settings: Mapping[str, object], name: str, header: SafetensorsHeader) -> type[RunOptions]:
    return run_by_script(settings) or RUNS[_family(name, header), "network" if "network_type" in settings else "full"]


def _missing_of_ours(settings: Mapping[str, object], base: str) -> dict[str, str]:
    missing = _base_and_images(base, "")
    if settings.get("masked_loss") and not settings.get("alpha_mask"):
        missing["conditioning_data_dir"] = "the folder of the masks"
    if settings.get("dim_from_weights"):
        missing["network_weights"] = "the LoRA file that the run started from"
    if settings.get("base_weights_multiplier"):
        missing["base_weights"] = "the LoRA files that were merged into the base model"
    return missing


def _base_and_images(base: str, folders: str) -> dict[str, str]:
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


def _of_kohya(name: str, header: SafetensorsHeader) -> Imported:
    texts = header.texts
    run = RUNS[_family(name, header), "network"]
    key_of = {_name(key): key for key in texts if key not in _FACTS and _is_setting(key)}
    given: dict[str, object] = {option: _value(texts[key]) for option, key in key_of.items()}
    _split_optimizer(given)
    given["network_args"] = _network_args(texts.get("ss_network_args", ""))
    from_data_sets = {key: value for key, value in _data_set(texts).items() if is_empty(given.get(key))}
    given |= from_data_sets
    base = str(given.pop("pretrained_model_name_or_path", "") or "")
    if can_be_found(base):
        given["pretrained_model_name_or_path"] = base
    merged, split = opened(given)
    sheet = KohyaSheet(run, merged, page=False, tab="lora")
    sheet.trains_text = any(re.match(r"lora_te|text_encoder", key) for key in header.shapes)
    sheet.trains_unet = any(not re.match(r"lora_te|text_encoder", key) and adapter_key(key) for key in header.shapes)
    fill(sheet, split)
    who_is_trained(sheet)
    if is_empty(given.get("network_dim")):
        _from_shapes(sheet, header)
    described = "ss_learning_rate" in texts
    found = sheet.settle(f"{KOHYA_ORIGIN if described else BARE_ORIGIN}: {run.label}", _base_and_images(base, _folders(texts)))
    return replace(found, rows=_rows(texts, key_of, found.rows), missing=found.missing + _also_missing(texts, sheet.known, described))


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
        told = [f"{name} ({entry['img_count']} images, {entry['n_repeats']} repeats)" for name, entry in folders.items()]
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
    return "it had " + ", ".join(told[:20]) + (f" and {len(told) - 20} more" if len(told) > 20 else "") if told else ""


def _also_missing(texts: Mapping[str, str], known: Collection[str], described: bool) -> list[str]:
    """What a person should know that no run needs."""
    told = []
    if texts.get("ss_reg_dataset_dirs", "{}") not in ("{}", "None", ""):
        told.append("reg_data_dir: the run had regularisation images; give their folder to repeat it")
    if texts.get("ss_vae_name", "None") not in ("None", ""):
        option = "ae" if "ae" in known else "vae"
        told.append(f"{option}: the run had a VAE of its own ({texts['ss_vae_name']})")
    if not described:
        told.append("learning_rate: the file says nothing about the training, only about the network")
    return told


def _from_shapes(sheet: KohyaSheet, header: SafetensorsHeader) -> None:
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
