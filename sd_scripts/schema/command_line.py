"""Options <-> the command line."""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, get_args

from sd_scripts.schema.errors import gathering

from . import kohya_lines, legacy, sleeping
from .errors import OptionError, Problem
from .fields import Options
from .files import given_path
from .flat import FlatField, O, advice_on, build, changed, core_type, expanded, fields, nearest, numbers, with_points
from .outside import json_of
from .runs import RunOptions
from .toml_files import read_toml

NO_OPTIONS = ("config_file", "run_dir", "dry_run", "cache_only", "estimate", "fit", "json")
"""Flags that are no options of a run."""


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


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are OptionErrors, so that they are reported together with all others."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse takes the first "--" out of an option's values, also where it is the value: --metadata_author=--.
        return super()._get_values(action, ["--", *arg_strings] if action.option_strings and "--" in arg_strings else arg_strings)


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


def parse_tool(tool: type[O], argv: Sequence[str]) -> O:
    """The options of a tool from its command line, as `parse_cli` does it for a run; what is given without effect is said at once."""
    return parse_question(tool, argv)[0]


def parse_question(
    tool: type[O], argv: Sequence[str], under: Mapping[str, Any] | None = None, over: Mapping[str, Any] | None = None
) -> tuple[O, Question | None]:
    """As parse_tool, with what is asked about memory where the tool `estimates`; None where the work is to be done.

    under: values in place of defaults. over: values that count more than what is given.
    """
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
            advice = f"write it --{plain}" if plain in known else advice_on(run, plain, value)
            problems.append(Problem(name, f"--{name}: {advice or 'there is no such option.' + nearest(name, list(known))}"))
            after_unknown = True
        elif not after_unknown:
            problems.append(Problem("", f'"{argument}" does not belong to an option; texts with spaces need quotes'))
    merged: dict[str, Any] = {}
    told: tuple[str, ...] = ()
    origin = ""
    if more["config_file"] is not None:
        origin = more["config_file"].name
        with gathering(problems):
            given_by_another = read_file(more["config_file"], run) if read_file is not None and issubclass(run, RunOptions) else None
            merged, told = given_by_another or (read_toml(more["config_file"]), ())
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
    merged, points = with_points(known, merged)
    notes += points
    options = None
    with gathering(problems):
        options = build(run, merged, origin, from_cli=True)
    if options is None or problems:
        raise OptionError(list(dict.fromkeys(problems)))
    notes += sleeping.notes(known, expanded(run, merged, origin)[0])
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
