"""Presets: named sets of differences from the defaults. The built-in ones lie in presets/<script>/, a person's own beside their runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sd_scripts.families import FACTS
from sd_scripts.schema import flat, toml_files
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import write_atomically
from sd_scripts.schema.labels import label
from sd_scripts.schema.runs import RunOptions

from . import files, form

BUILT_IN = Path(__file__).resolve().parent.parent / "presets"
OWN_FOLDER = ".presets"
"""Folder of a person's own presets inside the folder of runs."""
DEMO = next((facts.demo for facts in FACTS.values() if facts.demo is not None), "")

_KEPT = {"output_name", "sample_prompts", "resume", "log_tracker_name", "wandb_run_name", "training_comment"}


@dataclass(frozen=True)
class Preset:
    """One preset as its file says it: `about` is the comment at its top, `values` the flat differences."""

    name: str
    title: str
    about: str
    run: type[RunOptions]
    values: Mapping[str, Any]
    own: bool


@dataclass(frozen=True)
class Change:
    """One setting that a preset would change, as the page shows it."""

    label: str
    before: str
    after: str


def read(path: Path, own: bool) -> Preset:
    """A preset file. Its first comment line is the title, the comment lines after it say what it is for. Raises OptionError."""
    values = toml_files.read_toml(path)
    run = flat.run_of(values)
    comments = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comments.append(line.lstrip("# ").strip())
    title = comments[0].rstrip(".") if comments else path.stem
    settings = {name: value for name, value in values.items() if name not in ("script", "schema_version")}
    unknown = [name for name in settings if name not in form.shown_fields(run)]
    if unknown:
        raise OptionError(f"preset {path.name}: {', '.join(unknown)} cannot be set on the page; remove it from the file")
    return Preset(path.stem, title, " ".join(comments[1:]), run, settings, own)


@cache
def _built_in(path: Path) -> Preset:
    """Nobody writes those while the studio runs; reading them all takes 25 ms."""
    return read(path, own=False)


def available(output_dir: Path) -> tuple[list[Preset], list[str]]:
    """All presets, built-in ones first, and a sentence for each file that cannot be read."""
    found: list[Preset] = []
    broken: list[str] = []
    for folder, own in ((BUILT_IN, False), (output_dir / OWN_FOLDER, True)):
        for path in sorted(folder.glob("*/*.toml")):
            try:
                found.append(read(path, own) if own else _built_in(path))
            except OptionError as err:
                broken.append(f"{path.name}: {err}")
    return found, broken


def find(name: str, output_dir: Path, own: bool | None = None) -> Preset:
    """The preset of this name; of two, a person's own. Raises OptionError."""
    matching = [preset for preset in available(output_dir)[0] if preset.name == name and own in (None, preset.own)]
    if not matching:
        raise OptionError(f'there is no preset "{name}"; reload the page for the present list')
    return matching[-1]


def applied(preset: Preset, now: Mapping[str, form.Text]) -> dict[str, form.Text]:
    """What every control shows once the preset is used: defaults, then the preset.

    What says where things are and how they are called (folders, files, names, prompts, metadata) stays as it is now, unless the preset
    sets it, so the outcome depends on the form in nothing else.
    """
    return form.texts(preset.run, preset.values) | {name: now[name] for name in kept(preset) if name in now}


def kept(preset: Preset) -> list[str]:
    """The options that stay as they are when the preset is used."""
    own = (name for name, field in form.shown_fields(preset.run).items() if _is_own(name, field))
    return [name for name in own if name not in preset.values]


def _is_own(name: str, field: flat.FlatField) -> bool:
    return field.show.kind in ("folder", "file") or name in _KEPT or name.startswith("metadata_")


def difference(run: type[RunOptions], before: Mapping[str, form.Text], after: Mapping[str, form.Text]) -> list[Change]:
    """The settings whose controls would show something else, in page order; numbers that are only written differently are equal."""
    changes = []
    for name, field in form.shown_fields(run).items():
        old, new = before.get(name, form.to_text(field, field.default)), after[name]
        if old != new and form.from_text(field, old) != form.from_text(field, new) and not _same_number(old, new):
            changes.append(Change(label(name, run.family), _words(old), _words(new)))
    return changes


def _same_number(old: form.Text, new: form.Text) -> bool:
    try:
        return float(old) == float(new)
    except ValueError:
        return False


def _words(text: form.Text) -> str:
    if isinstance(text, bool):
        return "on" if text else "off"
    return text.replace("\n", ", ") or "none"


def keep(name: str, options: RunOptions, output_dir: Path) -> Preset:
    """Saves the settings that differ from the defaults as a preset of one's own; an older one of the same name is replaced.

    Places and names of this run (base model and images, output) are left out: a preset is a recipe. Raises OptionError.
    """
    run = type(options)
    known = form.shown_fields(run)
    recipe = {
        field_name: value
        for field_name, value in flat.changed(options).items()
        if field_name in known and known[field_name].show.kind not in ("folder", "file") and field_name not in _KEPT
    }
    stem = files.safe_name(name)
    lines = [f"# {name.strip()[:80]}", f"# Saved from the form; {len(recipe)} settings differ from the defaults.", f"[{toml_files.HEADER}]"]
    lines += [f'script = "{run.script}"', f"schema_version = {toml_files.SCHEMA_VERSION}"]
    complete = toml_files.to_toml(options)
    table = ""
    for line in complete.splitlines():
        if line.startswith("["):
            table = line
        elif line.partition(" = ")[0] in recipe and table != f"[{toml_files.HEADER}]":
            if table:
                lines += ["", table]
                table = ""
            lines.append(line)
    path = files.confine(output_dir / OWN_FOLDER / Path(run.script).stem / f"{stem}.toml", [output_dir])
    try:
        write_atomically(path, "\n".join(lines) + "\n")
    except OSError as err:
        raise OptionError(f"the preset cannot be saved as {path}: {err.strerror}") from err
    return read(path, own=True)
