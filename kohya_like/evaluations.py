"""The evaluations that a run of style transfer has left in its folder: which there are, their images, and what their summaries say.

Each is a folder `inference/epoch_0005`, or `inference/epoch_0005_step_000123` for one inside an epoch, that appears complete or not at all.
Nothing outside the run's folder is read, and a summary is taken only as far as it holds what one can hold.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sd_scripts.families import FACTS
from sd_scripts.runs.events import number, whole
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat, toml_files
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.outside import json_of

FILES = frozenset({".jpg", ".jpeg", ".png", ".csv"})
SUMMARY = "summary.json"
MAX_SUMMARY_BYTES = 4 << 20
_NAME = re.compile(r"epoch_(\d{4,9})(?:_step_(\d{6,9}))?")
_OF_SOURCE = ("style", "stem", "file", "vae")
_OF_PAIR = ("from", "to", "stem", "file")
"""What a pair says of itself in words; its numbers are its measures."""


@dataclass(frozen=True)
class Evaluation:
    """One folder. step is None for an evaluation between two epochs."""

    name: str
    epoch: int
    step: int | None
    time: float
    """When it appeared, Unix time; one that was made again has another."""

    def row(self) -> dict[str, Any]:
        return asdict(self)


def evaluates(config: Path) -> bool:
    """Whether runs of the kind that has this config.toml evaluate themselves so."""
    try:
        run = flat.run_of(toml_files.read_toml(config))
    except OptionError:
        # Settings of another program, or of another version.
        return False
    return FACTS[run.family].evaluates


def found(run: RunDirectory) -> list[Evaluation]:
    """The evaluations on disk, in the order in which they were made."""
    if not os.path.isdir(run.inference) or run.inference.is_symlink():
        return []
    folders = [path for path in run.inference.iterdir() if path.is_dir() and not path.is_symlink()]
    named = [(_NAME.fullmatch(path.name), path.stat().st_mtime) for path in folders]
    listed = [Evaluation(name[0], int(name[1]), int(name[2]) if name[2] else None, time) for name, time in named if name is not None]
    # One inside an epoch names the epochs that were complete; it comes after the evaluation at the end of the last of them.
    return sorted(listed, key=lambda each: (each.epoch, each.step or 0))


def folder(run: RunDirectory, name: str) -> Path | None:
    """The folder of the evaluation of this name; None when there is none."""
    return next((run.inference / each.name for each in found(run) if each.name == name), None)


def summary(folder: Path) -> dict[str, Any] | None:
    """What a folder's summary.json says, as far as it is one; None when it cannot be read.

    {"styles", "step", "epoch", "sources": [{"style", "stem", "file", "vae"}], "pairs": [{"from", "to", "stem", "file", "measures"}],
    "baselines": {name: measures}, "means": measures}, where measures are numbers by name.
    """
    file = folder / SUMMARY
    try:
        said = json_of(file.read_bytes()) if file.stat().st_size <= MAX_SUMMARY_BYTES and not file.is_symlink() else None
    except (OSError, ValueError):
        return None
    if not isinstance(said, dict):
        return None
    baselines = said.get("baselines")
    sources, pairs = _tables(said.get("sources")), _tables(said.get("pairs"))
    return {
        "styles": [style for style in _list(said.get("styles")) if isinstance(style, str)],
        "step": whole(said.get("step")) or 0,
        "epoch": whole(said.get("epoch")) or 0,
        "sources": [_words(item, _OF_SOURCE) for item in sources],
        "pairs": [{**_words(item, _OF_PAIR), "measures": _measures(item)} for item in pairs],
        "baselines": {name: _measures(told) for name, told in baselines.items()} if isinstance(baselines, dict) else {},
        "means": _measures(said.get("means")),
    }


def _words(item: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, str]:
    return {name: str(item.get(name) or "") for name in names}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _tables(value: object) -> list[Mapping[str, Any]]:
    return [item for item in _list(value) if isinstance(item, dict)]


def _measures(value: object) -> dict[str, float]:
    told = value.items() if isinstance(value, dict) else ()
    return {name: figure for name, each in told if name not in _OF_PAIR and (figure := number(each)) is not None}
