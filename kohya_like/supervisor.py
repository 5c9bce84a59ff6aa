"""Start, find again, queue and stop training processes. Knows run folders and processes, not training.

Everything it knows stands in the run folders, so a studio that was closed, killed or started twice finds the same runs:
- `config.toml` the options, `run.json` the start ({pid, create_time, run_id, argv} and what is in `_Record`), `launcher.json` the pid of
  what the runner started, `exit.json` the end.
- A queued run is one whose `run.json` has no pid. A run without `run.json` was started in a terminal and is shown, never started.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from sd_scripts.runs import gpus
from sd_scripts.runs.command import launch_command, launch_environment, processes_here, visible_gpus
from sd_scripts.runs.events import RunFailed
from sd_scripts.runs.orders import Asked
from sd_scripts.runs.resume import RunLock
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.trash import KEPT_SECONDS, Discarded, Trash
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import write_atomically
from sd_scripts.schema.outside import object_in, read_as
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.toml_files import to_toml

from . import monitor, processes, queueing
from .files import modified

State = Literal["queued", "running", "finished", "stopped", "failed", "died", "damaged"]
ENDED = ("finished", "stopped", "failed", "died", "damaged")
GRACE_SECONDS = 120.0
"""A run that is asked to stop gets this long to finish its step."""
SAVING_GRACE_SECONDS = 900.0
"""A run that is writing its state when the grace period ends gets this long to finish it."""
EMPTYING_SECONDS = 3600.0
"""Between two looks for what has been in the trash for long enough."""
CLAIM_SECONDS = 30.0
"""A start that was begun this long ago and led to no process was lost with its studio."""


@dataclass(frozen=True)
class _Record:
    """Content of run.json."""

    run_id: str
    queued: float
    """Unix time of the order to start."""
    pid: int | None = None
    """Of the runner; None while queued."""
    create_time: float | None = None
    argv: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    """What was added to the studio's own for this start."""
    device: str = ""
    """The GPUs it was given, as CUDA_VISIBLE_DEVICES lists them, or cpu."""
    events_offset: int = 0
    """Size of events.jsonl when the start was ordered: older farewells are not its own."""
    dropped: bool = False
    """Taken out of the queue before it began."""


