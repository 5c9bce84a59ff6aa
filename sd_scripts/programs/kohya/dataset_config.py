"""A data set file of sd-scripts or musubi-tuner, opened over the settings of a run: it becomes the text of dataset_config. So do data sets
that stand in the file of the run itself, where those programs do not read them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sd_scripts.schema import flat, toml_files
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported, Row
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.sheet import is_empty, number, parts

from ..table import ForeignSheet, opened, place
from .reading import names as names_of_settings


def said_of(name: str, edits: bool) -> tuple[str, str] | None:
    """See dataset.config; it loads what reads images, which no start of a script should wait for."""
    from sd_scripts.dataset import config

    return config.said_of(name, edits)


_MUSUBI = ("image_directory", "image_jsonl_file")
"""Keys by which musubi-tuner's files are known."""
_TABLES = ("general", "datasets", "subsets")
DEFAULTS: dict[str, object] = {"enable_bucket": False, "bucket_no_upscale": False, "bucket_reso_steps": 16, "resolution": [960, 544]}
"""What musubi-tuner takes where its file says nothing."""


def read(given: Mapping[str, Any], run: type[RunOptions]) -> Imported:
    """The text of dataset_config, with the batch size of its data sets, and a row for each key."""
    sheet = ForeignSheet("musubi-tuner", run, opened(given))
    names = {place(key).rpartition(".")[2] for key in sheet.given}
    sheet.program = "musubi-tuner" if names & set(_MUSUBI) else "sd-scripts"
    edits = "control_data_dir" in sheet.known
    for key in sheet.given:
        name = place(key).rpartition(".")[2]
        verdict, why = said_of(name, edits) or ("taken", "it stands in dataset_config")
        if name in _TABLES or verdict == "taken":
            sheet.write(key, "taken", "it stands in dataset_config")
        elif verdict == "unknown":
            sheet.unknown(key, sheet.program, [])
        elif verdict == "not supported" and sheet.value(key) is False:
            sheet.skip(key, "it is off")
        elif name.endswith("control_resolution") and "control_resolution" in sheet.known and (side := _side(sheet.value(key))) is not None:
            sheet.take(key, "control_resolution", side, "for the whole run; a square of this side has about that area")
        elif verdict == "not supported":
            sheet.lose(key, why)
        else:
            sheet.skip(key, why)
    sizes = {str(value): key for key, value in sheet.given.items() if key.endswith("batch_size")}
    for key in sizes.values():
        sheet.take(key, "train_batch_size", sheet.value(key), "for the whole run") if len(sizes) == 1 else sheet.lose(
            key, "data sets have batches of different sizes; one size, train_batch_size, holds for the whole run"
        )
    for option, value in DEFAULTS.items() if names & set(_MUSUBI) else ():
        if option not in names:
            sheet.assume_if_other(option, value, sheet.program)
    sheet.put("dataset_config", json.dumps(_read_ones(given, edits), ensure_ascii=False, default=str), next(iter(sheet.given), ""))
    return sheet.finish_data(f"data set file of {sheet.program}", needs_images=False)


def beside_a_run(tables: Mapping[str, Any]) -> bool:
    """Whether data sets stand in the file of a run: beside them is a setting that no data set has."""
    names = toml_files.opened({name: table for name, table in tables.items() if name not in _TABLES}).keys()
    of_run = (name for name in names & names_of_settings() if said_of(name, edits=True) is not None)
    return isinstance(tables.get("datasets"), list) and any(of_run)


def read_beside(tables: Mapping[str, Any], settings: Callable[[Mapping[str, Any]], Imported]) -> Imported:
    """A run with the data sets of its own file, unless the file names images as well; settings: what reads all but these tables."""
    named = next((name for name in _IMAGES if not is_empty(toml_files.opened(tables).get(name))), "")
    if named:
        found = settings({name: table for name, table in tables.items() if name != "datasets"})
        why = f"{named} says which images are trained; sd-scripts and musubi-tuner read such tables from a file that dataset_config names"
        return replace(found, rows=[*found.rows, Row("datasets", tables["datasets"], "not needed", why)])
    data = {name: table for name, table in tables.items() if name in _TABLES}
    found = settings({name: table for name, table in tables.items() if name not in _TABLES} | {"dataset_config": _OWN_FILE})
    check(found.run, "[[datasets]]")
    described = read(data, found.run)
    # What the settings leave at a default, and data sets say.
    said = {place(row.key).rpartition(".")[2] for row in described.rows}
    left = {"dataset_config", *(row.key for row in found.rows if row.key in said and row.text.startswith("not in the file"))}
    known, values = flat.fields(found.run), {name: value for name, value in found.values.items() if name not in left} | described.values
    note = "[[datasets]]: sd-scripts and musubi-tuner read them from a file that dataset_config names; those of this file were taken for it"
    return replace(
        found,
        values={name: value for name, value in values.items() if known[name].required or value != known[name].default},
        rows=[*(row for row in found.rows if row.key not in left), *described.rows],
        conflicts=[note, *found.conflicts, *described.conflicts],
    )


def check(run: type[RunOptions], name: str) -> None:
    """Raises OptionError for a kind of run that reads no data set files."""
    if "dataset_config" not in flat.fields(run):
        raise OptionError(f"{name} is for dataset_config, which {run.label} has not; give its folder as train_data_dir")


_IMAGES = ("train_data_dir", "in_json", "dataset_config")
"""What names the images of a run."""
_OWN_FILE = "(the file itself)"
"""dataset_config of a run whose data sets stand beside its settings, while these are read."""


def _side(size: object) -> int | None:
    """The side of a square with the area of a size; None for what is no size."""
    found = [number(side) for side in parts(size)]
    sides = [side for side in found if side is not None and side > 0]
    return max(16, round(math.sqrt(sides[0] * sides[-1]) / 16) * 16) if len(sides) == len(found) in (1, 2) else None


def _read_ones(given: Any, edits: bool) -> Any:
    """The tables without what is not read, with which no run would start."""
    if isinstance(given, list):
        return [_read_ones(item, edits) for item in given]
    if not isinstance(given, dict):
        return given
    left = {key: value for key, value in given.items() if key in _TABLES or said_of(str(key), edits) is None}
    return {key: _read_ones(value, edits) if key in _TABLES else value for key, value in left.items()}
