"""What people do with runs that are there: name, star, tag and describe them, delete them, and free the disk of old states.

What they say of a run is `desk.json` in its folder: the folder keeps its name, which is that of the run everywhere else. Who changes words
says which they have read; where somebody else has written since, nothing is lost: the present words come back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from starlette.routing import Route

from sd_scripts.families import FACTS
from sd_scripts.runs.orders import Asked
from sd_scripts.runs.states import BrokenState, check_state, read_manifest, state_folders
from sd_scripts.runs.trash import Discarded, Trash, bytes_of
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import TEMPORARY_MARK, one_at_a_time, write_atomically
from sd_scripts.schema.flat import run_of
from sd_scripts.schema.outside import object_in, read_as
from sd_scripts.schema.prompts import Defaults, PromptSpec, read_prompts
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.toml_files import read_toml, to_toml

from .answers import orders
from .supervisor import ENDED, Job, JobSupervisor, queue_of

FILE = "desk.json"
MAX_LABEL, MAX_NOTES, MAX_TAG, MAX_TAGS = 120, 20_000, 40, 30
_STARTED = re.compile(r"^\d{8}-\d{6}(_\d+)?-")
"""What the folder of a run has before its name."""


@dataclass(frozen=True)
class Tried:
    """What a sweep tries with a run. The page says it in the reader's language."""

    settings: tuple[tuple[str, str], ...] = ()
    """Label and value of each; none for a run of no sweep."""
    own: bool = False
    """Whether they are those of the form."""

    @property
    def words(self) -> str:
        """In English."""
        said = ", ".join(f"{label} {value}" for label, value in self.settings)
        return f"{said} (as in the form)" if said and self.own else said


@dataclass(frozen=True)
class Said:
    """What people say of a run. label: instead of its folder's name; empty for none."""

    label: str = ""
    notes: str = ""
    starred: bool = False
    tags: tuple[str, ...] = ()
    tried: Tried = Tried()

    @property
    def called(self) -> str:
        """What lists call the run, in English: its label, else what a sweep tries with it; empty where only its folder has a name."""
        return self.label or self.tried.words

    def names(self) -> dict[str, Any]:
        """What the page calls the run by."""
        return {"label": self.label, "tried": asdict(self.tried)}

    def row(self) -> dict[str, Any]:
        return asdict(self)


def read(folder: Path) -> Said:
    """What is said of the run in a folder; nothing where nobody has said anything that can be read."""
    try:
        stat = (folder / FILE).stat()
    except OSError:
        return Said()
    return _read(folder / FILE, stat.st_mtime_ns, stat.st_ino)


@lru_cache(maxsize=4096)
def _read(file: Path, _time: int, _inode: int) -> Said:
    known = object_in(file)
    tags = known.get("tags")
    return Said(
        str(known.get("label") or "")[:MAX_LABEL],
        str(known.get("notes") or "")[:MAX_NOTES],
        known.get("starred") is True,
        tuple(tag for tag in tags if isinstance(tag, str))[:MAX_TAGS] if isinstance(tags, list) else (),
        _tried(known.get("tried")),
    )


def _tried(known: object) -> Tried:
    try:
        return read_as(Tried, json.dumps(known or {}))
    except ValueError:
        return Tried()


def called(folder: Path) -> str:
    """What sentences call the run in a folder: as lists do, without the time."""
    return read(folder).called or _STARTED.sub("", folder.name)


