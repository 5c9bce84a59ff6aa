"""The JSON routes that the page polls for live runs, their images and files. Knows what is on disk; draws nothing.

Every route needs the token of the page, in the header `x-kl-token` or, for images and downloads, as
`?token=`. Runs are named by folder name and looked up in the supervisor's list; files are single names inside a run folder. No path
ever comes from the page.
"""

from __future__ import annotations

import hmac
import io
import os
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image, UnidentifiedImageError
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from sd_scripts.runs.command import shown
from sd_scripts.runs.events import Warned
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.outside import object_in

from . import causes, comparing, console, desk, evaluations, fixes, gpu, monitor, picks, reporting, supporting, sweeps, tools
from .answers import JsonAnswer, order_of
from .supervisor import GRACE_SECONDS, Job, JobSupervisor

FOLD_BYTES = 4 << 20
"""A poll reads at most this much of an event log; the page asks again at once while there is more."""
MAX_WATCHED = 32
THUMBNAIL_PIXELS = 320
MAX_THUMBNAILS = 400
DAMAGED = "Files that it has saved can still be downloaded, and lie in its folder. Put the file right, or delete the folder."
IMAGES = frozenset({".png", ".jpg", ".jpeg", ".webp"})
WEIGHTS = frozenset({".safetensors"})
DOWNLOADS = WEIGHTS | {".toml"}
BESIDE = frozenset({"tokenizer.json", "styles.json", "epochs.csv"})
"""What a model needs beside its weights, and the table of the epochs."""
SIDE_FOLDERS = re.compile(r"profile|nonfinite-\d+")
"""Folders inside a run folder whose files can be downloaded: what a profile or a loss that is no number has left."""
SIDE_FILES = IMAGES | {".json", ".txt"}


