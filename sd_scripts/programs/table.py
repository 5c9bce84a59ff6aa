"""What reading another program's file is made of: its names of models, a rule for each of its keys, and the sheet that rules fill in.

A program is one module beside this one: by what its files are known, what it calls models, and one table from key to rule. A key is the
path to a value, `train.lr`; `[]` stands for the number of an entry in a list of tables, `datasets[].resolution`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sd_scripts.families import FACTS, RUNS
from sd_scripts.runs.optimizer_arguments import ARGUMENTS
from sd_scripts.runs.told import header_of
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported
from sd_scripts.schema.objective import SizeShift
from sd_scripts.schema.optimizer import BY_NAME, SCHEDULE_FREE, ZOO
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.sheet import MISSING, Sheet, fitted, is_empty, is_off, number, parts, shown, switch, unless_empty, unless_off

DIFFUSERS_LINE = SizeShift((256, 0.5), (4096, 1.15))
"""By what diffusers' scheduler of flow matching shifts times with the image's size, where the model's own file says nothing else."""
TOKEN = 16
"""Pixels of a token's side in the families that shift by size: 2 x 2 latents of 8, or one of 16."""
NOT_HERE = "it is not part of this version"
MAX_DEPTH = 8
"""Tables inside tables that are opened; what is deeper stays one value."""


@dataclass(frozen=True)
class NamedModel:
    """One of a program's names of models: the family that trains it here, and the options that say which of the family's it is."""

    family: str
    """As the registry has it; one that is not there is refused by `label`."""
    label: str
    options: Mapping[str, object] = field(default_factory=dict)
    by_size: SizeShift | Literal["own"] | None = "own"
    """The line along which the program shifts times with the image's size: the family's own, another one, or none."""
    token: int = TOKEN
    """The pixels that it counts as a token's side in doing so."""
    layers: Mapping[str, object] = field(default_factory=dict)
    """The options that give an adapter the layers which it has there where a file says nothing of them."""
    beyond: str = ""
    """What has an adapter there as well, and cannot here."""
    parts: tuple[str, ...] = ()
    """The tables of its own parts, where a file has some for the parts of all models."""
    trains_texts: bool = False
    """Whether the program trains its text encoders."""


