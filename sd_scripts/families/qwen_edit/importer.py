"""A configuration of qwen-image-finetune (YAML), as a kind of run, values and a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported, Importer
from sd_scripts.schema.sheet import MISSING, Sheet, is_empty

from . import yaml

ORIGIN = "qwen-image-finetune configuration (YAML)"
_OTHER_MODELS = {"FluxKontext": "FLUX.1 Kontext", "DreamOmni2": "DreamOmni2", "Flux2Klein": "FLUX.2 Klein"}
"""What its trainers are for, besides this family."""


def read(name: str, given: Mapping[str, Any]) -> Imported:
    """The settings in a YAML file of that program. Raises OptionError for references to keys that are not there, and for another model."""
    found = yaml.translate(given)
    if (other := _OTHER_MODELS.get(str(given.get("trainer")))) is not None:
        raise OptionError(f"{name} is a file of {yaml.PROGRAM} for {other}, which is not trained here with its files")
    sheet = Sheet(yaml.RUN, found.given)
    for one in found.findings:
        if one.action == "take":
            sheet.take(one.key, one.option, one.value, one.text)
        elif one.action == "also":
            sheet.put(one.option, one.value, one.key)
        elif one.action == "assume":
            sheet.assume(one.option, one.value, yaml.PROGRAM)
        elif one.action == "skip":
            sheet.skip(one.key, one.text)
        elif one.action == "unknown":
            sheet.write(one.key, "unknown", one.text)
        else:
            sheet.refuse(one.key, one.text)
    missing = dict(MISSING)
    if not is_empty(sheet.values.get("dataset_config")):
        del missing["train_data_dir"]
    return sheet.settle(f"{ORIGIN}: {yaml.RUN.label}", missing)


IMPORTER = Importer(f"a {yaml.PROGRAM} configuration (.yaml)", (".yaml", ".yml"), yaml.looks_like, read)
