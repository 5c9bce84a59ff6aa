"""Flat names <-> sections: the command line, TOML files and the page all pass through here, and so do their error sentences."""

import difflib
import os
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from sd_scripts.families import RUNS

from . import legacy, sleeping
from .errors import OptionError, Problem, shortened
from .fields import VAST, Options, Section, Show, show_of
from .files import NOT_UTF_8, is_json, is_text
from .runs import RunOptions

M = TypeVar("M", bound=BaseModel)
O = TypeVar("O", bound=Options)


@dataclass(frozen=True)
class FlatField:
    """One option under its flat name."""

    name: str
    section: str
    info: FieldInfo
    show: Show

    @property
    def required(self) -> bool:
        return self.info.is_required()

    @property
    def default(self) -> Any:
        return None if self.required else self.info.default

    @property
    def help(self) -> str:
        return " ".join((self.info.description or "").split())

    @property
    def type(self) -> Any:
        """The annotation without None and without Annotated."""
        return core_type(self.info.annotation)

    @property
    def optional(self) -> bool:
        return _is_union(self.info.annotation) and type(None) in get_args(self.info.annotation)

    @property
    def choices(self) -> tuple[Any, ...]:
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def many(self) -> bool:
        """A list of values; on the command line they follow the flag, separated by spaces."""
        return get_origin(self.type) is tuple

    @property
    def numeric(self) -> bool:
        """A number, or a list of as many numbers as one likes; not a size, whose comma parts width and height."""
        of = get_args(self.type)[0] if self.many and Ellipsis in get_args(self.type) else self.type
        return core_type(of) in (int, float)

    @property
    def fractional(self) -> bool:
        """A number, or a list of numbers, that need not be whole."""
        return self.numeric and core_type(get_args(self.type)[0] if self.many else self.type) is float

    @cached_property
    def reader(self) -> TypeAdapter[Any]:
        """Reads one value as the section does, but without the section's own validators."""
        annotated: Any = Annotated[self.info.annotation, self.show, *self.info.metadata]
        return TypeAdapter(annotated)

    @property
    def bounds(self) -> dict[str, float]:
        """The tightest lower and upper limit: ge or gt, le or lt, where given; of each element for a list."""
        items = _constraints(self.info.annotation, list(self.info.metadata))
        low = [(value, key) for key in ("ge", "gt") for item in items if (value := getattr(item, key, None)) is not None]
        high = [(value, key) for key in ("lt", "le") for item in items if (value := getattr(item, key, None)) is not None]
        # Where both kinds name the same number, the strict one counts: gt sorts after ge, lt is the first of high.
        return {key: value for value, key in [*([max(low)] if low else []), *([min(high, key=lambda limit: limit[0])] if high else [])]}

    @property
    def range_text(self) -> str:
        """The limits in words, such as `1 or more` or `0 to 1`; empty without limits. Those that only nonsense passes are not told."""
        bounds = {key: value for key, value in self.bounds.items() if abs(value) < VAST}
        low = next((("" if key == "ge" else "above ") + _plain(bounds[key]) for key in ("ge", "gt") if key in bounds), "")
        high = next((("" if key == "le" else "below ") + _plain(bounds[key]) for key in ("le", "lt") if key in bounds), "")
        if low and high:
            return f"{low} to {high}"
        if low:
            return low if low.startswith("above") else f"{low} or more"
        return f"at most {high}" if high and not high.startswith("below") else high


