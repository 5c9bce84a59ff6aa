"""Captions of many pictures in one file: JSON lines as the hub writes them, or the JSON that kohya's tools write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sd_scripts.schema.errors import OptionError, Problem


def read_metadata(path: Path, separator: str) -> dict[str, str]:
    """File name (with / and with or without ending) -> caption, of a .jsonl (one object a line) or .json (name -> object) file.

    Raises OptionError that names every line that is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as err:
        raise OptionError(Problem("in_json", f"{path} cannot be read as UTF-8 text ({err})")) from err
    captions: dict[str, str] = {}
    problems: list[Problem] = []
    for place, name, entry in _metadata_entries(path, text, problems):
        caption = _metadata_caption(entry, separator)
        if caption is None or not isinstance(name, str) or not name:
            problems.append(Problem("in_json", f"{path.name}, {place}: wanted are file_name, and caption, text or tags as texts"))
        else:
            captions[os.path.normpath(name).replace(os.sep, "/")] = caption
    if problems:
        rest = len(problems) - 20
        raise OptionError(problems[:20] + ([Problem("in_json", f"{path.name}: and {rest} more like these")] if rest > 0 else []))
    return captions


def _metadata_entries(path: Path, text: str, problems: list[Problem]) -> Iterator[tuple[str, Any, Any]]:
    if path.suffix.lower() == ".json":
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as err:
            problems.append(Problem("in_json", f"{path.name} is not valid JSON: {err}"))
            return
        if isinstance(data, dict):
            yield from ((f"entry {name!r}", name, entry) for name, entry in data.items())
        elif isinstance(data, list):
            yield from ((f"entry {number}", _file_name(entry), entry) for number, entry in enumerate(data, 1))
        else:
            problems.append(Problem("in_json", f"{path.name} must be an object: file name -> caption"))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                entry = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as err:
                problems.append(Problem("in_json", f"{path.name}, line {number} is not valid JSON: {err}"))
                continue
            yield f"line {number}", _file_name(entry), entry


def _file_name(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return None
    return entry.get("file_name", entry.get("image_path", entry.get("absolute_path")))


def _metadata_caption(entry: Any, separator: str) -> str | None:
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, dict):
        return None
    caption = entry.get("caption", entry.get("text"))
    tags = entry.get("tags")
    if isinstance(tags, list):
        tags = f"{separator} ".join(map(str, tags))
    parts = [part for part in (caption, tags) if part is not None]
    return f"{separator} ".join(part for part in parts if part) if all(isinstance(part, str) for part in parts) else None
