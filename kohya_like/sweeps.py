"""Sweeps: several values of some settings are tried, and the steps go to those that do best.

Successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943) with a third kept, as Hyperband does (Li et al. 2018, arXiv 1603.06560):
all members train the first steps, the better third goes on from where it stopped, and so on, until two are left. They are told apart by
their held-out loss, which each measures on the same images with the same noise. The settings of the form give way only to what is clearly
better, because of many losses that differ by chance one is always the lowest: at the end, each at its best, and before it to what has no
lower learning rate, because a high one looks worse until it has decayed. A sweep is a folder in `.sweeps` of the output folder: the
settings of the form, and which run has which values; how far it is stands in the runs. Starts runs through the supervisor.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from sd_scripts.runs.events import RunStarted, Validated
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat, toml_files
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.files import one_at_a_time, write_atomically
from sd_scripts.schema.labels import label
from sd_scripts.schema.outside import read_as
from sd_scripts.schema.runs import RunOptions

from . import desk, form
from .measures import Mean, by_image
from .supervisor import ENDED, Job, JobSupervisor

FOLDER = ".sweeps"
KEPT = 3
"""One member in so many goes on."""
MOST_COST = 3.0
"""Times the steps of one run, for all members together."""
MOST_MEMBERS = 27
FEWEST = 2
"""Members that train to the end."""
SECTIONS = ("optimizer", "network")
"""Options of these change how a model is trained, never what the held-out loss measures."""
NOT_COMPARED = frozenset({"network_weights", "dim_from_weights", "train_unet", "lr_scheduler_type", "allow_custom_modules"})
HELD_OUT = 0.1
"""Part of the images that is held out where the form holds out none."""
TROUBLE = "trouble.txt"
RATE = "learning_rate"
RATES = (RATE, "unet_lr")
WAITS = ("queued", "running")


# What will be tried


@dataclass(frozen=True)
class Rungs:
    """The steps after which members are compared, the last at the end of the run or just before; and how many train up to each."""

    steps: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def cost(self) -> float:
        """Steps of all members together, in runs of full length."""
        before = (0, *self.steps)
        return sum(count * (step - last) for count, step, last in zip(self.counts, self.steps, before, strict=False)) / self.steps[-1]


def rungs_of(members: int, steps: int) -> Rungs:
    """The latest first comparison, each further one after twice the steps, with which all members together take at most MOST_COST times
    the steps of one run. Raises OptionError for too few steps.
    """
    counts = [members]
    while counts[-1] > (FEWEST if len(counts) > 1 else MOST_COST):
        counts.append(max(FEWEST, math.ceil(counts[-1] / KEPT)))
    doublings = range(len(counts) - 1)
    # What all train beside FEWEST whole runs, in first steps; with them they are to be MOST_COST whole runs.
    beside = members - FEWEST + sum((count - FEWEST) * 2**place for place, count in zip(doublings[:-1], counts[1:], strict=False))
    first = min(steps, int(steps * (MOST_COST - FEWEST)) // beside) if doublings else steps
    if first < 1:
        raise OptionError(Problem("max_train_steps", f"max_train_steps: {steps} steps are too few to compare {members} runs in; give more"))
    return Rungs((*(first * 2**place for place in doublings), steps - steps % first), tuple(counts))


def axes_of(run: type[RunOptions]) -> dict[str, flat.FlatField]:
    """The settings of a kind of run that can be swept over."""
    known = form.shown_fields(run)
    return {name: field for name, field in known.items() if field.section in SECTIONS and not field.many and name not in NOT_COMPARED}


def read_axes(run: type[RunOptions], given: Mapping[str, object]) -> dict[str, tuple[Any, ...]]:
    """The values of each setting, from texts such as `1e-4 3e-4` (spaces or commas between them). Raises OptionError with all problems."""
    known, read, problems = axes_of(run), {}, list[Problem]()
    for name, text in given.items():
        if name not in known:
            words = "is no option here" if name not in flat.fields(run) else "cannot be swept over"
            problems.append(Problem(name, f"{name} {words}; these can: {', '.join(known)}"))
            continue
        parts = flat.numbers(known[name], str(text))
        if len(parts) == 1 and "," in parts[0]:
            problems.append(Problem(name, flat.one_or_two(name, parts[0])))
            continue
        values = [form.from_text(known[name], part) for part in parts]
        if not values:
            problems.append(Problem(name, f"{name}: give the values to try, with spaces between them"))
        read[name] = tuple(dict.fromkeys(_switch(value) if known[name].type is bool else value for value in values))
    if not given:
        problems.append(Problem("", "choose a setting to try several values of, such as learning_rate"))
    refuse(problems)
    return read


def _switch(value: Any) -> Any:
    return {"on": True, "true": True, "off": False, "false": False}.get(str(value).lower(), value)


@dataclass(frozen=True)
class Member:
    """One run of a sweep. values: what differs from the form, empty for the form's own. rung: the last one it was started for, or -1.

    losses: mean held-out losses at the rungs before.
    """

    values: Mapping[str, Any]
    run: str = ""
    rung: int = -1
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """What is known of a sweep before anybody looks at its runs."""

    name: str
    base: RunOptions
    members: tuple[Member, ...]
    rungs: Rungs
    notes: tuple[str, ...] = ()
    """What was changed in the settings of the form, in sentences."""
    is_ended: bool = False
    """Nothing more is started: it is through, or somebody has ended it."""

    def options(self, member: Member) -> RunOptions:
        return flat.build(type(self.base), {**_given(self.base), **member.values})

    def tried(self, member: Member) -> desk.Tried:
        """What a member tries; of the form's own settings all that others try."""
        own = flat.flatten(self.base)
        values = member.values or {name: own[name] for each in self.members for name in each.values}
        settings = ((label(name, self.base.family) or name, self._said(name, value)) for name, value in values.items())
        return desk.Tried(tuple(settings), own=not member.values)

    def _said(self, name: str, value: Any) -> str:
        told = form.to_text(flat.fields(type(self.base))[name], value)
        return {True: "on", False: "off", "": "none"}.get(told, str(told))


