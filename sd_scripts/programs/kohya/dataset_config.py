"""A data set file of sd-scripts or musubi-tuner, opened over the settings of a run: it becomes the text of dataset_config."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from sd_scripts.schema.imported import Imported
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.sheet import number, parts

from ..table import ForeignSheet, opened, place


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