class ForeignSheet(Sheet):
    """A file of another program by the paths of its keys, as one kind of run."""

    def __init__(self, program: str, run: type[RunOptions], given: Mapping[str, object], model: NamedModel | None = None) -> None:
        super().__init__(run, given)
        self.program = program
        self.model = model or NamedModel(run.family, run.label)
        self.sets: list[dict[str, tuple[object, str]]] = []
        """For each data set of the file the options of its own, with the key to blame."""
        self._notes: dict[str, str] = {}

    def set_here(self, key: str, option: str, value: object, note: str = "", at: str = "") -> None:
        """An option of the data set that the key, or at, stands in. Its row is written when all data sets are known."""
        self.one(at or key)[option] = (value, key)
        self._notes[key] = note
        self.write(key, "renamed", option)

    def one(self, key: str) -> dict[str, tuple[object, str]]:
        """What the data set that a key stands in has been given so far."""
        found = re.search(r"\[(\d+)\]", key)
        index = int(found[1]) if found else 0
        while len(self.sets) <= index:
            self.sets.append({})
        return self.sets[index]

    def beside(self, key: str, name: str) -> object:
        """The value of another key of the same table."""
        table, dot, _ = key.rpartition(".")
        return self.value(f"{table}{dot}{name}")

    def finish(self, origin: str, defaults: Mapping[str, object]) -> Imported:
        """The import, with the data sets put where they belong, and that program's defaults where they are not ours."""
        self._place_sets()
        for option, value in defaults.items():
            self.assume_if_other(option, value, self.program)
        return self.settle(f"{origin}: {self.run.label}")

    def finish_data(self, origin: str, needs_images: bool) -> Imported:
        """The import of a file that describes data alone: its values, defaults among them, are for a form that is filled already."""
        self._place_sets()
        missing = {} if "dataset_config" in self.values else {"train_data_dir": MISSING["train_data_dir"]}
        found = self.settle(origin, {**{name: text for name, text in MISSING.items() if name != "train_data_dir"}, **missing})
        images = {"train_data_dir", "dataset_config"} & found.values.keys()
        decided = {
            option: self.known[option].default for option in (*self._keys_of, *(_REPLACED if images else ())) if option in self.known
        }
        still = [text for text in found.missing if needs_images and not images and text.startswith("train_data_dir:")]
        return replace(found, values={**decided, **found.values}, missing=still, adds=True)

    def _place_sets(self) -> None:
        """One folder, beside which there may be one for regularisation, stands in options of its own; more make a dataset_config."""
        named = [one for one in self.sets if "image_dir" in one]
        used = named or [one for one in self.sets if one][:1]
        said = {key for one in used for _value, key in one.values()}
        for key in [key for one in self.sets for _value, key in one.values() if key not in said]:
            self.skip(key, "its data set is off, or names no folder")
        reg = [one for one in named if one.get("is_reg", (False, ""))[0]]
        train = [one for one in used if one not in reg]
        if "dataset_config" not in self.known:
            for one in [*train[1:], *reg]:
                self.lose(one["image_dir"][1], "this kind of run reads one folder, train_data_dir; bring the images into it")
            train, reg = train[:1], []
        if len(train) <= 1 and len(reg) <= 1 and all(one.keys() <= {"image_dir", "is_reg", "recursive"} for one in reg):
            for option, (value, key) in [item for one in reg for item in one.items()]:
                self._give(key, "reg_data_dir", value) if option == "image_dir" else self.skip(key, "reg_data_dir says it")
            for option, (value, key) in [item for one in train for item in one.items()]:
                self._give(key, _OF_RUN.get(option, option), value)
        else:
            self._write_config(named)

    def _give(self, key: str, option: str, value: object) -> None:
        """An option of the run by a key of its only data set; what the key says besides has no row."""
        if key in self._notes:
            self.take(key, option, value, self._notes.pop(key))
        elif option in self.known:
            self.put(option, fitted(self.known[option], value), key)

    def _write_config(self, sets: list[dict[str, tuple[object, str]]]) -> None:
        """All data sets in one dataset_config, which is a text and no file."""
        datasets = []
        for one in sets:
            dataset: dict[str, object] = {name: self.on_grid(one[name][0])[0] for name in _OF_DATASET if name in one}
            subset: dict[str, object] = {name: value for name, (value, _key) in one.items() if name not in dataset and name not in _OF_ALL}
            datasets.append({**dataset, "subsets": [subset]})
            for option, (value, key) in one.items():
                if option not in _OF_ALL and key in self._notes:
                    note = self._notes.pop(key)
                    self.write(key, "renamed", f"{option} = {shown(value)} in dataset_config" + (f"; {note}" if note else ""))
        for name in _OF_ALL:
            found = [one[name] for one in sets if name in one]
            for _value, key in found:
                self._give(key, name, found[0][0])
            if len({str(value) for value, _ in found}) > 1:
                self.conflicts.append(f"{name} holds for the whole run here, and data sets differ: {shown(found[0][0])} was taken")
        if sets:
            self.put("dataset_config", json.dumps({"datasets": datasets}, ensure_ascii=False), sets[0]["image_dir"][1])


_OF_RUN = {"image_dir": "train_data_dir", "num_repeats": "dataset_repeats", "class_tokens": "instance_prompt"}
"""What options of a data set are called where there is one."""
_REPLACED = ("train_data_dir", "reg_data_dir", "in_json", "dataset_config", "instance_prompt", "class_prompt")
"""What a form says of images that others take the place of."""
_OF_DATASET = """resolution additional_resolutions enable_bucket bucket_reso_steps min_bucket_reso max_bucket_reso
    bucket_no_upscale""".split()