def planned(options: RunOptions, axes: Mapping[str, Sequence[Any]]) -> Sweep:
    """The sweep over all combinations, the form's own settings first. Raises OptionError with every problem of every member."""
    base, notes = _comparable(options)
    now = flat.flatten(base)
    members, seen, problems = [Member({})], [base], list[Problem]()
    for chosen in itertools.product(*axes.values()):
        values = dict(zip(axes, chosen, strict=True))
        try:
            made = flat.build(type(base), {**_given(base), **values})
        except OptionError as err:
            problems += err.problems
            continue
        # What sleeps beside another value makes no member of its own.
        if made not in seen:
            settled = flat.flatten(made)
            seen.append(made)
            members.append(Member({name: settled[name] for name in axes if settled[name] != now[name]}))
    refuse(problems)
    if RATE in axes and all(map(_overruled, seen)):
        raise OptionError(
            Problem(
                RATE, f"{RATE} has no effect, because these are given: {', '.join(_overruled(base))}; try values of those, or empty them"
            )
        )
    if not 2 <= len(members) <= MOST_MEMBERS:
        few = "all of these values are the form's own, so there is nothing to compare; give others"
        raise OptionError(
            few if len(members) < 2 else f"these are {len(members)} runs; a sweep has at most {MOST_MEMBERS}, so give fewer values"
        )
    rungs = rungs_of(len(members), base.training.max_train_steps)
    every = {"validate_every_n_steps": rungs.steps[0] if len(rungs.steps) > 1 else None}
    base = flat.build(type(base), {**_given(base), **every})
    return Sweep("", base, tuple(members), rungs, tuple(notes))


def _overruled(options: RunOptions) -> list[str]:
    """The rates that stand in the place of learning_rate, where all that is trained has one of its own."""
    values = flat.flatten(options)
    own = {"unet_lr": True, "text_encoder_lr": values.get("train_text_encoder")}
    rates = {name: values[name] for name, is_trained in own.items() if is_trained and name in values}
    return list(rates) if all(rate not in (None, ()) for rate in rates.values()) else []


def described(sweep: Sweep) -> str:
    """What a sweep will do, in sentences."""
    steps = " and ".join(map(str, sweep.rungs.steps[:-1]))
    compared = f"compared at steps {steps}, the better third goes on" if steps else "compared at the end"
    first = f"{len(sweep.members)} runs, {compared}: at most {sweep.rungs.cost:.1f} times the steps of one run."
    return " ".join((first, *sweep.notes))


