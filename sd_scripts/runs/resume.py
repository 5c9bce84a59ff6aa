"""Where a start begins: which run folder, which state, or nothing to do because the run is finished."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from sd_scripts.dataset.contents import FILE as IMAGES
from sd_scripts.dataset.contents import Contents, changes
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import lock
from sd_scripts.schema.flat import fields, flatten
from sd_scripts.schema.output import OutputOptions
from sd_scripts.schema.outside import json_in, object_in
from sd_scripts.schema.runs import RunOptions

from .events import LastWord, RunFinished
from .rundir import RunDirectory
from .states import BrokenState, check_state, newest_whole, read_manifest, state_folders

HARMLESS = {
    *("max_train_steps", "max_train_epochs", "log_every_n_steps", "deterministic", "profile"),
    "allow_custom_modules",
    *("train_data_dir", "reg_data_dir", "dataset_config", "in_json", "conditioning_data_dir", "control_data_dir"),
    *("vae_device", "text_encoder_device"),
    *("cache_dir", "cache_latents_to_disk", "cache_text_encoder_outputs_to_disk", "vae_batch_size", "text_encoder_batch_size"),
    *("max_data_loader_n_workers", "validate_every_n_steps", "max_validation_steps"),
    *("train_batch_size", "gradient_accumulation_steps"),
    *("num_class_images", "class_prompt", "instance_prompt"),
}
"""Options that leave every training step what it is, beside those of whole sections. Folders are told apart by the images in them and
their captions, batch sizes by their product."""
HARMLESS_SECTIONS = ("output", "samples", "distributed", "compile", "memory")
"""What is saved and shown, where it runs, how its code is made and what is kept where, changes nothing that is trained."""
TELLING = ("full_bf16",)
"""What of those sections does change it."""


def training_settings(options: RunOptions, global_batch: int) -> dict[str, Any]:
    """The settings that decide what a training step does."""
    known = fields(type(options))
    values = flatten(options).items()
    harmless = {name for name, field in known.items() if name in HARMLESS or field.section in HARMLESS_SECTIONS} - set(TELLING)
    kept = {name: value for name, value in values if name not in harmless}
    return {**kept, "global_batch": global_batch}


def fingerprint(settings: dict[str, Any]) -> str:
    """A short name for training settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=list).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Wanted:
    """What a start asks for. run_dir: the folder given with --run_dir; settings and dataset: what it would train.

    images: the data set image by image; model_files: looks at the files of the model, and gives nothing where nobody is to look.
    """

    options: OutputOptions
    resume: str
    run_dir: Path | None
    settings: dict[str, Any]
    dataset: str
    total_steps: int
    images: Contents = field(default_factory=dict)
    model_files: Callable[[], dict[str, str]] = dict

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.settings)


@dataclass(frozen=True)
class Start:
    """What a start does. run None: a new folder is made; state None: from the first step."""

    run: RunDirectory | None
    state: Path | None = None
    warnings: tuple[str, ...] = ()
    finished: bool = False

    @property
    def step(self) -> int:
        return 0 if self.state is None else check_state(self.state)["step"]


def choose(wanted: Wanted) -> Start:
    """Follows --resume and --run_dir. Raises OptionError with what there is instead of what was asked for."""
    resume = wanted.resume
    run = None if wanted.run_dir is None else RunDirectory(wanted.run_dir)
    if resume == "none":
        if run is not None and state_folders(run.state):
            raise _problem(f"none starts afresh, but {run.path} holds saved states already; give another run_dir, or resume = auto")
        return Start(run)
    if resume == "auto":
        return _continued(run, wanted) if run is not None else _newest(wanted)
    if resume == "latest":
        return _latest(run, wanted)
    if resume.isdigit():
        return _from_step(run, int(resume), wanted)
    if (epoch := epoch_in(resume)) is not None:
        return _from_epoch(run, epoch, wanted)
    return _from_path(run, Path(resume).expanduser(), wanted)


def _problem(message: str) -> OptionError:
    return OptionError(Problem("resume", f"resume: {message}"))


def is_finished(run: RunDirectory, output: OutputOptions, total_steps: int) -> bool:
    """Whether the run came to this many steps or more, and its file (or folder, for a diffusers model) is there."""
    words = [event for event in run.history() if isinstance(event, LastWord)]
    done = bool(words) and isinstance(words[-1], RunFinished) and words[-1].step >= total_steps
    return done and (run.path / f"{output.output_name}{output.ending}").exists()


