"""A configuration of this program (YAML), as a kind of run, values and a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sd_scripts.schema.imported import Imported, Importer
from sd_scripts.schema.sheet import Sheet

from .configuration import looks_like, translate
from .models import PROGRAM

ORIGIN = f"{PROGRAM} configuration (YAML)"


def read(name: str, given: Mapping[str, Any]) -> Imported:
    """The settings in a YAML file of that program. Raises OptionError for references to keys that are not there, and for a model that is
    not trained here."""
    found = translate(given, name)
    sheet = Sheet(found.run, found.given)
    for one in found.findings:
        if one.action == "take":
            sheet.take(one.key, one.option, one.value, one.text)
        elif one.action == "also":
            sheet.put(one.option, one.value, one.key)
        elif one.action == "assume":
            sheet.assume(one.option, one.value, PROGRAM)
        elif one.action == "skip":
            sheet.skip(one.key, one.text)
        elif one.action == "unknown":
            sheet.write(one.key, "unknown", one.text)
        else:
            sheet.refuse(one.key, one.text)
    return sheet.settle(f"{ORIGIN}: {found.run.label}")


IMPORTER = Importer(f"a {PROGRAM} configuration (.yaml)", (".yaml", ".yml"), looks_like, read)