def _comparable(options: RunOptions) -> tuple[RunOptions, list[str]]:
    """The options of the form as a sweep trains them, and what is different. Raises OptionError for what cannot be compared."""
    values, notes = _given(options), list[str]()
    if values.get("max_train_epochs"):
        raise OptionError(Problem("max_train_epochs", "max_train_epochs: a sweep counts steps; leave it empty and set max_train_steps"))
    if values.get("validation_split") == 0 and not values.get("dataset_config"):
        values["validation_split"] = HELD_OUT
        notes.append(f"{HELD_OUT:.0%} of the images are held out, because held-out losses are compared.")
    if values.pop("early_stop_patience", None) is not None:
        notes.append("early_stop_patience is left out: the sweep says who goes on.")
    if not values.get("save_state_on_train_end", True):
        values["save_state_on_train_end"] = True
        notes.append("States are kept, because the better runs go on from them.")
    values["resume"] = "none" if values.get("resume") in (None, "auto", "latest") else values["resume"]
    return flat.build(type(options), values), notes


def _given(options: RunOptions) -> dict[str, Any]:
    return {name: value for name, value in flat.flatten(options).items() if value is not None}


# How far it is


@dataclass(frozen=True)
class MemberStanding:
    """How a member does.

    state: that of its run; "waiting" where it has come to a rung before others, "" before it is started. losses: mean held-out loss at
    each rung that it has reached. out: why it did not go on; empty while it is in.
    """

    member: Member
    state: str
    step: int
    losses: tuple[float, ...]
    out: str = ""


@dataclass(frozen=True)
class SweepProgress:
    """standings: in the order of members. rung: the one that is being trained. starts: members whose turn it is. winner: its place."""

    standings: tuple[MemberStanding, ...]
    rung: int
    starts: tuple[int, ...]
    winner: int | None
    is_through: bool


@lru_cache(maxsize=256)
def _measured(file: Path, _time: int, _size: int) -> dict[int, Validated]:
    """Held-out losses of a run by step."""
    found: dict[int, Validated] = {}
    for event in RunDirectory(file.parent).history():
        if isinstance(event, RunStarted):
            # What came after the state from which it goes on is done again.
            found = {step: told for step, told in found.items() if step <= event.start_step}
        elif isinstance(event, Validated) and event.loss is not None:
            found[event.step] = event
    return found


def measured(run: RunDirectory) -> dict[int, Validated]:
    """What a run's log says of held-out losses, by step."""
    try:
        stat = run.events_file.stat()
    except OSError:
        return {}
    return _measured(run.events_file, stat.st_mtime_ns, stat.st_size)


def progress_of(sweep: Sweep, jobs: Mapping[str, Job]) -> SweepProgress:
    """Where a sweep stands; follows from its runs alone. jobs: all runs by name."""
    standings = [_standing(sweep, member, jobs.get(member.run)) for member in sweep.members]
    inside = list(range(len(standings)))
    for rung in range(len(sweep.rungs.steps)):
        starts = [place for place in inside if sweep.members[place].rung < rung]
        settled = [_settled(standings[place], rung) for place in inside]
        standings = [replace(one, out=settled[inside.index(place)]) if place in inside else one for place, one in enumerate(standings)]
        arrived = [place for place in inside if len(standings[place].losses) > rung]
        is_open = any(not standings[place].out and place not in arrived for place in inside)
        if is_open or starts:
            for place in () if sweep.is_ended else arrived:
                standings[place] = replace(standings[place], state="waiting")
            return SweepProgress(tuple(standings), rung, tuple(starts), None, False)
        if rung == len(sweep.rungs.steps) - 1 or not arrived:
            return SweepProgress(tuple(standings), rung, (), _winner(sweep, arrived, standings, jobs), True)
        first = None if _are_outrun(sweep, arrived, jobs, rung) else 0
        # Who was sent on stays in, also by an earlier rule.
        ranked = sorted(arrived, key=lambda place: (sweep.members[place].rung <= rung, place != first, standings[place].losses[rung]))
        inside = ranked[: max(FEWEST, sweep.rungs.counts[rung + 1])]
        for place in ranked[len(inside) :]:
            standings[place] = replace(standings[place], out=f"higher loss at step {sweep.rungs.steps[rung]}")
    raise AssertionError("a sweep has a rung")


