"""Training states (for us) and exported files (for users): written aside, fsynced, renamed; only whole ones are read.

A state is the folder `state/000800/`: one .safetensors file for each group of tensors, `state.json` for everything that is not
a tensor, and `manifest.json` with the size and SHA-256 of each file. Nothing in it can run code.
"""

from __future__ import annotations

import errno
import glob
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd_scripts.library.core.errors import TrainingError
from sd_scripts.runs.events import FileSaved
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.states import FORMAT, BrokenState, check_state, sha256, state_folders
from sd_scripts.schema.files import TEMPORARY_MARK, folder_aside
from sd_scripts.schema.output import OutputOptions
from sd_scripts.schema.outside import json_of

State = dict[str, Any]
"""Group name -> nested dictionaries and lists of tensors, numbers, texts and None."""


MOST_NAMES = 10
"""Of each kind in a table of weights that do not fit."""


class NoRoomLeft(TrainingError):
    """A file could not be written; what was there before is untouched."""


def pack(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """JSON for a nested value; tensors are put into `tensors` under a path-like name and referred to.

    Raises TypeError for anything else than dict, list, tuple, tensor, number, text and None.
    """
    if isinstance(value, Tensor):
        # A copy: optimizers share look-up tables between weights, and a file cannot say that two tensors are one.
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, Mapping):
        return {"dict": [[pack(key, tensors, f"{name}.key"), pack(item, tensors, f"{name}.{key}")] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [pack(item, tensors, f"{name}.{i}") for i, item in enumerate(value)]}
    raise TypeError(f"{name} is a {type(value).__name__}, which cannot be saved without running code on loading")


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What pack was given."""
    if not isinstance(packed, dict):
        return packed
    (kind, value), *rest = packed.items()
    if rest or kind not in ("tensor", "float", "dict", "list", "tuple"):
        raise BrokenState("state.json has an entry of an unknown kind; it was written by another version")
    if kind == "tensor":
        return tensors[value]
    if kind == "float":
        return float(value)
    if kind == "dict":
        return {unpack(key, tensors): unpack(item, tensors) for key, item in value}
    items = [unpack(item, tensors) for item in value]
    return tuple(items) if kind == "tuple" else items


def mismatch(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """A table of what is not the same in saved weights and in those that a run trains; empty when names and shapes agree."""
    rows: dict[str, list[tuple[str, str, str]]] = {
        "missing": [("-", _shape(wanted[name]), name) for name in wanted if name not in saved],
        "unexpected": [(_shape(saved[name]), "-", name) for name in saved if name not in wanted],
        "of another shape": [
            (_shape(saved[name]), _shape(wanted[name]), name)
            for name in wanted
            if name in saved and saved[name].shape != wanted[name].shape
        ],
    }
    if not any(rows.values()):
        return ""
    shown = [("", "in the state", "in this run", "weight")]
    for kind, found in rows.items():
        shown += [(kind, *row) for row in found[:MOST_NAMES]]
        shown += [("", "", "", f"and {len(found) - MOST_NAMES} more {kind}")] if len(found) > MOST_NAMES else []
    widths = [max(len(row[column]) for row in shown) for column in range(3)]
    lines = ["  " + "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]) for row in shown]
    counts = ", ".join(f"{len(found)} {kind}" for kind, found in rows.items())
    return "\n".join([f"{counts}, of {len(wanted)}", *lines])


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


_NOT_WRITABLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES),
    # Folders that somebody has made immutable, or has put a file in place of.
    *(errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
)


@contextmanager
def room_for(what: str, folder: Path) -> Iterator[None]:
    """Turns a failed write of `what` into a sentence; other errors pass."""
    try:
        yield
    except (OSError, SafetensorError) as err:
        if isinstance(err, OSError) and err.errno not in _NOT_WRITABLE:
            raise
        with suppress(OSError):
            free = shutil.disk_usage(folder).free / 2**30
            raise NoRoomLeft(
                f"{what} could not be written to {folder}: {err} ({free:.2f} GiB are free there). What was saved earlier is untouched; "
                "make room or choose another output_dir, then start again: training continues from the last saved state"
            ) from err
        raise


def remove_leftovers(run: RunDirectory) -> list[str]:
    """Deletes what a killed process left half-written in the run folder; returns the names."""
    removed = []
    for folder in (run.path, run.state, run.samples, run.inference):
        for path in sorted(folder.glob(f".*{TEMPORARY_MARK}*")) if folder.is_dir() else []:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(path.name)
    return removed


def read_state(path: Path) -> tuple[State, dict[str, Any]]:
    """The groups of a whole state, and its manifest. Raises BrokenState."""
    manifest = check_state(path)
    try:
        structure = json_of((path / "state.json").read_text(encoding="utf-8"))
        tensors: dict[str, Tensor] = {}
        for name in manifest["files"]:
            if name.endswith(".safetensors"):
                tensors.update(load_file(path / name))
        return {group: unpack(packed, tensors) for group, packed in structure.items()}, manifest
    except (OSError, ValueError, KeyError, SafetensorError) as err:
        raise BrokenState(f"it cannot be read: {err}") from err


def ends_period(epochs_done: Callable[[int], int], step: int, every: int) -> bool:
    """Whether an epoch whose number is a multiple of `every` ends with step `step` (counted from 1)."""
    return step > 0 and epochs_done(step) // every > epochs_done(step - 1) // every


@dataclass(frozen=True)
class Identity:
    """What a state belongs to: options that matter for training, images and captions, and how many processes wrote it."""

    fingerprint: str
    dataset: str
    world: int


class Checkpointer:
    """Writes the states of one run and removes those that are no longer wanted; knows when files are due. Knows no networks."""

    def __init__(
        self, run: RunDirectory, options: OutputOptions, identity: Identity, epochs_done: Callable[[int], int], total_steps: int
    ) -> None:
        """epochs_done: how many whole epochs lie before a step; total_steps: length of the run."""
        self._run, self._options, self._identity = run, options, identity
        self._epochs_done, self._total = epochs_done, total_steps
        self.saved_step: int | None = None
        """Step of the newest state known to be on disk."""

    def save_state(self, step: int, state: State) -> Path:
        """Writes `state/<step>/`, then removes states older than the newest save_last_n_states.

        Raises NoRoomLeft, with all earlier ones intact.
        """
        target = self._run.state / f"{step:06d}"
        # Only a broken one can be there: a run never comes to a step whose state it could have continued from.
        with room_for(f"the training state of step {step}", self._run.path), folder_aside(target) as aside:
            self._write_files(aside, step, state)
        self.saved_step = step
        self._run.log(FileSaved(step=step, what="state", file=f"state/{target.name}"))
        for old in state_folders(self._run.state)[: -self._options.save_last_n_states]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def _write_files(self, folder: Path, step: int, state: State) -> None:
        structure = {}
        for group, value in state.items():
            tensors: dict[str, Tensor] = {}
            structure[group] = pack(value, tensors, group)
            if tensors:
                save_file(tensors, folder / f"{group}.safetensors")
        (folder / "state.json").write_text(json.dumps(structure, allow_nan=False), encoding="utf-8")
        files = {}
        for file in sorted(folder.iterdir()):
            files[file.name] = {"size": file.stat().st_size, "sha256": sha256(file)}
        manifest = {
            "format": FORMAT,
            "step": step,
            "epochs": [self._epochs_done(step - 1), self._epochs_done(step)] if step else [0, 0],
            "fingerprint": self._identity.fingerprint,
            "dataset": self._identity.dataset,
            "world": self._identity.world,
            "files": files,
        }
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    def drop_states_after(self, step: int) -> list[int]:
        """Removes states beyond a step that training is sent back to: they belong to a future that will not come. Returns their steps."""
        dropped = [path for path in state_folders(self._run.state) if int(path.name) > step]
        for path in dropped:
            shutil.rmtree(path)
        return [int(path.name) for path in dropped]

    def _every_n_epochs(self) -> int | None:
        if self._options.save_n_epoch_ratio is not None:
            return max(1, self._epochs_done(self._total) // self._options.save_n_epoch_ratio)
        return self._options.save_every_n_epochs

    def _due_by_steps(self, step: int) -> bool:
        every = self._options.save_every_n_steps
        return every is not None and step % every == 0

    def _due_by_epochs(self, step: int) -> bool:
        every = self._every_n_epochs()
        return every is not None and ends_period(self._epochs_done, step, every)

    def export_due(self, step: int) -> bool:
        """Whether a file is saved after `step` optimizer steps; the end of the run is not counted here."""
        return self._due_by_steps(step) or self._due_by_epochs(step)

    def state_due(self, step: int) -> bool:
        """Whether the training state is saved after `step` optimizer steps; the end of the run is not counted here."""
        every = self._options.save_state_every_n_steps
        return (self._options.save_state and self.export_due(step)) or (every is not None and step % every == 0)

    def export_path(self, step: int) -> Path:
        """The file (or folder, for a diffusers model) of a step; the last one has the plain name."""
        name, ending = self._options.output_name, self._options.ending
        return self._run.path / (f"{name}{ending}" if step >= self._total else f"{name}-{step:06d}{ending}")

    @property
    def keeps_best(self) -> bool:
        """Whether the file of the lowest held-out loss is kept."""
        return self._options.save_best

    @property
    def patience(self) -> int | None:
        """How many held-out losses in a row may be no lower than the lowest one; None for any number."""
        return self._options.early_stop_patience

    @property
    def best_path(self) -> Path:
        """That file (or folder); no rule removes it."""
        return self._run.path / f"{self._options.output_name}-best{self._options.ending}"

    def exported(self, step: int, path: Path) -> None:
        """Logs a file that was written, and removes those that save_last_n_steps and save_last_n_epochs no longer keep."""
        self._run.log(FileSaved(step=step, what="export", file=path.name))
        ending = self._options.ending
        for old in self._run.path.glob(f"{glob.escape(self._options.output_name)}-[0-9]*{ending}"):
            number = old.name.removesuffix(ending).removeprefix(f"{self._options.output_name}-")
            if number.isdigit() and int(number) < step and not self._kept(int(number), step):
                if old.is_dir():
                    shutil.rmtree(old)
                else:
                    old.unlink()

    def _kept(self, old: int, now: int) -> bool:
        """Whether a file saved at step `old` stays at step `now`: it does when one of the rules that made it keeps it."""
        steps, saves = self._options.save_last_n_steps, self._options.save_last_n_epochs
        by_steps, by_epochs = self._due_by_steps(old), self._due_by_epochs(old)
        if not by_steps and not by_epochs:
            return True
        kept_by_steps = by_steps and (steps is None or old > now - steps)
        # As kohya's scripts count: N files, whose epochs lie save_every_n_epochs apart.
        epochs = None if saves is None else saves * (self._every_n_epochs() or 1)
        kept_by_epochs = by_epochs and (epochs is None or self._epochs_done(old) > self._epochs_done(now) - epochs)
        return kept_by_steps or kept_by_epochs