@dataclass(frozen=True)
class Job:
    """A run as it was when somebody looked."""

    path: Path
    state: State
    run_id: str | None
    """None for a run that was started in a terminal."""
    pid: int | None
    returncode: int | None
    summary: monitor.Summary
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """Belongs to argv: together they are the command of the run."""
    stopping: bool
    """It was asked to stop and has not ended yet."""
    waiting: queueing.Waiting = field(default_factory=queueing.Waiting)
    """While it is queued: what it waits for besides a device."""
    damage: str = ""
    """What is wrong with its folder, in a sentence; its state is `damaged` then, unless its processes are at work."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.path)


def queue_of(jobs: Sequence[Job]) -> list[Job]:
    """Those that wait, in the order in which they are to start."""

    def turn(job: Job) -> tuple[bool, float]:
        place = job.waiting.place
        return place is None, _queued_at(job.path) if place is None else place

    return sorted((job for job in jobs if job.state == "queued"), key=turn)


def devices() -> list[str]:
    """What runs are spread over: the GPUs this process may use (as CUDA_VISIBLE_DEVICES names them), or the CPU."""
    return gpus.visible() or ["cpu"]


class _Devices:
    """Which devices are free while the queue is looked through."""

    def __init__(self) -> None:
        self.all = devices()
        self._uuids = gpus.uuids() if self.all != ["cpu"] else []
        self._taken: set[str] = set()

    def check(self, options: RunOptions) -> None:
        """Raises OptionError for GPUs that will never be free here, because they are not here."""
        chosen = options.distributed.gpu_ids
        if self.all == ["cpu"]:
            if chosen:
                text = f"gpu_ids: {', '.join(chosen)} asked, but this machine shows no NVIDIA GPU to the studio; leave it empty"
                raise OptionError(Problem("gpu_ids", text))
            return
        known = self._whole(self.all)
        absent = [name for name, whole in zip(chosen, self._whole(chosen)) if whole not in known]
        if absent:
            raise OptionError(Problem("gpu_ids", f"gpu_ids: {', '.join(absent)} is not here; the studio may use {', '.join(self.all)}"))
        if processes_here(options.distributed) > len(self.all):
            text = f"num_gpus: {options.distributed.num_gpus} GPUs asked, {len(self.all)} here; set it to 0 for all of them"
            raise OptionError(Problem("num_gpus", text))

    def wanted(self, options: RunOptions) -> list[str]:
        """The devices that a run needs: those that were chosen, else the first free ones, as many as it has processes.

        Where there are not enough free ones, taken ones fill the places.
        """
        if self.all == ["cpu"]:
            return ["cpu"]
        by_freedom = sorted(self.all, key=lambda name: not self.are_free([name]))
        return list(options.distributed.gpu_ids) or by_freedom[: processes_here(options.distributed)]

    def are_free(self, names: Sequence[str]) -> bool:
        return not self._taken & set(self._whole(names))

    def take(self, names: Sequence[str]) -> None:
        """Nobody else gets these."""
        self._taken |= set(self._whole(names))

    def _whole(self, names: Sequence[str]) -> list[str]:
        return gpus.same_names(list(names), self._uuids)


class Guests(Protocol):
    """Other work that computes on the devices of runs, and waits for them in the same queue: tools."""

    def held(self) -> list[str]:
        """The devices that it computes on."""
        ...

    def waiting(self) -> list[str]:
        """What waits, the first one first."""
        ...

    def start_on(self, name: str, device: str) -> None: ...


class JobSupervisor:
    """All runs under `root`, and in other output folders that a run was started into from here."""

    def __init__(self, root: Path, command: Callable[[RunOptions, Path], list[str]] = launch_command) -> None:
        self.root = root.resolve()
        self._command = command
        self._lock = threading.RLock()
        self._known: dict[Path, tuple[tuple[float, ...], Job]] = {}
        self._watching: threading.Thread | None = None
        self._closed = threading.Event()
        self.listeners: list[Callable[[Sequence[Job]], None]] = []
        """Who hears of all runs about once a second while the queue is kept moving; they must not wait."""

        self.guests: Guests | None = None

    # Looking

    def jobs(self) -> list[Job]:
        """All runs on disk, newest first. Starts a queued one when its device has become free."""
        self._start_queued()
        return self._look()

    def seen(self) -> list[Job]:
        """All runs on disk, newest first, for those who only look: starts nothing."""
        return self._look()

    def find(self, run_name: str) -> Job | None:
        """The run with this folder name. Names are compared, never joined to a path."""
        path = next((path for path in self.run_folders() if path.name == run_name), None)
        return None if path is None else self._job(path, _Living())

    def _look(self) -> list[Job]:
        living = _Living()
        return [self._job(path, living) for path in sorted(self.run_folders(), key=lambda path: path.name, reverse=True)]

    def parents(self) -> list[Path]:
        """The folders that runs are looked for in."""
        return [self.root, *self._other_folders()]

    def run_folders(self) -> Iterator[Path]:
        """The folders of all runs, whoever started them."""
        for parent in self.parents():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(parent) as entries:
                for entry in entries:
                    # Unlike DirEntry.is_dir, isdir is False for a link to itself.
                    if not entry.name.startswith(".") and os.path.isdir(entry.path) and _is_run(entry.path):
                        yield Path(entry.path)

    @property
    def _folders_file(self) -> Path:
        return self.root / ".run_folders.json"

    def _other_folders(self) -> list[Path]:
        names = object_in(self._folders_file).get("folders", [])
        return [Path(name) for name in names if isinstance(name, str)] if isinstance(names, list) else []

    def _remember(self, parent: Path) -> None:
        others = self._other_folders()
        if parent != self.root and parent not in others:
            write_atomically(self._folders_file, json.dumps({"folders": [str(folder) for folder in [*others, parent]]}, indent=1))

    def _job(self, path: Path, living: _Living) -> Job:
        signature = _signature(path)
        known = self._known.get(path)
        if known is not None and known[0] == signature and known[1].state in ENDED:
            return known[1]
        record = _read_record(path)
        job = _terminal_job(path) if record is None else _studio_job(path, record, living)
        if job.state == "queued":
            job = replace(job, waiting=queueing.read(path))
        if damage := job.summary.damage or _damaged_settings(job.run):
            job = replace(job, damage=damage, state="running" if job.state == "running" else "damaged")
        self._known[path] = signature, job
        return job

    def members(self, job: Job) -> list[Any]:
        """The psutil processes of a run."""
        return _Living().members(job.run_id, job.pid)

    # Starting

    def start(self, script: str, options: RunOptions, resume: Path | None = None, stop_after: int | None = None) -> Job:
        """Makes a run folder, or continues the run in the folder `resume`, and starts it as soon as a device is free.

        stop_after: the step at which it saves its state and ends; None trains to the end. Raises OptionError when the folder cannot be
        written, is no run, or is still running, or when its GPUs are not here.
        """
        if script != options.script:
            raise OptionError(f"{script} does not train these options; {options.script} does")
        _Devices().check(options)
        with self._lock:
            run = self._new_run(options) if resume is None else self._continued_run(resume, options)
            self._remember(run.path.parent)
            run.orders.stop_after(stop_after)
            _write_record(run.path, _Record(uuid.uuid4().hex, time.time(), events_offset=_size(run.events_file)))
            self._start_queued()
        self.watch()
        return self._job(run.path, _Living())

    def resume(self, job: Job) -> Job:
        """Continues a run that ended, with its own settings, from its newest whole state."""
        options = job.run.options()
        return self.start(options.script, options, resume=job.path)

    def _new_run(self, options: RunOptions) -> RunDirectory:
        output = options.output
        return RunDirectory.create(Path(output.output_dir).expanduser().resolve(), output.output_name, options)

    def _continued_run(self, path: Path, options: RunOptions) -> RunDirectory:
        run = RunDirectory(path.resolve())
        if not run.config.is_file():
            raise OptionError(f"resume: {path} is not a run folder (it has no config.toml)")
        if self._job(run.path, _Living()).state in ("running", "queued"):
            raise OptionError(f"resume: {run.name} has not ended yet; stop it first")
        if run.state.is_dir() and any(run.state.iterdir()):
            # A run with states of its own continues from them; `none`, a step or a path said where it once began.
            options = options.model_copy(update={"distributed": options.distributed.model_copy(update={"resume": "auto"})})
        config = to_toml(options)
        if run.config.read_text(encoding="utf-8") != config:
            write_atomically(run.config, config)
        run.clear_stop()
        # Of what was asked of the session before.
        run.orders.take_back(~Asked.NOTHING)
        for name in ("exit.json", "launcher.json", queueing.FILE):
            (run.path / name).unlink(missing_ok=True)
        return run

    def _start_queued(self) -> list[Job]:
        """Starts the first queued runs that wait for nothing else on the devices that are free; all runs as they were before."""
        with self._lock:
            processes.collect()
            jobs = [self._adopted(job) for job in self._look()]
            under_way = [job.name for job in jobs if job.state not in ENDED]
            queued = [job for job in queue_of(jobs) if job.waiting.is_due(under_way)]
            guests = [] if self.guests is None else self.guests.waiting()
            if not queued and not guests:
                return jobs
            here = _Devices()
            for job in jobs:
                if job.state == "running":
                    here.take(self._held(job, here))
            self._start_guests(guests, here)
            for job in queued:
                try:
                    options = job.run.options()
                    here.check(options)
                except OptionError as err:
                    self._cannot_start(job.path, err)
                    continue
                wanted = here.wanted(options)
                if here.are_free(wanted):
                    self._launch(job.path, options, wanted)
                # Whoever waits keeps later ones from what it waits for, or a run on several GPUs might wait for ever.
                here.take(wanted)
            return jobs

    def _start_guests(self, waiting: Sequence[str], here: _Devices) -> None:
        """Starts what waits beside the runs on free devices. It goes first: images get their captions before a run reads them."""
        if self.guests is None:
            return
        here.take(self.guests.held())
        for name in waiting:
            free = next((device for device in here.all if here.are_free([device])), None)
            if free is None:
                return
            self.guests.start_on(name, free)
            here.take([free])

    def at_work(self) -> list[tuple[str, list[str]]]:
        """The runs under way, each with what it computes on, as a process of the studio would call it: cuda:0, ..., or cpu."""
        here = _Devices()
        named = {whole: f"cuda:{index}" for index, (whole,) in enumerate(here._whole([name]) for name in here.all)}
        running = [(job.name, self._held(job, here)) for job in self.jobs() if job.state == "running"]
        if here.all == ["cpu"]:
            return [(name, ["cpu"]) for name, _ in running]
        return [(name, [named[whole] for whole in here._whole(held) if whole in named]) for name, held in running]

    @staticmethod
    def _held(job: Job, here: _Devices) -> list[str]:
        """The devices a running run has: noted at its start, or as far as its options tell for one from a terminal."""
        noted = _device_of(job.path)
        if noted:
            return noted.split(",")
        try:
            options = job.run.options()
        except OptionError:
            return here.all[:1]
        return list(options.distributed.gpu_ids) or here.all[: processes_here(options.distributed)]

    def _adopted(self, job: Job) -> Job:
        """Notes the pid of a run whose studio died between starting it and noting it down."""
        record = _read_record(job.path)
        if job.state != "running" or record is None or record.pid is not None:
            return job
        living = _Living()
        eldest = min(living.of(record.run_id), key=processes.created, default=None)
        if eldest is not None:
            _write_record(job.path, replace(record, pid=eldest.pid, create_time=processes.created(eldest)))
        return self._job(job.path, living)

    def _launch(self, path: Path, options: RunOptions, names: Sequence[str]) -> None:
        record = _read_record(path)
        if record is None or not _claim(path):
            return
        run = RunDirectory(path)
        try:
            argv = self._command(options, path)
            environment = launch_environment(options) | ({} if names == ["cpu"] else visible_gpus(list(names)))
            pid = processes.start(path, argv, record.run_id, run.console, environment)
            process = processes.living(pid)
            begun = 0.0 if process is None else processes.created(process)
            started = replace(record, pid=pid, create_time=begun, argv=tuple(argv), environment=environment, device=",".join(names))
            _write_record(path, started)
            queueing.forget(path)
        except (OptionError, OSError) as err:
            self._cannot_start(path, err)
        finally:
            (path / "start.claim").unlink(missing_ok=True)

    @staticmethod
    def _cannot_start(path: Path, err: Exception) -> None:
        """The run is not lost: it stands in the list as failed, with this sentence."""
        record = _read_record(path)
        RunDirectory(path).log(RunFailed(step=0, text=str(err), advice=""))
        if record is not None:
            _write_record(path, replace(record, dropped=True))

    # The queue

    def plan(self, job: Job, order: Mapping[str, object]) -> None:
        """Changes the place of a queued run, or what it waits for: {"place": number from 0}, or an order of queueing.planned.

        Raises OptionError for a run that does not wait any more.
        """
        with self._lock:
            jobs = self._look()
            queue = queue_of(jobs)
            now = next((each for each in queue if each.path == job.path), None)
            if now is None:
                raise OptionError(f"{job.name} does not wait any more")
            place = order.get("place")
            if isinstance(place, int):
                queueing.moved([each.path for each in queue], job.path, place)
            else:
                others = {each.name: each.waiting for each in jobs if each.state not in ENDED}
                queueing.write(job.path, queueing.planned(job.name, now.waiting, order, others))
            self._start_queued()

    # The thread that keeps the queue moving while nobody looks

    def watch(self) -> None:
        """Keeps starting queued runs in the background; a second call does nothing."""
        with self._lock:
            if self._watching is None:
                self._watching = threading.Thread(target=self._watch, name="run queue", daemon=True)
                self._watching.start()

    def close(self) -> None:
        """Ends the background thread. Runs go on."""
        self._closed.set()
        if self._watching is not None:
            self._watching.join()
        processes.collect()

    def _watch(self) -> None:
        emptied = float("-inf")
        while not self._closed.wait(1.0):
            jobs = self._start_queued()
            for listener in self.listeners:
                listener(jobs)
            if time.monotonic() - emptied >= EMPTYING_SECONDS:
                emptied = time.monotonic()
                for parent in self.parents():
                    # What cannot be deleted is still there when somebody opens the trash.
                    with contextlib.suppress(OptionError):
                        Trash(parent).empty(older_than_seconds=KEPT_SECONDS)

    # Deleting

    @contextlib.contextmanager
    def ended(self, job: Job) -> Iterator[Job]:
        """Within the block nobody trains in the run's folder. Raises OptionError for a run that has not ended."""
        with self._lock:
            now = self._job(job.path, _Living())
            if now.state not in ENDED:
                raise OptionError(f"{job.name} has not ended yet ({now.state}); stop it first")
            lock = RunLock(job.run)
            lock.take()
            try:
                yield now
            finally:
                lock.release()

    def discard(self, job: Job) -> Discarded:
        """Moves a run that has ended into the trash of its output folder. Raises OptionError for one that has not."""
        with self.ended(job):
            return Trash(job.path.parent).put(job.name, [job.path])

    # Stopping

    def request_stop(self, job: Job) -> None:
        """Asks a run to finish its step, save and end; takes a queued one out of the queue."""
        with self._lock:
            now, record = self._adopted(self._job(job.path, _Living())), _read_record(job.path)
            if now.state == "queued" and record is not None:
                _write_record(job.path, replace(record, dropped=True))
            elif now.state == "running":
                now.run.request_stop()

    def stop(self, job: Job, grace_seconds: float = GRACE_SECONDS) -> None:
        """Stops a run: a stop file, the grace period, then terminate and kill for every process that carries its run id.

        Waits for the end. Raises TimeoutError naming the processes that cannot be ended.
        """
        self.request_stop(job)
        now = self._job(job.path, _Living())
        deadline, last = time.monotonic() + grace_seconds, time.monotonic() + grace_seconds + SAVING_GRACE_SECONDS
        while now.state == "running" and time.monotonic() < last:
            if time.monotonic() >= deadline and (grace_seconds <= 0 or now.summary.phase != "save"):
                break
            time.sleep(0.2)
            now = self._job(job.path, _Living())
        if now.state == "running":
            self._end(now)
        processes.collect()

    def _end(self, job: Job) -> None:
        members = _Living().members(job.run_id, job.pid)
        # The runner goes last: it writes the exit code of what it started.
        left = processes.end([process for process in members if process.pid != job.pid or job.run_id is None])
        # Ranks that were born while the others ended.
        members = _Living().members(job.run_id, job.pid)
        deadline = time.monotonic() + 3.0
        while job.pid is not None and processes.living(job.pid) and len(members) <= 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        left = processes.end(_Living().members(job.run_id, job.pid))
        if left:
            raise TimeoutError("these processes cannot be ended: " + ", ".join(str(process.pid) for process in left))


