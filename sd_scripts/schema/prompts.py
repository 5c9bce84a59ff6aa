"""Preview prompts: kohya's text, TOML and JSON forms, and prompts typed in directly, as one list of complete requests."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_scripts.schema.errors import refuse

from .errors import Problem
from .model import MAX_CONTROLS
from .outside import json_of, toml_of
from .samples import ELSEWHERE, SampleOptions, samplers_of

OPTION = "sample_prompts"
FLAGS = {
    "w": "width",
    "h": "height",
    "d": "seed",
    "l": "scale",
    "s": "sample_steps",
    "n": "negative_prompt",
    "ss": "sample_sampler",
    "g": "guidance_scale",
    "ci": "control_image",
}
"""kohya's flags in a line of text, and the keys of the same meaning in TOML and JSON."""
REPEATED = ("control_image",)
"""Keys whose flag may stand several times in a line; in TOML and JSON they take a list as well."""
_ONLY = {
    "g": "which has no embedding of guidance",
    "ci": "which takes no control images",
}
"""Flags that mean something only to families whose sample options have them among their own, and what to tell the others."""
_SAMPLER = "ss"
"""The flag of families that can be rendered with different samplers."""
_OTHER_MODELS = {
    "cn": "control image",
    "ctr": "CFG truncation",
    "rcfg": "CFG renormalisation",
    "fs": "flow shift",
}
_CONTROL = re.compile(r" --ci (.*?)(?= --|$)", re.MULTILINE)
_ENDINGS = (".txt", ".toml", ".json")


@dataclass(frozen=True)
class PromptSpec:
    """One preview, complete: sizes in pixels on the family's grid, seed below 2**63."""

    prompt: str
    negative_prompt: str
    width: int
    height: int
    seed: int
    steps: int
    cfg_scale: float
    sampler: str
    guidance: float = 3.5
    """What an embedding of guidance is told, in a model that has one."""
    controls: tuple[str, ...] = ()
    """Files of the images to be edited, in their order."""
    scheduler: str = "auto"
    shift: float | None = None


def flags_of(options: SampleOptions | type[SampleOptions]) -> dict[str, str]:
    """The flags that mean something to a family, by its sample options."""
    kind = options if isinstance(options, type) else type(options)
    known = {flag: key for flag, key in FLAGS.items() if flag not in _ONLY or flag in kind.own_flags}
    return known if samplers_of(kind) else {flag: key for flag, key in known.items() if flag != _SAMPLER}


@dataclass(frozen=True)
class Defaults:
    """What a prompt without flags gets. resolution is (width, height) of training; grid is what sides must be multiples of."""

    options: SampleOptions
    resolution: tuple[int, int]
    grid: int
    seed: int


@dataclass(frozen=True)
class _Entry:
    """One prompt as written: where it stands, for messages, and its keys."""

    where: str
    values: dict[str, Any]


def read_prompts(defaults: Defaults) -> list[PromptSpec]:
    """The previews that the options ask for; none for an empty sample_prompts.

    Without --d a prompt takes the seed of the run plus its place in the list. Raises OptionError with every problem and its line.
    """
    problems: list[Problem] = []
    flags = flags_of(defaults.options)
    entries = _entries(defaults.options.sample_prompts, flags, problems)
    size = _default_size(defaults, problems)
    specs = [_spec(entry, index, defaults, size, problems) for index, entry in enumerate(entries)]
    refuse(problems)
    return [spec for spec in specs if spec is not None]


def controls_in(text: str) -> list[str]:
    """The files that flags in kohya's text name."""
    return [found.strip() for found in _CONTROL.findall(text)]


def off_grid(size: tuple[int, int], grid: int) -> list[Problem]:
    """What is wrong with the size of an image."""
    if not any(side % grid for side in size):
        return []
    nearest = ",".join(str(_nearest(side, grid)) for side in size)
    return [
        Problem("size", f"size: {size[0]}x{size[1]} is off the model's grid; both sides are multiples of {grid}. The nearest is {nearest}")
    ]


def _problem(message: str) -> Problem:
    return Problem(OPTION, f"{OPTION}: {message}")