def _plain(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100_000 else f"{number:g}"


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def core_type(annotation: Any) -> Any:
    """The annotation without Annotated and without None."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if _is_union(annotation):
        rest = [item for item in get_args(annotation) if item is not type(None)]
        return core_type(rest[0]) if len(rest) == 1 else annotation
    return annotation


def _constraints(annotation: Any, found: list[Any]) -> list[Any]:
    """All Annotated metadata in an annotation, with pydantic's own Field objects opened."""
    for item in list(found):
        if isinstance(item, FieldInfo):
            found += item.metadata
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        for item in metadata:
            found += [*item.metadata, item] if isinstance(item, FieldInfo) else [item]
        return _constraints(inner, found)
    if _is_union(annotation) or get_origin(annotation) is tuple:
        for item in get_args(annotation):
            _constraints(item, found)
    return found


def section_of(run: type[Options], name: str) -> type[Section]:
    """The class of a section of a kind of run, or of a tool."""
    model = run.model_fields[name].annotation
    assert isinstance(model, type) and issubclass(model, Section)
    return model


@cache
def fields(run: type[Options]) -> dict[str, FlatField]:
    """Every option of a kind of run, or of a tool, by its flat name, in the order of the page."""
    found: dict[str, FlatField] = {}
    for section in run.model_fields:
        for name, field in section_of(run, section).model_fields.items():
            assert name not in found, f"{name} stands in {section} and {found[name].section}"
            found[name] = FlatField(name, section, field, show_of(field))
    return found


def run_of(values: Mapping[str, object]) -> type[RunOptions]:
    """The kind of run that a flat mapping is for, by its `script` entry."""
    script = values.get("script")
    for run in RUNS.values():
        if run.script == script:
            return run
    known = ", ".join(run.script for run in RUNS.values())
    raise OptionError(f"script: {script!r} is not one of this version's scripts ({known}); is this a file that Save TOML wrote?")


def nearest(name: str, known: Sequence[str]) -> str:
    """' Did you mean X?' for a name that is close to a known one, else ''."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


def expanded(run: type[Options], values: Mapping[str, object], origin: str) -> tuple[dict[str, object], list[Problem]]:
    """Opens network_args into plain options and finds names that do not exist."""
    known = fields(run)
    plain: dict[str, object] = {}
    problems: list[Problem] = []
    for given, value in values.items():
        name = legacy.FORMER.get(given, given)
        if name in ("script", "schema_version"):
            continue
        if name == "network_args":
            opened, wrong = legacy.network_args(value, known)
            problems += [Problem("network_args", text) for text in wrong]
            plain.update({key: item for key, item in opened.items() if key not in values})
        elif name in known:
            plain[name] = _place(known[name], _choice(known[name], value))
            problems += _place_problems(known[name], plain[name])
        else:
            verdict = advice_on(run, name, value) or _of_other_runs(name)
            where = f" (in {origin})" if origin else ""
            if verdict is not None:
                problems.append(Problem(name, f"{name}{where}: {verdict}"))
            else:
                problems.append(Problem(name, f"{name}{where}: there is no such option.{nearest(name, list(known))}"))
    return plain, problems


def advice_on(run: type[Options], name: str, value: object) -> str | None:
    """What to do about another program's option; None for one that nobody has."""
    if name in run.renamed:
        return f"use {run.renamed[name]}"
    return legacy.verdict(name, value, run)


def _of_other_runs(name: str) -> str | None:
    """What to tell somebody who gave an option that only other kinds of run have."""
    labels = [run.label for run in RUNS.values() if name in fields(run)]
    return f"it has no effect here, it is for {' and '.join(labels)}; remove it" if labels else None


def _choice(field: FlatField, value: object) -> object:
    """A choice between numbers comes from the command line and the page as text."""
    return next((choice for choice in field.choices if isinstance(choice, int) and str(choice) == value), value)


def _place(field: FlatField, value: object) -> object:
    """`~/images` means the same in a file and on the page as in a shell. An empty place is none: it must never be the present folder."""
    if field.show.kind not in ("folder", "file", "start"):
        return value
    if isinstance(value, list | tuple):
        return [_place(field, item) for item in value if not isinstance(item, str) or item.strip()]
    if not isinstance(value, str):
        return value
    return (os.path.expanduser(value) if value.startswith("~") else value) if value.strip() else None


def _place_problems(field: FlatField, value: object) -> list[Problem]:
    """What no file system takes as a path, and what is no text at all; whether it is there is asked later."""
    place = field.show.kind in ("folder", "file", "start")
    problems = []
    for text in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(text, str) or (is_text(text) and (is_json(text) or not place)):
            continue
        why = ""
        if not is_text(text):
            why = NOT_UTF_8
        elif "\0" in text:
            why = "has a NUL character"
        elif max(len(part.encode(errors="surrogateescape")) for part in text.split("/")) > 255 or len(text) > 4095:
            why = "is longer than a path can be"
        elif text.startswith("~"):
            why = "begins with the home folder of a user whom this machine does not know"
        problems += [Problem(field.name, f'{field.name}: "{shortened(text)}" {why}')] if why else []
    return problems


_DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+(e[-+]?\d+)?", re.IGNORECASE)
_THOUSANDS = re.compile(r"[-+]?0*[1-9]\d*,\d{3}")


def with_point(text: str) -> str:
    """A number with a decimal comma written with a point. 1,000 may be a thousand or one: it stays, and the schema asks."""
    return text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) and not _THOUSANDS.fullmatch(text) else text