def _are_outrun(sweep: Sweep, arrived: Sequence[int], jobs: Mapping[str, Job], rung: int) -> bool:
    """Whether the form's own settings have come to a rung with a loss that is clearly above that of others with no lower learning rate."""
    own = flat.flatten(sweep.base)
    runs = {place: jobs[sweep.members[place].run].run for place in {0, *arrived} if sweep.members[place].run in jobs}
    told = {place: measured(run).get(sweep.rungs.steps[rung]) for place, run in runs.items()}

    def is_slower(values: Mapping[str, Any]) -> bool:
        return any(values[name] < (own.get(name) or own.get(RATE) or 0.0) for name in RATES if values.get(name) is not None)

    fast = [place for place in arrived if place != 0 and not is_slower(sweep.members[place].values)]
    return any(_is_below(told.get(place), told.get(0)) for place in fast)


def _winner(sweep: Sweep, arrived: Sequence[int], standings: Sequence[MemberStanding], jobs: Mapping[str, Job]) -> int | None:
    """The lowest loss of a whole run, where it is clearly below the lowest with the settings of the form."""
    lowest = {place: _lowest(jobs.get(sweep.members[place].run)) for place in arrived}

    def loss(place: int) -> float:
        best = lowest[place]
        return standings[place].losses[-1] if best is None or best.loss is None else best.loss

    def is_better(place: int) -> bool:
        """Whether the form's own settings give way to a member; without both logs the losses alone tell."""
        below = _is_below(lowest[place], lowest[0])
        return loss(place) < loss(0) if below is None else below

    able = [place for place in arrived if place == 0 or 0 not in arrived or is_better(place)]
    return min(able, key=loss, default=None)


def _is_below(one: Validated | None, other: Validated | None) -> bool | None:
    """Whether held-out losses are clearly lower than others; None where they are not of the same samples."""
    difference = _difference(one, other)
    return None if difference is None else difference.value < -(difference.half or 0.0)


def _standing(sweep: Sweep, member: Member, job: Job | None) -> MemberStanding:
    if job is None:
        return MemberStanding(member, "gone" if member.run else "", 0, member.losses)
    losses = list(member.losses)
    # Its log is read when it has ended, where a loss that it measured counts with the state that it saved.
    told = measured(job.run) if job.state in ENDED else {}
    for step in sweep.rungs.steps[len(losses) : member.rung + 1]:
        if step not in told:
            break
        losses.append(told[step].loss or 0.0)
    return MemberStanding(member, job.state, job.summary.step, tuple(losses))


def _settled(standing: MemberStanding, rung: int) -> str:
    """Why a member that has not come to a rung will not come there; empty where it has come, or is on its way."""
    if len(standing.losses) > rung or standing.member.rung < rung or standing.state in WAITS:
        return ""
    if not standing.state:
        return "was not started"
    step = standing.step
    told = {"stopped": f"stopped at step {step}", "failed": f"failed at step {step}", "died": f"died at step {step}"}
    told |= {"gone": "its folder is gone", "finished": "measured no held-out loss", "damaged": "its folder is damaged"}
    return told[standing.state]


def verdict(sweep: Sweep, progress: SweepProgress, jobs: Mapping[str, Job]) -> str:
    """What came out, in a sentence: how well the winner does, and how sure it is that it does better than the settings of the form."""
    if progress.winner is None:
        return "No run came to the end; the reasons stand beside them." if progress.is_through else ""
    won, own = progress.standings[progress.winner], progress.standings[0]
    best = _lowest(jobs.get(won.member.run))
    loss = f"{won.losses[-1] if best is None else best.loss:.4g}"
    if progress.winner == 0:
        return f"The settings of the form stay, with a held-out loss of {loss}; nothing that was tried is clearly better."
    if best is None:
        return f"Its held-out loss is {loss}."
    said = f"Its held-out loss is lowest at step {best.step}, {loss}"
    if own.member.run not in jobs or not own.losses:
        return f"{said}."
    if len(own.losses) == len(sweep.rungs.steps):
        interval = _interval(_difference(best, _lowest(jobs[own.member.run])))
        return f"{said}, which is lower than the form's settings come to by {interval}." if interval else f"{said}."
    step = sweep.rungs.steps[len(own.losses) - 1]
    interval = _interval(_difference(*(measured(jobs[each.member.run].run).get(step) for each in (won, own))))
    return f"{said}; at step {step} it is lower than that of the form's settings by {interval}." if interval else f"{said}."


def _interval(difference: Mean | None) -> str:
    """How much lower losses are, empty where they are not clearly lower."""
    if difference is None or difference.value >= -(difference.half or 0.0):
        return ""
    told = f"{-100 * difference.value:.3g}"
    return f"{told} %" if difference.half is None else f"{told} ± {100 * difference.half:.2g} % (95 %)"


