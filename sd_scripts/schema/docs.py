"""The options reference: one Markdown table for each section, made from the schema."""

from __future__ import annotations

from typing import Any, get_args

from .flat import FlatField, core_type, fields
from .runs import RUNS, RunOptions

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


def reference(run: type[RunOptions]) -> str:
    """The options of one kind of run as Markdown."""
    lines = [f"## {run.label} (`{run.script}`)", ""]
    known = fields(run)
    for section, info in run.model_fields.items():
        lines += [
            f"### {section}",
            "",
            str(getattr(info.annotation, "__doc__", "")),
            "",
            "| option | value | default | meaning |",
            "|---|---|---|---|",
        ]
        for field in known.values():
            if field.section == section:
                where = " *(command line only)*" if field.show.cli_only else ""
                text = field.help.replace("|", "\\|")
                lines.append(f"| `{field.name}` | {type_text(field)} | {default_text(field)} | {text}{where} |")
        lines.append("")
    return "\n".join(lines)


def page() -> str:
    """docs/options.md."""
    head = (
        "# Options\n\nMade by `python -m sd_scripts.schema docs`; do not edit. Each option is a flag (`--network_dim 32`), a key in TOML\n"
        "file (`network_dim = 32`) and a field on the page. Switches are `--flip_aug` and `--no_flip_aug`; lists take several values\n"
        "(`--optimizer_args weight_decay=0.01 betas=(0.9,0.99)`); `none` gives an optional number its default back.\n"
        "Flags win over the file, the file over the defaults.\n"
    )
    return "\n".join([head, *(reference(run) for run in RUNS.values())])