_OF_ALL = """masked_loss masked_loss_outside_weight normalize_masked_loss train_batch_size prior_loss_weight control_resolution
    cache_latents cache_latents_to_disk on_bad_image validation_split""".split()
"""Options that hold for all data sets."""

Rule = Callable[[ForeignSheet, str], None]
"""Writes the row of one key."""
Table = dict[str, Rule]


@dataclass(frozen=True)
class TwoWay:
    """A rule with its way back."""

    write: Rule
    option: str
    """The option of a run that the key is for."""
    back: Callable[[Any], object]
    """What the key says for a value of the option; None leaves the key out."""

    def __call__(self, sheet: ForeignSheet, key: str) -> None:
        self.write(sheet, key)


def said(table: Table, values: Mapping[str, Any], others: Mapping[str, object]) -> dict[str, Any]:
    """The tables of a file that says these options: each by the first key that has a way back for it, and by others, which win, by path.
    An entry of a list of tables, `datasets[].`, is the first of its list. What is None or empty is left out."""
    found: dict[str, object] = {}
    written: set[str] = set()
    for path, rule in table.items():
        if isinstance(rule, TwoWay) and rule.option not in written and values.get(rule.option) is not None:
            found[path] = rule.back(values[rule.option])
            written |= {rule.option} if found[path] is not None else set()
    tables: dict[str, Any] = {}
    for path, value in {**found, **others}.items():
        if value is None or value == "" or value == []:
            continue
        *parents, name = path.split(".")
        place: Any = tables
        for parent in parents:
            if parent.endswith("[]"):
                place = place.setdefault(parent[:-2], [{}])[0]
            else:
                place = place.setdefault(parent, {})
        place[name] = list(value) if isinstance(value, tuple) else value
    return tables


def opened(given: Mapping[str, object], prefix: str = "", depth: int = 0) -> dict[str, object]:
    """Values by path: tables are opened, and lists of tables with the number of each entry."""
    found: dict[str, object] = {}
    for name, value in given.items():
        path = f"{prefix}{name}"
        tables = value if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value) else None
        if depth >= MAX_DEPTH or not (tables or (isinstance(value, Mapping) and value)):
            found[path] = value
        elif tables:
            for index, table in enumerate(tables):
                found |= opened(table, f"{path}[{index}].", depth + 1) if table else {f"{path}[{index}]": table}
        elif isinstance(value, Mapping):
            found |= opened(value, f"{path}.", depth + 1)
    return found


def place(key: str) -> str:
    """The name under which a table has a key."""
    return re.sub(r"\[\d+\]", "[]", key)


def fill(sheet: ForeignSheet, table: Table) -> None:
    """Writes the row of every key. One that the table lacks is unknown: nothing is dropped without a word."""
    for key in sheet.given:
        rule_of(table)(sheet, key)


def rule_of(table: Table) -> Rule:
    """What writes the row of any key."""

    def write(sheet: ForeignSheet, key: str) -> None:
        rule = table.get(place(key)) or next((one for name, one in _openings(place(key), table)), None)
        if rule is None and sheet.value(key) == {} and any(name.startswith(f"{place(key)}.") for name in table):
            sheet.skip(key, "it is empty")
        elif rule is None:
            sheet.unknown(key, sheet.program, list(table))
        else:
            try:
                rule(sheet, key)
            except OverflowError:
                # Infinite, or so large that what it is multiplied by makes it so.
                sheet.refuse(key, f"{shown(sheet.value(key))} is too large a number")

    return write


def _openings(key: str, table: Table) -> Iterator[tuple[str, Rule]]:
    """Rules for a whole table, which the table has as `name.*`, and for all names that begin alike, `name_*`; the nearest first."""
    for mark in "._":
        begun = key
        while mark in begun:
            begun = begun.rpartition(mark)[0]
            if f"{begun}{mark}*" in table:
                yield begun, table[f"{begun}{mark}*"]