def _lowest(job: Job | None) -> Validated | None:
    """Where a run did best. Late steps of a good rate can be worse than those before, because it has learned the images by heart."""
    return min(measured(job.run).values(), key=lambda told: told.loss or 0.0, default=None) if job else None


def _difference(one: Validated | None, other: Validated | None) -> Mean | None:
    """By what part held-out losses of one run lie above those of another; None where they are not of the same samples.

    Of each image relative to its own loss in the other run: some are several times as hard as others, and so are their differences.
    """
    if not one or not other or not one.samples or [time for time, _ in one.samples] != [time for time, _ in other.samples or ()]:
        return None
    high, low = ([loss for _, loss in told.samples or ()] for told in (one, other))
    images = min(one.images or len(low), len(low))
    usual = [statistics.fmean(low[place::images]) for place in range(images)]
    gaps = [(this - that) / scale for this, that, scale in zip(high, low, itertools.cycle(usual), strict=False) if scale]
    return by_image(gaps, images) if len(gaps) == len(low) else None


# What is on the disk


def names_in(root: Path) -> list[str]:
    """The sweeps of an output folder, the newest first."""
    return sorted((path.parent.name for path in (root / FOLDER).glob("*/sweep.json")), reverse=True)


class Sweeps:
    """The sweeps of one output folder."""

    def __init__(self, supervisor: JobSupervisor) -> None:
        self.supervisor = supervisor
        self.folder = supervisor.root / FOLDER
        self._heard: dict[str, tuple[str, ...]] = {}

    def begin(self, sweep: Sweep) -> Sweep:
        """Keeps a sweep and starts its first runs. Raises OptionError."""
        named = f"{datetime.now().strftime('%Y%m%d-%H%M%S')}-{sweep.base.output.output_name}"
        with one_at_a_time(self.supervisor.root, ".sweeping"):
            name = next(
                each
                for each in itertools.chain([named], (f"{named}-{count}" for count in itertools.count(2)))
                if not (self.folder / each).exists()
            )
            kept = replace(sweep, name=name)
            try:
                (self.folder / name).mkdir(parents=True)
                write_atomically(self.folder / name / "base.toml", toml_files.to_toml(kept.base))
                self._write(kept)
            except OSError as err:
                raise OptionError(f"the sweep cannot be kept in {self.folder}: {err.strerror or err}; free some space there") from err
        self.advance(kept.name)
        return self.read(kept.name)

    def names(self) -> list[str]:
        """The newest first."""
        return names_in(self.supervisor.root)

    def read(self, name: str) -> Sweep:
        """Raises OptionError for one that is not there or cannot be read."""
        if name not in self.names():
            raise OptionError(f"there is no sweep {name} in {self.supervisor.root}")
        return _read(self.folder / name, *_stamp(self.folder / name))

    def _write(self, sweep: Sweep) -> None:
        told = {
            "members": [asdict(member) for member in sweep.members],
            **asdict(sweep.rungs),
            "notes": sweep.notes,
            "is_ended": sweep.is_ended,
        }
        write_atomically(self.folder / sweep.name / "sweep.json", json.dumps(told, ensure_ascii=False, indent=1))

    def jobs(self) -> dict[str, Job]:
        return {job.name: job for job in self.supervisor.seen()}

    def advance(self, name: str) -> SweepProgress:
        """Starts what a sweep has come to. Whoever calls it, and how often, makes no difference. Raises OptionError."""
        with one_at_a_time(self.supervisor.root, ".sweeping"):
            sweep = self.read(name)
            progress = progress_of(sweep, self.jobs())
            if sweep.is_ended:
                return progress
            for place in progress.starts:
                sweep = self._started(sweep, place, progress)
            if progress.is_through:
                if progress.winner is not None:
                    self._say(sweep.members[progress.winner], {"starred": True})
                self._write(replace(sweep, is_ended=True))
            return progress

    def _started(self, sweep: Sweep, place: int, progress: SweepProgress) -> Sweep:
        """The sweep with a member started for the present rung, written down before the next one is."""
        member, steps, rung = sweep.members[place], sweep.rungs.steps, progress.rung
        options = sweep.options(member)
        until = steps[rung] if rung < len(steps) - 1 else None
        job = self.supervisor.find(member.run) if member.run else None
        if job is None or job.state not in WAITS:
            job = self.supervisor.start(options.script, options, resume=None if job is None else job.path, stop_after=until)
        begun = replace(member, run=job.name, rung=rung, losses=progress.standings[place].losses)
        after = replace(sweep, members=tuple(begun if at == place else each for at, each in enumerate(sweep.members)))
        self._write(after)
        if not member.run:
            self._say(begun, {"tags": {"add": [f"sweep {sweep.name}"[: desk.MAX_TAG]]}}, sweep.tried(member))
        return after

    def _say(self, member: Member, order: Mapping[str, Any], tried: desk.Tried | None = None) -> None:
        job = self.supervisor.find(member.run)
        if job is not None:
            desk.say(job.path, order)
            if tried is not None:
                desk.try_out(job.path, tried)

    def end(self, name: str) -> None:
        """Starts nothing more, and stops what is at work or waits."""
        with one_at_a_time(self.supervisor.root, ".sweeping"):
            sweep = self.read(name)
            self._write(replace(sweep, is_ended=True))
            for member in sweep.members:
                job = self.supervisor.find(member.run) if member.run else None
                if job is not None and job.state in WAITS:
                    self.supervisor.request_stop(job)

    def hear(self, jobs: Sequence[Job]) -> None:
        """A listener of the supervisor: goes on with each sweep that is not through, when the state of one of its runs has changed."""
        states = {job.name: job.state for job in jobs}
        for name in self.names():
            try:
                sweep = self.read(name)
                heard = tuple(states.get(member.run, "") for member in sweep.members)
                if not sweep.is_ended and self._heard.get(name) != heard:
                    self.advance(name)
                    (self.folder / name / TROUBLE).unlink(missing_ok=True)
                    self._heard[name] = heard
            except OptionError as err:
                # It stays as it is, and its page says why.
                self._trouble(name, err)

    def _trouble(self, name: str, err: OptionError) -> None:
        """What keeps a sweep from going on, for whoever looks at it."""
        with contextlib.suppress(OSError):
            write_atomically(self.folder / name / TROUBLE, str(err))

    def trouble(self, name: str) -> list[str]:
        """Why a sweep does not go on."""
        try:
            return [(self.folder / name / TROUBLE).read_text(encoding="utf-8")]
        except (OSError, ValueError):
            return []

    def discard_others(self, name: str) -> list[str]:
        """Moves the runs of a sweep that is through, but for the winner, into the trash; their names. Raises OptionError."""
        sweep, jobs = self.read(name), self.jobs()
        progress = progress_of(sweep, jobs)
        if progress.winner is None:
            raise OptionError("this sweep has no winner; delete its runs one by one in the list")
        others = [jobs[member.run] for place, member in enumerate(sweep.members) if place != progress.winner and member.run in jobs]
        return [self.supervisor.discard(job).what for job in others]