def runs_named(output_dir: Path, name: str) -> list[RunDirectory]:
    """Runs with this output_name, newest first."""
    folders = [path for path in output_dir.glob("*") if path.is_dir() and path.name.endswith(f"-{name}")] if output_dir.is_dir() else []
    found = []
    for path in sorted(folders, key=lambda path: path.name, reverse=True):
        stamp = path.name.removesuffix(f"-{name}").partition("_")[0]
        if stamp.replace("-", "").isdigit() and (path / "config.toml").is_file():
            found.append(RunDirectory(path))
    return found


def meta_of(run: RunDirectory) -> dict[str, Any]:
    """run_meta.json of a run; empty without one."""
    return object_in(run.meta)


def _newest(wanted: Wanted) -> Start:
    """auto without a folder: the newest run of the same name, settings, images and model; without one, a new run.

    Where only images or model are others, it says so: nobody has to know that they have changed.
    """
    passed: list[str] = []
    for run in runs_named(Path(wanted.options.output_dir), wanted.options.output_name):
        meta = meta_of(run)
        if meta.get("fingerprint") != wanted.fingerprint:
            continue
        if meta.get("dataset_hash") != wanted.dataset:
            passed.append(f"{_image_changes(run, wanted)}; to go on with that run all the same, give --run_dir {run.path}")
        elif not is_finished(run, wanted.options, wanted.total_steps) and (other := _model_changes(run, wanted)):
            passed.append(f"{other}; to begin with the weights of that run all the same, give resume = {run.path}")
        else:
            return _continued(run, wanted)
        passed[-1] = f"a new run begins at the first step instead of going on with {run.path}: {passed[-1]}"
    return Start(None, warnings=tuple(passed[:1]))


def _image_changes(run: RunDirectory, wanted: Wanted) -> str:
    return changes(json_in(run.path / IMAGES), wanted.images)


def _model_changes(run: RunDirectory, wanted: Wanted) -> str:
    """Which files of the model are others than those a run was begun with, in words; empty where there are none, or nobody can know."""
    old, new = meta_of(run).get("model_files"), wanted.model_files()
    if not isinstance(old, dict) or not new:
        return ""
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return f"files of the model have changed ({'; '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)})" if names else ""


def _latest(run: RunDirectory | None, wanted: Wanted) -> Start:
    """latest: the newest whole state of the run in run_dir, or of the newest run of this name that has one."""
    name, folder = wanted.options.output_name, Path(wanted.options.output_dir)
    candidates = [run] if run is not None else runs_named(folder, name)
    for candidate in candidates:
        if newest_whole(candidate.state)[0] is not None or is_finished(candidate, wanted.options, wanted.total_steps):
            return _continued(candidate, wanted)
    where = str(run.path) if run is not None else f"a run named {name} in {folder}"
    raise _problem(f"latest needs a saved state, and there is none of {where}; auto starts a new run where there is none")


def _continued(run: RunDirectory, wanted: Wanted) -> Start:
    """Goes on in a run's own folder, from its newest whole state."""
    if is_finished(run, wanted.options, wanted.total_steps):
        return Start(run, finished=True)
    state, broken = newest_whole(run.state)
    if state is None:
        return Start(run, warnings=(*broken, *(["no whole state is left; training starts from the first step"] if broken else [])))
    differences = differing_settings(meta_of(run).get("settings"), wanted.settings)
    if check_state(state)["fingerprint"] != wanted.fingerprint:
        raise _problem(
            f"{run.path} was trained with other settings ({differences}); to go on with the new ones all the same give the state itself, "
            f"resume = {state}, and for a fresh start another run_dir"
        )
    if other := _model_changes(run, wanted):
        raise _problem(
            f"{other} since {run.path} was begun; put the earlier ones back, or to go on with these all the same give the state itself, "
            f"resume = {state}; resume = none starts a new run"
        )
    return Start(run, state, (*broken, *_dataset_warning(state, wanted)))


def _from_step(run: RunDirectory | None, step: int, wanted: Wanted) -> Start:
    """A step of the run in run_dir, or of the newest run of this name; the latter branches off into a new folder."""
    source = _source(run, f"step {step}", wanted)
    states = {int(path.name): path for path in state_folders(source.state)}
    if step not in states:
        there = f"it has the steps {', '.join(map(str, sorted(states)))}" if states else "it has no saved states"
        raise _problem(f"{source.path} has no saved state of step {step}; {there}")
    return _from_state(run, states[step], wanted)


