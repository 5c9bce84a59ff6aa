"""Flat names <-> sections: the command line, TOML files and the page all pass through here, and so do their error sentences."""

import argparse
import difflib
import itertools
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import toml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from sd_scripts.families import RUNS

from . import kohya_lines, legacy, sleeping
from .errors import OptionError, Problem, shortened
from .fields import VAST, Options, Section, Show, show_of
from .files import NOT_UTF_8, given_path, is_json, is_text
from .outside import json_of, toml_of
from .runs import RunOptions

M = TypeVar("M", bound=BaseModel)
O = TypeVar("O", bound=Options)
NO_OPTIONS = ("config_file", "run_dir", "dry_run", "cache_only", "estimate", "fit", "json")
"""Flags that are no options of a run."""
HEADER = "kohya_like"
"""The TOML table that says which kind of run a file is for."""
SCHEMA_VERSION = 2
"""Written into files; version 1 had other defaults, see RunOptions.defaults_of_version_1."""


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


@dataclass(frozen=True)
class Invocation:
    """What one command line asks for."""

    options: RunOptions
    run_dir: Path | None
    dry_run: bool
    cache_only: bool
    given: frozenset[str]
    """Flat names that came from the command line or the file, not from defaults."""
    estimate: bool = False
    """Forecast the memory that the run will take, and stop."""
    fit: float | None = None
    """GiB of a card for which a plan is wanted; implies estimate."""
    as_json: bool = False
    """Whether the forecast is for a program."""
    notes: tuple[str, ...] = ()
    """What was given in another program's words, and what it was taken as; and what was given without effect. In sentences."""


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


def _expand(run: type[Options], values: Mapping[str, object], origin: str) -> tuple[dict[str, object], list[Problem]]:
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
            verdict = _advice(run, name, value) or _of_other_runs(name)
            where = f" (in {origin})" if origin else ""
            if verdict is not None:
                problems.append(Problem(name, f"{name}{where}: {verdict}"))
            else:
                problems.append(Problem(name, f"{name}{where}: there is no such option.{nearest(name, list(known))}"))
    return plain, problems


def _advice(run: type[Options], name: str, value: object) -> str | None:
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
    """The numbers of a list, as a person parts them. 1,5 for a list of fractions may be one or two: it stays whole, and the schema asks."""
    if field.numeric and core_type(get_args(field.type)[0]) is float and _DECIMAL_COMMA.fullmatch(text.strip()):
        return [text.strip()]
    return [part for part in re.split(r"[\s,]+", text) if part]


