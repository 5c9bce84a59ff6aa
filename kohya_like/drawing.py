"""Pictures drawn with the saved files of a run: the JSON routes of the panel beside it. The tool of the run's family does the work, on the
bench of tools.py; the pictures lie in `drawn/<start>` inside the run folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.tools import ToolOptions

from . import console, live, tools
from .context import Context
from .supervisor import Job

ENDINGS = frozenset({".png"})


def models(job: Job) -> list[str]:
    """Names of the saved files and folders of a run, newest first."""
    found = [path for path in job.path.iterdir() if live.inside(job.path, path.name, live.WEIGHTS) or (path / "model_index.json").is_file()]
    return [path.name for path in sorted(found, key=lambda path: (-path.stat().st_mtime_ns, path.name))]


def pictures(started: tools.Started, folder: Path) -> list[dict[str, Any]]:
    """The pictures that a finished start has reported and that lie in its folder, each with its seed, and the grid as the last."""
    told = tools.report(started)
    report = told if isinstance(told, dict) else {}
    seed, given, grid = (report.get(name) for name in ("seed", "pictures", "grid"))
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


def _started(bench: tools.ToolBench, job: Job, tool: type[ToolOptions], texts: dict[str, Any]) -> tools.Started:
    """Starts the tool with the saved file that the form names. Raises OptionError."""
    name = texts.get(tools.MODEL)
    if name not in models(job):
        raise OptionError(Problem(tools.MODEL, f"{tools.MODEL}: {name} is not among the saved files of this run any more; choose another"))
    return bench.draw(tool, job.path, job.path / str(name), texts)


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
        return JSONResponse({"detail": f"{what} is not on disk any more."}, 404)

    def panel(request: Request) -> Response:
        try:
            job, tool = found(request)
        except KeyError:
            return gone("This run")
        before = [{**tools.row(item), "prompt": item.order.texts.get("prompt", "")} for item in bench.recent(job.name)]
        now = {"models": models(job), "runs": before}
        return JSONResponse({**tools.form_of(tool, without=(tools.MODEL, tools.PICTURES)), **now})

    async def start(request: Request) -> Response:
        try:
            order = await request.json()
            job, tool = found(request)
        except ValueError:
            return JSONResponse({"detail": "This is not an order of the page."}, 400)
        except KeyError:
            return gone("This run")
        if not isinstance(order, dict) or not isinstance(order.get("texts"), dict):
            return JSONResponse({"detail": "This is not an order of the page."}, 400)
        try:
            started = await run_in_threadpool(_started, bench, job, tool, order["texts"])
        except OptionError as err:
            return JSONResponse({"problems": [{"option": problem.option, "message": str(problem)} for problem in err.problems]})
        return JSONResponse({"run": tools.row(started)})

    def one(request: Request) -> Response:
        try:
            job, started = of_run(request)
            offset = int(request.query_params.get("console", "-1"))
        except ValueError:
            return JSONResponse({"detail": "console is a whole number."}, 400)
        except KeyError:
            return gone("This")
        error = "\n".join(console.last_lines(started.path / "console.log", 12)) if started.state in ("failed", "died") else ""
        return JSONResponse({**tools.detail(started, offset), "pictures": pictures(started, _folder(job, started)), "error": error})

    def picture(request: Request) -> Response:
        try:
            job, started = of_run(request)
            path = live.inside(_folder(job, started), request.path_params["file"], ENDINGS)
        except KeyError:
            path = None
        if path is None:
            return gone("This picture")
        name = f"{job.name}-{path.name}" if request.query_params.get("save") == "1" else None
        return FileResponse(path, filename=name, headers={"cache-control": "private, max-age=3600"})

    return [
        Route("/kl/draw/{run}", panel),
        Route("/kl/draw/{run}", start, methods=["POST"]),
        Route("/kl/draw/{run}/{name}", one),
        Route("/kl/draw/{run}/{name}/{file}", picture),
    ]
