"""What somebody wants to draw with, as options of generate.py: runs, files that runs saved, LoRA files, models. Knows no tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from sd_scripts.families import FACTS, RUNS
from sd_scripts.schema import flat, toml_files
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.files import pipeline_file
from sd_scripts.schema.generate import FAMILIES, GenerateOptions, generate_options
from sd_scripts.schema.model import is_hub_id, not_there
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.prompts import Defaults, nearest_size
from sd_scripts.schema.runs import RunOptions

from .rundir import RunDirectory
from .told import can_be_found, header_of, is_adapter, model_family, settings_of, told_family

BASE = "pretrained_model_name_or_path"
BUILT_IN = Path(__file__).resolve().parents[2] / "presets"
_SETTINGS = {
    "sample_steps": "steps",
    "sample_cfg_scale": "cfg_scale",
    "sample_negative_prompt": "negative_prompt",
    "sample_sampler": "sampler",
    "sample_guidance_scale": "guidance",
    "sample_scheduler": "scheduler",
    "sample_shift": "shift",
}
"""Options of previews, and what they are called for drawing."""


@dataclass(frozen=True)
class Material:
    """What a run, a file or a model is, for drawing with it."""

    family: str | None
    """None where nothing tells."""
    values: dict[str, Any]
    """Options that follow from it: base, LoRA files, what a run's model options were, settings of its previews."""
    prompts: str = ""
    """What the run's previews were asked for."""
    seed: int | None = None
    """Of the run."""


def completed(given: Mapping[str, object], from_cli: bool = False) -> GenerateOptions:
    """The options of generate.py that somebody gave, with what follows from draw_with, base and LoRA files filled in.

    Raises OptionError with every problem: files that are not there, damaged, or of different families.
    """
    values, kind = filled(given)
    return flat.build(kind, values, from_cli=from_cli)


def filled(given: Mapping[str, object]) -> tuple[dict[str, object], type[GenerateOptions]]:
    """The same before it is checked: flat values, and the kind of options that they are for. Raises OptionError."""
    draw_with, base = str(given.get("draw_with") or "").strip(), str(given.get(BASE) or "").strip()
    loras, named = _texts(given.get("lora")), str(given.get("family") or "").strip() or None
    if named is not None:
        generate_options(named)
    found = material(draw_with, named) if draw_with else Material(None, {})
    based = of_model(base, named, BASE) if base else Material(None, {})
    families = {"draw_with": found.family, BASE: based.family, "family": named}
    families |= {f"lora: {Path(name).name}": _family_of_lora(name) for name in loras}
    family = _agreed(families)
    values: dict[str, object] = {**based.values, **found.values, **{name: value for name, value in given.items() if value is not None}}
    values["lora"] = [*_texts(found.values.get("lora")), *loras]
    if not str(values.get("prompt") or "").strip() and not str(values.get("prompt_list") or "").strip() and found.prompts:
        values["prompt_list"] = found.prompts
        values.setdefault("seed", found.seed)
    known = flat.fields(generate_options(family))
    # What a run's model options had and drawing does not need; what a person gave is checked.
    return {name: value for name, value in values.items() if name in known or name in given}, generate_options(family)


def _agreed(families: Mapping[str, str | None]) -> str:
    """The one family that all sources tell. Raises OptionError."""
    told = {where: family for where, family in families.items() if family is not None}
    if not told:
        text = f"family: nothing tells which family this is; give one of {', '.join(FAMILIES)}"
        raise OptionError(Problem("family", text))
    first, family = next(iter(told.items()))
    problems = []
    for where, other in told.items():
        if other != family:
            option = where.partition(":")[0]
            text = f"{where} is for {FACTS[other].label}, but {first} is for {FACTS[family].label}; give what belongs together"
            problems.append(Problem(option, text))
    if family not in FAMILIES:
        problems.append(
            Problem("draw_with", f"draw_with: {FACTS[family].label} does not draw from a prompt; its run has a panel of its own")
        )
    refuse(problems)
    return family