def _points(known: Mapping[str, FlatField], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
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
            both = value.replace(",", " and ")
            return f"{field.name}: {shown} may mean {decimal}, or the numbers {both}; write {decimal}, or a space between them"
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
    plain, problems = _expand(run, values, origin)
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
    return sleeping.asleep(fields(run), _expand(run, values, "")[0])


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


def to_toml(options: Options) -> str:
    """The options as a TOML file with a table for each section: every value except those that are None or asleep, and no cli_only ones.

    These are always defaults, so leaving them out loses nothing.
    """
    known, values = fields(type(options)), flatten(options)
    tables: dict[str, dict[str, Any]] = {HEADER: {"script": options.script, "schema_version": SCHEMA_VERSION}}
    without_effect = sleeping.asleep(known, values)
    for name, value in values.items():
        if value is None or known[name].show.cli_only or name in without_effect:
            continue
        tables.setdefault(known[name].section, {})[name] = list(value) if isinstance(value, tuple) else value
    return "\n".join(
        f"[{table}]\n" + "".join(f"{name} = {_toml_value(value)}\n" for name, value in entries.items()) for table, entries in tables.items()
    )


def _toml_value(value: Any) -> str:
    """One value in TOML. JSON's strings are TOML's basic strings, apart from DEL, which TOML wants escaped."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return str(toml.dumps({"v": value})).removeprefix("v = ").strip()


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as flat values; tables are opened, so kohya's flat files and ours both work. Raises OptionError with line and column."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as err:
        raise OptionError(f"config_file: {path} does not exist") from err
    except (OSError, UnicodeDecodeError) as err:
        raise OptionError(f"config_file: {path} cannot be read as text: {err}") from err
    return parse_toml(text, path.name)


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The flat values of a TOML text; `name` is used in messages."""
    try:
        data = toml_of(text)
    except ValueError as err:
        raise OptionError(f"{name} is not valid TOML: {err}") from err
    flat: dict[str, Any] = {}
    twice = []
    for key, value in data.items():
        for inner, item in value.items() if isinstance(value, dict) else [(key, value)]:
            if inner in flat:
                twice.append(inner)
            flat[inner] = item
    if twice:
        raise OptionError([Problem(key, f"{key} stands twice in {name}, in different tables; keep one") for key in twice])
    return _with_defaults_of_its_version(flat)


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are OptionErrors, so that they are reported together with all others."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse takes the first "--" out of an option's values, also where it is the value: --metadata_author=--.
        return super()._get_values(action, ["--", *arg_strings] if action.option_strings and "--" in arg_strings else arg_strings)


def _with_defaults_of_its_version(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a file with the defaults that were others in its version, so that it means what it meant when it was written."""
    if values.get("schema_version") != 1:
        return values
    run = next((run for run in RUNS.values() if run.script == values.get("script")), None)
    return values if run is None else {**run.defaults_of_version_1, **values}


def _first_of(run: type[Options]) -> FlatField | None:
    """What a tool works on: the first option without a default, whose values may stand first on the command line without its flag."""
    if issubclass(run, RunOptions):
        return None
    return next((field for field in fields(run).values() if field.required), None)


def _named(tool: type[Options], words: Sequence[str]) -> list[str]:
    """The command line of a tool with a flag for the words that it begins with."""
    first = _first_of(tool)
    count = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    if first is None or count == 0 or (count > 1 and not first.many) or f"--{first.name}" in (word.partition("=")[0] for word in words):
        return list(words)
    return [f"--{first.name}", *words]


def parser(run: type[Options]) -> argparse.ArgumentParser:
    """The command line of a kind of run, or of a tool. Values stay text: pydantic reads them, as it does those of a file."""
    first = _first_of(run)
    begins = "--config_file FILE" if first is None else first.name.upper() + (" ..." if first.many else "")
    parse = _Parser(prog=run.script, usage=f"{run.script} {begins} [--option value ...]", allow_abbrev=False, description=run.__doc__)
    parse.add_argument("--config_file", type=given_path, help="TOML file with options; flags win over it")
    if issubclass(run, RunOptions):
        parse.add_argument("--run_dir", type=given_path, help="folder of this run; without it a new one is made in output_dir")
        parse.add_argument("--dry_run", action="store_true", help="check everything, print what would be done, and stop")
        parse.add_argument("--cache_only", action="store_true", help="encode images and captions into the cache, and stop")
        parse.add_argument(
            "--network_args", nargs="*", default=argparse.SUPPRESS, help="options of the network as key=value, as in kohya's scripts"
        )
    if run.estimates:
        parse.add_argument("--estimate", action="store_true", help="say how much memory of a GPU this will take, and stop")
        parse.add_argument("--fit", metavar="SIZE", help="make a plan with which it fits on a card of this size, such as 12GB, and stop")
        parse.add_argument("--json", action="store_true", help="answer --estimate and --fit as lines of JSON")
    groups = {name: parse.add_argument_group(name, getattr(info.annotation, "__doc__", "")) for name, info in run.model_fields.items()}
    for name, field in fields(run).items():
        group = groups[field.section]
        text = field.help.replace("%", "%%")
        if field.type is bool:
            group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
            continue
        hint = "|".join(map(str, field.choices)) or (field.show.unit or field.range_text or "value")
        count: Any = {"nargs": "*"} if field.many else {}
        group.add_argument(f"--{name}", default=argparse.SUPPRESS, help=text, metavar=hint.replace("%", "%%"), **count)
    return parse


def _split_bool_flags(run: type[Options], argv: Sequence[str]) -> list[str]:
    """`--no_x` for a switch x becomes argparse's `--no-x`; `--x=true` and `--x=false` become the switch they mean."""
    known, out = fields(run), []
    former = "|".join(legacy.FORMER)
    for argument in argv:
        argument = re.sub(rf"^(--(?:no[-_])?)({former})(?==|$)", lambda found: found[1] + legacy.FORMER[found[2]], argument)
        name, _, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--no_") and name not in known and name[3:] in known and known[name[3:]].type is bool:
            argument = f"--no-{name[3:]}"
        elif argument.startswith("--") and name in known and known[name].type is bool and value.lower() in ("true", "false"):
            argument = f"--{name}" if value.lower() == "true" else f"--no-{name}"
        out.append(argument)
    return out


ReadFile = Callable[[Path, type[RunOptions]], tuple[dict[str, object], tuple[str, ...]] | None]
"""Options in another program's file, and its report in sentences; None for a file that is no other program's."""


def parse_cli(run: type[RunOptions], argv: Sequence[str], read_file: ReadFile | None = None) -> Invocation:
    """Defaults < --config_file < flags. Raises OptionError with every problem at once; --help prints and leaves, as usual."""
    options, given, notes, more = _parse(run, argv, read_file=read_file)
    asked = Invocation(options, more["run_dir"], more["dry_run"], more["cache_only"], given, notes=notes)
    question = _question(more)
    return replace(asked, estimate=question is not None, fit=None if question is None else question.fit, as_json=more["json"])


def card_size(text: str | None) -> float | None:
    """GiB of a card, from a text such as 12GB, 11.5GiB or 24; None gives None. Raises OptionError for another text."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:g|gb|gib)?", text.strip().lower())
    if found is None or float(found[1]) <= 0:
        raise OptionError(Problem("fit", f"fit: {text} is not the size of a card; write it as 12GB"))
    return float(found[1])


@dataclass(frozen=True)
class Question:
    """What a command line asks about memory, in place of having the work done."""

    fit: float | None
    """See Invocation."""
    as_json: bool


def _question(more: Mapping[str, Any]) -> Question | None:
    return Question(card_size(more["fit"]), more["json"]) if more["estimate"] or more["fit"] is not None else None


def parse_tool(tool: type[O], argv: Sequence[str], under: Mapping[str, Any] | None = None, over: Mapping[str, Any] | None = None) -> O:
    """The options of a tool from its command line, as `parse_cli` does it for a run; what is given without effect is said at once.

    under: values in place of defaults. over: values that count more than what is given.
    """
    return parse_question(tool, argv, under, over)[0]


def parse_question(
    tool: type[O], argv: Sequence[str], under: Mapping[str, Any] | None = None, over: Mapping[str, Any] | None = None
) -> tuple[O, Question | None]:
    """As parse_tool, with what is asked about memory where the tool `estimates`; None where the work is to be done."""
    options, _, notes, more = _parse(tool, argv, under, over)
    sys.stderr.write("".join(f"{note}\n" for note in notes))
    return options, _question(more) if tool.estimates else None


def _parse(
    run: type[O],
    argv: Sequence[str],
    under: Mapping[str, Any] | None = None,
    over: Mapping[str, Any] | None = None,
    read_file: ReadFile | None = None,
) -> tuple[O, frozenset[str], tuple[str, ...], dict[str, Any]]:
    """Options, the names that were given, sentences about other programs' words and what is asleep, and the flags that are no options."""
    line, foreign = kohya_lines.split(run, fields(run), argv) if issubclass(run, RunOptions) else (_named(run, argv), {})
    values, rest = parser(run).parse_known_args(_split_bool_flags(run, line))
    given = dict(vars(values)) | foreign
    problems: list[Problem] = []
    known = fields(run)
    more: dict[str, Any] = {name: given.pop(name) for name in NO_OPTIONS if name in given and name not in known}
    after_unknown = False
    for argument, after in itertools.zip_longest(rest, rest[1:], fillvalue="--"):
        if argument.startswith("--"):
            name, equals, text = argument.removeprefix("--").partition("=")
            plain = name.replace("-", "_")
            value: object = text if equals else True if after.startswith("--") else after
            advice = f"write it --{plain}" if plain in known else _advice(run, plain, value)
            problems.append(Problem(name, f"--{name}: {advice or 'there is no such option.' + nearest(name, list(known))}"))
            after_unknown = True
        elif not after_unknown:
            problems.append(Problem("", f'"{argument}" does not belong to an option; texts with spaces need quotes'))
    merged: dict[str, Any] = {}
    told: tuple[str, ...] = ()
    origin = ""
    if more["config_file"] is not None:
        origin = more["config_file"].name
        try:
            given_by_another = read_file(more["config_file"], run) if read_file is not None and issubclass(run, RunOptions) else None
            merged, told = given_by_another or (read_toml(more["config_file"]), ())
        except OptionError as err:
            problems += err.problems
        if merged.get("script", run.script) != run.script:
            problems.append(Problem("script", f"{origin} is for {merged['script']}, but this is {run.script}; start that script"))
        for name in [name for name in merged if name in known and known[name].show.cli_only]:
            problems.append(Problem(name, f"{name} in {origin}: it may only be given on the command line (--{name})"))
            del merged[name]
    notes: list[str] = []
    for need in [need for name in given if name in known for need in known[name].show.conditions if need.off]:
        # Flags win over the file: what replaces an option there does not replace it when it is given here.
        if need.name not in given and merged.get(need.name) is not None:
            notes.append(f"{need.name} = {merged.pop(need.name)} in {origin} gave way to what the command line gives in its place")
    merged.update({name: _text_to_value(known.get(name), value) for name, value in given.items()})
    merged = {**(under or {}), **merged, **(over or {})}
    if issubclass(run, RunOptions):
        merged, said = kohya_lines.translated(run, known, merged)
        notes += said
    merged, points = _points(known, merged)
    notes += points
    options = None
    try:
        options = build(run, merged, origin, from_cli=True)
    except OptionError as err:
        problems += err.problems
    if options is None or problems:
        raise OptionError(list(dict.fromkeys(problems)))
    notes += sleeping.notes(known, _expand(run, merged, origin)[0])
    return options, frozenset(name for name in merged if name in known), (*told, *notes), more


def _text_to_value(field: FlatField | None, value: Any) -> Any:
    """What argparse leaves as text: `none` for an optional number, a list written with commas, or as JSON."""
    if field is None:
        return value
    if field.optional and field.type is not str and isinstance(value, str) and value.lower() == "none":
        return None
    if field.many and isinstance(value, list) and len(value) == 1:
        of_texts = core_type(get_args(field.type)[0]) is str
        if of_texts and (texts := _json_texts(value[0])) is not None:
            return texts
        if not of_texts and Ellipsis in get_args(field.type):
            return numbers(field, value[0])
    return value


def _json_texts(text: str) -> list[str] | None:
    """The list that a text such as `["a", "--b"]` writes; None when it is something else, such as the expression [0-9]."""
    try:
        data = json_of(text)
    except ValueError:
        return None
    return data if isinstance(data, list) and all(isinstance(item, str) for item in data) else None


def to_argv(options: Options) -> list[str]:
    """The flags that give these options on the command line: only what differs from the defaults."""
    known, argv = fields(type(options)), []
    for name, value in changed(options).items():
        if known[name].type is bool:
            argv.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, tuple) and all(isinstance(item, str) for item in value):
            # argparse would take an element such as --x for a flag, and one such as ["a"] would be read as JSON: then all go as JSON.
            plain = not any(item.startswith("-") or _json_texts(item) is not None for item in value)
            argv += [f"--{name}", *value] if plain else [f"--{name}={json.dumps(value, ensure_ascii=False)}"]
        else:
            text = ",".join(map(repr, value)) if isinstance(value, tuple) else repr(value) if isinstance(value, float) else str(value)
            argv.append(f"--{name}={text}")
    return argv


def fail(err: OptionError, program: str) -> NoReturn:
    """Prints the sentences and ends the process with 2."""
    lines = "\n".join(f"  - {problem}" for problem in err.problems)
    count = len(err.problems)
    sys.stderr.write(f"{program}: {'one problem' if count == 1 else f'{count} problems'}, nothing was started:\n{lines}\n")
    raise SystemExit(2)