@dataclass
class _Watched:
    """What has been read of one run; each event is parsed once, however many tabs look."""

    progress: monitor.Progress = field(default_factory=monitor.Progress)
    offset: int = 0
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    usage: gpu.ProcessUsage = field(default_factory=gpu.ProcessUsage)
    pids: frozenset[int] = frozenset()
    """Of the run's processes, when somebody last looked for them."""
    pids_until: float = 0.0
    """When to look again, on the monotonic clock."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, file: Path) -> bool:
        """Folds what is new; whether that was all of it."""
        read = 0
        while read < FOLD_BYTES:
            chunk = monitor.read_events(file, self.offset)
            if chunk.reset:
                self.progress, self.nonce = monitor.Progress(), uuid.uuid4().hex[:8]
            read += max(1, chunk.offset - self.offset)
            self.offset = chunk.offset
            self.progress.fold(chunk.events)
            if chunk.complete:
                return True
        return False


class Live:
    """The answers to the polls. Holds only what could be read again from the run folders."""

    def __init__(self, supervisor: JobSupervisor) -> None:
        self.supervisor = supervisor
        self.gpus = gpu.Sampler()
        self._watched: OrderedDict[Path, _Watched] = OrderedDict()
        self._stopping: dict[str, float] = {}
        self._lock = threading.Lock()

    def runs(self) -> list[dict[str, Any]]:
        """One row for each run on disk, newest first."""
        jobs = self.supervisor.jobs()
        places = desk.places(jobs)
        return [{**_row(job), "queue": places.get(job.name)} for job in jobs]

    def run(self, job: Job, generation: str, points: int, console_offset: int, version: str) -> dict[str, Any]:
        """What changed in a run since the page last asked.

        generation and points say which part of the curve the page has, console_offset how far it has read the console, version which
        lists of images, files and warnings it shows.
        """
        watched = self._watch(job.path)
        with watched.lock:
            complete = watched.read(job.run.events_file)
            progress = watched.progress
            now = time.time()
            row = _row(job)
            answer = {
                **row,
                "complete": complete,
                "phase": progress.phase if job.state == "running" else job.state,
                "phase_seconds": round(now - progress.phase_since, 1) if progress.phase_since else None,
                "step": progress.step,
                "steps": progress.steps,
                "loss": progress.loss,
                "epochs": (progress.started.epochs if progress.started else None) or None,
                "fraction": progress.fraction(row["stop_step"]),
                "cached": {what: list(pair) for what, pair in progress.cached.items()},
                "eta_seconds": progress.eta_seconds(now, row["stop_step"]) if job.state == "running" else None,
                "seconds_per_step": progress.seconds_per_step,
                "session": asdict(progress.sessions.present),
                "total": asdict(progress.sessions.total),
                "sessions": progress.sessions.count,
                "forecast_gib": progress.forecast_gib,
                **{
                    name: getattr(progress.last_step, name, None)
                    for name in ("images_per_second", "peak_gib", "grad_norm", "epoch", "data_fetch", "fwd_bwd", "opt_step", "step_total")
                },
                "asked": desk.asked(job),
                "queue": desk.queue(self.supervisor, job),
                "console": asdict(console.read_console(job.run.console, console_offset)),
                **self._curve(watched, generation, points),
                **self._lists(job, progress, version),
            }
        if job.damage:
            answer["cause"] = {"text": job.damage, "advice": DAMAGED, "why": "", "lines": [], "fix": None}
        elif job.state in ("failed", "died"):
            answer["cause"] = self._cause(job, progress)
        deadline = self._stopping.get(job.run_id or job.name)
        answer["ends_in_seconds"] = max(0.0, deadline - time.monotonic()) if deadline is not None and job.state == "running" else None
        return answer

    def _watch(self, path: Path) -> _Watched:
        with self._lock:
            watched = self._watched.pop(path, None) or _Watched()
            self._watched[path] = watched
            while len(self._watched) > MAX_WATCHED:
                self._watched.popitem(last=False)
            return watched

    def _curve(self, watched: _Watched, generation: str, points: int) -> dict[str, Any]:
        curve = watched.progress.curve
        present = f"{watched.nonce}-{curve.generation}"
        # The last point may still take in neighbours, so it is sent again.
        first = max(0, min(points, len(curve.points)) - 1) if generation == present else 0
        points_now = curve.points[first:]
        told = {"part_names": curve.part_names, "parts": [point.part_row(curve.part_names) for point in points_now]}
        return {"generation": present, "first": first, "points": [point.row() for point in points_now], **told}

    def _lists(self, job: Job, progress: monitor.Progress, version: str) -> dict[str, Any]:
        files = _files(job.path)
        on_disk = [each.row() for each in evaluations.found(job.run)]
        present = "-".join(
            str(part)
            for part in (
                len(progress.samples),
                progress.last_time if progress.phase == "sample" else 0,
                len(progress.validation),
                sum(progress.warnings.values()),
                hash((tuple(files), tuple((each["name"], each["time"]) for each in on_disk), tuple(progress.evaluations))) & 0xFFFFFFFF,
                job.run.evaluation_requested(),
                job.state,
                picks.chosen(job.path),
            )
        )
        if version == present:
            return {"version": present}
        tool = tools.drawing_tool(job.run.config)
        return {
            "version": present,
            "samples": _samples(progress),
            "validation": progress.validation,
            "warnings": [[text, count] for text, count in progress.warnings.items()],
            "files": [{**vars(file), "path": str(job.path / file.name), "note": _note(job, progress, file.name)} for file in files],
            "draws": "" if tool is None else tool.deed,
            "evaluates": evaluations.evaluates(job.run.config),
            "evaluation_requested": job.run.evaluation_requested(),
            "evaluations": on_disk,
            "measures": [[step, *(told.get(name) for name in monitor.MEASURES)] for step, told in sorted(progress.evaluations.items())],
            "measure_names": monitor.MEASURES,
            "command": self._command(job),
        }

    def compared(self, names: Sequence[str]) -> dict[str, Any]:
        """Runs beside one another: what comparing.py tells of each with its previews, the settings that differ, and names of no run.

        Raises OptionError for too many.
        """
        if len(names) > comparing.MOST_RUNS:
            raise OptionError(f"{len(names)} runs were chosen; {comparing.MOST_RUNS} fit on one plot, so choose fewer")
        jobs = {name: self.supervisor.find(name) for name in dict.fromkeys(names)}
        known = [job for job in jobs.values() if job is not None]
        rows, complete = [], True
        for job in known:
            watched = self._watch(job.path)
            with watched.lock:
                complete = watched.read(job.run.events_file) and complete
                told = comparing.beside(job, watched.progress)
                rows.append({**told, **desk.read(job.path).names(), "samples": _samples(watched.progress)})
        settings, problem = [], ""
        try:
            settings = [vars(row) for row in comparing.differences(known)] if len(known) > 1 else []
        except OptionError as err:
            problem = str(err)
        missing = [name for name, job in jobs.items() if job is None]
        return {"runs": rows, "settings": settings, "problem": problem, "missing": missing, "complete": complete}

    def _command(self, job: Job) -> dict[str, str]:
        argv = list(job.argv)
        return {shell: shown(argv, shell, job.environment) for shell in ("sh", "powershell")} if argv else {}

    def machine(self, job: Job, since: float) -> dict[str, Any]:
        """Readings of the GPUs now and at the moments after `since` (Unix time), and which of them the run uses.

        Where there is no GPU, why, and what the run's processes use.
        """
        readings = self.gpus.readings()
        watched = self._watch(job.path)
        with watched.lock:
            if not readings.devices:
                usage = watched.usage.read(lambda: self.supervisor.members(job)) if job.state == "running" else None
                return {"gpu": gpu.as_json(readings), "problem": readings.problem, "usage": usage}
            pids = self._pids(job, watched, any(device.processes for device in readings.devices))
        return {
            "gpu": gpu.as_json(readings, pids),
            "problem": readings.problem,
            "of_run": gpu.used_by(readings.devices, _devices_of(job.path), pids),
            "history_seconds": gpu.HISTORY_SECONDS,
            "history": [[moment.time, moment.gpus] for moment in self.gpus.history(since)],
        }

    def _pids(self, job: Job, watched: _Watched, are_told: bool) -> Collection[int]:
        """The run's processes, looked for at most once in the time between two readings; nobody asks where no GPU tells any."""
        now = time.monotonic()
        if job.state == "running" and are_told and now >= watched.pids_until:
            watched.pids = frozenset(process.pid for process in self.supervisor.members(job))
            watched.pids_until = now + gpu.PERIOD_SECONDS
        return watched.pids if job.state == "running" else ()

    def _diagnosis(self, job: Job, progress: monitor.Progress) -> causes.Cause:
        return causes.diagnose(console.last_lines(job.run.console), job.returncode, progress.farewell if job.state == "failed" else None)

    def _cause(self, job: Job, progress: monitor.Progress) -> dict[str, Any]:
        cause, farewell = self._diagnosis(job, progress), progress.farewell
        refused = job.state == "failed" and farewell is not None and farewell.refused
        fix = fixes.fix_of(job, cause)
        return {
            "text": cause.text,
            "why": cause.why,
            "advice": cause.advice,
            "fix": None if fix is None else fix.as_page(),
            # The sentence of a refusal says all; what follows it on the console is the launcher's astonishment.
            "lines": [] if refused else causes.without_launcher(console.last_lines(job.run.console, 200))[-12:],
            "refused": refused,
        }

    def fix(self, job: Job) -> Job:
        """Does what the button about the failure of a run promises. Raises OptionError where there is nothing to start."""
        watched = self._watch(job.path)
        with watched.lock:
            while not watched.read(job.run.events_file):
                continue
            fix = fixes.fix_of(job, self._diagnosis(job, watched.progress)) if job.state in ("failed", "died") else None
        if fix is None or fix.goes_to:
            raise OptionError(f"{job.name} has no failure that a start could mend")
        return fixes.start(self.supervisor, job, fix)

    def stop(self, job: Job, grace_seconds: float) -> None:
        """Begins to stop a run and comes back at once."""
        key = job.run_id or job.name
        self._stopping[key] = time.monotonic() + grace_seconds
        self.supervisor.request_stop(job)
        threading.Thread(target=self._stop, args=(job, grace_seconds, key), name=f"stop {job.name}", daemon=True).start()

    def _stop(self, job: Job, grace_seconds: float, key: str) -> None:
        try:
            self.supervisor.stop(job, grace_seconds)
        except TimeoutError as err:
            job.run.log(Warned(text=f"Stopping: {err}; they may hang in a driver. Restarting the machine frees the GPU."))
        finally:
            self._stopping.pop(key, None)