def _from_epoch(run: RunDirectory | None, epoch: int, wanted: Wanted) -> Start:
    """The state that was saved at the end of an epoch, counted from 1; where it is looked for, and where it leads, is as with a step."""
    source = _source(run, f"epoch {epoch}", wanted)
    states = epoch_states(source.state)
    if epoch not in states:
        ends = f"it has the ends of the epochs {', '.join(map(str, states))}" if states else "it has no state from the end of an epoch"
        others = [str(int(path.name)) for path in state_folders(source.state) if path not in states.values()]
        within = f", and within epochs the steps {', '.join(others)}, which resume = <step> takes" if others else ""
        raise _problem(f"{source.path} has no state saved at the end of epoch {epoch}; {ends}{within}")
    return _from_state(run, states[epoch], wanted)


def epoch_in(resume: str) -> int | None:
    """The N of resume = epoch:N; None for anything else."""
    word, colon, number = resume.partition(":")
    return int(number) if word == "epoch" and colon and number.isdigit() else None


def epoch_states(folder: Path) -> dict[int, Path]:
    """The states inside `state/` that were saved at the end of an epoch, by its number from 1, in order.

    A step of few images may end several epochs. States of earlier versions do not say which, and are left out.
    """
    found: dict[int, Path] = {}
    for path in state_folders(folder):
        with suppress(BrokenState):
            before, done = read_manifest(path).get("epochs", (0, 0))
            found |= dict.fromkeys(range(before + 1, done + 1), path)
    return found


def _source(run: RunDirectory | None, what: str, wanted: Wanted) -> RunDirectory:
    """The run whose state is meant: that in run_dir, or the newest of this name."""
    if run is not None:
        return run
    options = wanted.options
    named = runs_named(Path(options.output_dir), options.output_name)
    if not named:
        raise _problem(f"there is no run named {options.output_name} in {options.output_dir} whose {what} could be used")
    return named[0]


def _from_path(run: RunDirectory | None, path: Path, wanted: Wanted) -> Start:
    """A state folder, or a run folder whose newest whole state is taken."""
    if not path.is_dir():
        raise _problem(f"{path} is not a folder; give auto, latest, none, a step, epoch:N, or the folder of a state or of a run")
    if (path / "manifest.json").is_file() or path.parent.name == "state":
        return _from_state(run, path, wanted)
    state, broken = newest_whole(path / "state")
    if state is None:
        raise _problem(f"{path} holds no whole training state" + (f": {'; '.join(broken)}" if broken else ""))
    start = _from_state(run, state, wanted)
    return Start(start.run, start.state, (*broken, *start.warnings))


def _from_state(run: RunDirectory | None, state: Path, wanted: Wanted) -> Start:
    """An explicit state is used even with other settings; the log says what differs."""
    try:
        manifest = check_state(state)
    except BrokenState as err:
        raise _problem(f"{state} cannot be used: {err}") from err
    warnings = list(_dataset_warning(state, wanted))
    if manifest["fingerprint"] != wanted.fingerprint:
        differences = differing_settings(meta_of(RunDirectory(state.parent.parent)).get("settings"), wanted.settings)
        warnings.append(f"the state was trained with other settings ({differences}); training goes on with the new ones")
    if other := _model_changes(RunDirectory(state.parent.parent), wanted):
        warnings.append(f"{other} since the state was saved; training goes on with those that are there now")
    return Start(run, state, tuple(warnings))


def differing_settings(old: object, new: dict[str, Any]) -> str:
    """Names of the settings that differ, with both values, for messages."""
    if not isinstance(old, dict):
        return "which ones is not known"
    before, now = (json.loads(json.dumps(settings, default=list)) for settings in (old, new))
    names = [
        f"{name}: {before.get(name)!r}, now {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    return "; ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _dataset_warning(state: Path, wanted: Wanted) -> Iterator[str]:
    if check_state(state)["dataset"] != wanted.dataset:
        told = _image_changes(RunDirectory(state.parent.parent), wanted)
        yield f"{told} since the state was saved; training goes on with what is there now"


class RunLock:
    """Held by the process that trains in a run folder, and by nothing once that process is gone, however it ended."""

    def __init__(self, run: RunDirectory) -> None:
        self._path = run.path / ".lock"
        self._file: IO[str] | None = None

    def take(self) -> None:
        """Raises OptionError when another process trains in this folder."""
        file = self._path.open("a")
        try:
            lock(file)
        except OSError as err:
            file.close()
            raise _problem(
                f"{self._path.parent} is being trained by another process; stop that one first, or use resume = none for a new run"
            ) from err
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
