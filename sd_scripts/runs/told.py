"""What the header of a saved file tells of the run or model that it came from: family, settings, base. Reads no weights and no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sd_scripts.families import FACTS, OWN_SIGNS, RUNS
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.runs import RunOptions

from .safetensors_header import SafetensorsHeader, needed_bytes, read_header

CONFIG = "kohya_like.config"
"""Header key of the settings that this program writes into its files."""
_ADAPTER = re.compile(r"\.(lora_(down|up|A|B)\b|lora\.(down|up)\.|hada_w|lokr_w|oft_|lora_linear_layer)|_lora\.(down|up)\.")
_MARKS = {name: facts.adapters for name, facts in reversed(FACTS.items()) if facts.adapters is not None}
"""Later families first: their files may have layers of earlier ones as well, never the other way round."""
_KINDS = {
    "lora": ("lora_down", "lora_A", ".lora.down.", "_lora.down."),
    "dora": ("dora_scale", "lora_magnitude_vector"),
    "loha": (".hada_w",),
    "lokr": (".lokr_w",),
    "oft": (".oft_",),
}
_CONTEXT = re.compile(r"attn2[._]to_[kv]\.(lora_down|lora_A)")


def header_of(path: Path) -> SafetensorsHeader:
    """The header of a file. Raises OptionError for a file that cannot be read or is no safetensors file."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            return read_header(path.name, start + file.read(max(0, needed_bytes(start) - len(start))))
    except OSError as err:
        raise OptionError(f"{path.name} cannot be read: {err.strerror or err}") from err


def adapter_key(key: str) -> bool:
    """Whether a tensor of this name is one of an adapter."""
    return _ADAPTER.search(key) is not None


def is_adapter(header: SafetensorsHeader) -> bool:
    """Whether a file holds an adapter, and not a model."""
    return any(map(adapter_key, header.shapes))


def told_family(name: str, header: SafetensorsHeader) -> str | None:
    """The family that an adapter was made for, by its texts or its layers; None where neither says it.

    Raises OptionError for a family that is not trained here, and for settings of ours that are damaged.
    """
    texts = header.texts
    if CONFIG in texts and (run := run_by_script(settings_of(name, header))) is not None:
        return run.family
    for said in (texts.get("ss_base_model_version", ""), texts.get("modelspec.architecture", "")):
        found = next((family for family, marks in _MARKS.items() if said.lower().startswith(marks.architectures)), None)
        if found is not None:
            return found
        if said and said != "None":
            raise OptionError(f"{name} was made for {said}, a model family that is not trained here")
    for key, shape in header.shapes.items():
        wide = shape[1] if _CONTEXT.search(key) and len(shape) >= 2 else None
        if found := next((family for family, marks in _MARKS.items() if wide in marks.text_widths), None):
            return found
    return next((family for family, marks in _MARKS.items() if any(re.search(marks.layers, key) for key in header.shapes)), None)


def adapter_of_another(name: str, header: SafetensorsHeader, family: str) -> str | None:
    """The family that an adapter was made for, where that is certainly not this one; None where only whoever reads it can tell."""
    try:
        told = told_family(name, header)
    except OptionError:
        return None
    if told is None or told == family:
        return None
    theirs, ours = FACTS[told].lora_module or "", FACTS[family].lora_module or ""
    # Later models of a house have layers by the same names, so that a file may be for each of them. The widths of a UNet leave no doubt.
    is_alike = not _MARKS[told].text_widths and (ours == theirs or ours.startswith(f"{theirs}_"))
    return None if is_alike else told


def adapter_kind(header: SafetensorsHeader) -> str | None:
    """The network_type of an adapter's file; None for a file of several or of another."""
    kinds = {kind for kind, marks in _KINDS.items() if any(mark in key for key in header.shapes for mark in marks)}
    kinds -= {"lora"} if "dora" in kinds else set()
    return kinds.pop() if len(kinds) == 1 else None


def model_family(header: SafetensorsHeader) -> str | None:
    """The family of a model's file, by its settings or its tensors; None where nothing says it."""
    run = run_by_script(settings_of("the file", header)) if CONFIG in header.texts else None
    if run is not None:
        return run.family
    return next((name for name, signs in OWN_SIGNS.items() if any(sign.recognises(header) for sign in signs)), None)


def settings_of(name: str, header: SafetensorsHeader) -> dict[str, object]:
    """The settings in the header of a file of ours; none without. Raises OptionError for damaged ones."""
    try:
        settings = json_of(header.texts.get(CONFIG, "{}"))
    except ValueError as err:
        raise OptionError(f"{name}: the settings in its header are damaged; export it again") from err
    if not isinstance(settings, dict):
        raise OptionError(f"{name}: the settings in its header are not a table; export it again")
    return settings


def run_by_script(settings: Mapping[str, object]) -> type[RunOptions] | None:
    """The kind of run that settings are for."""
    return next((run for run in RUNS.values() if run.script == settings.get("script")), None)


def can_be_found(base: str) -> bool:
    """Whether a base model's name leads to it: a hub id or the built-in one."""
    return base == "toy" or re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None
