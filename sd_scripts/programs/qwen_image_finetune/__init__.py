"""A configuration of this program (YAML), as a kind of run, values and a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sd_scripts.schema.imported import Imported, Importer

from .configuration import looks_like, translate
from .models import PROGRAM

ORIGIN = f"{PROGRAM} configuration (YAML)"


def read(name: str, given: Mapping[str, Any]) -> Imported:
    """The settings in a YAML file of that program. Raises OptionError for references to keys that are not there, and for a model that is
    not trained here."""
    sheet = translate(given, name)
    return sheet.settle(f"{ORIGIN}: {sheet.run.label}")


IMPORTER = Importer(f"a {PROGRAM} configuration (.yaml)", (".yaml", ".yml"), looks_like, read)
