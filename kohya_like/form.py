"""The form: schema -> controls in the page, and what the page says -> flat values. The controls themselves are drawn by web/train/form.js.

A control holds text, or true/false for a switch, exactly as the person left it; nothing is converted on the way. That way a wrong number
is still there to be explained, a seed of 63 bits survives JavaScript, and an empty field can mean None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, get_args

from sd_scripts.families import FACTS, RUNS
from sd_scripts.schema import flat, legacy
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.fields import Options
from sd_scripts.schema.flat import FlatField
from sd_scripts.schema.labels import label
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.prompts import OPTION as PROMPTS
from sd_scripts.schema.runs import RunOptions

from . import files, theme
from .training_modes import TRAINING_MODES

Text = str | bool
"""What one control holds."""

_SEPARATORS = re.compile(r"[\s,]+")


def run_key(run: type[RunOptions]) -> str:
    """The name of a kind of run on the page: `family/method`."""
    return f"{run.family}/{run.method}"


def run_of_key(key: object) -> type[RunOptions]:
    """The kind of run behind the page's name for it; the first one for an unknown name, such as one an older page remembers."""
    return next((run for run in RUNS.values() if run_key(run) == key), next(iter(RUNS.values())))


def control(field: FlatField) -> str:
    """Which control a field gets: check, select, number, size, numbers, lines, prompts, start, gpus, area or text."""
    if field.type is bool:
        return "check"
    if field.show.kind in ("start", "gpus"):
        return field.show.kind
    if field.choices:
        return "select"
    if field.many:
        elements = [flat.core_type(item) for item in get_args(field.type)]
        if elements[0] is str:
            return "lines"
        return "numbers" if Ellipsis in elements else "size"
    if field.type in (int, float):
        return "number"
    if field.name == PROMPTS:
        return "prompts"
    return "area" if field.show.kind == "text" else "text"


def to_text(field: FlatField, value: Any) -> Text:
    """What the control of a field shows for a value."""
    kind = control(field)
    if value is None:
        return ""
    if kind == "check":
        return bool(value)
    if kind == "size":
        if not isinstance(value, list | tuple):
            return str(value)
        width, height = value
        return f"{width}" if width == height else f"{width},{height}"
    if kind in ("numbers", "gpus"):
        return " ".join(map(_number, value))
    if kind == "lines":
        items = [str(item) for item in value]
        plain = all(item.splitlines() == [item] and item.strip() == item for item in items) and not "".join(items[:1]).startswith("[")
        return "\n".join(items) if plain else json.dumps(items, ensure_ascii=False)
    return _number(value) if kind == "number" else str(value)


def from_text(field: FlatField, text: Any) -> Any:
    """The flat value of what a control holds. Numbers stay text: the schema reads them and explains what is wrong with them."""
    kind = control(field)
    if not isinstance(text, str):
        return text
    if kind == "select":
        return next((choice for choice in field.choices if str(choice) == text), text or None if field.optional else text)
    if kind == "numbers":
        parts = flat.numbers(field, text)
        return [flat.with_point(part) for part in parts] if len(parts) > 1 else parts or (None if field.optional else [])
    if kind in ("size", "gpus"):
        parts = [part for part in _SEPARATORS.split(text.replace("x", ",") if kind == "size" else text) if part]
        return parts if parts or not field.optional else None
    if kind == "lines":
        return _lines(text)
    if text.strip() == "" and (field.optional or field.required):
        return None
    return flat.with_point(text.strip()) if kind == "number" else text


