"""Configurations of qwen-image-finetune (YAML, its first schema and the later one) in our options.

Pure: a mapping in, a sheet out, with a row for every key. The studio shows the rows; the values build a run. The keys, and what
that program does with them are those of its commits ab39db6 (2025-08) and 460ba1a (2026-03).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.outside import yaml_of
from sd_scripts.schema.runs import RunOptions

from ..table import ForeignSheet, fill, kind_of_run
from .keys import DEFAULTS, PLAIN, PREDICT, SEED_KEYS
from .models import BASES, DEFAULT, MODELS, PROGRAM, name_of
from .rules import TABLE

Options = TypeVar("Options", bound=RunOptions)

SECTIONS = ("model", "data", "train", "cache", "predict", "optimizer", "lr_scheduler", "logging", "loss", "validation")
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")


NO_IMAGES = "(a dataloader)"
"""train_data_dir where a configuration names no images."""


class Config(dict[str, Any]):
    """A configuration as scripts for that program use it: sections are attributes, and keys as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {name} here; it has {', '.join(self) or 'nothing'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def config_of(given: object) -> Config:
    """A configuration of a mapping, or of an object with attributes, section by section; a Config stays the one it is.

    Raises OptionError for anything else.
    """
    if isinstance(given, Config):
        return given
    entries = given if isinstance(given, Mapping) else getattr(given, "__dict__", None)
    if entries is None:
        raise OptionError(f"config: a {type(given).__name__} is no configuration; give a path, a mapping or an object with sections")
    return Config({str(name): config_of(value) if _is_section(value) else value for name, value in entries.items()})


def _is_section(value: object) -> bool:
    return isinstance(value, Mapping) or (hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Enum))


def read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises OptionError for a file that is not there or cannot be read."""
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as err:
        raise OptionError(f"config: {path.name} cannot be read: {getattr(err, 'strerror', None) or 'it is not a text'}") from err
    return yaml_of(text, path.name)


def looks_like(given: Mapping[str, object]) -> bool:
    """Whether this is a configuration of that program: at least two of its sections that are sections."""
    return sum(isinstance(given.get(name), Mapping) for name in SECTIONS) >= 2


def translate(given: Mapping[str, Any], file: str = "the configuration") -> ForeignSheet:
    """What every key of a configuration becomes. Raises OptionError for references to keys that are not there, and for a model that is not
    trained here; a trainer that nobody knows has a row."""
    name = name_of(given)
    run, model = kind_of_run(PROGRAM, file, MODELS, name if name in MODELS else DEFAULT, "network")
    values = _flattened(given)
    problems: list[Problem] = []
    for key, value in values.items():
        values[key] = _resolved(value, values, problems)
    refuse(problems)
    sheet = ForeignSheet(PROGRAM, run, values, model)
    fill(sheet, TABLE)
    base = BASES.get(run.family)
    layers = {} if values.get("model.lora.target_modules") else model.layers
    for option, value in {**DEFAULTS, **layers, **({"pretrained_model_name_or_path": base} if base else {})}.items():
        if not sheet.decided(option):
            sheet.assume(option, value, PROGRAM)
    return sheet


def refusals(sheet: ForeignSheet) -> list[str]:
    """What of a configuration will not happen, as sentences."""
    return [f"{row.key}: {row.text}" for row in sheet.rows.values() if row.verdict in ("not supported", "unknown")]


def predict_devices(sheet: ForeignSheet) -> dict[str, str]:
    """Devices of prediction by option: none of a run, but kept for who predicts."""
    told = {option: sheet.first(*(f"predict.devices.{name}" for name in names)) for option, names in PREDICT.items()}
    return {option: str(device) for option, device in told.items() if device is not None}


def run_of(given: Mapping[str, Any], run: type[Options]) -> tuple[Options, dict[str, str]]:
    """Options of a run of this kind, and devices of prediction by option, of a configuration. It may leave out the images: see NO_IMAGES.

    Raises OptionError with everything that is refused or wrong.
    """
    found = translate(given)
    if found.run is not run:
        raise OptionError(Problem("trainer", f"trainer: {given['trainer']} is {found.run.label}, but this is {run.label}"))
    refused = [Problem("", text) for text in refusals(found)]
    named = found.values.get("train_data_dir") is not None
    try:
        options = flat.build(run, found.values if named else {**found.values, "train_data_dir": NO_IMAGES})
    except OptionError as err:
        raise OptionError([*refused, *err.problems]) from err
    if refused:
        raise OptionError(refused)
    return options, predict_devices(found)


def complete(config: Config, options: RunOptions) -> None:
    """Writes into a configuration what it leaves to that program, and resolves its references."""
    plain = flat.flatten(options)
    everything = translate(config).given
    for key, option in PLAIN.items():
        # Keys of the first schema say of a file that it is of that schema.
        everything.setdefault(key, None if key in SEED_KEYS else plain[option])
    everything.setdefault("model.quantize", plain["transformer_quantization"] != "none")
    everything.setdefault("cache.use_cache", plain["cache_latents"])
    everything.setdefault("predict.devices", Config())
    for key, value in everything.items():
        *sections, name = key.split(".")
        place = config
        for section in sections:
            if not isinstance(place.get(section), Config):
                place[section] = Config()
            place = place[section]
        place.setdefault(name, value)
        if isinstance(place[name], str):
            place[name] = value


def _flattened(given: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Values by dotted key. Lists, and the mapping of one data set, stay whole."""
    found: dict[str, object] = {}
    for name, value in given.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in _WHOLE:
            found |= _flattened(value, f"{key}.")
        else:
            found[key] = value
    return found


_WHOLE = ("data.init_args.dataset_path", "data.init_args.processor.init_args.multi_resolutions", "validation.dataset")


def _resolved(value: object, given: Mapping[str, object], problems: list[Problem], depth: int = 0) -> object:
    """The value with `${section.key}` replaced by what stands there."""
    if isinstance(value, list):
        return [_resolved(item, given, problems, depth) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value

    def there(name: str) -> object:
        if depth > 8 or name not in given:
            why = "refers to itself" if depth > 8 else "is not in the file"
            problems.append(Problem("", f"${{{name}}}: {why}; write the value out"))
            return ""
        return _resolved(given[name], given, problems, depth + 1)

    whole = _REFERENCE.fullmatch(value.strip())
    if whole:
        return there(whole[1].strip())
    return _REFERENCE.sub(lambda match: str(there(match[1].strip())), value)