@dataclass(frozen=True)
class DataFile:
    """A file of a program that describes images or previews alone, and that its main file names."""

    program: str
    what: str
    """What it describes, in words."""
    named_by: str
    """The key of the main file that names it."""
    key: str
    """The key under which the program's table has what it holds."""
    table: Table
    looks_like: Callable[[object], bool]
    needs_images: bool = True

    @property
    def accepted(self) -> str:
        """What it is, in words."""
        return f"{self.what} of {self.program}"

    def read(self, given: object, run: type[RunOptions]) -> Imported:
        """What it says to a run of this kind."""
        sheet = ForeignSheet(self.program, run, opened({self.key: given}))
        fill(sheet, self.table)
        return sheet.finish_data(self.accepted, self.needs_images)


def kind_of_run(program: str, file: str, models: Mapping[str, NamedModel], name: str, method: str) -> tuple[type[RunOptions], NamedModel]:
    """The kind of run for a program's name of a model. Raises OptionError with the true reason for what is not trained here."""
    model = models.get(name)
    if model is None:
        raise OptionError(f"{file} is a file of {program} for {name or 'a model that it does not name'}, which this version does not know")
    if model.family not in FACTS:
        raise OptionError(f"{file} is a file of {program} for {model.label}, which this version does not train")
    if (model.family, method) not in RUNS:
        other = next(run.label for (family, _), run in RUNS.items() if family == model.family)
        what = {"full": "the whole model", "network": "an adapter"}.get(method, method)
        raise OptionError(f"{file} is a file of {program} that trains {what} of {model.label}; this version has {other} alone")
    return RUNS[model.family, method], model


def each(prefix: str, names: str, rule: Rule) -> Table:
    """The same rule for several keys of a table."""
    return dict.fromkeys((f"{prefix}{name}" for name in names.split()), rule)


# --- rules ------------------------------------------------------------------------------------------------------------


def to(option: str, note: str = "", convert: Callable[[object], object] | None = None) -> Rule:
    """The value of another option. Where a run has no such option, the row says for what it is."""

    @unless_empty
    def rule(sheet: ForeignSheet, key: str) -> None:
        value = sheet.value(key)
        if option not in sheet.known and is_off(value):
            sheet.skip(key, "it is off")
        else:
            sheet.take(key, option, value if convert is None else convert(value), note)

    return rule if convert is not None else TwoWay(rule, option, lambda value: value)


def more_than_zero(option: str) -> Rule:
    """As `to`, where 0, or a switch that is off, is the same as nothing."""

    @unless_off
    def rule(sheet: ForeignSheet, key: str) -> None:
        to(option)(sheet, key)

    return TwoWay(rule, option, lambda value: value)


def here(option: str, note: str = "", convert: Callable[[object], object] | None = None) -> Rule:
    """An option of the data set that the key stands in."""

    @unless_empty
    def rule(sheet: ForeignSheet, key: str) -> None:
        value = sheet.value(key)
        sheet.set_here(key, option, value if convert is None else convert(value), note)

    return TwoWay(rule, _OF_RUN.get(option, option), lambda value: value)


def folder_here() -> Rule:
    """The folder of a data set, with the folders inside it."""

    def rule(sheet: ForeignSheet, key: str) -> None:
        here("image_dir")(sheet, key)
        if not is_empty(sheet.value(key)):
            sheet.one(key)["recursive"] = (True, key)

    return TwoWay(rule, _OF_RUN["image_dir"], lambda value: value)


def switched_here(option: str) -> Rule:
    """A switch of the data set that the key stands in; off says nothing."""

    @unless_off
    def rule(sheet: ForeignSheet, key: str) -> None:
        sheet.set_here(key, option, switch(sheet.value(key)) if switch(sheet.value(key)) is not None else sheet.value(key))

    return TwoWay(rule, option, lambda value: value)


def unneeded(why: str) -> Rule:
    """Nothing is lost without it."""

    def rule(sheet: ForeignSheet, key: str) -> None:
        sheet.skip(key, "it is empty" if is_empty(sheet.value(key)) else why)

    return rule


