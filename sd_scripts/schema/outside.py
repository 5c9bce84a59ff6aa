"""JSON and TOML from outside: whatever is wrong with a text is a ValueError. YAML, which may hold more than values: an OptionError."""

import json
import tomllib
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import TypeAdapter, ValidationError

from .errors import OptionError

T = TypeVar("T")
MAX_YAML_CHARACTERS = 1 << 20
_READERS: dict[type, TypeAdapter[Any]] = {}
TOO_DEEP = "it is nested too deeply"


def json_of(text: str | bytes) -> Any:
    """What a JSON text says. Raises ValueError, also for nesting that Python does not follow."""
    try:
        return json.loads(text)
    except RecursionError as err:
        raise ValueError(TOO_DEEP) from err


def json_in(file: Path) -> Any:
    """What a JSON file says; None where it is missing, cannot be read, or is not whole."""
    try:
        return json_of(file.read_bytes())
    except (OSError, ValueError):
        return None


def object_in(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds; empty where json_in finds something else."""
    found = json_in(file)
    return found if isinstance(found, dict) else {}


def read_as(kind: type[T], text: str | bytes) -> T:
    """A dataclass as a JSON text has it, without what it does not know. Raises ValueError for values that are not of its types."""
    try:
        reader = _READERS.get(kind) or _READERS.setdefault(kind, TypeAdapter(kind))
        return cast(T, reader.validate_python(json_of(text)))
    except ValidationError as err:
        first = err.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}") from err
    except (ArithmeticError, TypeError) as err:
        raise ValueError(str(err)) from err


def toml_of(text: str) -> dict[str, Any]:
    """What a TOML text says. Raises ValueError, also for nesting that Python does not follow."""
    try:
        return tomllib.loads(text)
    except RecursionError as err:
        raise ValueError(TOO_DEEP) from err


def yaml_of(text: str, name: str) -> dict[str, Any]:
    """The mapping in a YAML text. Raises OptionError for what is no YAML, or no mapping. Nothing but plain values is ever made of it."""
    if len(text) > MAX_YAML_CHARACTERS:
        raise OptionError(f"{name} has {len(text)} characters, which is too much for a configuration")
    try:
        # Asked event by event, before anything is made of them: a few nested anchors make billions of values.
        if any(getattr(event, "anchor", None) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise OptionError(f"{name} uses YAML anchors (& and *), which are not read; write the values out")
        found = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as err:
        where = " ".join(str(err).split())[:200]
        raise OptionError(f"{name} is not valid YAML: {where}") from err
    if not isinstance(found, dict):
        raise OptionError(f"{name} holds no settings: a configuration has sections such as model:, data: and train:")
    return found
