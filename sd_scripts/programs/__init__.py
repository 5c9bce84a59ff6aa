"""Other trainers: one module for each, with the signs of its files, its names of models and the meaning of its keys. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from sd_scripts.families import importers
from sd_scripts.schema import toml_files
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported, Importer
from sd_scripts.schema.outside import json_of, toml_of, yaml_of
from sd_scripts.schema.runs import RunOptions

from . import ai_toolkit, command_lines, diffsynth, diffusers_examples, diffusion_pipe, musubi, onetrainer, qwen_image_finetune, simpletuner
from .command_lines import Command
from .kohya import reading as kohya
from .table import DataFile

IMPORTERS: tuple[Importer, ...] = (
    ai_toolkit.IMPORTER,
    musubi.IMPORTER,
    onetrainer.IMPORTER,
    diffusion_pipe.IMPORTER,
    simpletuner.IMPORTER,
    qwen_image_finetune.IMPORTER,
)
"""What reads the files of other trainers that no family comes from, kohya's apart."""
DATA: tuple[DataFile, ...] = (*onetrainer.DATA, *simpletuner.DATA, *diffusion_pipe.DATA)
"""Their files that describe images or previews alone."""
MAX_DATA_BYTES = 1 << 20
LINES: tuple[Callable[[str, Command], Imported | None], ...] = (
    musubi.of_line,
    kohya.of_line,
    diffusers_examples.of_line,
    diffsynth.of_line,
)
"""What reads command lines, each None for another program's."""


def read_lines(
    name: str,
    text: str,
    own: Callable[[Command], Imported | None],
    file: Callable[[Path], Imported],
    path: Path | None = None,
    allowed: Callable[[Path], Path] = Path,
) -> Imported:
    """The settings of the first training that a text starts; own reads lines of this program, file the files of settings that lines of
    other programs name. Raises OptionError where it starts none.

    path: where the text lies, for the files that a line names; allowed: see with_data.
    """
    found = [_with_file(command, path, allowed) for command in command_lines.commands(name, text)]
    trainings = [command for command in found if "train" in command.name or command.name == "fine_tune.py"]
    for command in trainings:
        for read in (lambda _name, line: own(line), *LINES):
            imported = read(name, command)
            if imported is not None:
                if len(trainings) > 1:
                    which = f"{command.name}, number {trainings.index(command) + 1}"
                    starts = f"{name} starts {len(trainings)} trainings; the settings are those of {which}"
                    imported.conflicts.insert(0, starts)
                return imported
    for command in found:
        if command.settings:
            return _of_settings(name, command, file, path, allowed)
    scripts = ", ".join(dict.fromkeys(command.name for command in found))
    raise OptionError(
        f"{name} starts {scripts or 'no Python script with options'}, which is no training whose command lines are read; those of "
        "sd-scripts, musubi-tuner, diffusers' examples and DiffSynth-Studio are"
    )


def _of_settings(
    name: str, command: Command, file: Callable[[Path], Imported], path: Path | None, allowed: Callable[[Path], Path]
) -> Imported:
    """The settings in the file that a line names. Raises OptionError where it is not there to be read."""
    found = next(filter(None, (_opened(place, allowed) for place in _places(path, command.settings))), None) if path is not None else None
    if found is None:
        raise OptionError(f"{name} starts {command.name}, whose settings are in {command.settings}; open that file")
    imported = file(found)
    imported.conflicts.insert(0, f"{name} starts {command.name} with {command.settings}; the settings are those of that file")
    return imported


def _with_file(command: Command, path: Path | None, allowed: Callable[[Path], Path]) -> Command:
    """A command line with what stands in its file of options, where that is beside the script."""
    named = command.options.get("config_file")
    if path is None or not isinstance(named, str) or command_lines.unresolved(named) is not None:
        return command
    names = (named, f"{named}.toml") if not named.endswith(".toml") else (named,)
    read = (_read_data(place, allowed) for one in names for place in _places(path, one))
    tables = next((tables for tables in read if isinstance(tables, Mapping)), {})
    return replace(command, file=toml_files.opened(tables))


class UnclearOwner(OptionError):
    """A file that several programs could own; one of their names answers."""

    def __init__(self, name: str, found: Sequence[Importer]) -> None:
        self.file, self.programs = name, tuple(map(_program, found))
        super().__init__(
            f"{name} could be {' or '.join(one.accepted for one in found)}; which of them? Put the program's name into the file's, "
            f"such as {self.programs[0]}-{name}"
        )


def _program(importer: Importer) -> str:
    return re.sub(r".*\bof (the )?|[ (].*", "", importer.accepted)


