"""The sheet an importer fills in: values on one side, one row for every key on the other; and the check that the values build."""

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, get_args

from sd_scripts.families import FACTS, RUNS

from . import flat, legacy
from .errors import OptionError, Problem
from .flat import FlatField
from .imported import Imported, Row, Verdict
from .memory import DECIDES_FIT
from .runs import RunOptions

SECRETS = {"wandb_api_key", "wandb_key", "huggingface_token"}
_SECRET = re.compile(r"(^|[._])(token|password|secret|api_key|access_key\w*)$")
"""Ends of names whose values are shown nowhere."""
HIDDEN = "…"
MISSING = {
    "pretrained_model_name_or_path": "the base model: a .safetensors file, a diffusers folder or a hub id",
    "train_data_dir": "the folder of the training images",
}
"""What a run needs and another program's file may lack, and what to tell the person."""
PLACEHOLDER = "toy"
"""Stands for what the file cannot give while the rest is checked."""
_OFF_WORDS = ("", "none", "no", "false", "off", "default")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none", "")


def number(value: object) -> float | None:
    """A number that may be written as text; None for anything else, and for numbers that are not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def switch(value: object) -> bool | None:
    """A switch that may be written as text or number; None for anything else."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    return True if text in _TRUE else False if text in _FALSE else None


def is_empty(value: object) -> bool:
    """Whether a value says nothing at all."""
    return value is None or value == [] or value == {} or (isinstance(value, str) and value.strip().lower() in ("", "none", "[]"))


def is_off(value: object) -> bool:
    """Whether a value is one that switches something off."""
    return is_empty(value) or (isinstance(value, str) and value.strip().lower() in _OFF_WORDS) or number(value) == 0 or value is False


def parts(value: object) -> list[str]:
    """The elements of a list that may be written as text, with commas or blanks."""
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    return str(value).replace("[", " ").replace("]", " ").replace(",", " ").split()


def fitted(field: FlatField, value: object) -> object:
    """A value in the type of a field, as far as that is possible; the schema explains what is wrong with the rest."""
    if field.type is bool:
        found = switch(value)
        return value if found is None else found
    if field.type in (int, float):
        return _fitted_number(value, field.type is int)
    if field.choices:
        return next((choice for choice in field.choices if str(choice).lower() == str(value).strip().lower()), value)
    if field.many and get_args(field.type)[0] is str:
        return value if isinstance(value, list) else [str(value)]
    if field.many and Ellipsis in get_args(field.type):
        return parts(value) if isinstance(value, str | list | tuple) else [str(value)]
    if field.type is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if field.many:
        sides = [number(side) for side in parts(str(value).replace("x", ",").strip("()"))]
        return [int(side) for side in sides if side is not None] * (3 - len(sides)) if 0 < len(sides) <= 2 and None not in sides else value
    return value


def _fitted_number(value: object, whole: bool) -> object:
    found = number(value)
    if found is None or isinstance(value, int):
        return value
    if not whole:
        return found
    return int(found) if found.is_integer() else value