def say(folder: Path, order: Mapping[str, Any]) -> tuple[Said, list[str]]:
    """Writes what an order changes: what is said now, and which words were not written because somebody else had changed them.

    order: `label` and `notes` as {"before", "after"}, `tags` as {"add": [...], "remove": [...]}, `starred`; each may be absent.
    Raises OptionError for words that are too long, and where the disk takes no more.
    """
    words = {name: order[name] for name in ("label", "notes") if isinstance(order.get(name), dict)}
    tags = order.get("tags") if isinstance(order.get("tags"), dict) else {}
    assert isinstance(tags, dict)
    added, removed = ([" ".join(str(tag).split()) for tag in tags.get(what) or ()] for what in ("add", "remove"))
    _check(words, added)
    if not folder.is_dir():
        raise OptionError(f"{folder.name} is no longer there.")
    with one_at_a_time(folder, ".desk"):
        now = read(folder)
        others = [name for name, change in words.items() if getattr(now, name) not in (change.get("before"), change.get("after"))]
        label, notes = (
            getattr(now, name) if name in others or name not in words else str(words[name]["after"]).strip() for name in ("label", "notes")
        )
        tagged = dict.fromkeys([tag for tag in now.tags if tag not in removed] + [tag for tag in added if tag])
        starred = order["starred"] if isinstance(order.get("starred"), bool) else now.starred
        after = replace(now, label=label, notes=notes, starred=starred, tags=tuple(tagged)[:MAX_TAGS])
        if after != now:
            _write(folder, after)
    return after, others


def try_out(folder: Path, tried: Tried) -> None:
    """Writes what a sweep tries with a run. Raises OptionError where the disk takes no more."""
    with one_at_a_time(folder, ".desk"):
        _write(folder, replace(read(folder), tried=tried))


def _write(folder: Path, said: Said) -> None:
    try:
        write_atomically(folder / FILE, json.dumps(asdict(said), ensure_ascii=False, indent=1))
    except OSError as err:
        raise OptionError(f"{folder / FILE} could not be written: {err.strerror or err}.") from err


def _check(words: Mapping[str, Mapping[str, Any]], tags: list[str]) -> None:
    for name, most in (("label", MAX_LABEL), ("notes", MAX_NOTES)):
        if name in words and len(str(words[name].get("after", ""))) > most:
            raise OptionError(f"The {'name' if name == 'label' else name} may have {most:,} characters; shorten it.")
    long = next((tag for tag in tags if len(tag) > MAX_TAG), None)
    if long is not None:
        raise OptionError(f'The tag "{long[:MAX_TAG]}..." may have {MAX_TAG} characters; separate tags with commas.')


def freeable(job: Job, also_newest: bool, thorough: bool = False) -> list[Path]:
    """States of a run that may go: all but the newest whole one, from which it goes on; that one too of a run that has finished.

    thorough: the bytes of the state that is kept are checked, not its files' sizes alone.
    """
    folders = state_folders(job.run.state) if job.state in ENDED and not job.run.state.is_symlink() else []
    if also_newest and job.state == "finished":
        return folders
    for folder in reversed(folders):
        try:
            (check_state if thorough else read_manifest)(folder)
        except BrokenState:
            continue
        return [path for path in folders if path != folder]
    # None of them is whole: whoever looks into them by hand may still find something.
    return []


def clean(supervisor: JobSupervisor, job: Job, steps: set[int], also_newest: bool) -> int:
    """Deletes states of these steps as far as they may go, for good, and gives the bytes. Raises OptionError for a run at work."""
    freed = 0
    with supervisor.ended(job) as now:
        for folder in freeable(now, also_newest, thorough=True):
            if int(folder.name) in steps:
                size = bytes_of(folder)
                # Half a state is never taken for a whole one.
                aside = folder.with_name(f".{folder.name}{TEMPORARY_MARK}deleted")
                try:
                    folder.rename(aside)
                    shutil.rmtree(aside)
                except OSError as err:
                    raise OptionError(f"{folder} could not be deleted: {err.strerror or err}.") from err
                freed += size
    return freed


def disk(supervisor: JobSupervisor, also_newest: bool) -> dict[str, Any]:
    """What each run takes, which states may go and what that frees, what is in the trash, and what is free."""
    rows = []
    for job in supervisor.jobs():
        old = freeable(job, also_newest)
        row = {"name": job.name, **read(job.path).names(), "state": job.state, "bytes": bytes_of(job.path)}
        row |= {"states": bytes_of(job.run.state) if os.path.isdir(job.run.state) else 0, "steps": [int(path.name) for path in old]}
        rows.append({**row, "frees": sum(map(bytes_of, old))})
    kept = [(trash, entry) for trash in map(Trash, supervisor.parents()) for entry in trash.entries()]
    thrown = [
        {"name": entry.name, "what": entry.what, **_of_thrown(trash, entry).names(), "time": entry.time, "bytes": trash.bytes_of(entry)}
        for trash, entry in kept
    ]
    return {"runs": rows, "trash": thrown, "free": shutil.disk_usage(supervisor.root).free if supervisor.root.is_dir() else None}


