"""Which checkpoint of a grid to keep: what is proposed and why, what somebody chose, and the files that this makes superfluous.

A choice stands in the run's folder, `choice.json`, and in the file's own header. Nothing here draws or measures.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sd_scripts.runs import drawing
from sd_scripts.runs.safetensors_header import CHOSEN, entries_of, replace_texts
from sd_scripts.runs.trash import Trash
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import write_atomically
from sd_scripts.schema.outside import object_in

from .measures import HeldOut, Nearness
from .votes import Standing, is_clear

FILE = "choice.json"
CLEARLY = 4 / 3
"""How many halves of the 95 % interval a loss must lie above the lowest one to be clearly higher: about those of a 99 % interval. Several
checkpoints are compared, and samples of one image are alike."""


@dataclass(frozen=True)
class Candidate:
    """A column that holds a checkpoint, with what is known of it."""

    column: int
    label: str
    held_out: HeldOut | None
    near: Nearness | None


@dataclass(frozen=True)
class Proposal:
    """column is None where nothing tells which is best; why is a sentence."""

    column: int | None
    why: str


def proposal(candidates: Sequence[Candidate], ranking: Sequence[Standing], base: Nearness | None) -> Proposal:
    """Which of the checkpoints to keep. Clear votes decide; else it is one whose held-out loss is not clearly above the lowest: of those
    that copy fewest training images the one that has trained longest. The loss of few held-out images is lowest before images are best
    (tests/bench/picks.py). base: nearness of the base's images."""
    if len(candidates) < 2:
        return Proposal(None, "Nothing is proposed: the grid has no two checkpoints.")
    by_column = {one.column: one for one in candidates}
    voted = [one for one in ranking if one.column in by_column]
    if voted and is_clear(ranking) and ranking[0].column in by_column:
        best = ranking[0]
        label, won = by_column[best.column].label, f"{best.share:.0%} of its {best.votes} blind votes"
        return Proposal(best.column, f"{label} is proposed: it won {won}, more than any other column.")
    measured = [(one, one.held_out) for one in candidates if one.held_out is not None]
    if len(measured) < 2:
        text = (
            "Nothing is proposed: the run measured no held-out loss of these files (validation_split); vote blind, or choose one yourself."
        )
        return Proposal(None, text)
    lowest, least = min(measured, key=lambda pair: pair[1].mean.value)
    alike = [(one, told) for one, told in measured if one is lowest or (told.behind is not None and not told.behind.exceeds(CLEARLY))]
    kept, loss = min(alike, key=lambda pair: (_copies(pair[0].near, base), -pair[1].step))
    last, _ = max(alike, key=lambda pair: pair[1].step)
    if kept is lowest:
        why = f"{kept.label} is proposed: it has the lowest held-out loss ({least.mean.value:.4g}) of {len(measured)}."
    else:
        why = (
            f"{kept.label} is proposed: its held-out loss ({loss.mean.value:.4g}) is not clearly above the lowest of {len(measured)} "
            f"({lowest.label}, {least.mean.value:.4g}){', and of those it has trained longest' if kept is last else ''}."
        )
    if kept.near is not None:
        near = kept.near
        if kept is lowest or kept is last:
            why += f" {near.copies} of its {near.count} images nearly copy a training image."
        else:
            why += f" {near.copies} of its {near.count} images nearly copy a training image, fewer than of {last.label}."
    return Proposal(kept.column, why)


def _copies(near: Nearness | None, base: Nearness | None) -> int:
    """Images that nearly copy a training image, beyond those of the base."""
    return max(0, (near.copies if near is not None else 0) - (base.copies if base is not None else 0))


# What somebody chose


def chosen(folder: Path) -> str:
    """Name of the file of a run that somebody chose and that is still there; "" for none."""
    name = object_in(folder / FILE).get("file")
    return name if isinstance(name, str) and Path(name).name == name and (folder / name).exists() else ""


def choose(file: Path, why: str) -> None:
    """Marks one of a run's files in the run's folder and in its own header, in place of what was chosen before. Folders of whole models
    are marked in the run's folder alone. Raises OptionError."""
    before = chosen(file.parent)
    try:
        _mark(file, why)
        write_atomically(file.parent / FILE, json.dumps({"file": file.name, "why": why, "time": time.time()}, ensure_ascii=False))
        if before and before != file.name:
            _mark(file.parent / before, None)
    except OSError as err:
        raise OptionError(f"the choice cannot be kept in {file.parent}: {err.strerror}; free some space there, and choose again") from err


def _mark(file: Path, why: str | None) -> None:
    """Writes the text into a file's header, or takes it out; the tensors and the time of change stay."""
    if not file.is_file():
        return
    stat = file.stat()
    texts = dict(entries_of(file)[0].get("__metadata__") or {})
    wanted = {name: text for name, text in texts.items() if name != CHOSEN} | ({} if why is None else {CHOSEN: why})
    if wanted != texts:
        replace_texts(file, file, wanted)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


# What is superfluous then


def others(folder: Path) -> list[tuple[Path, int]]:
    """What a run has saved besides the file that was chosen, each with its bytes; nothing where none was chosen."""
    kept = chosen(folder)
    return [(path, _bytes(path)) for path in drawing.saved_files(folder) if path.name != kept] if kept else []


def _bytes(path: Path) -> int:
    parts = path.rglob("*") if path.is_dir() else [path]
    return sum(part.stat().st_size for part in parts if part.is_file())


def delete_others(folder: Path, names: Sequence[str]) -> int:
    """Moves what was saved besides the chosen file into the trash; the bytes that emptying it frees. names: of the files that somebody
    agreed to.

    Raises OptionError where these are not the others any more, and where one cannot be moved.
    """
    found = others(folder)
    if not found or sorted(path.name for path, _ in found) != sorted(names):
        raise OptionError("the files of this run have changed since; look at them again before they are deleted")
    Trash(folder.parent).put(f"Other files of {folder.name}", [path for path, _ in found])
    return sum(size for _, size in found)
