"""The form: schema -> controls in the page, and what the page says -> flat values. The controls themselves are drawn by assets/form.js.

A control holds text, or true/false for a switch, exactly as the person left it; nothing is converted on the way. That way a wrong number
is still there to be explained, a seed of 63 bits survives JavaScript, and an empty field can mean None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

import gradio as gr

from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.flat import FlatField
from sd_scripts.schema.runs import RUNS, RunOptions

from . import files, look

Text = str | bool
"""What one control holds."""

_WORDS = {
    "lr": "LR",
    "unet": "UNet",
    "vae": "VAE",
    "ema": "EMA",
    "snr": "SNR",
    "cfg": "CFG",
    "dir": "folder",
    "json": "JSON",
    "reso": "resolution",
    "aug": "augmentation",
    "reg": "regularisation",
    "loraplus": "LoRA+",
    "lokr": "LoKr",
    "oft": "OFT",
    "ip": "IP",
    "wandb": "W&B",
    "dim": "rank",
}
_SEPARATORS = re.compile(r"[\s,]+")


def run_key(run: type[RunOptions]) -> str:
    """The name of a kind of run on the page: `sdxl/network`."""
    return f"{run.family}/{run.method}"


def run_of_key(key: object) -> type[RunOptions]:
    """The kind of run behind the page's name for it; the first one for an unknown name, such as one an older page remembers."""
    return next((run for run in RUNS.values() if run_key(run) == key), next(iter(RUNS.values())))


def label(name: str) -> str:
    """An option's name as words: `min_bucket_reso` is `Min bucket resolution`."""
    words = " ".join(_WORDS.get(word, word) for word in name.split("_"))
    return words[0].upper() + words[1:]


def control(field: FlatField) -> str:
    """Which control a field gets: check, select, number, size, numbers, lines, area or text."""
    if field.type is bool:
        return "check"
    if field.choices:
        return "select"
    if field.many:
        elements = [flat.core_type(item) for item in get_args(field.type)]
        if elements[0] is str:
            return "lines"
        return "numbers" if Ellipsis in elements else "size"
    if field.type in (int, float):
        return "number"
    return "area" if field.show.kind == "text" else "text"


def to_text(field: FlatField, value: Any) -> Text:
    """What the control of a field shows for a value."""
    kind = control(field)
    if value is None:
        return ""
    if kind == "check":
        return bool(value)
    if kind == "size":
        width, height = value
        return f"{width}" if width == height else f"{width},{height}"
    if kind == "numbers":
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
    if kind in ("numbers", "size"):
        parts = [part for part in _SEPARATORS.split(text.replace("x", ",") if kind == "size" else text) if part]
        return parts if parts or not field.optional else None
    if kind == "lines":
        return _lines(text)
    if text.strip() == "" and (field.optional or field.required):
        return None
    return text.strip() if kind == "number" else text


