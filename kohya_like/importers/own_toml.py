"""A configuration of this program: a file of Save TOML, a run's config.toml, a preset."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from sd_scripts.families import RUNS
from sd_scripts.programs.command_lines import Command, clear
from sd_scripts.schema import flat
from sd_scripts.schema.imported import Imported
from sd_scripts.schema.sheet import Sheet

ORIGIN = "configuration of this program (TOML)"


def of_line(command: Command) -> Imported | None:
    """The settings of a command line of this program; None for one of kohya's scripts, some of which have the same names."""
    if not re.search(r"(^|[/\\])sd_scripts[/\\]", command.script) or command.name not in {run.script for run in RUNS.values()}:
        return None
    run = next(run for run in RUNS.values() if run.script == command.name)
    known, unclear = clear(command.options)
    off = {name[3:]: False for name in known if name.startswith("no_") and name not in flat.fields(run)}
    given = {name: value for name, value in known.items() if name[3:] not in off or not name.startswith("no_")}
    return imported({"script": run.script, **given, **off}, unclear)


def imported(given: Mapping[str, object], unclear: Mapping[str, tuple[object, str]] = MappingProxyType({})) -> Imported:
    """The settings of a file whose `script` says what it is for, taken as they are. Raises OptionError for a script that is not here.

    unclear: what stands in it in words that only a shell knows, with a sentence for each.
    """
    run = flat.run_of(given)
    sheet = Sheet(run, given)
    for key in given:
        _row(sheet, key)
    sheet.ask(unclear, _row)
    return sheet.settle(f"{ORIGIN}: {run.label}")


def _row(sheet: Sheet, key: str) -> None:
    if key in ("script", "schema_version"):
        sheet.skip(key, f"it says that the file is for {sheet.run.label}")
    elif key in sheet.known and not sheet.known[key].show.cli_only:
        sheet.take(key, key, sheet.value(key))
    else:
        sheet.refuse(key, sheet.advice(key, sheet.value(key)) if key not in sheet.known else "only the command line may give it")
