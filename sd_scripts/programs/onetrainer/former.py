"""What configurations of OneTrainer that were saved by earlier versions call otherwise, as that program itself brings them up to date."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAMES = {
    "lora_layers": "layer_filter",
    "lora_layer_preset": "layer_filter_preset",
    "lora_layers_regex": "layer_filter_regex",
    "save_after": "save_every",
    "save_after_unit": "save_every_unit",
    "vae_model_name": "vae.model_name",
}
"""Paths of today by those of before."""
_OF_PARTS = (
    (re.compile(r"train_(unet|prior|text_encoder|text_encoder_2)"), "train"),
    (re.compile(r"train_(unet|prior|text_encoder|text_encoder_2)_epochs"), "stop_training_after"),
    (re.compile(r"(unet|prior|text_encoder|text_encoder_2)_learning_rate"), "learning_rate"),
    (re.compile(r"(unet|prior|text_encoder|text_encoder_2|vae)_weight_dtype"), "weight_dtype"),
)
_WITH_PRIOR = ("WUERSTCHEN_2", "STABLE_CASCADE_1")
"""Models of which a part is called prior; others' transformer was called so up to version 8 of the file."""


def of_today(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tables of a configuration with the names of today, and for the path of each that has another one what the file calls it."""
    tables: dict[str, Any] = {}
    called: dict[str, str] = {}
    optimizer = given.get("optimizer")
    for key, value in given.items():
        path = _path_of_today(key, isinstance(optimizer, str))
        tables |= _put(tables, path, value) if path != key else {key: value}
        called |= {path: key} if path != key else {}
    if str(given.get("model_type")) not in _WITH_PRIOR and isinstance(given.get("prior"), Mapping) and "transformer" not in given:
        tables["transformer"] = tables.pop("prior")
        called |= {f"transformer.{name}": f"prior.{name}" for name in tables["transformer"]}
    if "layer_filter_preset" in tables and tables["layer_filter_preset"] is None:
        tables["layer_filter_preset"] = "full"
    if (gamma := tables.pop("min_snr_gamma", 0.0)) and "loss_weight_fn" not in tables:
        tables |= {"loss_weight_fn": "MIN_SNR_GAMMA", "loss_weight_strength": gamma}
        called |= {"loss_weight_strength": "min_snr_gamma"}
    if isinstance(concepts := tables.get("concepts"), list):
        tables["concepts"] = [_concept(one, index, called) for index, one in enumerate(concepts)]
    return tables, called


def _path_of_today(key: str, optimizer_is_a_name: bool) -> str:
    if optimizer_is_a_name and (key == "optimizer" or key.startswith("optimizer_")) and key != "optimizer_defaults":
        return f"optimizer.{key.removeprefix('optimizer_')}"
    found = next(((match[1], name) for pattern, name in _OF_PARTS if (match := pattern.fullmatch(key))), None)
    return f"{found[0]}.{found[1]}" if found else _NAMES.get(key, key)


def _put(tables: Mapping[str, Any], path: str, value: object) -> dict[str, Any]:
    table, dot, name = path.partition(".")
    if not dot:
        return {table: value}
    before = tables.get(table)
    found: dict[str, Any] = {**before} if isinstance(before, Mapping) else {}
    found.setdefault(name, value)
    if name == "stop_training_after":
        found.setdefault("stop_training_after_unit", "EPOCH")
    return {table: found}


def _concept(concept: Any, index: int, called: dict[str, str]) -> Any:
    if not isinstance(concept, Mapping):
        return concept
    found = dict(concept)
    if "repeats" in found and "balancing" not in found:
        found["balancing"] = found.pop("repeats")
        called[f"concepts[{index}].balancing"] = f"concepts[{index}].repeats"
    if "validation_concept" in found and "type" not in found:
        found["type"] = "VALIDATION" if found.pop("validation_concept") else "STANDARD"
        called[f"concepts[{index}].type"] = f"concepts[{index}].validation_concept"
    return found
