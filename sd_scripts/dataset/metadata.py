"""Captions, control images, masks and weights of many images in one file: JSON lines, the JSON that kohya's tools write, or a table
(CSV)."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.outside import json_of

from .weights import NAMES as WEIGHTS
from .weights import Weights, weights_of

FILES = ("metadata.jsonl", "metadata.csv")
"""Names of metadata files that are found by themselves; the first wins where both name an image."""
_NAMES = ("file_name", "image_path", "target", "target_path", "absolute_path", "image")
_CAPTIONS = ("caption", "text", "prompt")
_CONTROLS = ("control_path", "control", "controls", "control_images", "edit_image", "kontext_images")
_NUMBERED_CONTROL = re.compile(r"^control_path_(\d+)$")
_MASKS = ("mask", "mask_path", "path_mask")
_SHOWN_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Listed:
    """What a file says about one image; paths as they are written there."""

    caption: str
    controls: tuple[str, ...] = ()
    mask: str = ""
    weights: Weights = ()


def read_metadata(path: Path, separator: str) -> dict[str, Listed]:
    """File name (with / and with or without ending) -> what is said of it, of a .jsonl (one object a line), .json (name -> object) or .csv.

    Paths of a .csv come back absolute, because they are relative to it. Raises OptionError that names every line that is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as err:
        raise OptionError(Problem("in_json", f"{path} cannot be read as UTF-8 text ({err})")) from err
    listed: dict[str, Listed] = {}
    problems: list[Problem] = []
    entries = _table_entries(path, text, problems) if path.suffix.lower() == ".csv" else _json_entries(path, text, problems)
    for place, name, entry in entries:
        known = _listed(entry, separator)
        weights, wrong = weights_of(entry if isinstance(entry, dict) else {})
        problems += [Problem("in_json", f"{path.name}, {place}: {message}") for message in wrong]
        if known is None or not isinstance(name, str) or not name:
            problems.append(
                Problem(
                    "in_json",
                    f"{path.name}, {place}: wanted are file_name, and caption, text or tags as texts "
                    "(for edit pairs control_path as a text or a list of texts too)",
                )
            )
        else:
            listed[os.path.normpath(name).replace(os.sep, "/")] = replace(known, weights=weights)
    if problems:
        rest = len(problems) - _SHOWN_PROBLEMS
        more = [Problem("in_json", f"{path.name}: and {rest} more like these")] if rest > 0 else []
        raise OptionError(problems[:_SHOWN_PROBLEMS] + more)
    return listed


def caption_in_json(text: str, separator: str) -> str | None:
    """The caption in a .json file beside an image: a text, or an object with caption, text, prompt or tags; None for anything else."""
    try:
        data = json_of(text)
    except ValueError:
        return None
    said = isinstance(data, dict) and not {*_CAPTIONS, "tags"} & data.keys()
    return None if said else _caption(data, separator)


def lists_controls(path: Path) -> bool:
    """Whether a .jsonl or .csv file names control images anywhere; what is wrong with it is said when its captions are read."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            if path.suffix.lower() == ".csv":
                return any(map(_is_of_controls, file.readline().strip().split(",")))
            entries = (json_of(line) for line in file if line.strip())
            return any(isinstance(entry, dict) and _controls(entry) for entry in entries)
    except (OSError, ValueError):
        return False


def _json_entries(path: Path, text: str, problems: list[Problem]) -> Iterator[tuple[str, Any, Any]]:
    if path.suffix.lower() == ".json":
        try:
            data = json_of(text)
        except ValueError as err:
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
                entry = json_of(line)
            except ValueError as err:
                problems.append(Problem("in_json", f"{path.name}, line {number} is not valid JSON: {err}"))
                continue
            yield f"line {number}", _file_name(entry), entry


def _table_entries(path: Path, text: str, problems: list[Problem]) -> Iterator[tuple[str, Any, Any]]:
    """Rows of a table with the columns path_target, prompt, path_control..., path_mask and weights, as entries of the names above."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = [column.strip() for column in reader.fieldnames or []]
        name_column = next((column for column in ("path_target", *_NAMES) if column in columns), None)
        text_column = next((column for column in ("prompt", *_CAPTIONS) if column in columns), None)
        for column, role in ((name_column, "path_target"), (text_column, "prompt")):
            if column is None:
                shown = ", ".join(columns) or "nothing"
                problems.append(Problem("in_json", f"{path.name} has no column {role}; its first line has {shown}, separated by commas"))
        if name_column is None or text_column is None:
            return
        controls = sorted(filter(_is_of_controls, columns))
        for row in reader:
            cells = {key.strip(): (value or "").strip() for key, value in row.items() if key is not None and not isinstance(value, list)}
            place = f"line {reader.line_num}"
            if None in row:
                problems.append(
                    Problem("in_json", f"{path.name}, {place} has more cells than the first line; put texts with commas in quotes")
                )
                continue
            files = [_from(path, cells[column]) for column in controls if cells[column]]
            weights = {column: _number(cells[column]) for column in WEIGHTS if cells.get(column)}
            entry = {"caption": cells[text_column], "controls": files, "mask": _from(path, cells.get("path_mask", "")), **weights}
            yield place, _from(path, cells[name_column]), entry
    except csv.Error as err:
        problems.append(Problem("in_json", f"{path.name}, line {reader.line_num} is not valid CSV: {err}"))


def _is_of_controls(column: str) -> bool:
    return "path_control" in column or column.strip() in _CONTROLS


def _number(cell: str) -> float | str:
    """The number in a cell; a text that is none stays one, and is refused where weights are read."""
    try:
        return float(cell)
    except ValueError:
        return cell


def _from(table: Path, cell: str) -> str:
    return os.path.abspath(table.parent / cell) if cell else ""


def _file_name(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return None
    return next((entry[name] for name in _NAMES if name in entry), None)


def _listed(entry: Any, separator: str) -> Listed | None:
    """None for what is neither a caption nor an object of texts."""
    caption = _caption(entry, separator)
    if caption is None or not isinstance(entry, dict):
        return None if caption is None else Listed(caption)
    controls, mask = _controls(entry), next((entry[name] for name in _MASKS if entry.get(name) is not None), "")
    if controls is None or not isinstance(mask, str):
        return None
    return Listed(caption, controls, mask)


def _controls(entry: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Paths of the control images, in order; None where one is no text."""
    numbered = sorted((int(match[1]), name) for name in entry if (match := _NUMBERED_CONTROL.match(name)))
    found: list[Any] = []
    for name in (*_CONTROLS, *(name for _, name in numbered)):
        value = entry.get(name)
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(found) if all(isinstance(path, str) and path for path in found) else None


def _caption(entry: Any, separator: str) -> str | None:
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, dict):
        return None
    caption = next((entry[name] for name in _CAPTIONS if name in entry), None)
    tags = entry.get("tags")
    if isinstance(tags, list):
        tags = f"{separator} ".join(map(str, tags))
    parts = [part for part in (caption, tags) if part is not None]
    return f"{separator} ".join(part for part in parts if part) if all(isinstance(part, str) for part in parts) else None