def _number(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _lines(text: str) -> list[str]:
    """One element a line; a JSON list for elements that a line cannot hold."""
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except ValueError:
            items = None
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return items
    return [line.strip() for line in text.splitlines() if line.strip()]


@cache
def shown_fields(run: type[RunOptions]) -> dict[str, FlatField]:
    """The fields that the page has: all but those for the command line only."""
    return {name: field for name, field in flat.fields(run).items() if not field.show.cli_only}


def texts(run: type[RunOptions], values: Mapping[str, Any]) -> dict[str, Text]:
    """What every control shows for these flat values; a missing one shows its default."""
    return {name: to_text(field, values.get(name, field.default)) for name, field in shown_fields(run).items()}


def group_of(run: type[RunOptions], field: FlatField) -> str:
    """The group in which the page shows a field."""
    return look.BASICS if field.show.basic else str(getattr(run.model_fields[field.section].annotation, "title", "")) or field.section


def _specification(run: type[RunOptions], field: FlatField) -> dict[str, Any]:
    """One field as form.js draws it; entries that say nothing are left out."""
    section = run.model_fields[field.section].annotation
    spec = {
        "name": field.name,
        "label": label(field.name),
        "help": field.help,
        "control": control(field),
        "default": to_text(field, field.default),
        "unit": field.show.unit,
        "range": field.range_text,
        "choices": [str(choice) for choice in field.choices],
        "suggestions": list(field.show.suggestions),
        "required": field.required,
        "optional": field.optional,
        "section": field.section,
        "about": " ".join((getattr(section, "__doc__", "") or "").split()),
        "group": group_of(run, field),
    }
    return {key: value for key, value in spec.items() if value not in ("", [], False) or key == "default"}


@cache
def schema_json() -> str:
    """Everything form.js knows about the options, as JSON: fields once, and for each kind of run its groups in page order."""
    pool: list[dict[str, Any]] = []
    runs = {}
    for run in RUNS.values():
        groups: dict[str, list[int]] = {name: [] for name in (look.BASICS, *look.GROUPS)}
        for field in shown_fields(run).values():
            spec = _specification(run, field)
            if spec not in pool:
                pool.append(spec)
            groups.setdefault(spec["group"], []).append(pool.index(spec))
        kept = [{"title": title, "fields": numbers} for title, numbers in groups.items() if numbers]
        runs[run_key(run)] = {"label": run.label, "script": run.script, "about": run.__doc__ or "", "groups": kept}
    return json.dumps({"fields": pool, "runs": runs}, ensure_ascii=False, separators=(",", ":"))


def script() -> bytes:
    """form.js and desk.js with the schema before them, as they are served: one request."""
    # "</" cannot stand in a script that somebody pastes into a page, and U+2028 ends a line in old engines.
    data = schema_json().replace("</", "<\\/").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return f"window.klSchema={data};\n".encode() + look.asset("form.js") + look.asset("desk.js")


def part(name: str, value: Any = None, events: tuple[str, ...] = (), **identity: Any) -> gr.HTML:
    """A gr.HTML whose inside form.js draws: `kl.mount(name, element, props, trigger, watch)`.

    events are the names of its own events. A function, because gradio writes stub files for subclasses. identity takes elem_id and
    elem_classes.
    """
    # Gradio learns the names of own events from the quoted words in this text.
    return gr.HTML(
        value,
        html_template="<div class='kl-part'></div>",
        js_on_load=f"window.kl.mount({json.dumps(name)}, element, props, trigger, watch, {json.dumps(events)});",
        head=look.script_tag("form.js", script()),
        apply_default_css=False,
        **identity,
    )


def fieldset(group: str) -> gr.HTML:
    """The controls of one group; its value is {"run": kind of run, "values": {name: text}} and always what the person sees."""
    return part(f"fieldset:{group}", {"run": "", "values": {}}, elem_classes=["kl-fieldset"])


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


def options(payloads: Iterable[Any], roots: tuple[Path, ...]) -> RunOptions:
    """The options that the page describes. Raises OptionError with every problem, paths outside the roots among them."""
    run, values = read(payloads)
    problems = outside(run, values, roots)
    try:
        built = flat.build(run, values)
    except OptionError as err:
        raise OptionError([*problems, *err.problems]) from err
    if problems:
        raise OptionError(problems)
    return built


_PROMPT_FILES = (".txt", ".toml", ".json")


def outside(run: type[RunOptions], values: Mapping[str, Any], roots: tuple[Path, ...]) -> list[Problem]:
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
        return text not in ("auto", "none") and not text.isdigit()
    if field.name == "sample_prompts":
        return "\n" not in text and text.lower().endswith(_PROMPT_FILES)
    if field.show.kind not in ("folder", "file") or text == "toy" or text.startswith("toy:"):
        return False
    # A hub id is `owner/name`: it looks like a path, but nothing of that name is here.
    is_hub_id = field.show.kind == "file" and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text) is not None and ".." not in text
    return not (is_hub_id and not Path(text).exists())
