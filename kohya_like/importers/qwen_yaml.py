"""A configuration of qwen-image-finetune (YAML), as a kind of run, values and a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sd_scripts.families.qwen_edit import yaml as qwen_yaml
from sd_scripts.schema.errors import OptionError

from .kohya_ss import MISSING
from .report import Imported
from .sheet import Sheet, is_empty

ORIGIN = "qwen-image-finetune configuration (YAML)"


def read(name: str, given: Mapping[str, Any]) -> Imported:
    """The settings in a YAML file of that program. Raises OptionError with a sentence for another file."""
    if not qwen_yaml.looks_like(given):
        raise OptionError(f"{name} has none of the sections (model, data, train ...) of {qwen_yaml.PROGRAM}, whose YAML files are read")
    found = qwen_yaml.translate(given)
    sheet = Sheet(qwen_yaml.RUN, found.given)
    for one in found.findings:
        if one.action == "take":
            sheet.take(one.key, one.option, one.value, one.text)
        elif one.action == "also":
            sheet.put(one.option, one.value, one.key)
        elif one.action == "assume":
            sheet.assume(one.option, one.value, qwen_yaml.PROGRAM)
        elif one.action == "skip":
            sheet.skip(one.key, one.text)
        else:
            sheet.refuse(one.key, one.text)
    missing = dict(MISSING)
    if not is_empty(sheet.values.get("dataset_config")):
        del missing["train_data_dir"]
    return sheet.settle(f"{ORIGIN}: {qwen_yaml.RUN.label}", missing)