def _number(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _lines(text: str) -> list[str]:
    """One element a line; a JSON list for elements that a line cannot hold."""
    if text.lstrip().startswith("["):
        try:
            items = json_of(text)
        except ValueError:
            items = None
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return items
    return [line.strip() for line in text.splitlines() if line.strip()]


@cache
def shown_fields(run: type[Options]) -> dict[str, FlatField]:
    """The fields that the page has, in its order: all but those for the command line only."""
    places = {name: place for info in run.model_fields.values() for place, name in enumerate(getattr(info.annotation, "leading", ()))}
    sections = list(run.model_fields)

    def place(field: FlatField) -> tuple[int, int]:
        return sections.index(field.section), places.get(field.name, len(places))

    return {field.name: field for field in sorted(flat.fields(run).values(), key=place) if not field.show.cli_only}


def texts(run: type[RunOptions], values: Mapping[str, Any]) -> dict[str, Text]:
    """What every control shows for these flat values; a missing one shows its default."""
    return {name: to_text(field, values.get(name, field.default)) for name, field in shown_fields(run).items()}


def group_of(run: type[RunOptions], field: FlatField) -> str:
    """The group in which the page shows a field."""
    return theme.BASICS if field.show.basic else str(getattr(run.model_fields[field.section].annotation, "title", "")) or field.section


def specification(field: FlatField, family: str = "") -> dict[str, Any]:
    """One field of a family's runs, or of a tool, as the page draws it; entries that say nothing are left out."""
    spec = {
        "name": field.name,
        "label": label(field.name, family),
        "help": field.help,
        "control": control(field),
        "default": to_text(field, field.default),
        "unit": field.show.unit,
        "range": field.range_text,
        "choices": [str(choice) for choice in field.choices],
        "suggestions": list(field.show.suggestions),
        "required": field.required,
        "unless": field.show.unless,
        "optional": field.optional,
        # A base model or a LoRA file fits one family only.
        "path": field.show.kind if field.show.kind in ("file", "folder") else "",
        "ofFamily": field.section in ("model", "network") and field.show.kind in ("file", "folder"),
        "needs": [asdict(need) for need in field.show.conditions],
        "fold": field.show.fold,
        "fractions": field.many and field.fractional,
    }
    return {key: value for key, value in spec.items() if value not in ("", [], False) or key == "default"}


@cache
def schema_json() -> str:
    """Everything the page knows about the options, as JSON.

    `fields` holds each field once, whatever kinds of run have it; `runs` has for each kind its groups in page order, and in a group the
    numbers of its fields under the sentence about their section.
    """
    pool: dict[str, int] = {}
    known: dict[tuple[int, str, str], int] = {}
    runs = {}
    for run in RUNS.values():
        groups: dict[str, dict[str, list[int]]] = {name: {} for name in (theme.BASICS, *theme.GROUPS)}
        for field in shown_fields(run).values():
            group = group_of(run, field)
            # Most kinds of run have most options from the same class.
            key = id(field.info), label(field.name, run.family), group
            if key not in known:
                spec = json.dumps({**specification(field, run.family), "group": group}, ensure_ascii=False, separators=(",", ":"))
                known[key] = pool.setdefault(spec, len(pool))
            about = "" if group == theme.BASICS else " ".join((run.model_fields[field.section].annotation.__doc__ or "").split())
            groups.setdefault(group, {}).setdefault(about, []).append(known[key])
        kept = [
            {"title": title, "blocks": [{"about": about, "fields": numbers} for about, numbers in blocks.items()]}
            for title, blocks in groups.items()
            if blocks
        ]
        runs[run_key(run)] = {"label": run.label, "script": run.script, "groups": kept}
    families = {name: facts.label for name, facts in FACTS.items()}
    former = {new: old for old, new in legacy.FORMER.items()}
    rest = {"runs": runs, "families": families, "modes": [asdict(mode) for mode in TRAINING_MODES], "former": former}
    return f'{{"fields":[{",".join(pool)}],{json.dumps(rest, ensure_ascii=False, separators=(",", ":"))[1:]}'


def read(payloads: Iterable[Any]) -> tuple[type[RunOptions], dict[str, Any]]:
    """The kind of run and the flat values from the values of all fieldsets. Fields that the page does not have are left out."""
    key: Any = None
    said: dict[str, Any] = {}
    for payload in payloads:
        if isinstance(payload, Mapping) and isinstance(payload.get("values"), Mapping):
            key = payload.get("run") or key
            said.update(payload["values"])
    run = run_of_key(key)
    known = shown_fields(run)
    return run, {name: from_text(known[name], text) for name, text in said.items() if name in known}


def options(payloads: Iterable[Any], roots: tuple[Path, ...], sections: Collection[str] = ()) -> RunOptions:
    """The options that the page describes. Raises OptionError with every problem, paths outside the roots among them.

    sections: those that count; the others are left at their defaults, and whichever model is asked for is the built-in one. Empty for all.
    """
    run, said = read(payloads)
    if sections:
        known = shown_fields(run)
        said = {name: value for name, value in said.items() if known[name].section in sections}
        said |= {name: "toy" for name, field in known.items() if field.required}
    without_effect = flat.asleep(run, said)
    values = {name: value for name, value in said.items() if name not in without_effect}
    problems = outside(run, values, roots)
    try:
        built = flat.build(run, values)
    except OptionError as err:
        raise OptionError([*problems, *err.problems]) from err
    refuse(problems)
    return built


_PROMPT_FILES = (".txt", ".toml", ".json")


def outside(run: type[Options], values: Mapping[str, Any], roots: tuple[Path, ...]) -> list[Problem]:
    """Problems for values that name places outside the roots. Hub ids, `toy` and text that is no path pass."""
    problems = []
    for name, field in shown_fields(run).items():
        given = values.get(name)
        for text in given if isinstance(given, list | tuple) else [given]:
            if not isinstance(text, str) or not text.strip() or not _names_a_place(field, text.strip()):
                continue
            try:
                files.confine(text.strip(), roots)
            except OptionError as err:
                problems += [Problem(name, f"{name}: {problem.message}") for problem in err.problems]
    return problems


def _names_a_place(field: FlatField, text: str) -> bool:
    if field.name == "resume":
        return text not in ("auto", "latest", "none") and not text.isdigit()
    if field.name in ("sample_prompts", "prompt_list"):
        return "\n" not in text and text.lower().endswith(_PROMPT_FILES)
    if field.show.kind not in ("folder", "file") or text == "toy" or text.startswith("toy:"):
        return False
    # A hub id is `owner/name`: it looks like a path, but nothing of that name is here.
    is_hub_id = field.show.kind == "file" and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text) is not None and ".." not in text
    return not (is_hub_id and not Path(text).exists())
