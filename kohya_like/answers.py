"""JSON answers of the studio's own routes: a file on the disk that holds what JSON cannot say never keeps the page from the rest."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.responses import JSONResponse


class JsonAnswer(JSONResponse):
    """An answer as JSON; numbers that are none (NaN, infinity) become null, halves of characters the replacement character."""

    def render(self, content: Any) -> bytes:
        try:
            text = _written(content)
        except ValueError:
            text = _written(_finite(content))
        return text.encode("utf-8", "replace")


def _written(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