def _entries(text: str, flags: Mapping[str, str], problems: list[Problem]) -> list[_Entry]:
    text = text.strip()
    if "\n" in text or not text.lower().endswith(_ENDINGS):
        return _from_text(text, "line", flags, problems)
    path = Path(text).expanduser()
    try:
        content = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        problems.append(_problem(f"the file {path} does not exist; give an existing {', '.join(_ENDINGS)} file, or the prompts themselves"))
        return []
    except (OSError, UnicodeDecodeError) as err:
        problems.append(_problem(f"{path} cannot be read as text: {err}"))
        return []
    try:
        if path.suffix.lower() == ".toml":
            return _from_toml(toml_of(content), path.name, problems)
        if path.suffix.lower() == ".json":
            return _from_json(json_of(content), path.name, problems)
    except ValueError as err:
        problems.append(_problem(f"{path.name} is not valid {path.suffix[1:].upper()}: {err}"))
        return []
    return _from_text(content, f"{path.name} line", flags, problems)


def _from_text(text: str, place: str, known: Mapping[str, str], problems: list[Problem]) -> list[_Entry]:
    """kohya's text: one prompt a line, flags after it separated by ` --`; lines that start with # are comments."""
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        where = f"{place} {number}"
        prompt, *flags = (" " + line).split(" --")
        values: dict[str, Any] = {"prompt": prompt.strip()}
        for flag in flags:
            name, _, value = flag.strip().partition(" ")
            _take_flag(values, known, name, value.strip(), where, problems)
        entries.append(_Entry(where, values))
    return entries


def _take_flag(values: dict[str, Any], known: Mapping[str, str], name: str, value: str, where: str, problems: list[Problem]) -> None:
    if name in _OTHER_MODELS:
        problems.append(_problem(f"{where}: --{name} ({_OTHER_MODELS[name]}) means nothing to this model; remove it"))
    elif name in FLAGS and name not in known:
        problems.append(_problem(f"{where}: --{name} means nothing to this model, {_reason(name)}; remove it"))
    elif name not in known:
        problems.append(_problem(f"{where}: there is no flag --{name}; known are {', '.join(f'--{flag}' for flag in known)}"))
    elif FLAGS[name] in REPEATED:
        values[FLAGS[name]] = [*values.get(FLAGS[name], []), value]
    elif FLAGS[name] in values:
        problems.append(_problem(f"{where}: --{name} stands twice; keep one"))
    else:
        values[FLAGS[name]] = value


def _reason(flag: str) -> str:
    """Why a flag means nothing to a model."""
    return "which has one sampler, its own" if flag == _SAMPLER else _ONLY[flag]


def _from_toml(data: Mapping[str, Any], name: str, problems: list[Problem]) -> list[_Entry]:
    """`[prompt]` with common keys and `[[prompt.subset]]` for each image; a key in both is an error."""
    table = data.get("prompt")
    if not isinstance(table, dict) or set(data) != {"prompt"}:
        problems.append(_problem(f"{name} needs exactly one table [prompt], with [[prompt.subset]] tables in it"))
        return []
    common = {key: value for key, value in table.items() if key != "subset"}
    subsets = table.get("subset", [{}])
    if not isinstance(subsets, list) or not all(isinstance(subset, dict) for subset in subsets):
        problems.append(_problem(f"{name}: subset must be written as [[prompt.subset]]"))
        return []
    entries = []
    for number, subset in enumerate(subsets, start=1):
        where = f"{name} subset {number}"
        problems += [
            _problem(f"{where}: {key} stands in [prompt] too; keep one of the two") for key in sorted(common.keys() & subset.keys())
        ]
        entries.append(_Entry(where, {**common, **subset}))
    return entries


def _from_json(data: Any, name: str, problems: list[Problem]) -> list[_Entry]:
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        problems.append(_problem(f'{name} must be a list of objects such as {{"prompt": "a cat", "width": 1024}}'))
        return []
    return [_Entry(f"{name} entry {number}", dict(item)) for number, item in enumerate(data, start=1)]


def _default_size(defaults: Defaults, problems: list[Problem]) -> tuple[int, int]:
    """sample_size, which must lie on the grid, or the resolution of training brought to it."""
    grid, size = defaults.grid, defaults.options.sample_size
    if size is None:
        return nearest_size(defaults)
    for side in size:
        if side % grid:
            problems.append(Problem("sample_size", f"sample_size: {side} is not a multiple of {grid}; {_neighbours(side, grid)}"))
    return size


