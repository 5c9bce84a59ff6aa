"""Whether a file or folder that an option names may be the model that a run needs, as far as headers and configurations tell it.

The loaders of the families say more, with torch; what is refused here they would refuse as well.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from sd_scripts.families import FACTS, OWN_SIGNS
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.outside import json_of

from .drawing import has_toy, pipelines_of
from .model_headers import LORA, UNKNOWN, check_bits, is_gguf, read_safetensors, what_is
from .told import adapter_kind, adapter_of_another, header_of

BASE = "pretrained_model_name_or_path"


def problems_of_toy(family: str, option: str, value: str, known: Collection[str]) -> list[Problem]:
    """What is wrong with asking for a built-in model: not every family has one. known: values of the option that the form proposes, among
    them every `toy:<name>` that fits."""
    if value != "toy" and value not in known:
        return [Problem(option, f"{option}: there is no built-in model {value}; give toy, a file, a folder or a hub id")]
    if option != BASE or not FACTS[family].bases or has_toy(family):
        return []
    there = ", ".join(FACTS[name].label for name in FACTS if has_toy(name))
    text = f"{option}: there is no built-in model of {FACTS[family].label}; there are those of {there}. Give a file, a folder or a hub id"
    return [Problem(option, text)]


def problems_of_file(family: str, option: str, value: str, wants_adapter: bool, kind: str | None = None) -> list[Problem]:
    """What is wrong with a file or folder on this disk; nothing where only whoever loads it can tell.

    kind: the kind of adapter that the file must hold.
    """
    path = Path(value).expanduser()
    try:
        if path.is_dir():
            _check_folder(family, option, path)
        elif not is_gguf(path) and path.suffix.lower() != ".json":
            _check_file(family, option, path, wants_adapter)
            if wants_adapter:
                _check_adapter(family, option, path, kind)
    except OptionError as err:
        return [Problem(option, problem.message) for problem in err.problems]
    except OSError as err:
        return [Problem(option, f"{option}: {path} cannot be read: {err.strerror or err}")]
    return []


def _check_file(family: str, option: str, path: Path, wants_adapter: bool) -> None:
    header = read_safetensors(path, option)
    check_bits(header, option)
    what = what_is(header)
    label = FACTS[family].label
    if wants_adapter and what not in (LORA, UNKNOWN):
        raise OptionError(f"{option}: {path.name} is {what}; a LoRA file belongs here")
    if not wants_adapter and what == LORA:
        advice = "LoRA files go into base_weights (merged first) or network_weights (trained further)"
        raise OptionError(f"{option}: {path.name} is a LoRA file; you chose {label}. {advice}")
    if option == BASE and what not in {sign.what for sign in OWN_SIGNS[family]}:
        raise OptionError(f"{option}: {path.name} is {what}; you chose {label}. Choose its own family, or a base model of {label}")


def _check_adapter(family: str, option: str, path: Path, kind: str | None) -> None:
    header, label = header_of(path), FACTS[family].label
    if (other := adapter_of_another(path.name, header, family)) is not None:
        raise OptionError(f"{option}: {path.name} is for {FACTS[other].label}; you chose {label}. Choose a file for {label}")
    found = adapter_kind(header)
    if kind is not None and found is not None and found != kind:
        raise OptionError(f"{option}: {path.name} holds {found}, but network_type is {kind}; set network_type = {found}")


def _check_folder(family: str, option: str, path: Path) -> None:
    if option != BASE:
        if not any(path.glob("config.json")) and not any(path.glob("*/config.json")):
            raise OptionError(f"{option}: the folder {path.name} holds no model: neither it nor a folder in it has a config.json")
        return
    if not FACTS[family].bases:
        return  # that of a run, which made it
    try:
        name = str(json_of((path / "model_index.json").read_text(encoding="utf-8")).get("_class_name"))
    except FileNotFoundError:
        files = sorted(file.name for file in path.glob("*.safetensors"))
        hint = f"It has {files[0]}: to load that file, give its path" if files else "A base model's folder has a model_index.json"
        raise OptionError(f"{option}: the folder {path.name} is not a diffusers folder. {hint}") from None
    except (ValueError, AttributeError) as err:
        raise OptionError(f"{option}: model_index.json in {path.name} cannot be read; download or copy the model again") from err
    if name not in pipelines_of(family) and any(name in pipelines_of(other) for other in FACTS):
        label, kind = FACTS[family].label, name.removesuffix("Pipeline")
        advice = f"Choose its own family, or a base model of {label}"
        raise OptionError(f"{option}: {path.name} is a {kind} model ({name}); you chose {label}. {advice}")