def _texts(value: object) -> list[str]:
    return [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else []


def _family_of_lora(name: str) -> str | None:
    """The family of a LoRA file; None where nothing tells. Raises OptionError for one that is not there or no LoRA."""
    path = Path(name).expanduser()
    if not path.is_file() or path.suffix.lower() != ".safetensors":
        # Said with what else is wrong with it, when it is read.
        return None
    try:
        header = header_of(path)
        if not is_adapter(header):
            raise OptionError(f"{path.name} holds no adapter; a model goes into draw_with or {BASE}")
        return told_family(path.name, header)
    except OptionError as err:
        raise OptionError([Problem("lora", f"lora: {problem.message}") for problem in err.problems]) from err


def material(text: str, family: str | None = None) -> Material:
    """What a path, a hub id or `toy` is. family: what it is taken for where its files do not tell. Raises OptionError."""
    path = Path(text).expanduser()
    if text != "toy" and path.is_dir() and (path / "config.toml").is_file():
        return of_run(path)
    if text != "toy" and path.exists() and (path.parent / "config.toml").is_file() and not (path / "config.toml").is_file():
        return of_run(path.parent, path)
    return of_model(text, family, "draw_with")


def of_run(folder: Path, saved: Path | None = None) -> Material:
    """A run, with one of the files that it saved, or the newest. Raises OptionError where it has saved nothing or cannot be read."""
    run = RunDirectory(Path(os.path.abspath(folder)))
    options = run.options()
    file = Path(os.path.abspath(saved)) if saved is not None else next(iter(saved_files(run.path)), None)
    if file is None:
        text = f"draw_with: the run {run.name} has saved nothing yet; wait for its first checkpoint"
        raise OptionError(Problem("draw_with", text))
    model = _model_of(options)
    values: dict[str, Any] = {**model, **_settings_of(options)}
    if options.method == "network":
        values["lora"] = [str(file)]
    else:
        base = str(model.get(BASE) or "")
        for name in ("revision", "variant", "base_weights", "base_weights_multiplier"):
            values.pop(name, None)
        facts = FACTS[options.family]
        if file.is_file() and not facts.whole_files and base:
            # The file has the network that was trained; the others are the base's.
            values = {**dict.fromkeys(facts.companions, base), **values}
        values[BASE] = str(file)
    return Material(options.family, values, options.samples.sample_prompts, options.training.seed)


def untrained(text: str, family: str | None = None) -> Material | None:
    """What a run or a file was before it was trained; None for what is no run and no LoRA, and where a run made its model itself.

    Raises OptionError.
    """
    path = Path(text).expanduser()
    for folder in (path, path.parent) if text != "toy" else ():
        if not (folder / "config.toml").is_file():
            continue
        options = RunDirectory(Path(os.path.abspath(folder))).options()
        model = _model_of(options)
        return Material(options.family, {**model, **_settings_of(options)}) if model.get(BASE) else None
    found = material(text, family)
    return (
        Material(found.family, {name: value for name, value in found.values.items() if name != "lora"})
        if found.values.get("lora")
        else None
    )


def saved_files(folder: Path) -> list[Path]:
    """What a run has saved for people, newest first: files, and folders of whole models."""
    found = [path for path in folder.iterdir() if _is_saved(path)] if folder.is_dir() else []
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def _is_saved(path: Path) -> bool:
    if path.name.startswith(".") or path.is_symlink():
        return False
    return (path.suffix == ".safetensors" and path.is_file()) or (path / "model_index.json").is_file()


def _model_of(options: RunOptions) -> dict[str, Any]:
    """The model options of a run that are not as they are by default."""
    known = flat.fields(type(options))
    return {name: value for name, value in flat.changed(options).items() if known[name].section == "model" and value is not None}


def _settings_of(options: RunOptions) -> dict[str, Any]:
    """How the run's previews were drawn."""
    samples = options.samples
    found = {ours: getattr(samples, theirs) for theirs, ours in _SETTINGS.items() if theirs in type(samples).model_fields}
    width, height = samples.sample_size or nearest_size(Defaults(samples, options.dataset.resolution, type(options.model).grid, 0))
    return {**found, "size": [width, height]}


def first_words(prompts: str) -> str:
    """The first of a run's prompts, without its flags; empty where they are in a file of their own."""
    lines = [line.strip() for line in prompts.splitlines() if line.strip() and not line.strip().startswith("#")]
    if not lines or (len(lines) == 1 and lines[0].lower().endswith((".txt", ".toml", ".json"))):
        return ""
    return (" " + lines[0]).partition(" --")[0].strip()


def has_toy(family: str) -> bool:
    """Whether this copy has a built-in model of the family."""
    return (Path(__file__).resolve().parents[1] / "toy" / "bases" / family).is_dir()


def of_model(text: str, family: str | None, option: str) -> Material:
    """A LoRA file, or a model: file, diffusers folder, hub id, toy. Raises OptionError."""
    if text == "toy":
        if family is None:
            return Material(None, {BASE: "toy"})
        if not has_toy(family):
            there = ", ".join(name for name in FAMILIES if has_toy(name))
            text = f"{option}: there is no built-in toy of {family}, which is not drawn with before it is trained; train one from a preset"
            raise OptionError(Problem(option, f"{text} and give its run, or choose the toy of {there}"))
        return Material(family, {BASE: "toy", **_of_toy(family)})
    path = Path(text).expanduser()
    if path.is_dir():
        return Material(_family_of_folder(path) or family, {BASE: str(path)})
    if not path.is_file():
        if is_hub_id(text):
            return Material(family, {BASE: text})
        raise OptionError(Problem(option, not_there(option, text, family is None or has_toy(family))))
    if path.suffix.lower() != ".safetensors":
        # What it may be, or why it is not opened, says who loads it.
        return Material(family, {BASE: str(path)})
    try:
        header = header_of(path)
        if not is_adapter(header):
            return Material(model_family(header) or family, {BASE: str(path)})
        return _of_adapter(path, told_family(path.name, header) or family, settings_of(path.name, header), option)
    except OptionError as err:
        raise OptionError(
            [Problem(option, f"{option}: {problem.message.removeprefix(f'{option}: ')}") for problem in err.problems]
        ) from err


def _of_adapter(path: Path, family: str | None, settings: Mapping[str, Any], option: str) -> Material:
    """A LoRA file outside of a run, with what its header tells of the run that made it."""
    if option == BASE:
        raise OptionError(f"{path.name} is a LoRA file, not a base model; give it as draw_with or lora")
    values: dict[str, Any] = {"lora": [str(path)]}
    run = None if family is None else RUNS.get((family, "network"))
    base = str(settings.get(BASE) or "")
    if run is not None and settings:
        known = flat.fields(run)
        told = {name: value for name, value in settings.items() if name in known and value is not None}
        values |= {name: value for name, value in told.items() if known[name].section == "model" and name != BASE}
        values |= {ours: told[theirs] for theirs, ours in _SETTINGS.items() if theirs in told}
        if told.get("sample_size") or told.get("resolution"):
            values["size"] = told.get("sample_size") or told["resolution"]
    if can_be_found(base):
        values[BASE] = base
    return Material(family, values)


def _family_of_folder(path: Path) -> str | None:
    """The family of a model in a diffusers folder, by the name of its pipeline; None for another folder."""
    try:
        file = pipeline_file(path)
        name = "" if file is None else str(json_of(file.read_text(encoding="utf-8"))["_class_name"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    alike = {family: max((_common(name, one) for one in pipelines_of(family)), default=0) for family in FAMILIES}
    best = max(alike, key=lambda family: alike[family])
    return best if alike[best] >= 4 else None


def _common(one: str, other: str) -> int:
    """How many letters two names begin with in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@cache
def pipelines_of(family: str) -> tuple[str, ...]:
    """Names of the pipelines of a family's published models."""
    folder = Path(__file__).resolve().parents[1] / "families" / family / "configs"
    return tuple(str(json_of(path.read_text(encoding="utf-8"))["_class_name"]) for path in sorted(folder.rglob("model_index.json")))


def _of_toy(family: str) -> dict[str, Any]:
    """How a family's built-in model is drawn with: as in the preset that trains on it."""
    for run in (run for run in RUNS.values() if run.family == family):
        for path in sorted((BUILT_IN / Path(run.script).stem).glob("toy-*.toml")):
            return _settings_of(flat.build(run, {**toml_files.read_toml(path), "output_dir": "."}))
    return {}