class _Living:
    """The processes of all runs at one moment, looked up only when a run's own pid does not settle it."""

    def __init__(self) -> None:
        self._by_run: dict[str, list[Any]] | None = None

    def of(self, run_id: str) -> list[Any]:
        if self._by_run is None:
            self._by_run = processes.of_runs()
        return self._by_run.get(run_id, [])

    def members(self, run_id: str | None, pid: int | None) -> list[Any]:
        """Every process of a run: its tree, and all that carry its id."""
        found = {process.pid: process for process in (self.of(run_id) if run_id else [])}
        if pid is not None and (run_id is None or pid in found):
            found |= {process.pid: process for process in processes.tree(pid)}
        return list(found.values())


def _studio_job(path: Path, record: _Record, living: _Living) -> Job:
    """A run this or an earlier studio started."""
    brief = monitor.summary(path / "events.jsonl", record.events_offset)
    exit_record = object_in(path / "exit.json")
    returncode = exit_record.get("returncode") if exit_record.get("run_id") == record.run_id else None
    alive = record.pid is not None and processes.is_same(record.pid, record.create_time or 0.0, record.run_id)
    if not alive and returncode is None and not record.dropped and (record.pid is not None or (path / "start.claim").exists()):
        # The runner is gone without a word, or its studio died before it noted the pid: ranks may still be at work.
        alive = bool(living.of(record.run_id))
    stopping = RunDirectory(path).stop_requested()
    return Job(
        path=path,
        state=_state(record, alive, returncode if isinstance(returncode, int) else None, brief, stopping),
        run_id=record.run_id,
        pid=record.pid,
        returncode=returncode if isinstance(returncode, int) else None,
        summary=brief,
        argv=record.argv,
        environment=record.environment,
        stopping=stopping and alive,
    )


