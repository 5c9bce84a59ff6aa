"""The defaults of kohya_ss's own page (its config.toml): the same settings as its JSON, in a table for each part of the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sd_scripts.families import RUNS
from sd_scripts.schema import flat
from sd_scripts.schema.imported import Imported, Row

from . import reading
from .sheet import KOHYA, NAMES

_TRAINING = ("model", "folders", "accelerate_launch", "basic", "advanced", "network", "samples", "huggingface", "metadata")
"""Tables of the page for a training; a later one wins, as the page reads save_every_n_steps from advanced. The others are tools."""
_PLACES = dict.fromkeys(("models_dir", "vae_dir", "state_dir", "log_tracker_config_dir"), "a folder to choose from")


_LONG_NAMES = reading.TABLE.keys() | NAMES.keys() | {name for run in RUNS.values() if run.family in KOHYA for name in flat.fields(run)}


def looks_like(given: Mapping[str, Any]) -> bool:
    """Whether these are tables of that page: it alone has accelerate_launch, and the two with most settings."""
    tables = {name for name, entries in given.items() if isinstance(entries, Mapping)}
    return "accelerate_launch" in tables or {"basic", "advanced"} <= tables


def read(name: str, given: Mapping[str, Any]) -> Imported:
    """The settings in these tables, with a row for each key; one that is not read, or stands twice, is named with its table."""
    tables = {table: entries for table, entries in given.items() if isinstance(entries, Mapping)}
    settings: dict[str, object] = {}
    stood: dict[str, str] = {}
    left: list[Row] = []
    for table in (*_TRAINING, *_of_family(tables)):
        for key, value in tables.pop(table, {}).items():
            name_there = _name_in_json(table, key)
            if key in _PLACES:
                left.append(Row(f"{table}.{key}", value, "not needed", f"it is {_PLACES[key]} on kohya_ss's page"))
                continue
            if name_there in settings:
                why = f"it stands in [{table}] as well, where that page reads it"
                left.append(Row(stood[name_there], settings[name_there], "not needed", why))
            settings[name_there], stood[name_there] = value, f"{table}.{key}"
    left += [
        Row(
            f"{table}.{key}",
            value,
            "not needed",
            f"[{table}] is another part of kohya_ss's page, or a family that this file does not train",
        )
        for table, entries in tables.items()
        for key, value in entries.items()
    ]
    return reading.from_defaults(settings, name, left)


def _of_family(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The tables of the family that the file is for: its page has no box for it, so the base model's name tells."""
    family = reading.guessed(tables.get("model", {}))
    prefix = KOHYA[family].prefix
    return [table for table in tables if prefix and table.startswith(prefix)]


def _name_in_json(table: str, key: str) -> str:
    """What the page's JSON calls a setting: it puts the table before the names that others have as well."""
    return f"{table}_{key}" if f"{table}_{key}" in _LONG_NAMES else key
