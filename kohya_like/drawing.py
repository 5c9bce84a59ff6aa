"""Images drawn with the saved files of a run: the JSON routes of the panel beside it. The tool of the run's family does the work, on the
bench of tools.py; the images lie in `drawn/<start>` inside the run folder, with the image that the tool worked on where it takes one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.tools import ToolOptions

from . import console, evaluations, live, tools
from .answers import JsonAnswer, order_of
from .context import Context
from .predictions import MAX_UPLOAD_BYTES
from .supervisor import Job

ENDINGS = frozenset({".png"})
STYLES = "styles.json"
"""In the folder of a run that learned styles: their names."""
TARGET, FROM = "target", "source"
"""The options of a tool that name the style to take on and the one that the image has."""
AUTO, AVERAGE = "auto", "average"
"""What an image's style may be besides those of the model."""
MAX_STYLES_BYTES = 1 << 20


def models(job: Job) -> list[str]:
    """Names of the saved files and folders of a run, newest first."""
    found = [path for path in job.path.iterdir() if live.inside(job.path, path.name, live.WEIGHTS) or (path / "model_index.json").is_file()]
    return [path.name for path in sorted(found, key=lambda path: (-path.stat().st_mtime_ns, path.name))]


def images(started: tools.Started, folder: Path) -> list[dict[str, Any]]:
    """The images that a finished start has reported and that lie in its folder, each with its seed, and the grid as the last."""
    told = tools.report(started)
    report = told if isinstance(told, dict) else {}
    # Reports of 0.1 have the files under "pictures".
    seed, given, grid = (report.get(name) for name in ("seed", "outputs" if "outputs" in report else "pictures", "grid"))
    first = seed if isinstance(seed, int) else None
    found: list[dict[str, Any]] = [
        {"file": Path(path).name, "seed": None if first is None else first + place, "grid": False}
        for place, path in enumerate(given if isinstance(given, list) else [])
        if isinstance(path, str)
    ]
    if isinstance(grid, str):
        found.append({"file": Path(grid).name, "seed": first, "grid": True})
    return [item for item in found if live.inside(folder, str(item["file"]), ENDINGS)]


def _folder(job: Job, started: tools.Started) -> Path:
    return job.path / tools.DRAWN / started.name


def styles(job: Job) -> list[str]:
    """The styles that a run has learned: those it began with, or those of its newest evaluation where it went on from a saved model. Empty
    where it learned none, or has not come so far."""
    file = job.path / STYLES
    try:
        said = json_of(file.read_bytes()) if not file.is_symlink() and file.stat().st_size <= MAX_STYLES_BYTES else None
    except (OSError, ValueError):
        said = None
    if isinstance(said, list):
        return [name for name in said if isinstance(name, str)]
    made = evaluations.found(job.run)
    newest = evaluations.summary(job.run.inference / made[-1].name) if made else None
    return newest["styles"] if newest is not None else []


def _form(tool: type[ToolOptions], job: Job) -> dict[str, Any]:
    """The tool's form, with the styles of the run to choose from."""
    made = tools.form_of(tool, without=(tools.MODEL, tools.IMAGES))
    known = styles(job)
    for field in made["fields"] if known else ():
        if field["name"] == TARGET:
            field |= {"suggestions": known, "default": known[0]}
        elif field["name"] == FROM:
            field |= {"control": "select", "choices": [AUTO, *known, AVERAGE]}
    return made


def _source(context: Context, bench: tools.ToolBench, tool: type[ToolOptions], texts: dict[str, Any]) -> Path | None:
    """The single image that the tool is to work on: an upload, or a file, which is taken as an upload is. None for all else, such as a
    folder. Raises OptionError."""
    text = texts.get(tools.IMAGE)
    if tools.IMAGE not in flat.fields(tool) or not isinstance(text, str) or not text.strip():
        return None
    try:
        upload = context.predictions.upload(text)
    except KeyError:
        gone = f"{tools.IMAGE}: the image that was given is not kept any more; choose it again"
        raise OptionError(Problem(tools.IMAGE, gone)) from None
    if upload is not None:
        return upload
    problems: list[Problem] = []
    path = Path(bench.confined(tools.IMAGE, text, problems))
    if problems or path.is_dir():
        return None
    try:
        with path.open("rb") as file:
            name, _size = context.predictions.take_image(file.read(MAX_UPLOAD_BYTES + 1))
    except OSError as err:
        raise OptionError(Problem(tools.IMAGE, f"{tools.IMAGE}: {path} cannot be read: {err.strerror}")) from err
    except OptionError as err:
        told = [problem.message.removeprefix("images: ") for problem in err.problems]
        raise OptionError([Problem(tools.IMAGE, f"{tools.IMAGE}: {text}") for text in told]) from err
    return context.predictions.upload(name)