class Sheet:
    """Values and rows of one file, while an importer goes through its keys.

    Each of `take`, `skip` and `refuse` writes the row of one key. A later call for the same key replaces the row, never adds one.
    """

    def __init__(self, run: type[RunOptions], given: Mapping[str, object]) -> None:
        self.run = run
        self.given = dict(given)
        self.known = flat.fields(run)
        self.values: dict[str, object] = {}
        self.rows: dict[str, Row] = {}
        self._keys_of: dict[str, list[str]] = {}
        self.conflicts: list[str] = []
        self.called: dict[str, str] = {}
        """What the file calls keys that are read under another name."""

    def value(self, key: str) -> object:
        """What the file says at this key; None without it."""
        return self.given.get(key)

    def first(self, *keys: str) -> object:
        """The first value of these keys that says something."""
        return next((self.given[key] for key in keys if key in self.given and not is_empty(self.given[key])), None)

    def number(self, *keys: str) -> float | None:
        """The first of these keys that says something, as a number."""
        return number(self.first(*keys))

    def on(self, *keys: str) -> bool:
        """Whether one of these switches is on."""
        return any(switch(self.given.get(key)) is True for key in keys)

    def write(self, key: str, verdict: Verdict, text: str) -> None:
        """The row of a key."""
        value = self.given.get(key)
        secret = key.rpartition(".")[2] in SECRETS or _SECRET.search(key)
        shown = HIDDEN if secret and not is_empty(value) else value
        self.rows[key] = Row(key, shown, verdict, text)

    def skip(self, key: str, why: str) -> None:
        """The key is not needed, because ..."""
        self.write(key, "not needed", why)

    def refuse(self, key: str, text: str) -> None:
        """The key is not supported; text says why and what to do."""
        self.write(key, "not supported", text)

    def unknown(self, key: str, program: str, known: Iterable[str]) -> None:
        """A key that this version does not know of the program: nothing is made of it, and that is said."""
        self.write(
            key, "unknown", f"this version knows no such setting of {program}; nothing was made of it.{flat.nearest(key, list(known))}"
        )

    def without_rule(self, key: str, name: str, program: str) -> None:
        """A key that says something and has no rule: not supported where kohya's or another kind of run has such a name, else unknown."""
        if legacy.find(name, self.run) is None and not self.families_with(name):
            self.unknown(key, program, self.known)
        else:
            self.refuse(key, self.advice(name, self.value(key)))

    def has(self, option: str, value: object) -> bool:
        """Whether this kind of run has the option, and the option the value where it is a choice."""
        return option in self.known and (not self.known[option].choices or value in self.known[option].choices)

    def decided(self, option: str) -> bool:
        """Whether some key of the file has given this option a value."""
        return option in self._keys_of

    def lose(self, key: str, text: str) -> None:
        """The key is not supported, and the result or what fits into memory follows from it: it stands above the form as well."""
        self.refuse(key, text)
        self.conflicts.append(f"{self.called.get(key, key)} = {shown(self.value(key))}: {text}")

    def ask(self, unclear: Mapping[str, tuple[object, str]], rule: Callable[[Any, str], None]) -> None:
        """The rows of keys whose values nobody knows yet: not needed, or unknown, where any value would be, else to be given in the form.

        unclear: by key the value as it is written, and what to tell the person. rule: what would write the row if it were known.
        """
        for key, (value, text) in unclear.items():
            rows = [self._tried(key, stand_in, rule) for stand_in in (value, "7")]
            self.given[key] = value
            first, other = rows
            if first is not None and other is not None and first.verdict == other.verdict and first.verdict in ("not needed", "unknown"):
                self.write(key, first.verdict, first.text)
            else:
                self.lose(key, text)

    def _tried(self, key: str, value: object, rule: Callable[[Any, str], None]) -> Row | None:
        """The row that a rule would write for a value, without anything that follows from it."""
        other = copy.copy(self)
        other.given, other.values, other.rows, other.conflicts = {**self.given, key: value}, {**self.values}, {}, []
        other._keys_of = {option: [*keys] for option, keys in self._keys_of.items()}
        rule(other, key)
        return other.rows.get(key)

    def take(self, key: str, option: str, value: object, note: str = "") -> None:
        """The key gives this option this value. One that is the default is not kept, because it is there anyway."""
        if option not in self.known:
            self.refuse(key, self.advice(option, value))
            return
        field = self.known[option]
        value = fitted(field, value)
        if option == "resolution":
            value, rounded = self.on_grid(value)
            note = "; ".join(text for text in (note, rounded) if text)
        same = option == self.called.get(key, key) and not note and _same(field, value, self.given.get(key))
        if same:
            self.write(key, "taken", "as it is" if not self._is_default(field, value) else "as it is, which is the default here as well")
        else:
            self.write(key, "renamed", f"{option} = {shown(value)}" + (f"; {note}" if note else ""))
        self.put(option, value, key)

    def on_grid(self, size: object) -> tuple[object, str]:
        """A size whose sides the model takes, and a note where they are others."""
        grid = getattr(flat.section_of(self.run, "model"), "grid", 1)
        sides = [number(side) for side in size] if isinstance(size, list | tuple) else []
        if not any(side is not None and side % grid for side in sides) or None in sides:
            return size, ""
        return [max(grid, int(side // grid) * grid) for side in sides if side is not None], f"sides are multiples of {grid}"

    def put(self, option: str, value: object, key: str = "") -> None:
        """Sets an option; key is the one to blame when it does not fit."""
        if key:
            self._keys_of.setdefault(option, []).append(key)
        if option == "additional_resolutions":
            value = self.on_grid(value)[0]
        if self._is_default(self.known[option], value):
            self.values.pop(option, None)
        else:
            self.values[option] = value

    def assume(self, option: str, value: object, program: str) -> None:
        """An option that the file leaves at the other program's default, which is not ours."""
        key = option if option not in self.rows else f"{option} (not in the file)"
        self.put(option, value, key)
        self.rows[key] = Row(key, None, "taken", f"not in the file: {option} = {shown(value)} is {program}'s default")

    def assume_if_other(self, option: str, value: object, program: str) -> None:
        """As `assume`, for what this kind of run has, the file does not say, and is another default here."""
        if option in self.known and not self.decided(option) and not self._is_default(self.known[option], value):
            self.assume(option, value, program)

    def advice(self, name: str, value: object) -> str:
        """What to tell about a name that is no option of this kind of run."""
        said = legacy.verdict(name, value, self.run)
        if said is not None:
            text = said.removeprefix("not supported: ").removeprefix("not needed, because ")
            return text.removesuffix("; remove it").removesuffix(". Remove it")
        families = self.families_with(name)
        if families:
            return f"it has no effect here; it is for {families}"
        return f"it is not known here.{flat.nearest(name, list(self.known))}"

    def families_with(self, name: str) -> str:
        """The other kinds of run that have this option, in words; empty when there is none."""
        having = {key for key, run in RUNS.items() if name in flat.fields(run)}
        by_family = {family: [method for kin, method in having if kin == family] for family in FACTS}
        all_of = Counter(kin for kin, _method in RUNS)
        methods = {"network": "adapters", "full": "whole models", "scratch": "models from nothing"}
        said = [
            FACTS[family].label + ("" if len(found) == all_of[family] else f" ({methods[found[0]]})")
            for family, found in by_family.items()
            if found
        ]
        return " and ".join(said)

    def _is_default(self, field: FlatField, value: object) -> bool:
        if field.required:
            return False
        default: object = field.default
        if isinstance(default, tuple):
            given = value if isinstance(value, list | tuple) else parts(value) if isinstance(value, str) else [value]
            return [str(item) for item in given] == [str(item) for item in default]
        return (type(value) is type(default) and value == default) or (isinstance(value, int | float) and value == default)

    def settle(self, origin: str, missing: Mapping[str, str] | None = None) -> Imported:
        """The import, with every value that the schema refuses turned into a row that says why.

        missing: for each option that a run needs and the file may lack, what to tell the person; None are the usual ones.
        """
        if missing is None:
            has_images = not is_empty(self.values.get("dataset_config"))
            missing = {name: text for name, text in MISSING.items() if not (has_images and name == "train_data_dir")}
        stand_ins = {name: self._stand_in(name) for name in missing if name not in self.values}
        needed = [f"{name}: {missing[name]}" for name in stand_ins]
        while True:
            try:
                built = flat.flatten(flat.build(self.run, {**stand_ins, **self.values}))
                asleep = flat.asleep(self.run, {**stand_ins, **self.values})
                self.values = {name: value if name in asleep else built[name] for name, value in self.values.items()}
                for key, why in [(key, why) for option, why in asleep.items() for key in self._keys_of.get(option, [])]:
                    self.rows[key] = replace(self.rows[key], text=f"{self.rows[key].text}; it has no effect until {why}")
                break
            except OptionError as err:
                removed = [self._demote(problem) for problem in err.problems]
                if not any(removed):
                    needed += [f"{problem.option}: {problem.message.removeprefix(problem.option + ': ')}" for problem in err.problems]
                    break
        rows = [replace(row, key=self.called.get(row.key, row.key)) for row in self.rows.values()]
        return Imported(self.run, self.values, rows, needed, self.conflicts, origin)

    def _stand_in(self, option: str) -> object:
        if not self.known[option].many:
            return PLACEHOLDER
        multipliers = self.values.get("base_weights_multiplier")
        return [PLACEHOLDER] * (len(multipliers) if isinstance(multipliers, list | tuple) else 1)

    def _demote(self, problem: Problem) -> bool:
        """Takes back the value that a problem is about; False when no value of the file is to blame.

        Of several that contradict each other, one that decides whether the run fits into memory stays.
        """
        words = [word.strip("(),.:;") for word in problem.message.split()]
        about = [name for name in dict.fromkeys((problem.option, *words)) if name in self.values]
        if not about:
            return False
        alone = problem.message.startswith(f"{about[0]}:")
        option = about[0] if alone else next((name for name in about if name not in DECIDES_FIT), about[0])
        left, default = self.values.pop(option), self.known[option].default
        stays = f" {option} stays {shown(default)}." if not self.known[option].required else ""
        for key in self._keys_of.get(option, []):
            self.refuse(key, (problem.message.rstrip(".") + "." + stays).replace("?.", "?"))
        winners = [f"{name} = {shown(self.values[name])}" for name in about if name in self.values] if not alone else []
        if winners:
            self.conflicts.append(f"{option} = {shown(left)} gave way to {', '.join(winners)}: {problem.message.partition(';')[0]}.{stays}")
        return True


S = TypeVar("S", bound=Sheet)


def unless_empty(rule: Callable[[S, str], None]) -> Callable[[S, str], None]:
    """A rule of a key that says something; an empty one is passed over."""

    def asked(sheet: S, key: str) -> None:
        sheet.skip(key, "it is empty") if is_empty(sheet.value(key)) else rule(sheet, key)

    return asked


def unless_off(rule: Callable[[S, str], None]) -> Callable[[S, str], None]:
    """A rule of a switch, or of a number that counts above 0; one that is off is passed over."""

    def asked(sheet: S, key: str) -> None:
        sheet.skip(key, "it is off") if is_off(sheet.value(key)) else rule(sheet, key)

    return asked


def shown(value: object) -> str:
    """A value in a sentence."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "empty"
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _same(field: FlatField, value: object, given: object) -> bool:
    """Whether a value is what the file says, apart from how it is written."""
    if value == given or str(value) == str(given):
        return True
    if isinstance(value, int | float) and number(given) == value:
        return True
    return isinstance(value, list) and value == parts(given)
