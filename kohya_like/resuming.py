"""Where Start would begin, told before anybody presses it. Reads run folders, neither images nor weights; the rules are those of
sd_scripts/runs/resume.py, which the training process follows.

What only that process can know, it says in the run's log: whether a state is whole to the last byte, and whether images, captions or
files of the model have changed since.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sd_scripts.runs.command import processes_here
from sd_scripts.runs.resume import differing_settings, epoch_in, epoch_states, is_finished, meta_of, runs_named, training_settings
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.states import BrokenState, read_manifest, state_folders
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.runs import RunOptions

from . import desk, monitor

PLACES = ("train_data_dir", "reg_data_dir", "dataset_config", "in_json", "conditioning_data_dir", "control_data_dir")
"""Options that say where the images are; a run with others is taken for one on other images."""
OFFERED_RUNS, OFFERED_STATES = 5, 5
"""Runs, and states of each, that are offered to begin from, newest first."""
AT_START = "Whether images, captions or files of the model have changed is looked at when it starts, and the log says so."

UnderWay = Callable[[Path], str]
"""The state of the run in a folder where it is running or queued, otherwise nothing."""
Kind = Literal["new", "continue", "from state", "finished", "busy", "refused"]


@dataclass(frozen=True)
class Outlook:
    """What Start would do, in a sentence for the page. finished, busy and refused: nothing is started."""

    kind: Kind
    text: str
    notes: tuple[str, ...] = ()
    run: Path | None = None
    """The run folder that goes on; None when a new one is made."""
    state: Path | None = None
    """The state that training begins with; None for the first step."""

    @property
    def starts(self) -> bool:
        return self.kind in ("new", "continue", "from state")


@dataclass(frozen=True)
class Offer:
    """A state that resume can name."""

    run: str
    step: int
    path: str
    saved: str
    called: dict[str, Any]
    """What the page calls the run by, beside its own name."""


@dataclass(frozen=True)
class Foresight:
    """What the page shows: the outlook, and what else resume could be."""

    kind: str = ""
    text: str = ""
    notes: tuple[str, ...] = ()
    offers: list[Offer] = field(default_factory=list)
    base: str = ""
    """What is known of the base model: its licence, and what few steps want."""

    def as_page(self) -> dict[str, Any]:
        return asdict(self)


def foresight(options: RunOptions, under_way: UnderWay) -> Foresight:
    """What the page shows for these options."""
    found = outlook(options, under_way)
    return Foresight(found.kind, found.text, found.notes, list(_offers(options)))


def outlook(options: RunOptions, under_way: UnderWay) -> Outlook:
    """What a start with these options would do."""
    asked = options.distributed.resume.strip()
    if asked == "none":
        return Outlook("new", "Starts a new run from the first step, as Resume says.")
    if asked == "auto":
        return _automatic(options, under_way)
    if asked == "latest":
        return _latest(options, under_way)
    epoch = epoch_in(asked)
    if epoch is not None:
        return _from_epoch(options, epoch)
    return _from_step(options, int(asked)) if asked.isdigit() else _from_path(options, Path(asked).expanduser())


def _automatic(options: RunOptions, under_way: UnderWay) -> Outlook:
    """The newest run of this name with the same settings and images goes on; without one, a new run begins."""
    others: list[tuple[str, str]] = []
    for run in _named(options):
        differing = _differing(run, options)
        if differing:
            others.append((desk.called(run.path), differing))
            continue
        if state := under_way(run.path):
            return _busy(run, state)
        return _continued(run, options)
    if not others:
        return Outlook("new", "Starts a new run from the first step.")
    name, differing = others[0]
    return Outlook("new", "Starts a new run from the first step.", (f"The earlier run {name} has other settings: {differing}.",))


def _latest(options: RunOptions, under_way: UnderWay) -> Outlook:
    """The newest run of this name that has a state goes on, and no other."""
    for run in _named(options):
        total = _total_steps(run, options)
        if newest_state(run.state)[0] is None and not (total is not None and is_finished(run, options.output, total)):
            continue
        if state := under_way(run.path):
            return _busy(run, state)
        differing = _differing(run, options)
        if differing:
            text = f"{desk.called(run.path)} was trained with other settings ({differing}); auto starts a new run."
            return Outlook("refused", text, run=run.path)
        return _continued(run, options)
    text = f"latest needs a saved state, and no run named {options.output.output_name} in {options.output.output_dir} has one."
    return Outlook("refused", text)


def _busy(run: RunDirectory, state: str) -> Outlook:
    name = desk.called(run.path)
    if state == "queued":
        text = f"{name} waits in the queue. Start offers to open it or to train again."
    else:
        text = f"{name} is at work. Start offers to open it or to train again."
    return Outlook("busy", text, run=run.path)


def _continued(run: RunDirectory, options: RunOptions) -> Outlook:
    total, name = _total_steps(run, options), desk.called(run.path)
    if total is not None and is_finished(run, options.output, total):
        text = f"{name} is finished already ({total} steps). More steps make it longer; Start offers to open it or to train again."
        return Outlook("finished", text, run=run.path)
    state, broken = newest_state(run.state)
    if state is None:
        notes = (*broken, f"The earlier run {name} has the same settings, but no saved state to go on from.")
        return Outlook("new", "Starts a new run from the first step.", notes)
    step = int(state.name)
    of = "" if total is None else f" of {total}"
    text = f"Continues {name} from step {step}{of}, saved {_ago(state)}."
    return Outlook("continue", text, (*broken, AT_START), run.path, state)


def _from_step(options: RunOptions, step: int) -> Outlook:
    return _from_moment(options, "step", step, lambda folder: {int(path.name): path for path in state_folders(folder)})


def _from_epoch(options: RunOptions, epoch: int) -> Outlook:
    return _from_moment(options, "epoch", epoch, epoch_states)


def _from_moment(options: RunOptions, unit: str, number: int, states_of: Callable[[Path], dict[int, Path]]) -> Outlook:
    """The state of a step, or of the end of an epoch, of the newest run of this name. states_of: all those in a folder, by number."""
    named = _named(options)
    if not named:
        text = f"There is no run named {options.output.output_name} in {options.output.output_dir} whose {unit} {number} could be used."
        return Outlook("refused", text)
    source = named[0]
    states = states_of(source.state)
    if number not in states:
        there = f"it has the {unit}s {', '.join(map(str, states))}" if states else "it has none"
        return Outlook("refused", f"{desk.called(source.path)} has no saved state of {unit} {number}; {there}.")
    return _from_state(options, states[number])


def _from_path(options: RunOptions, path: Path) -> Outlook:
    """A state folder, or a run folder whose newest state is taken."""
    if not path.is_dir():
        return Outlook(
            "refused", f"{path} is not a folder; give auto, latest, none, a step, epoch:N, or the folder of a state or of a run."
        )
    if (path / "manifest.json").is_file() or path.parent.name == "state":
        return _from_state(options, path)
    state, broken = newest_state(path / "state")
    if state is None:
        return Outlook("refused", f"{path} holds no whole training state" + (f": {'; '.join(broken)}." if broken else "."))
    return _from_state(options, state)


def _from_state(options: RunOptions, state: Path) -> Outlook:
    """A new run that begins where a state stands, even with other settings."""
    source = RunDirectory(state.parent.parent)
    try:
        step = int(read_manifest(state)["step"])
    except BrokenState as err:
        return Outlook("refused", f"{state} cannot be used: {err}.")
    differing = _differing(source, options)
    notes = (f"It was trained with other settings ({differing}); the new run goes on with those of the form.",) if differing else ()
    text = f"Starts a new run from step {step} of {desk.called(source.path)}, saved {_ago(state)}."
    return Outlook("from state", text, (*notes, AT_START), state=state)


def _named(options: RunOptions) -> list[RunDirectory]:
    return runs_named(Path(options.output.output_dir).expanduser(), options.output.output_name)


def _differing(run: RunDirectory, options: RunOptions) -> str:
    """What the options of a run have that these have not, in words; empty when it is the same training on the same images."""
    try:
        old = run.options()
    except OptionError:
        return "its config.toml is not one of this version"
    if type(old) is not type(options):
        return f"it is a run of {old.script}"
    before, now = settings_of(old), settings_of(options)
    told = meta_of(run).get("settings")
    if isinstance(told, dict) and "global_batch" in told:
        # What it really was: the number of processes may have been another one then.
        before["global_batch"] = told["global_batch"]
    before |= {name: value for name, value in flat.flatten(old).items() if name in PLACES}
    now |= {name: value for name, value in flat.flatten(options).items() if name in PLACES}
    return "" if before == now else differing_settings(before, now)


def settings_of(options: RunOptions) -> dict[str, Any]:
    """What decides what a step of these options trains on this machine."""
    distributed = options.distributed
    together = options.dataset.train_batch_size * options.training.gradient_accumulation_steps
    batch = distributed.global_batch_size or together * processes_here(distributed) * distributed.num_machines
    return training_settings(options, batch)


def _total_steps(run: RunDirectory, options: RunOptions) -> int | None:
    """Steps of the whole run; with max_train_epochs only its own log knows, as long as the number of epochs is the same."""
    epochs = options.training.max_train_epochs
    if epochs is None:
        return options.training.max_train_steps
    if run.options().training.max_train_epochs != epochs:
        return None
    return monitor.summary(run.events_file).steps or None


def newest_state(folder: Path, before: float = math.inf) -> tuple[Path | None, tuple[str, ...]]:
    """The newest state before a step whose files are all there, and a sentence for each newer one that is not."""
    broken = []
    for path in reversed([path for path in state_folders(folder) if int(path.name) < before]):
        try:
            read_manifest(path)
        except BrokenState as err:
            broken.append(f"The state of step {int(path.name)} is broken and is not used: {err}.")
            continue
        return path, tuple(broken)
    return None, tuple(broken)


def _offers(options: RunOptions) -> Iterator[Offer]:
    for run in _named(options)[:OFFERED_RUNS]:
        names = desk.read(run.path).names()
        for state in list(reversed(state_folders(run.state)))[:OFFERED_STATES]:
            if (state / "manifest.json").is_file():
                yield Offer(run.name, int(state.name), str(state), _ago(state), names)


def _ago(state: Path) -> str:
    """How long ago a state was saved, in words."""
    seconds = max(0.0, time.time() - (state / "manifest.json").stat().st_mtime)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // length)
        if count:
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "just now"