@dataclass(frozen=True)
class _Told:
    """What the file of a sweep says."""

    members: tuple[Member, ...]
    steps: tuple[int, ...]
    counts: tuple[int, ...]
    notes: tuple[str, ...]
    is_ended: bool


def _stamp(folder: Path) -> tuple[int, int]:
    try:
        stat = (folder / "sweep.json").stat()
    except OSError as err:
        raise OptionError(f"{folder.name}: its sweep.json cannot be read: {err.strerror}") from err
    return stat.st_mtime_ns, stat.st_ino


@lru_cache(maxsize=64)
def _read(folder: Path, _time: int, _inode: int) -> Sweep:
    try:
        told = read_as(_Told, (folder / "sweep.json").read_bytes())
        values = toml_files.read_toml(folder / "base.toml")
        base = flat.build(flat.run_of(values), values, origin="base.toml")
        rungs = Rungs(told.steps, told.counts)
        if not told.members or not rungs.steps or len(rungs.steps) != len(rungs.counts):
            raise ValueError("it has no members")
        if any(not -1 <= member.rung < len(rungs.steps) or len(member.losses) > len(rungs.steps) for member in told.members):
            raise ValueError("a member is at a rung that it does not have")
        sweep = Sweep(folder.name, base, told.members, rungs, told.notes, told.is_ended)
        for member in sweep.members:
            sweep.options(member)
        return sweep
    except (OSError, ValueError) as err:
        raise OptionError(f"{folder.name}: the sweep cannot be read ({err}); delete the folder {folder}") from err