def _state(record: _Record, alive: bool, returncode: int | None, brief: monitor.Summary, stop_requested: bool) -> State:
    if alive:
        return "running"
    if brief.farewell is not None:
        return cast(State, brief.farewell.kind)
    if record.pid is None:
        return "stopped" if record.dropped else "queued"
    if stop_requested:
        return "stopped"
    return "finished" if returncode == 0 else "died"


def _terminal_job(path: Path) -> Job:
    """A run that was started in a terminal: its log tells its pid and its end."""
    brief = monitor.summary(path / "events.jsonl")
    process = None if brief.pid is None else processes.living(brief.pid)
    alive = process is not None and processes.created(process) <= brief.started_at + 1.0
    # After a later resume the pid may stand in the middle of a long log, which is not read here; fresh lines are proof enough. A
    # folder that was made just now has no line yet.
    now = time.time()
    fresh = now - brief.last_time < 120.0 < brief.last_time - brief.started_at or (
        not brief.last_time and not brief.damage and now - modified(path) < 60.0
    )
    alive = brief.farewell is None and (alive or fresh)
    run = RunDirectory(path)
    state = "running" if alive else "died" if brief.farewell is None else cast(State, brief.farewell.kind)
    return Job(path, state, None, brief.pid if alive else None, None, brief, (), {}, run.stop_requested() and alive)