def owner(name: str, given: object, ending: str) -> Importer | None:
    """The importer for these tables, of those for files with this ending; None where none knows them.

    Raises UnclearOwner, which asks, where several could own the file and its name has none of their programs.
    """
    if not isinstance(given, Mapping):
        return None
    found = [one for one in (*IMPORTERS, *importers()) if ending in one.endings and one.looks_like(given)]
    named = [one for one in found if _program(one).lower() in name.lower()]
    if len(found) > 1 and len(named) != 1:
        raise UnclearOwner(name, found)
    return next(iter(named or found), None)


def data_file(given: object) -> DataFile | None:
    """Whose description of images or previews this is; None for anything else."""
    return next((one for one in DATA if one.looks_like(given)), None)


def with_data(given: Any, path: Path, allowed: Callable[[Path], Path] = Path) -> Any:
    """The tables of a main file with the files of data that it names in their places, where they are there: beside it, or as seen from one
    of the three folders above. allowed may raise OptionError for a path that is not to be opened."""
    found = dict(given) if isinstance(given, Mapping) else given
    for one in DATA if isinstance(given, Mapping) else ():
        key = next((key for key in (one.named_by, f"--{one.named_by}") if isinstance(given.get(key), str) and given[key]), "")
        places = _places(path, given[key]) if key else []
        tables = next((tables for place in places if (tables := _read_data(place, allowed)) is not None and one.looks_like(tables)), None)
        if tables is not None and (one.key == one.named_by.lstrip("-") or not given.get(one.key)):
            found |= {key if one.key == one.named_by else one.key: tables}
    return found


def _places(main: Path, named: str) -> list[Path]:
    """Where a file may lie that a main file names: as it is written, beside the main file or seen from one of the three folders above, then
    the same for the ends of its path, because folders are copied without those above them."""
    parts = PurePosixPath(named.replace("\\", "/")).parts
    ends = [named, *("/".join(parts[start:]) for start in range(1, len(parts)))]
    return [folder / end for end in ends for folder in (main.parent, *list(main.parent.parents)[:3])]


def _opened(path: Path, allowed: Callable[[Path], Path]) -> Path | None:
    """A file that is there and may be opened; where it may not, nothing is said of whether it is there."""
    try:
        path = allowed(path)
        return path if path.is_file() else None
    except (OSError, OptionError):
        return None


def _read_data(path: Path, allowed: Callable[[Path], Path]) -> object:
    try:
        path = allowed(path)
        if not path.is_file() or path.stat().st_size > MAX_DATA_BYTES:
            return None
        text = path.read_text(encoding="utf-8-sig")
        return toml_of(text) if path.suffix.lower() == ".toml" else json_of(text)
    except (OSError, ValueError, OptionError):
        return None


def of_config_file(path: Path, run: type[RunOptions]) -> tuple[dict[str, object], tuple[str, ...]] | None:
    """The options that a file of another program holds for a kind of run, and its report in sentences; None for a TOML of this program, or
    one in kohya's words, which a command line takes. Raises OptionError for a file that is for another kind of run."""
    name, ending = path.name, path.suffix.lower().replace(".yml", ".yaml")
    try:
        text = path.read_text(encoding="utf-8-sig") if ending in (".json", ".yaml", ".toml") else ""
        given = yaml_of(text, name) if ending == ".yaml" else json_of(text) if ending == ".json" else toml_of(text)
    except (OSError, ValueError) as err:
        if ending == ".json" and not isinstance(err, OSError):
            raise OptionError(f"config_file: {name} is not valid JSON: {err}") from err
        return None
    ours = isinstance(given, Mapping) and ("script" in given or toml_files.HEADER in given)
    importer = None if ours else owner(name, given, ending)
    if importer is None and ending == ".json" and isinstance(given, dict) and kohya.looks_like_kohya(given):
        found = kohya.from_json(given, name)
    elif importer is not None:
        found = importer.read(name, with_data(given, path))
    elif ending == ".toml" or not text:
        return None
    else:
        raise OptionError(f"config_file: {name} is a configuration of no program that is read here; give a TOML file")
    if found.run is not run:
        raise OptionError(f"config_file: {name} is a {found.origin}, but this is {run.script}; start {found.run.script}")
    quiet = found.count("taken") + found.count("not needed")
    rows = [f"{name}: {row.key}: {row.verdict}: {row.text}" for row in found.rows if row.verdict not in ("taken", "not needed")]
    return found.values, (f"{name}: {found.origin}; {quiet} keys are taken as they are or not needed", *found.conflicts, *rows)
