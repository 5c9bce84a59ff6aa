"""Recognises what kind of file somebody dropped on the page, and hands it to the importer for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sd_scripts.families import importers
from sd_scripts.programs import IMPORTERS, command_lines, data_file, owner, read_lines, with_data
from sd_scripts.programs.kohya import dataset_config
from sd_scripts.programs.kohya import defaults as kohya_defaults
from sd_scripts.programs.kohya import reading as kohya
from sd_scripts.runs import safetensors_header
from sd_scripts.schema import toml_files
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported, Importer
from sd_scripts.schema.outside import json_of, toml_of, yaml_of
from sd_scripts.schema.runs import RunOptions

from . import lora_file, own_toml, programs

SCRIPTS = (".sh", ".bat", ".cmd", ".ps1")
"""Endings of scripts for shells."""
MAX_TEXT_BYTES = 4 << 20
"""More than any configuration; a larger file is something else."""
_ACCEPTED = ", ".join(
    (
        "a kohya_ss configuration (.json or .toml), an sd-scripts configuration (.toml), a file of Save TOML",
        "a command line (.sh, .bat, .ps1 or pasted)",
        *(one.accepted for one in (*IMPORTERS, *importers())),
        "or a LoRA (.safetensors)",
    )
)


@dataclass(frozen=True)
class Opened:
    """How a file was opened, for what it alone does not say."""

    run: type[RunOptions] | None = None
    """The kind of run of the form, which a description of data is put into."""
    program: str = ""
    """Whose file it is, where somebody was asked."""
    path: Path | None = None
    """Where it lies, for the files that it names."""
    allowed: Callable[[Path], Path] = Path
    """Raises OptionError for a path that is not to be opened."""

    def owner(self, name: str, given: object, ending: str) -> Importer | None:
        """The importer for these tables; see programs.owner."""
        return owner(f"{self.program} {name}".strip(), given, ending)

    def with_data(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tables with those of the files that they name."""
        found: Mapping[str, Any] = with_data(given, self.path, self.allowed) if self.path is not None else given
        return found