def only(usual: object, text: str, banner: bool = False) -> Rule:
    """A setting that is not here: nothing is lost while it has its usual value, or is off."""

    def rule(sheet: ForeignSheet, key: str) -> None:
        value = sheet.value(key)
        same = value == usual or (number(value) is not None and number(value) == number(usual))
        if is_empty(value) or (isinstance(usual, bool | type(None)) and usual is not True and is_off(value)):
            sheet.skip(key, "it is off" if not is_empty(value) else "it is empty")
        elif same or (isinstance(usual, str) and str(value).lower() == usual.lower()):
            sheet.skip(key, f"{shown(value)} is what happens here as well")
        else:
            (sheet.lose if banner else sheet.refuse)(key, text)

    return rule


def words(option: str, meanings: Mapping[str, object], otherwise: str) -> Rule:
    """A choice whose words are others. What is not among them is refused with the option that stands in its place."""

    def rule(sheet: ForeignSheet, key: str) -> None:
        value = sheet.value(key)
        name = str(value).strip().lower()
        if is_empty(value) and name not in meanings:
            sheet.skip(key, "it is empty")
        elif name in meanings and sheet.has(option, meanings[name]):
            sheet.take(key, option, meanings[name])
        else:
            sheet.refuse(key, f"{shown(value)}: {otherwise}")

    return TwoWay(rule, option, {ours: theirs for theirs, ours in reversed(list(meanings.items()))}.get)


def where(condition: Callable[[ForeignSheet], bool], rule: Rule, why: str) -> Rule:
    """A rule that counts under a condition alone; else nothing is lost, and why says it."""

    @unless_empty
    def chosen(sheet: ForeignSheet, key: str) -> None:
        if condition(sheet):
            rule(sheet, key)
        else:
            sheet.skip(key, why)

    return TwoWay(chosen, rule.option, rule.back) if isinstance(rule, TwoWay) else chosen


def switch_to(option: str, value: object) -> Rule:
    """A switch that gives another option this value when it is on."""

    @unless_off
    def rule(sheet: ForeignSheet, key: str) -> None:
        sheet.take(key, option, value)

    return TwoWay(rule, option, lambda given: True if given == value else None)