def nearest_size(defaults: Defaults) -> tuple[int, int]:
    """The resolution of training brought to the grid."""
    return (_nearest(defaults.resolution[0], defaults.grid), _nearest(defaults.resolution[1], defaults.grid))


def _nearest(side: int, grid: int) -> int:
    return max(grid, round(side / grid) * grid)


def _neighbours(side: int, grid: int) -> str:
    low = side // grid * grid
    return f"the nearest are {low} and {low + grid}" if low else f"the smallest is {grid}"


def _spec(entry: _Entry, index: int, defaults: Defaults, size: tuple[int, int], problems: list[Problem]) -> PromptSpec | None:
    options, values, where = defaults.options, entry.values, entry.where
    before = len(problems)
    keys = ("prompt", *flags_of(options).values())
    for key in values:
        if key not in keys:
            problems.append(_problem(f"{where}: there is no key {key}; known are {', '.join(keys)}"))
    for key in ("prompt", "negative_prompt"):
        if not isinstance(values.get(key, ""), str):
            problems.append(_problem(f"{where}: {key} must be text, not {values[key]!r}"))
    if not values.get("prompt"):
        problems.append(_problem(f"{where}: the prompt is missing"))
    width = _number(values, "width", size[0], (defaults.grid, 8192), where, problems)
    height = _number(values, "height", size[1], (defaults.grid, 8192), where, problems)
    for key, side in (("width", width), ("height", height)):
        if key in values and side % defaults.grid:
            problems.append(
                _problem(f"{where}: {_named(key)} {side} is not a multiple of {defaults.grid}; {_neighbours(side, defaults.grid)}")
            )
    seed = _number(values, "seed", (defaults.seed + index) % 2**63, (0, 2**63 - 1), where, problems)
    steps = _number(values, "sample_steps", options.sample_steps, (1, 1000), where, problems)
    scale = _scale(values, "scale", options.sample_cfg_scale, where, problems)
    guidance = _scale(values, "guidance_scale", options.embedded_guidance, where, problems)
    samplers = samplers_of(type(options)) or ("auto",)
    sampler = values.get("sample_sampler", options.sampler)
    sampler = ELSEWHERE.get(sampler, sampler) if isinstance(sampler, str) else sampler
    if sampler not in samplers:
        problems.append(_problem(f"{where}: {_named('sample_sampler')} {sampler!r} is not one of {', '.join(samplers)}"))
    controls = _controls(values, where, problems)
    if len(problems) > before:
        return None
    negative = values.get("negative_prompt", options.sample_negative_prompt)
    chosen = options.scheduler, options.shift
    return PromptSpec(values["prompt"], negative, width, height, seed, steps, scale, sampler, guidance, controls, *chosen)


def _controls(values: Mapping[str, Any], where: str, problems: list[Problem]) -> tuple[str, ...]:
    """Files of the control images, as they were written."""
    value = values.get("control_image", [])
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not all(isinstance(file, str) and file for file in files):
        problems.append(_problem(f"{where}: {_named('control_image')} {value!r} is neither the path of an image nor a list of paths"))
        return ()
    if len(files) > MAX_CONTROLS:
        problems.append(_problem(f"{where}: {len(files)} control images; a model takes {MAX_CONTROLS} at most"))
    problems += [
        _problem(f"{where}: {_named('control_image')} there is no file {file}") for file in files if not Path(file).expanduser().is_file()
    ]
    return tuple(files)


def _named(key: str) -> str:
    """A key and the flag of the same meaning, for messages."""
    return f"{key} (--{next(flag for flag, name in FLAGS.items() if name == key)})"


def _number(values: Mapping[str, Any], key: str, default: int, limits: tuple[int, int], where: str, problems: list[Problem]) -> int:
    value = values.get(key, default)
    try:
        number = int(value) if not isinstance(value, bool | float) else None
    except (TypeError, ValueError):
        number = None
    low, high = limits
    if number is None or not low <= number <= high:
        problems.append(_problem(f"{where}: {_named(key)} {value!r} is not a whole number from {low} to {high}"))
        return default
    return number


def _scale(values: Mapping[str, Any], key: str, default: float, where: str, problems: list[Problem]) -> float:
    value = values.get(key, default)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        problems.append(_problem(f"{where}: {_named(key)} {value!r} is not a number of 0 or more"))
        return default
    return number