def read(name: str, data: bytes, opened: Opened = Opened()) -> Imported:
    """The settings in a file: kohya_ss GUI JSON or TOML, an sd-scripts configuration, our own TOML, what the families' importers read, or
    a LoRA .safetensors.

    name is the file's name, for messages and as a hint at the family. Of a .safetensors file the header is enough (see
    safetensors_header.needed_bytes), so the page need not send the weights. Raises OptionError with a sentence for a file that is none
    of these, or is damaged; UnclearOwner for one that several programs could own.
    """
    if not data:
        raise OptionError(f"{name} is empty")
    if name.lower().endswith(".safetensors") or safetensors_header.looks_like_safetensors(data):
        return lora_file.read(name, data)
    if name.lower().endswith((".ckpt", ".pt", ".pth", ".bin")):
        raise OptionError(f"{name}: files of this kind can run code when they are read; only .safetensors is opened")
    if len(data) > MAX_TEXT_BYTES:
        raise OptionError(f"{name} has {len(data)} bytes, which is too much for a configuration; give {_ACCEPTED}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise OptionError(f"{name} is not a text; give {_ACCEPTED}") from err
    if name.lower().endswith((".yaml", ".yml")):
        return _of_yaml(name, text, opened)
    if name.lower().endswith(SCRIPTS) or (not name.lower().endswith((".json", ".toml")) and command_lines.looks_like(text)):
        return read_lines(name, text, own_toml.of_line, partial(_file, opened=opened), opened.path, opened.allowed)
    is_json = name.lower().endswith(".json") or text.lstrip().startswith("{")
    return _of_json(name, text, opened) if is_json else _of_toml(name, text, opened)


def _file(path: Path, opened: Opened) -> Imported:
    """A file of settings that a command line names."""
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise OptionError(f"{path.name} is too large for a configuration; give {_ACCEPTED}")
    return read(path.name, path.read_bytes(), replace(opened, path=path))


def own(name: str, text: str) -> dict[str, Any] | None:
    """The flat values of a TOML text that this program wrote; None for any other. Raises OptionError for what is no TOML."""
    tables = _tables(name, text)
    header = tables.get(toml_files.HEADER)
    return toml_files.parse_toml(text, name) if "script" in tables or (isinstance(header, Mapping) and "script" in header) else None


def _of_yaml(name: str, text: str, opened: Opened) -> Imported:
    given = yaml_of(text, name)
    _no_other_program(name, given)
    importer = opened.owner(name, given, ".yaml")
    if importer is None:
        raise OptionError(f"{name} has none of the sections of a program whose YAML files are read; give {_ACCEPTED}")
    return importer.read(name, given)


def _of_json(name: str, text: str, opened: Opened) -> Imported:
    try:
        given = json_of(text)
    except ValueError as err:
        raise OptionError(f"{name} is not valid JSON: {err}") from err
    importer = opened.owner(name, given, ".json")
    if importer is not None:
        return importer.read(name, opened.with_data(given))
    if (found := _of_data(name, given, opened.run)) is not None:
        return found
    _no_other_program(name, given)
    if not isinstance(given, dict):
        raise OptionError(f"{name} is a list or a single value, not settings; give {_ACCEPTED}")
    if not kohya.looks_like_kohya(given):
        raise OptionError(f"{name} has no settings that kohya_ss saves; give {_ACCEPTED}")
    return kohya.from_json(given, name)


def _of_toml(name: str, text: str, opened: Opened) -> Imported:
    tables, ours = _tables(name, text), own(name, text)
    if ours is not None:
        return own_toml.imported(ours)
    if dataset_config.beside_a_run(tables):
        return dataset_config.read_beside(tables, lambda settings: _of_tables(name, settings, opened))
    return _of_tables(name, tables, opened)


def _of_tables(name: str, tables: Mapping[str, Any], opened: Opened) -> Imported:
    if (importer := opened.owner(name, tables, ".toml")) is not None:
        return importer.read(name, opened.with_data(tables))
    if (found := _of_data(name, tables, opened.run)) is not None:
        return found
    _no_other_program(name, tables)
    if kohya_defaults.looks_like(tables):
        return kohya_defaults.read(name, tables)
    given = toml_files.values_of(tables, name)
    if not kohya.looks_like_kohya(given):
        raise OptionError(f"{name} has no settings that kohya's programs know; give {_ACCEPTED}")
    return kohya.from_toml(given, name)


def _tables(name: str, text: str) -> Mapping[str, Any]:
    try:
        return toml_of(text)
    except ValueError as err:
        if name.lower().endswith(".toml"):
            raise OptionError(f"{name} is not valid TOML: {err}") from err
        raise OptionError(f"{name} is neither a command line nor settings; as TOML: {err}. Give {_ACCEPTED}") from err


def _no_other_program(name: str, given: object) -> None:
    """Refuses the files of programs that have no importer, by their name."""
    program = programs.owner(given)
    if program is not None:
        raise OptionError(f"{name} is a file of {program}, which is not read here; give {_ACCEPTED}")


def _of_data(name: str, given: Any, run: type[RunOptions] | None) -> Imported | None:
    """What a description of images says to a run; None for what is no such file. Raises OptionError where there is no run to put it into,
    and for a file of captions."""
    one, is_config = data_file(given), isinstance(given, dict) and isinstance(given.get("datasets"), list)
    if (one or is_config) and run is None:
        over = "open it on the page, over the settings of a run"
        if one:
            raise OptionError(f"{name} holds {one.accepted}, not a run; {over}")
        raise OptionError(f"{name} describes a data set, not a run; give its path as dataset_config, or {over}")
    if run is not None and one:
        return one.read(given, run)
    if run is not None and is_config:
        dataset_config.check(run, name)
        return dataset_config.read(given, run)
    captions = isinstance(given, dict) and given and all(isinstance(value, dict) for value in given.values())
    if captions and all({"caption", "tags", "train_resolution"} & value.keys() for value in given.values()):
        raise OptionError(f"{name} holds captions, not settings; give its path as in_json")
    return None
