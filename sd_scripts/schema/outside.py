"""JSON and TOML from outside: whatever is wrong with a text is a ValueError."""

from __future__ import annotations

import json
import tomllib
from typing import Any

TOO_DEEP = "it is nested too deeply"


def json_of(text: str | bytes) -> Any:
    """What a JSON text says. Raises ValueError, also for nesting that Python does not follow."""
    try:
        return json.loads(text)
    except RecursionError as err:
        raise ValueError(TOO_DEEP) from err


def toml_of(text: str) -> dict[str, Any]:
    """What a TOML text says. Raises ValueError, also for nesting that Python does not follow."""
    try:
        return tomllib.loads(text)
    except RecursionError as err:
        raise ValueError(TOO_DEEP) from err
