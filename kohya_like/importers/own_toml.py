"""A configuration of this program: a file of Save TOML, a run's config.toml, a preset."""

from __future__ import annotations

from collections.abc import Mapping

from sd_scripts.schema import flat
from sd_scripts.schema.imported import Imported
from sd_scripts.schema.sheet import MISSING, Sheet, is_empty

ORIGIN = "configuration of this program (TOML)"


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
