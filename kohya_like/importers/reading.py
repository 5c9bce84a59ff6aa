"""Recognises what kind of file somebody dropped on the page, and hands it to the importer for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sd_scripts.families.qwen_edit import yaml as schema_yaml
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.outside import json_of, toml_of

from . import acrf, kohya_defaults, kohya_ss, lora_file, own_toml, programs, qwen_yaml, safetensors_header
from .report import Imported

MAX_TEXT_BYTES = 4 << 20
"""More than any configuration; a larger file is something else."""
_ACCEPTED = (
    "a kohya_ss configuration (.json or .toml), an sd-scripts configuration (.toml), a file of Save TOML, a qwen-image-finetune "
    "configuration (.yaml), one of the AC-RF trainer (.toml or .json), or a LoRA (.safetensors)"
)


def read(name: str, data: bytes) -> Imported:
    """The settings in a file: kohya_ss GUI JSON or TOML, an sd-scripts configuration, our own TOML, qwen-image-finetune's YAML, the
    AC-RF trainer's TOML or JSON, or a LoRA .safetensors.

    name is the file's name, for messages and as a hint at the family. Of a .safetensors file the header is enough (see
    safetensors_header.needed_bytes), so the page need not send the weights. Raises OptionError with a sentence for a file that is none
    of these, or is damaged.
    """
    if not data:
        raise OptionError(f"{name} is empty")
    if name.lower().endswith(".safetensors") or safetensors_header.looks_like_safetensors(data):
        return lora_file.read(name, data)
    if name.lower().endswith((".ckpt", ".pt", ".pth", ".bin")):
        raise OptionError(f"{name}: files of this kind can run code when they are read; only .safetensors is opened")
    if len(data) > MAX_TEXT_BYTES:
        raise OptionError(f"{name} has {len(data)} bytes, which is too much for a configuration; give {_ACCEPTED}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise OptionError(f"{name} is not a text; give {_ACCEPTED}") from err
    if name.lower().endswith((".yaml", ".yml")):
        return _of_yaml(name, text)
    return _of_json(name, text) if name.lower().endswith(".json") or text.lstrip().startswith("{") else _of_toml(name, text)


def own(name: str, text: str) -> dict[str, Any] | None:
    """The flat values of a TOML text that this program wrote; None for any other. Raises OptionError for what is no TOML."""
    tables = _tables(name, text)
    header = tables.get(flat.HEADER)
    return flat.parse_toml(text, name) if "script" in tables or (isinstance(header, Mapping) and "script" in header) else None


def _of_yaml(name: str, text: str) -> Imported:
    given = schema_yaml.parse(text, name)
    _no_other_program(name, given)
    return qwen_yaml.read(name, given)


def _of_json(name: str, text: str) -> Imported:
    try:
        given = json_of(text)
    except ValueError as err:
        raise OptionError(f"{name} is not valid JSON: {err}") from err
    _no_other_program(name, given)
    if not isinstance(given, dict):
        raise OptionError(f"{name} is a list or a single value, not settings; give {_ACCEPTED}")
    _no_data_set(name, given)
    if acrf.looks_like(given):
        return acrf.read(name, given)
    if not kohya_ss.looks_like_kohya(given):
        raise OptionError(f"{name} has no settings that kohya_ss saves; give {_ACCEPTED}")
    return kohya_ss.from_json(given, name)


def _of_toml(name: str, text: str) -> Imported:
    tables, ours = _tables(name, text), own(name, text)
    if ours is not None:
        return own_toml.imported(ours, name)
    if acrf.looks_like(tables):
        return acrf.read(name, tables)
    _no_other_program(name, tables)
    _no_data_set(name, tables)
    if kohya_defaults.looks_like(tables):
        return kohya_defaults.read(name, tables)
    given = flat.parse_toml(text, name)
    if not kohya_ss.looks_like_kohya(given):
        raise OptionError(f"{name} has no settings that kohya's programs know; give {_ACCEPTED}")
    return kohya_ss.from_toml(given, name)


def _tables(name: str, text: str) -> Mapping[str, Any]:
    try:
        return toml_of(text)
    except ValueError as err:
        raise OptionError(f"{name} is not valid TOML: {err}") from err


def _no_other_program(name: str, given: object) -> None:
    """Refuses the files of programs that have no importer, by their name."""
    program = None if isinstance(given, Mapping) and acrf.looks_like(given) else programs.owner(given)
    if program is not None:
        raise OptionError(f"{name} is a file of {program}, which is not read here; give {_ACCEPTED}")


def _no_data_set(name: str, given: Mapping[str, Any]) -> None:
    """Refuses what describes pictures and not a run: a data set configuration, a metadata file."""
    if isinstance(given.get("datasets"), list):
        raise OptionError(f"{name} describes a data set, not a run; give its path as dataset_config")
    if given and all(isinstance(value, dict) and {"caption", "tags", "train_resolution"} & value.keys() for value in given.values()):
        raise OptionError(f"{name} holds captions, not settings; give its path as in_json")