PRECISIONS = {
    "fp32": "no",
    "float32": "no",
    "float": "no",
    "no": "no",
    "fp16": "fp16",
    "float16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}
"""Words of mixed_precision."""
FILE_PRECISIONS = {name: {"no": "float"}.get(ours, ours) for name, ours in PRECISIONS.items()}
SCHEDULES = {"constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "constant"}

_SAME = BY_NAME | {
    other: ours
    for ours, others in {
        "AdamW": "adam pagedadamw pagedadamw32bit adamw_optimi adamw_bf16 optimi-adamw bnb-adamw bnb-adamw-paged torch-adamw",
        "AdamW8bit": "adamw_8bit adam_8bit adam8bit adamw8 adam8 bnb-adamw8bit adamw8bitkahan ao-adamw8bit",
        "PagedAdamW8bit": "bnb-adamw8bit-paged pagedadam8bit",
        "Lion": "optimi-lion bnb-lion",
        "Lion8bit": "lion_8bit pagedlion8bit bnb-lion8bit bnb-lion8bit-paged",
        "ScheduleFreeAdamW": "schedule_free_adamw",
        "ScheduleFreeSGD": "schedule_free_sgd",
        "DAdaptAdam": "dadapt_adam dadaptadamw",
        "DAdaptAdan": "dadapt_adan",
        "DAdaptLion": "dadapt_lion",
        "StableAdamW": "optimi-stableadamw",
        "Adan": "optimi-adan",
    }.items()
    for other in others.split()
}
"""Optimizers of other programs that compute the same, in small letters: packages, pages and bits differ alone."""
_NEAREST = (
    ("prodigy", "Prodigy", "of the same kind"),
    ("dadapt", "Prodigy", "which finds its own step size too, from a learning rate of 1"),
    ("d_adapt", "Prodigy", "which finds its own step size too, from a learning rate of 1"),
    ("came", "CAME", "of the same kind"),
    ("ademamix", "AdEMAMix", "of the same kind"),
    ("lion", "Lion", "of the same kind"),
    ("sgd", "SGD", "of the same kind"),
    ("adafactor", "Adafactor", "of the same kind"),
    ("8bit", "AdamW8bit", "the nearest there is"),
    ("", "AdamW", "the usual choice"),
)


def among(names: str, rule: Rule) -> Rule:
    """A rule for all keys of a table that the program has; what it adds later is unknown."""
    known = frozenset(names.split())

    @unless_empty
    def chosen(sheet: ForeignSheet, key: str) -> None:
        if known.isdisjoint(re.split(r"[.\[\]]+", key)[1:]):
            sheet.unknown(key, sheet.program, sorted(known))
        else:
            rule(sheet, key)

    return chosen


def optimizer() -> Rule:
    """The optimizer, or the nearest there is, with a banner."""

    def rule(sheet: ForeignSheet, key: str) -> None:
        name = str(sheet.value(key) or "")
        ours, why = optimizer_of(name)
        if not name:
            sheet.skip(key, "it is empty")
        elif not why:
            coupled = "adam" in name.lower() and "adamw" not in name.lower()
            sheet.take(key, "optimizer_type", ours, "its weight decay is decoupled here" if coupled else "")
        else:
            sheet.put("optimizer_type", ours, key)
            sheet.lose(key, f"it is not built in; optimizer_type = {ours} was put, {why}. Check the learning rate")

    return rule


def optimizer_of(name: str) -> tuple[str, str]:
    """Our optimizer for another program's, and what it is the nearest to; an empty text when it computes the same."""
    short = name.strip().lower().rpartition(".")[2]
    if short in _SAME:
        return _SAME[short], ""
    return nearest_optimizer(short)


def nearest_optimizer(short: str) -> tuple[str, str]:
    """Our optimizer of the kind that the name of another one, in small letters, tells, and what is alike."""
    return next((ours, why) for piece, ours, why in _NEAREST if piece in short)


ARGUMENT_NAMES = " ".join(sorted({name for names in ARGUMENTS.values() for name in names}))
"""What one of our optimizers or another takes."""


def takes(optimizer: str, name: str) -> bool:
    """Whether our optimizer has an argument of this name; one in 8 bits has those of the other. Of the zoo's those that mean one thing."""
    if optimizer in ZOO:
        own = ("r", "weight_lr_power", "warmup_steps") if optimizer in SCHEDULE_FREE else ("weight_decouple",)
        return name in ("betas", "weight_decay", *own)
    return name in ARGUMENTS.get(optimizer.removeprefix("Paged").removesuffix("8bit"), ARGUMENT_NAMES.split())


def literal(value: object) -> str:
    """A value as optimizer_args write it."""
    if isinstance(value, list | tuple):
        return "(" + ",".join(literal(item) for item in value) + ")"
    return str(value)


def take_arguments(sheet: ForeignSheet, key: str, arguments: list[str]) -> None:
    """optimizer_args, of which several keys of a file are parts: the first of them carries all."""
    if sheet.decided("optimizer_args"):
        sheet.skip(key, "it stands in optimizer_args together with the others")
    else:
        sheet.take(key, "optimizer_args", arguments)


@unless_off
def released(sheet: ForeignSheet, key: str) -> None:
    """Weights that move as soon as their gradient is there."""
    if "fused_backward_pass" not in sheet.known:
        sheet.skip(key, "an adapter's gradients are small")
    else:
        sheet.put("max_grad_norm", 0.0, key)
        sheet.take(key, "fused_backward_pass", True, "gradients are never there together, so max_grad_norm = 0")


BITS = {
    **dict.fromkeys(("qfloat8", "float8", "fp8", "fp8-quanto", "fp8-torchao", "float_8", "fp8uz-quanto", "fp8_scaled"), "qfloat8"),
    **dict.fromkeys(("qint8", "int8", "int8-quanto", "int8-torchao", "uint8", "int_8", "int_w8a8", "convrot8", "int_w8a8_gguf"), "qint8"),
    **dict.fromkeys(("qint4", "int4", "uint4", "nf4", "nfloat_4", "int4-quanto", "int4-torchao", "nvfp4", "nf4-bnb"), "nf4"),
    **dict.fromkeys(("fp8_base", "float8_e4m3fn", "float8_e5m2", "float_w8a8"), "fp8"),
}
"""Words for the bits of frozen weights."""


def quantized(sheet: ForeignSheet, key: str, bits: str, option: str = "transformer_quantization") -> None:
    """Frozen weights in few bits, by another program's word for them; what has no counterpart becomes the nearest, with a banner."""
    short = bits.partition("|")[0].strip().lower()
    wanted = BITS.get(short)
    if option not in sheet.known:
        sheet.skip(key, "the text encoders are not held in few bits here; they leave the device once captions are encoded")
    elif sheet.run.method != "network" and option == "transformer_quantization":
        sheet.skip(key, "weights that are trained themselves stay as they are")
    elif wanted is not None and sheet.has(option, wanted) and "|" not in bits:
        sheet.take(key, option, wanted, "with a scale for each row")
    elif wanted is not None and sheet.has(option, wanted):
        sheet.put(option, wanted, key)
        sheet.lose(key, f"{bits.partition('|')[2]} corrects such weights there and is not read; {option} = {wanted} was put")
    else:
        few = re.search(r"[2-7]", short) is not None
        nearest = "nf4" if few and sheet.has(option, "nf4") else "qint8"
        sheet.put(option, nearest, key)
        sheet.lose(key, f"there are no such weights here ({bits}); {option} = {nearest} was put, the nearest")


def assume_layers(sheet: ForeignSheet) -> None:
    """Gives an adapter the layers that the program gives it where the file says nothing of them; what cannot be is said above the form.
    Expressions of what is left out join those of the file."""
    if sheet.run.method != "network" or sheet.decided("target_modules"):
        return
    for option, value in sheet.model.layers.items():
        if option == "exclude_modules" and isinstance(value, list):
            value = [*parts(sheet.values.get(option, ())), *value]
            sheet.put(option, value, option)
        if option in sheet.known and (option == "exclude_modules" or not sheet.decided(option)):
            sheet.assume(option, value, sheet.program)
    if beyond := sheet.model.beyond:
        sheet.conflicts.append(f"{beyond} have an adapter in {sheet.program} as well; here an adapter has layers of the blocks alone")


def own_line(sheet: ForeignSheet) -> tuple[str, SizeShift] | None:
    """The family's own timestep_sampling by the image's size, with its line; None where it has none."""
    found: Mapping[str, SizeShift] = getattr(flat.section_of(sheet.run, "objective"), "size_shifts", {})
    return next(iter(found.items()), None)


def line_of(sheet: ForeignSheet) -> SizeShift | None:
    """The line along which the program shifts this model's times with the image's size."""
    own = own_line(sheet)
    return sheet.model.by_size if sheet.model.by_size != "own" else own[1] if own else None


def size_shift(line: SizeShift, side: float, token: int = TOKEN) -> float:
    """The factor by which a line shifts times at a square of this side in pixels."""
    (few, low), (many, high) = line.fewest, line.most
    return math.exp(low + (high - low) * ((side / token) ** 2 - few) / (many - few))


def times_by_size(sheet: ForeignSheet, key: str, side: float, line: SizeShift, *, even: bool = False, scale: float = 1.0) -> None:
    """Sigmoid times, or even ones, shifted along a line of another program: by the family's own density where it is that line, else by the
    one shift that images of this side have."""
    own, token, spread = own_line(sheet), sheet.model.token, {} if scale == 1 else {"sigmoid_scale": scale}
    if own and not even and token == TOKEN and (own[1].fewest, own[1].most) == (line.fewest, line.most):
        times(sheet, key, own[0], "the shift of the image's size", **spread)
    else:
        note = f"shifted as images of {side:g} px are; there each size has a shift of its own"
        times(sheet, key, "sigma" if even else "shift", note, discrete_flow_shift=round(size_shift(line, side, token), 4), **spread)


def shifted(time: float, shift: float) -> float:
    """A time moved towards noise, as samplers of flow matching do it."""
    return shift * time / (1 + (shift - 1) * time)


def times(sheet: ForeignSheet, key: str, sampling: str, note: str = "", **more: float) -> None:
    """A density of training times, with the numbers that belong to it; refused where a family cannot draw it."""
    if not sheet.has("timestep_sampling", sampling):
        default = sheet.known["timestep_sampling"].default if "timestep_sampling" in sheet.known else "its own"
        sheet.lose(key, f"this family has no such times; timestep_sampling stays {default}")
        return
    for option, value in more.items():
        sheet.put(option, value, key)
    told = ", ".join(f"{option} = {value:g}" for option, value in more.items())
    sheet.take(key, "timestep_sampling", sampling, "; ".join(text for text in (f"with {told}" if told else "", note) if text))


def sizes(value: object) -> tuple[int, list[int]] | None:
    """The largest of a list of sides and the others, from a number, a list, or a text with commas; None for something else."""
    found = [number(part) for part in parts(value)] if not isinstance(value, int | float) else [number(value)]
    whole = sorted({int(side) for side in found if side is not None and side >= 16})
    return (whole[-1], whole[:-1]) if whole and None not in found else None


def sides_here(sheet: ForeignSheet, key: str) -> None:
    """The sides of squares at whose areas each image of a data set is trained, once at each."""
    found = sizes(sheet.value(key))
    if found is None:
        sheet.refuse(key, f"{shown(sheet.value(key))} is no side in pixels, nor a list of them; give resolution")
        return
    side, others = found
    sheet.set_here(key, "resolution", [side, side], f"and additional_resolutions = {shown(others)}" if others else "")
    if others:
        sheet.one(key)["additional_resolutions"] = (others, key)


def version_of(family: str, base: str) -> str:
    """kohya's switch for the version of a base model, such as `v2`; empty for the first. The file or folder tells it, where it is on this
    computer, else the name."""
    facts, path = FACTS[family].kohya, Path(base).expanduser()
    for version in facts.versions if facts else ():
        try:
            if path.is_file():
                found = version.recognises(header_of(path))
            else:
                unet = json_of((path / "unet" / "config.json").read_bytes())
                found = isinstance(unet, dict) and unet.get("cross_attention_dim") == version.text_width
        except (OSError, ValueError):
            found = re.search(version.names, base, re.IGNORECASE) is not None
        if found:
            return version.switch
    return ""


def line_of_prompt(prompt: object, **flags: object) -> str:
    """One line of sample_prompts."""
    text = _without_flags(prompt)
    return " ".join([text, *(f"--{flag} {_without_flags(value)}" for flag, value in flags.items() if value is not None and value != "")])


def _without_flags(text: object) -> str:
    """A text in one line, in which no two dashes begin a flag."""
    return re.sub(r"(^|\s)--+(?=\S)", r"\1- ", " ".join(str(text).split()))


def targets(names: Sequence[object]) -> list[str]:
    """Pieces of module names as expressions of target_modules."""
    return [re.escape(re.sub(r"^(transformer|unet|diffusion_model)\.", "", str(name))).replace(r"\_", "_") for name in names]


def ends_of_names(names: Iterable[str]) -> list[str]:
    """Ends of the names of modules, as peft takes them, as expressions of target_modules."""
    return [rf"(^|\.){re.escape(name)}$".replace(r"\_", "_") for name in names]