def _claim(path: Path) -> bool:
    """Whether this studio may start the run: two studios on one folder must not both do it."""
    claim = path / "start.claim"
    with contextlib.suppress(FileNotFoundError):
        if time.time() - claim.stat().st_mtime > CLAIM_SECONDS:
            claim.unlink()
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    record = _read_record(path)
    if record is not None and record.pid is None:
        return True
    claim.unlink(missing_ok=True)
    return False


def _is_run(path: str) -> bool:
    """Whether a folder holds a run: its settings, or where these are lost, what a run leaves behind."""
    for name in ("config.toml", "events.jsonl", "run.json"):
        try:
            os.lstat(os.path.join(path, name))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            # A folder that is not to be looked into is a run if it bears the name of one.
            return re.match(r"\d{8}-\d{6}-.", os.path.basename(path)) is not None
        return True
    return False


def _damaged_settings(run: RunDirectory) -> str:
    """Why the settings of a run cannot be read, in a sentence. What they say is read by whoever uses them."""
    try:
        run.config.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        return "config.toml, which holds its settings, is missing."
    except OSError as err:
        return f"config.toml, which holds its settings, cannot be read: {err.strerror}."
    except UnicodeDecodeError:
        return "config.toml, which holds its settings, is not text."
    return ""


def _signature(path: Path) -> tuple[float, ...]:
    """Changes when a file that decides the state changes."""
    found: list[float] = []
    for name in ("run.json", "exit.json", "events.jsonl", "stop.request", "config.toml"):
        try:
            stat = os.stat(path / name)
            found += [stat.st_mtime_ns, stat.st_size]
        except OSError:
            found += [0, 0]
    return tuple(found)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _read_record(path: Path) -> _Record | None:
    """None for a run that no studio has started, and where its file says nothing that makes sense."""
    try:
        return read_as(_Record, (path / "run.json").read_bytes())
    except (OSError, ValueError):
        return None


def _write_record(path: Path, record: _Record) -> None:
    write_atomically(path / "run.json", json.dumps(asdict(record), indent=1))


def _queued_at(path: Path) -> float:
    record = _read_record(path)
    return 0.0 if record is None else record.queued


def _device_of(path: Path) -> str:
    record = _read_record(path)
    return "" if record is None else record.device


if __name__ == "__main__":
    from .cleanup import main

    main()