def _started(context: Context, bench: tools.ToolBench, job: Job, tool: type[ToolOptions], texts: dict[str, Any]) -> tools.Started:
    """Starts the tool with the saved file that the form names. Raises OptionError."""
    name = texts.get(tools.MODEL)
    if name not in models(job):
        raise OptionError(Problem(tools.MODEL, f"{tools.MODEL}: {name} is not among the saved files of this run any more; choose another"))
    return bench.draw(tool, job.path, job.path / str(name), texts, _source(context, bench, tool, texts))


def routes(context: Context) -> list[Route]:
    """The routes of the panel. The guard asks all of them for the token of the page."""
    bench = tools.ToolBench(context.output_dir, context.roots)

    def found(request: Request) -> tuple[Job, type[ToolOptions]]:
        job = context.supervisor.find(request.path_params["run"])
        tool = None if job is None else tools.drawing_tool(job.run.config)
        if job is None or tool is None:
            raise KeyError("run")
        return job, tool

    def of_run(request: Request) -> tuple[Job, tools.Started]:
        job, _tool = found(request)
        started = bench.find(request.path_params["name"])
        if started.order.of_run != job.name:
            raise KeyError("start")
        return job, started

    def gone(what: str) -> Response:
        return JsonAnswer({"detail": f"{what} is not on disk any more."}, 404)

    def panel(request: Request) -> Response:
        try:
            job, tool = found(request)
        except KeyError:
            return gone("This run")
        told = ("prompt", TARGET)
        before = [{**tools.row(item), **{name: item.order.texts.get(name, "") for name in told}} for item in bench.recent(job.name)]
        now = {"models": models(job), "runs": before}
        return JsonAnswer({**_form(tool, job), **now, "maxBytes": MAX_UPLOAD_BYTES})

    async def start(request: Request) -> Response:
        order = await order_of(request)
        try:
            job, tool = found(request)
        except KeyError:
            return gone("This run")
        if not isinstance(order.get("texts"), dict):
            return JsonAnswer({"detail": "This is not an order of the page."}, 400)
        try:
            started = await run_in_threadpool(_started, context, bench, job, tool, order["texts"])
        except OptionError as err:
            return JsonAnswer({"problems": err.at_options()})
        return JsonAnswer({"run": tools.row(started)})

    def one(request: Request) -> Response:
        try:
            job, started = of_run(request)
            offset = int(request.query_params.get("console", "-1"))
        except ValueError:
            return JsonAnswer({"detail": "console is a whole number."}, 400)
        except KeyError:
            return gone("This")
        error = "\n".join(console.last_lines(started.path / "console.log", 12)) if started.state in ("failed", "died") else ""
        folder = _folder(job, started)
        source = tools.SOURCE if live.inside(folder, tools.SOURCE, ENDINGS) else ""
        return JsonAnswer({**tools.detail(started, offset), "images": images(started, folder), "source": source, "error": error})

    def image(request: Request) -> Response:
        try:
            job, started = of_run(request)
            path = live.inside(_folder(job, started), request.path_params["file"], ENDINGS)
        except KeyError:
            path = None
        if path is None:
            return gone("This image")
        name = f"{job.name}-{path.name}" if request.query_params.get("save") == "1" else None
        return FileResponse(path, filename=name, headers={"cache-control": "private, max-age=3600"})

    return [
        Route("/kl/draw/{run}", panel),
        Route("/kl/draw/{run}", start, methods=["POST"]),
        Route("/kl/draw/{run}/{name}", one),
        Route("/kl/draw/{run}/{name}/{file}", image),
    ]
