"""A configuration of this program: a file of Save TOML, a run's config.toml, a preset."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sd_scripts.families import RUNS
from sd_scripts.programs.command_lines import Command
from sd_scripts.schema import flat
from sd_scripts.schema.imported import Imported
from sd_scripts.schema.sheet import MISSING, Sheet, is_empty

ORIGIN = "configuration of this program (TOML)"


def of_line(command: Command) -> Imported | None:
    """The settings of a command line of this program; None for one of kohya's scripts, some of which have the same names."""
    if not re.search(r"(^|[/\\])sd_scripts[/\\]", command.script) or command.name not in {run.script for run in RUNS.values()}:
        return None
    run = next(run for run in RUNS.values() if run.script == command.name)
    off = {name[3:]: False for name in command.options if name.startswith("no_") and name not in flat.fields(run)}
    given = {name: value for name, value in command.options.items() if name[3:] not in off or not name.startswith("no_")}
    return imported({"script": run.script, **given, **off}, command.name)


def imported(given: Mapping[str, object], name: str) -> Imported:
    """The settings of a file whose `script` says what it is for, taken as they are. Raises OptionError for a script that is not here."""
    run = flat.run_of(given)
    sheet = Sheet(run, given)
    for key, value in given.items():
        if key in ("script", "schema_version"):
            sheet.skip(key, f"it says that the file is for {run.label}")
        elif key in sheet.known and not sheet.known[key].show.cli_only:
            sheet.take(key, key, value)
        else:
            sheet.refuse(key, sheet.advice(key, value) if key not in sheet.known else "only the command line may give it")
    missing = dict(MISSING)
    if not is_empty(sheet.value("dataset_config")):
        del missing["train_data_dir"]
    return sheet.settle(f"{ORIGIN}: {run.label}", missing)