def _of_thrown(trash: Trash, entry: Discarded) -> Said:
    """What is said of the run that was deleted, or whose files were."""
    said = read(next(iter(trash.held(entry)), trash.folder))
    return said if said != Said() or not entry.paths else read(Path(entry.paths[0]).parent)


MAX_PROMPTS = 20_000
WISHES = {"save": Asked.SAVE, "sample": Asked.SAMPLES, "pause": Asked.PAUSE}


def stop_step(job: Job) -> int | None:
    """The step before its last one after which a run at work shall end; None where it trains to the end."""
    stop = job.run.orders.stop_step() if job.state == "running" else None
    return stop if stop and stop < (job.summary.steps or stop + 1) else None


def asked(job: Job) -> dict[str, Any]:
    """What somebody has asked of a run at work and is still to come, and whether it can draw samples at all."""
    if job.state != "running":
        return {}
    now = job.run.orders.asked()
    wishes = {name: wish in now for name, wish in WISHES.items()}
    try:
        prompts = _prompts(job.run.config, job.run.config.stat().st_mtime_ns)
    except OSError:
        prompts = None
    told = {"other": Asked.OTHER in now, "stop_step": job.run.orders.stop_step()}
    return {**wishes, **told, "draws": prompts is not None, "prompts": prompts or ""}


@lru_cache(maxsize=256)
def _prompts(config: Path, _time: int) -> str | None:
    """The prompts in the settings of a run; empty where it evaluates instead, None where there is nothing to draw samples of."""
    try:
        said = read_toml(config)
        return str(said.get("sample_prompts") or "") or ("" if FACTS[run_of(said).family].evaluates else None)
    except OptionError:
        return None


def _checked(job: Job, text: object) -> RunOptions:
    """The options of a run with other prompts. Raises OptionError for what are none, and for files that its own prompts do not name."""
    options, written = job.run.options(), str(text or "").strip()
    if FACTS[options.family].evaluates:
        raise OptionError("this run evaluates its styles; it has no prompts")
    if not written or len(written) > MAX_PROMPTS:
        raise OptionError(f"sample_prompts: write between 1 and {MAX_PROMPTS:,} characters, one prompt a line")
    if "\n" not in written and Path(written).suffix.lower() in (".txt", ".toml", ".json"):
        raise OptionError(f"sample_prompts: {written} names a file; write the prompts themselves")
    after = options.model_copy(update={"samples": options.samples.model_copy(update={"sample_prompts": written})})

    def specs(of: RunOptions, grid: int) -> list[PromptSpec]:
        return read_prompts(Defaults(of.samples, of.dataset.resolution, grid, of.training.seed))

    # What a run has of its own is asked for its files alone.
    known = {file for spec in specs(options, 1) for file in spec.controls}
    strange = [file for spec in specs(after, options.model.grid) for file in spec.controls if file not in known]
    if strange:
        raise OptionError(
            f"sample_prompts: --ci {strange[0]} is no control image of this run; only those that its prompts name can be used"
        )
    return after


