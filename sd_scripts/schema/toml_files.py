"""Options <-> TOML files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import toml

from sd_scripts.families import RUNS
from sd_scripts.schema.errors import refuse

from . import sleeping
from .errors import OptionError, Problem
from .fields import Options
from .flat import fields, flatten
from .outside import toml_of

HEADER = "kohya_like"
"""The TOML table that says which kind of run a file is for."""
SCHEMA_VERSION = 2
"""Written into files; version 1 had other defaults, see RunOptions.defaults_of_version_1."""


def to_toml(options: Options) -> str:
    """The options as a TOML file with a table for each section: every value except those that are None or asleep, and no cli_only ones.

    These are always defaults, so leaving them out loses nothing.
    """
    known, values = fields(type(options)), flatten(options)
    tables: dict[str, dict[str, Any]] = {HEADER: {"script": options.script, "schema_version": SCHEMA_VERSION}}
    without_effect = sleeping.asleep(known, values)
    for name, value in values.items():
        if value is None or known[name].show.cli_only or name in without_effect:
            continue
        tables.setdefault(known[name].section, {})[name] = list(value) if isinstance(value, tuple) else value
    return "\n".join(
        f"[{table}]\n" + "".join(f"{name} = {_toml_value(value)}\n" for name, value in entries.items()) for table, entries in tables.items()
    )


def _toml_value(value: Any) -> str:
    """One value in TOML. JSON's strings are TOML's basic strings, apart from DEL, which TOML wants escaped."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return str(toml.dumps({"v": value})).removeprefix("v = ").strip()


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as flat values; tables are opened, so kohya's flat files and ours both work. Raises OptionError with line and column."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as err:
        raise OptionError(f"config_file: {path} does not exist") from err
    except (OSError, UnicodeDecodeError) as err:
        raise OptionError(f"config_file: {path} cannot be read as text: {err}") from err
    return parse_toml(text, path.name)


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The flat values of a TOML text; `name` is used in messages."""
    try:
        return values_of(toml_of(text), name)
    except ValueError as err:
        raise OptionError(f"{name} is not valid TOML: {err}") from err


def values_of(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The flat values of the tables of a file; `name` is used in messages. Raises OptionError for a key that stands there twice."""
    flat: dict[str, Any] = {}
    problems = []
    for key, item in _entries(tables):
        if key in flat and flat[key] != item:
            problems.append(Problem(key, f"{key} stands twice in {name}, in different tables, as {flat[key]} and as {item}; keep one"))
        flat[key] = item
    refuse(problems)
    return _with_defaults_of_its_version(flat)


def opened(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a file whose tables are only for the eye; of two with one name the last counts."""
    return dict(_entries(tables))


def _entries(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        yield from value.items() if isinstance(value, Mapping) else [(key, value)]


def _with_defaults_of_its_version(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a file with the defaults that were others in its version, so that it means what it meant when it was written."""
    if values.get("schema_version") != 1:
        return values
    run = next((run for run in RUNS.values() if run.script == values.get("script")), None)
    return values if run is None else {**run.defaults_of_version_1, **values}