def numbers(field: FlatField, text: str) -> list[str]:
    """The numbers of a list, as a person parts them."""
    return fractions(text) if field.fractional else _parted(text)


def fractions(text: str) -> list[str]:
    """The numbers of a list of fractions: of `0,5 1` a comma is the decimal sign; `1,5` alone may be one or two, and stays whole."""
    words = [word for word in (part.strip(",") for part in re.split(r"[\s;]+", text)) if word]
    return words if all("," not in word or _DECIMAL_COMMA.fullmatch(word) for word in words) else _parted(text)


def _parted(text: str) -> list[str]:
    return [part for part in re.split(r"[\s,;]+", text) if part]


def with_points(known: Mapping[str, FlatField], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values with a point in each number that was written with a decimal comma, and a sentence for each."""
    out, notes = dict(values), []
    for name, value in values.items():
        items = value if isinstance(value, list | tuple) else [value]
        # A list of one may have been meant as two.
        if name not in known or not known[name].numeric or (known[name].many and len(items) == 1):
            continue
        taken = [with_point(item) if isinstance(item, str) else item for item in items]
        notes += [f"{name}: {old} is read as {new}, with a decimal comma" for old, new in zip(items, taken, strict=True) if old != new]
        out[name] = taken if isinstance(value, list | tuple) else taken[0]
    return out, notes


def one_or_two(name: str, value: str) -> str:
    """What is asked about 1,5 in a list of fractions."""
    shown, decimal, both = shortened(f'"{value}"'), value.replace(",", ".", 1), value.replace(",", " and ")
    return f"{name}: {shown} may mean {decimal}, or the numbers {both}; write {decimal}, or a space between them"


def _sentence(error: Mapping[str, Any], field: FlatField) -> str:
    """pydantic's error in our words: name, value, what is allowed."""
    value, context, kind = error.get("input"), error.get("ctx") or {}, error["type"]
    shown = shortened(repr(value) if not isinstance(value, str) else f'"{value}"')
    if kind == "missing":
        return f"{field.name} is missing: {field.help}"
    if kind == "literal_error":
        choices = [str(choice) for choice in field.choices]
        return f"{field.name}: {shown} is not one of {', '.join(choices)}.{nearest(str(value), choices)}"
    if kind == "value_error":
        return f"{field.name}: {context.get('error', error['msg'])}"
    if kind == "string_pattern_mismatch":
        return f"{field.name}: {shown} has characters that no file name should have, starts with a dot, or is empty or too long"
    allowed = field.range_text
    number = {
        "int_parsing": "a whole number",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_parsing": "a number",
    }
    number |= {"float_type": "a number", "bool_parsing": "true or false", "bool_type": "true or false", "string_type": "a text"}
    number |= {
        "tuple_type": "a list" if Ellipsis in get_args(field.type) else "a size such as 1024 or 1024,768",
        "finite_number": "a finite number",
        "int_parsing_size": "a smaller whole number",
    }
    if kind in ("int_parsing", "float_parsing") and isinstance(value, str) and "," in value:
        plain, decimal = value.replace(",", ""), value.replace(",", ".", 1)
        if field.many:
            return one_or_two(field.name, value)
        return f"{field.name}: {shown} may mean {plain} or {decimal}; write one of them, without a comma"
    if kind in number:
        return f"{field.name}: {shown} is not {number[kind]}" + (f" ({allowed} is allowed)" if allowed else "")
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        limit = next(value for key, value in field.bounds.items() if (key in ("le", "lt")) is kind.startswith("less"))
        if abs(limit) >= VAST:
            words = {"le": "at most", "lt": "less than", "ge": "at least", "gt": "more than"}
            allowed = f"{words[next(key for key, value in field.bounds.items() if value == limit)]} {limit:,}"
        return f"{field.name}: {shown} is out of range; {allowed} is allowed"
    if kind in ("too_long", "too_short", "string_too_short"):
        return f"{field.name}: {shown} has the wrong length: {error['msg'][0].lower()}{error['msg'][1:]}"
    return f"{field.name}: {shown}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _problems(error: ValidationError, known: Mapping[str, FlatField]) -> Iterator[Problem]:
    """A pydantic error as sentences; a validator's message is one line for each problem and belongs to the first option it names."""
    for item in error.errors(include_url=False):
        names = [str(part) for part in item["loc"] if str(part) in known]
        if names:
            field = known[names[0]]
            yield Problem(names[0], _sentence(dict(item), field))
            continue
        for line in str((item.get("ctx") or {}).get("error", item["msg"])).splitlines():
            words = [word.strip("(),.:;") for word in line.split()]
            mentioned = [word for word in words if word in known]
            yield Problem(mentioned[0] if mentioned else "", line)


def build(run: type[O], values: Mapping[str, object], origin: str = "", *, from_cli: bool = False) -> O:
    """Options from flat values. Raises OptionError with every problem at once: unknown names, wrong values, contradictions.

    origin names the file the values come from, for messages. Options that only the command line may give are refused unless from_cli.
    What sleeps keeps its default, whatever is given; `asleep` tells what that is.
    """
    known = fields(run)
    plain, problems = expanded(run, values, origin)
    if not from_cli:
        for name in [name for name in plain if known[name].show.cli_only]:
            if plain.pop(name):
                problems.append(
                    Problem(
                        name,
                        f"{name} may only be given on the command line (--{name}), because it lets a configuration run other people's code",
                    )
                )
    for name in sleeping.asleep(known, plain):
        del plain[name]
    sections: dict[str, Section] = {}
    for section, info in run.model_fields.items():
        model = info.annotation
        assert isinstance(model, type) and issubclass(model, Section)
        chosen = {name: value for name, value in plain.items() if known[name].section == section and value is not None}
        found, wrong = _validated(model, chosen, known)
        problems += wrong
        if found is not None:
            sections[section] = found
    if sections.keys() == run.model_fields.keys():
        options, wrong = _validated(run, sections, known)
        wrong_names = {problem.option for problem in problems}
        problems += [problem for problem in wrong if not any(name and name in problem.message for name in wrong_names)]
        if options is not None and not problems:
            return options
    raise OptionError(list(dict.fromkeys(problems)))


def asleep(run: type[Options], values: Mapping[str, object]) -> dict[str, str]:
    """The given options that sleep, each with what would wake it."""
    return sleeping.asleep(fields(run), expanded(run, values, "")[0])


def _validated(model: type[M], values: Mapping[str, Any], known: Mapping[str, FlatField]) -> tuple[M | None, list[Problem]]:
    """The model and no problems, or every problem, and the model with defaults in place of wrong values where that is possible.

    pydantic leaves out a model's own validators as soon as one field is wrong. So that all problems are told at once, the others are
    validated again without the wrong ones; what that says about a wrong field is left out.
    """
    try:
        return model.model_validate(values), []
    except ValidationError as err:
        problems = list(_problems(err, known))
        wrong = {str(part) for item in err.errors(include_url=False) for part in item["loc"][:1]}
    if not wrong or any(field.is_required() and name not in values for name, field in model.model_fields.items()):
        return None, problems
    rest, more = _validated(model, {name: value for name, value in values.items() if name not in wrong}, known)
    return rest, problems + [problem for problem in more if not any(name in problem.message for name in wrong)]


def flatten(options: Options) -> dict[str, Any]:
    """All values by flat name."""
    return {name: getattr(getattr(options, field.section), name) for name, field in fields(type(options)).items()}


def with_absolute_paths(options: O) -> O:
    """The same options with every path that exists here, and every folder that will be made here, written from the root.

    So that the configuration kept in a run folder means the same wherever it is read.
    """
    known = fields(type(options))
    values = flatten(options)
    for name, value in values.items():
        made = name in ("output_dir", "cache_dir")
        built_in = isinstance(value, str) and (value in known[name].show.suggestions or value.startswith("toy:"))
        # A text may be the path of a file with the text.
        text_file = known[name].show.kind == "text" and isinstance(value, str) and value.endswith((".txt", ".toml", ".json"))
        is_path = known[name].show.kind in ("folder", "file") or (text_file and "\n" not in value)
        if is_path and isinstance(value, str) and not built_in and not is_json(value) and (made or Path(value).exists()):
            values[name] = str(Path(value).absolute())
    if values == flatten(options):
        return options
    given = {name: value for name, value in values.items() if value is not None}
    return build(type(options), given, from_cli=True)


def changed(options: Options) -> dict[str, Any]:
    """The values that differ from their defaults."""
    known = fields(type(options))
    return {name: value for name, value in flatten(options).items() if known[name].required or value != known[name].default}
