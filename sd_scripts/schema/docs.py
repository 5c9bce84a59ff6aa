"""What is made from the program for its readers: the options reference in Markdown, and the JSON Schema of the event log."""

import json
from collections.abc import Callable
from typing import Any, get_args

from pydantic import TypeAdapter

from sd_scripts.families import RUNS
from sd_scripts.runs.events import KINDS, Event

from .flat import FlatField, core_type, fields

_TYPES = {str: "text", int: "whole number", float: "number", bool: "switch"}


def type_text(field: FlatField) -> str:
    """The type of a field in words: its choices, or what kind of value, with unit and range."""
    if field.choices:
        return " \\| ".join(f"`{choice}`" for choice in field.choices)
    kind: Any = field.type
    if field.many:
        elements = [core_type(item) for item in get_args(kind) if item is not Ellipsis]
        words = "width,height" if len(elements) == 2 else f"list of {_TYPES[elements[0]]}s"
    else:
        words = _TYPES[kind]
    details = ", ".join(part for part in (field.show.unit, field.range_text) if part)
    return f"{words} ({details})" if details else words


def default_text(field: FlatField) -> str:
    """The default as it is written in a TOML file; `required` and `none` are words."""
    if field.required:
        return "required"
    value = field.default
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "`" + (",".join(map(str, value)) or "empty") + "`"
    return f"`{value}`" if value != "" else "empty"


def _kinds(name: str) -> str:
    """Which kinds of runs have an option: all, or their scripts."""
    having = [run for run in RUNS.values() if name in fields(run)]
    return "all" if len(having) == len(RUNS) else ", ".join(f"`{run.script.removesuffix('.py')}`" for run in having)


def _told(name: str, tell: Callable[[FlatField], str]) -> str:
    """What is told about an option; where kinds of runs differ, each with its own."""
    by_text: dict[str, list[str]] = {}
    for run in RUNS.values():
        if name in fields(run):
            by_text.setdefault(tell(fields(run)[name]), []).append(run.script.removesuffix(".py"))
    if len(by_text) == 1:
        return next(iter(by_text))
    return "; ".join(f"{text} ({', '.join(scripts)})" for text, scripts in by_text.items())


MANY = 8
"""Suggestions of a field beyond which its help does not name them all."""


def section_reference(section: str) -> str:
    """The options of one section, of all kinds of runs, as Markdown; an option that several have stands once."""
    found: dict[str, FlatField] = {}
    for run in RUNS.values():
        found |= {name: field for name, field in fields(run).items() if field.section == section and name not in found}
    lines = [f"## {section}", "", "| option | value | default | runs | meaning |", "|---|---|---|---|---|"]
    for name, field in found.items():
        where = " *(command line only)*" if field.show.cli_only else ""
        text = _told(name, lambda one: one.help.replace("|", "\\|"))
        names = f" Names: {', '.join(field.show.suggestions)}." if len(field.show.suggestions) > MANY else ""
        lines.append(f"| `{name}` | {_told(name, type_text)} | {_told(name, default_text)} | {_kinds(name)} | {text}{names}{where} |")
    return "\n".join([*lines, ""])


def _event_schema(name: str, kind: type[Event]) -> dict[str, Any]:
    """The JSON Schema of one kind of line."""
    made = TypeAdapter(kind).json_schema(mode="serialization")
    made["properties"] = {"kind": {"const": name}, **made["properties"]}
    return {**made, "required": ["time", "kind", *(each for each in made.get("required", []) if each != "time")]}


def event_schema() -> str:
    """docs/events.schema.json: what a line of events.jsonl may be."""
    said = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of events.jsonl",
        "description": "A number that is not finite is null. Other kinds and fields may be added.",
        "oneOf": [_event_schema(name, kind) for name, kind in KINDS.items()],
    }
    return json.dumps(said, indent=1) + "\n"


def page() -> str:
    """docs/options.md."""
    head = (
        "# Options\n\nMade by `python -m sd_scripts.schema docs`; do not edit. Each option is a flag (`--network_dim 32`), a key in TOML\n"
        "file (`network_dim = 32`) and a field on the page. Switches are `--flip_aug` and `--no_flip_aug`; lists take several values\n"
        "(`--optimizer_args weight_decay=0.01 betas=(0.9,0.99)`); `none` gives an optional number its default back.\n"
        "Flags win over the file, the file over the defaults.\n\n| run | script |\n|---|---|\n"
    )
    head += "".join(f"| {run.label} | `{run.script}` |\n" for run in RUNS.values())
    sections = dict.fromkeys(section for run in RUNS.values() for section in run.model_fields)
    return "\n".join([head, *(section_reference(section) for section in sections)])
