"""A data set file of sd-scripts or musubi-tuner, opened over the settings of a run: it becomes the text of dataset_config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sd_scripts.schema.imported import Imported
from sd_scripts.schema.runs import RunOptions

from ..table import ForeignSheet, opened, place

_MUSUBI = ("image_directory", "image_jsonl_file")
"""Keys by which musubi-tuner's files are known."""
DEFAULTS: dict[str, object] = {"enable_bucket": False, "bucket_no_upscale": False, "bucket_reso_steps": 16, "resolution": [960, 544]}
"""What musubi-tuner takes where its file says nothing."""


def read(given: Mapping[str, Any], run: type[RunOptions]) -> Imported:
    """The text of dataset_config, with the batch size of its data sets, and a row for each key."""
    sheet = ForeignSheet("musubi-tuner", run, opened(given))
    names = {place(key).rpartition(".")[2] for key in sheet.given}
    for key in sheet.given:
        sheet.write(key, "taken", "it stands in dataset_config; Check data set tells what of it is not known here")
    sizes = {str(value): key for key, value in sheet.given.items() if key.endswith("batch_size")}
    for key in sizes.values():
        sheet.take(key, "train_batch_size", sheet.value(key), "for the whole run") if len(sizes) == 1 else sheet.lose(
            key, "data sets have batches of different sizes; one size, train_batch_size, holds for the whole run"
        )
    for option, value in DEFAULTS.items() if names & set(_MUSUBI) else ():
        if option not in names:
            sheet.assume_if_other(option, value, sheet.program)
    sheet.put("dataset_config", json.dumps(given, ensure_ascii=False, default=str), next(iter(sheet.given), ""))
    return sheet.finish_data(f"data set file of {'musubi-tuner' if names & set(_MUSUBI) else 'sd-scripts'}", needs_images=False)
