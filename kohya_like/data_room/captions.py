"""What an order of the page makes of a caption."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from sd_scripts.schema.errors import OptionError


def rewritten(order: Mapping[str, Any]) -> Callable[[str], str]:
    """What an order makes of a caption: find and replace (regex: a regular expression), then prefix and suffix. Raises OptionError."""
    find, replace = str(order.get("find") or ""), str(order.get("replace") or "")
    prefix, suffix = str(order.get("prefix") or ""), str(order.get("suffix") or "")
    if not (find or prefix or suffix):
        raise OptionError("Say what to find, or what to put before or behind.")
    try:
        pattern = re.compile(find if order.get("regex") else re.escape(find), 0 if order.get("case") else re.IGNORECASE)
        if order.get("regex"):
            pattern.sub(replace, "")
    except (re.error, IndexError) as err:
        raise OptionError(f"{find!r} with {replace!r} is not a regular expression: {err}.") from err

    def change(text: str) -> str:
        if find:
            text = pattern.sub(replace if order.get("regex") else lambda _match: replace, text)
        # What is there already is not put there twice.
        text = text if text.startswith(prefix) else prefix + text
        return (text if text.endswith(suffix) else text + suffix).strip()

    return change
