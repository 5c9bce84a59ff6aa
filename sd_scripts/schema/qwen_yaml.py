"""Configurations of qwen-image-finetune (YAML, its first schema and the later one) in our options.

Pure: a mapping in, findings out, one for every key. The studio shows them as rows; their values build a run. The keys, and what
that program does with them are those of its commits ab39db6 (2025-08) and 460ba1a (2026-03).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .errors import OptionError, Problem
from .qwen_yaml_keys import PROGRAM, Finding, Reader, Translation
from .qwen_yaml_rules import GROUPS, RULES
from .runs import RUNS, RunOptions

__all__ = ["PROGRAM", "RUN", "Finding", "Translation", "looks_like", "parse", "read", "translate"]

RUN: type[RunOptions] = RUNS["qwen_edit", "network"]
SECTIONS = ("model", "data", "train", "cache", "predict", "optimizer", "lr_scheduler", "logging", "loss", "validation")
MAX_TEXT_CHARACTERS = 1 << 20
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")


def parse(text: str, name: str) -> dict[str, Any]:
    """The mapping in a YAML text. Raises OptionError for what is no YAML, or no mapping. Nothing but plain values is ever made of it."""
    if len(text) > MAX_TEXT_CHARACTERS:
        raise OptionError(f"{name} has {len(text)} characters, which is too much for a configuration")
    if re.search(r"(^|[\s\[{,:-])[&*][A-Za-z0-9_]", text):
        # A few nested anchors make billions of values.
        raise OptionError(f"{name} uses YAML anchors (& and *), which are not read; write the values out")
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as err:
        where = " ".join(str(err).split())[:200]
        raise OptionError(f"{name} is not valid YAML: {where}") from err
    if not isinstance(found, dict):
        raise OptionError(f"{name} holds no settings: a configuration has sections such as model:, data: and train:")
    return found


def read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises OptionError for a file that is not there or cannot be read."""
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as err:
        raise OptionError(f"config: {path.name} cannot be read: {getattr(err, 'strerror', None) or 'it is not a text'}") from err
    return parse(text, path.name)


def looks_like(given: Mapping[str, object]) -> bool:
    """Whether this is a configuration of that program: at least two of its sections that are sections."""
    return sum(isinstance(given.get(name), Mapping) for name in SECTIONS) >= 2


def translate(given: Mapping[str, Any]) -> Translation:
    """What every key of a configuration becomes. Raises OptionError for references to keys that are not there."""
    found = Translation(_flattened(given))
    problems: list[Problem] = []
    for key, value in found.given.items():
        found.given[key] = _resolved(value, found.given, problems)
    if problems:
        raise OptionError(problems)
    reader = Reader(found, RULES, GROUPS)
    for key in found.given:
        reader.key(key)
    reader.assume()
    return found


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