def ask(job: Job, what: str, step: object = None, text: object = None) -> dict[str, Any]:
    """Asks a run at work for something after its present step. what: of WISHES, go_on, or stop_at with a step (None takes it back).

    text: prompts, for sample (once, instead of its own) and for prompts (from now on; they are written into its config.toml).

    Raises OptionError for what cannot be asked now.
    """
    if job.state != "running" or job.stopping:
        raise OptionError(f"{job.name} is not at work; only a run that trains can be asked for something")
    orders = job.run.orders
    if what == "go_on":
        orders.take_back(Asked.PAUSE)
    elif what == "stop_at":
        if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
            raise OptionError(f"stop after step {step}: a whole number is needed")
        if step is not None and not job.summary.step < step < (job.summary.steps or step + 1):
            raise OptionError(f"stop after step {step}: choose one between {job.summary.step + 1} and {(job.summary.steps or 0) - 1}")
        orders.stop_after(step)
    elif what in ("sample", "prompts") and not asked(job)["draws"]:
        raise OptionError("this run has no sample_prompts; give some in the Train tab before a start")
    elif what == "prompts":
        write_atomically(job.run.config, to_toml(_checked(job, text)))
    elif what == "sample" and text is not None:
        orders.ask_other(_checked(job, text).samples.sample_prompts)
    elif what in WISHES:
        orders.ask(WISHES[what])
    else:
        raise OptionError(f"{what} cannot be asked of a run; {', '.join(WISHES)}, prompts, go_on and stop_at can")
    return asked(job)


def places(jobs: Sequence[Job]) -> dict[str, dict[str, Any]]:
    """Of each queued one of all runs: its place among those that wait, and what it still waits for besides a device."""
    queue = queue_of(jobs)
    under_way = {job.name: job for job in jobs if job.state not in ENDED}

    def told(job: Job, place: int) -> dict[str, Any]:
        first = under_way.get(job.waiting.after)
        names = {"after": "", "after_called": {}} if first is None else {"after": first.name, "after_called": read(first.path).names()}
        return {**asdict(job.waiting), **names, "place": place, "of": len(queue)}

    return {job.name: told(job, place) for place, job in enumerate(queue)}


def queue(supervisor: JobSupervisor, job: Job) -> dict[str, Any]:
    """Of a queued run: its place, and the runs that it could wait for."""
    if job.state != "queued":
        return {}
    jobs = supervisor.seen()
    others = [{"name": each.name, **read(each.path).names()} for each in jobs if each.state not in ENDED and each.name != job.name]
    here = places(jobs).get(job.name)
    return {} if here is None else {**here, "others": others}


def routes(supervisor: JobSupervisor) -> list[Route]:
    """All of them; the guard asks each for the token of the page."""

    def job_of(name: object) -> Job:
        job = supervisor.find(str(name))
        if job is None:
            raise OptionError(f"{name} is not on disk.")
        return job

    def spoken(order: Mapping[str, Any]) -> dict[str, Any]:
        now, others = say(job_of(order.get("run")).path, order)
        return {**now.row(), "others": others}

    def discard(order: Mapping[str, Any]) -> dict[str, Any]:
        return {"entry": supervisor.discard(job_of(order.get("run"))).name}

    def looked(order: Mapping[str, Any]) -> dict[str, Any]:
        return disk(supervisor, order.get("newest") is True)

    def cleaned(order: Mapping[str, Any]) -> dict[str, Any]:
        runs = order.get("runs")
        jobs = [(job_of(name), set(steps)) for name, steps in (runs.items() if isinstance(runs, dict) else ())]
        return {"freed": sum(clean(supervisor, job, steps, order.get("newest") is True) for job, steps in jobs)}

    def restore(order: Mapping[str, Any]) -> dict[str, Any]:
        for trash in map(Trash, supervisor.parents()):
            if order.get("entry") in {entry.name for entry in trash.entries()}:
                return {"what": trash.restore(str(order["entry"])).what}
        raise OptionError("It is no longer in the trash.")

    def empty(order: Mapping[str, Any]) -> dict[str, Any]:
        # What was thrown away since the page looked stays.
        names = [str(name) for name in order["entries"]]
        return {"freed": sum(Trash(parent).empty(names) for parent in supervisor.parents())}

    def plan(order: Mapping[str, Any]) -> dict[str, Any]:
        supervisor.plan(job_of(order.get("run")), order)
        return queue(supervisor, job_of(order.get("run")))

    work: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
        "say": spoken,
        "queue": plan,
        "delete": discard,
        "disk": looked,
        "clean": cleaned,
        "restore": restore,
        "empty": empty,
    }

    return [orders("/kl/desk/{what}", work)]