def thumbnail(file: Path) -> bytes:
    """A small WebP of a preview. Raises OSError for what is no image or one of absurd size."""
    return _thumbnail(file, file.stat().st_mtime_ns)


@lru_cache(MAX_THUMBNAILS)
def _thumbnail(file: Path, _time: int) -> bytes:
    try:
        with Image.open(file) as image:
            image.draft("RGB", (2 * THUMBNAIL_PIXELS, 2 * THUMBNAIL_PIXELS))
            small = image.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError) as err:
        raise OSError(f"{file.name} is not an image that can be shown") from err
    small.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    stream = io.BytesIO()
    small.save(stream, "WEBP", quality=82)
    return stream.getvalue()


def routes(supervisor: JobSupervisor, token: str) -> list[Route]:
    """Our routes under /kl/, for `app_kwargs`. Starts the thread that keeps the queue moving."""
    live = Live(supervisor)
    supervisor.watch()

    def with_token(answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
        def guarded(request: Request) -> Response:
            given = request.headers.get("x-kl-token") or request.query_params.get("token", "")
            if not hmac.compare_digest(given.encode(), token.encode()):
                return JsonAnswer({"detail": "This route needs the token of the page. Reload the page."}, 401)
            return answer(request)

        return guarded

    def with_job(answer: Callable[[Request, Job], Response]) -> Callable[[Request], Response]:
        def found(request: Request) -> Response:
            job = supervisor.find(request.path_params["run"])
            return JsonAnswer({"detail": "This run is not on disk."}, 404) if job is None else answer(request, job)

        return with_token(found)

    def runs(_request: Request) -> Response:
        return JsonAnswer({"runs": live.runs(), "sweeps": bool(sweeps.names_in(supervisor.root))})

    def compare(request: Request) -> Response:
        try:
            return JsonAnswer(live.compared(request.query_params.getlist("run")))
        except OptionError as err:
            return JsonAnswer({"detail": str(err)}, 400)

    def run(request: Request, job: Job) -> Response:
        query = request.query_params
        try:
            points, console_offset = int(query.get("points", "0")), int(query.get("console", "-1"))
        except ValueError:
            return JsonAnswer({"detail": "points and console are whole numbers."}, 400)
        return JsonAnswer(live.run(job, query.get("generation", ""), points, console_offset, query.get("version", "")))

    def machine(request: Request, job: Job) -> Response:
        try:
            since = float(request.query_params.get("since", "0"))
        except ValueError:
            return JsonAnswer({"detail": "since is a time in seconds."}, 400)
        return JsonAnswer(live.machine(job, since))

    def sample(request: Request, job: Job) -> Response:
        return image_of(inside(job.run.samples, request.path_params["file"], IMAGES), request)

    def evaluation(request: Request, job: Job) -> Response:
        folder = evaluations.folder(job.run, request.path_params["name"])
        summary = None if folder is None else evaluations.summary(folder)
        return JsonAnswer({"detail": "This evaluation is not on disk."}, 404) if summary is None else JsonAnswer(summary)

    def evaluated(request: Request, job: Job) -> Response:
        folder = evaluations.folder(job.run, request.path_params["name"])
        file = None if folder is None else inside(folder, request.path_params["file"], evaluations.FILES)
        if folder is None or file is None or file.suffix != ".csv":
            return image_of(file, request)
        return FileResponse(file, filename=f"{job.name}-{folder.name}-{file.name}", media_type="text/csv")

    def evaluate(_request: Request, job: Job) -> Response:
        if job.state != "running" or not evaluations.evaluates(job.run.config):
            return JsonAnswer({"detail": "Only a run of style transfer that is at work can evaluate now."}, 409)
        job.run.request_evaluation()
        return JsonAnswer({"state": "requested"})

    async def ask(request: Request) -> Response:
        order = await order_of(request)
        job = supervisor.find(request.path_params["run"])
        if job is None:
            return JsonAnswer({"detail": "This run is not on disk."}, 404)
        try:
            return JsonAnswer(desk.ask(job, str(order.get("what")), order.get("step"), order.get("text")))
        except OptionError as err:
            return JsonAnswer({"detail": str(err)}, 409)

    def image_of(file: Path | None, request: Request) -> Response:
        """An image of a run, small or whole."""
        if file is None:
            return JsonAnswer({"detail": "There is no such image."}, 404)
        cached = {"cache-control": "private, max-age=3600"}
        if request.query_params.get("size") != "thumb":
            return FileResponse(file, headers=cached)
        try:
            return Response(thumbnail(file), media_type="image/webp", headers=cached)
        except OSError:
            # Half-written, or damaged: the page shows its place holder and asks again.
            return JsonAnswer({"detail": "This image cannot be shown."}, 404)

    def download(request: Request, job: Job) -> Response:
        file = downloadable(job.path, request.path_params["file"])
        if file is None:
            return JsonAnswer({"detail": "There is no such file to download."}, 404)
        return FileResponse(file, filename=file.name, media_type="application/octet-stream")

    def stop(request: Request, job: Job) -> Response:
        now = request.query_params.get("now") == "1"
        live.stop(job, grace_seconds=0.0 if now else GRACE_SECONDS)
        return JsonAnswer({"state": "stopping"})

    def resume(_request: Request, job: Job) -> Response:
        try:
            return JsonAnswer({"state": supervisor.resume(job).state})
        except OptionError as err:
            return JsonAnswer({"detail": str(err)}, 409)

    def report(request: Request, job: Job) -> Response:
        headers = {"content-disposition": f'attachment; filename="{quote(job.name)}.html"'}
        return Response(reporting.page(job, request.query_params.get("language", "en")), media_type="text/html", headers=headers)

    def support(_request: Request, job: Job) -> Response:
        headers = {"content-disposition": f'attachment; filename="{quote(job.name)}-support.zip"'}
        return Response(supporting.archive(job), media_type="application/zip", headers=headers)

    def fix(_request: Request, job: Job) -> Response:
        try:
            return JsonAnswer({"run": live.fix(job).name})
        except OptionError as err:
            return JsonAnswer({"detail": str(err)}, 409)

    return [
        Route("/kl/runs", with_token(runs)),
        Route("/kl/runs/compare", with_token(compare)),
        Route("/kl/run/{run}", with_job(run)),
        Route("/kl/run/{run}/machine", with_job(machine)),
        Route("/kl/run/{run}/sample/{file}", with_job(sample)),
        Route("/kl/run/{run}/file/{file:path}", with_job(download)),
        Route("/kl/run/{run}/evaluation/{name}", with_job(evaluation)),
        Route("/kl/run/{run}/evaluation/{name}/{file}", with_job(evaluated)),
        Route("/kl/run/{run}/evaluate", with_job(evaluate), methods=["POST"]),
        Route("/kl/run/{run}/ask", ask, methods=["POST"]),
        Route("/kl/run/{run}/stop", with_job(stop), methods=["POST"]),
        Route("/kl/run/{run}/report", with_job(report)),
        Route("/kl/run/{run}/support", with_job(support)),
        Route("/kl/run/{run}/fix", with_job(fix), methods=["POST"]),
        Route("/kl/run/{run}/resume", with_job(resume), methods=["POST"]),
    ]


def inside(folder: Path, name: str, endings: frozenset[str]) -> Path | None:
    """The file of this name directly in a folder; None for all else, such as a path, a link that leads out, another kind of file."""
    if not name or name.startswith(".") or Path(name).name != name or "\\" in name or "\0" in name:
        return None
    file = folder / name
    if file.suffix.lower() not in endings or not os.path.isfile(file):
        return None
    return file if file.resolve().parent == folder.resolve() else None


@dataclass(frozen=True)
class SavedFile:
    """A file of a run to download; its name may begin with one of SIDE_FOLDERS."""

    name: str
    bytes: int


def downloadable(path: Path, name: str) -> Path | None:
    """The file of a run folder that the page may download under this name; None for all else."""
    folder, slash, file = name.rpartition("/")
    if slash:
        return inside(path / folder, file, SIDE_FILES) if SIDE_FOLDERS.fullmatch(folder) and not (path / folder).is_symlink() else None
    return inside(path, file, frozenset({Path(file).suffix}) if file in BESIDE else DOWNLOADS)


def _files(path: Path) -> list[SavedFile]:
    """Files to download: weights, newest first, then the settings, then what stands in folders of its own."""
    names = [entry.name for entry in path.iterdir()]
    folders = [name for name in names if SIDE_FOLDERS.fullmatch(name) and (path / name).is_dir()]
    names += [f"{folder}/{file.name}" for folder in folders for file in (path / folder).iterdir()]
    found = [(name, file.stat()) for name in names if (file := downloadable(path, name)) is not None]
    found.sort(key=lambda item: ("/" in item[0], not item[0].endswith(".safetensors"), -item[1].st_mtime_ns, item[0]))
    return [SavedFile(name, stat.st_size) for name, stat in found]


def _samples(progress: monitor.Progress) -> list[dict[str, Any]]:
    """The previews of a run, by step and prompt."""
    return [
        {
            "step": step,
            "index": index,
            "file": Path(event.file).name,
            "prompt": event.prompt,
            "seed": event.seed,
            "time": event.time or None,
        }
        for (step, index), event in sorted(progress.samples.items())
    ]


def _note(job: Job, progress: monitor.Progress, name: str) -> str:
    """What is known of a saved file beside its name."""
    saved = next((event for event in reversed(progress.saved) if event.file == name), None)
    told = ["chosen"] if picks.chosen(job.path) == name else []
    if saved is not None:
        told.append(f"lowest validation loss, step {saved.step}" if saved.what == "best" else f"step {saved.step}")
    return " · ".join(told)


def _devices_of(path: Path) -> list[str]:
    """The GPUs that a run from the studio was given, as CUDA_VISIBLE_DEVICES names them."""
    device = object_in(path / "run.json").get("device")
    return [name.strip() for name in device.split(",")] if isinstance(device, str) else []


def _row(job: Job) -> dict[str, Any]:
    brief = job.summary
    return {
        "name": job.name,
        "state": job.state,
        "stopping": job.stopping,
        "step": brief.step,
        "steps": brief.steps,
        "stop_step": desk.stop_step(job),
        "loss": brief.loss,
        "started": brief.started_at or None,
        "last_time": brief.last_time or None,
        "terminal": job.run_id is None,
        **desk.read(job.path).row(),
    }
