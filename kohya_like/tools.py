"""Runs tools as processes of their own, and the JSON routes of the Tools tab. Knows no tool's work.

Tools that draw images with the saved files of a run have their place beside the run: see drawing.py.

Each start gets a folder in `.tools/` inside the folder of runs: `tool.json` the order, `console.log` progress and messages, `report.json`
the tool's report, `exit.json` the end. Like a run it goes on without the studio, and a later studio finds it.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sd_scripts.families import TOOLS
from sd_scripts.runs.command import SCRIPTS, shown, visible_gpus
from sd_scripts.schema import command_line, flat, toml_files
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.files import write_atomically
from sd_scripts.schema.model import only_on_hub
from sd_scripts.schema.outside import json_in, object_in, read_as
from sd_scripts.schema.tools import ToolOptions

from . import console, files, form, processes
from .answers import JsonAnswer, order_of
from .context import Context

FOLDER = ".tools"
"""Folder inside the folder of runs."""
REPORT = "report"
"""The option that names the report's file; the studio sets it."""
OUTPUT = "save_to"
"""The option that names the file a tool writes."""
MODEL, IMAGES = "ckpt", "out"
"""The options of a drawing tool that name the model and the folder of the images; the studio sets both."""
IMAGE = "image"
"""The option of a drawing tool that names the image to work on, where it has one."""
SOURCE = "source.png"
"""That image beside what became of it."""
DRAWN = "drawn"
"""Folder inside a run folder, with a folder of images for each start of a drawing tool."""
HISTORY = "history_order"
"""The option under whose name a tool's changes can be taken back."""
IMAGE_LIST = "images.jsonl"
MAX_SUGGESTED = 200
MAX_LISTED = 20
MAX_REPORT_BYTES = 4 << 20
_PERCENT = re.compile(r"(\d{1,3})%\|")

State = Literal["queued", "running", "finished", "failed", "cancelled", "died"]
ENDED = ("finished", "failed", "cancelled", "died")


@dataclass(frozen=True)
class ImageList:
    """Images that a tool of the Data tab works on, with their caption or mask files, as JSON lines; names are below root."""

    root: Path
    text: str


@dataclass(frozen=True)
class ToolOrder:
    """Content of tool.json."""

    tool: str
    run_id: str
    started: float
    """Unix time."""
    argv: tuple[str, ...]
    texts: dict[str, form.Text]
    """What the form held, to fill it again."""
    output: str
    """Path of the file that the tool writes; empty for a tool that only looks."""
    pid: int = 0
    create_time: float = 0.0
    cancelled: bool = False
    of_run: str = ""
    """Name of the run whose files a drawing tool uses; empty for a tool of a tab."""
    needs_device: bool = False
    """It waits until a device is free, as a training does."""
    queued: bool = False
    """It waits now. Its place in the queue is its name, which begins with the time."""
    device: str = ""
    """What it was given, as CUDA_VISIBLE_DEVICES names it, or cpu."""
    about: str = ""
    """The folder of images that a tool of the Data tab works on."""


@dataclass(frozen=True)
class Started:
    """One start of a tool as it was when somebody looked."""

    name: str
    order: ToolOrder
    state: State
    path: Path


class ToolBench:
    """Starts tools, finds them again, ends them."""

    def __init__(self, output_dir: Path, roots: tuple[Path, ...]) -> None:
        self._output_dir = output_dir
        self._roots = roots
        # The supervisor's queue starts in a thread of its own what a page may be stopping.
        self._lock = threading.Lock()

    def options(self, tool: type[ToolOptions], texts: Mapping[str, Any], settled: Mapping[str, str] | None = None) -> ToolOptions:
        """The options that the form describes, with canonical paths. Raises OptionError with every problem.

        A name without a folder means a file in the folder of runs. A file that is there already is never written over. settled holds
        paths that the studio decides.
        """
        known = form.shown_fields(tool)
        settled = settled or {}
        asked = {name: text for name, text in texts.items() if name in known and name != REPORT and name not in settled}
        values = {name: form.from_text(known[name], text) for name, text in asked.items()}
        problems: list[Problem] = []
        for name, value in values.items():
            if known[name].show.kind not in ("file", "folder") or value is None:
                continue
            if value in known[name].show.suggestions:
                continue
            if name in tool.hub and isinstance(value, str) and (values.get(tool.server) or only_on_hub(value)):
                continue
            items = value if isinstance(value, list) else [value]
            told = len(problems)
            confined = [self.confined(name, item, problems) for item in items if isinstance(item, str) and item.strip()]
            # Told now: one that waits for a device would find it in hours. Of what lies outside nothing more is said.
            missing = [place for place in confined if not Path(place).exists()] if name in tool.hub and len(problems) == told else []
            problems += [
                Problem(name, f"{name}: there is no file or folder {place}; give one, or a hub id (owner/name)") for place in missing
            ]
            values[name] = confined if isinstance(value, list) else next(iter(confined), None)
        target = values.get(OUTPUT)
        if isinstance(target, str) and Path(target).exists():
            problems.append(Problem(OUTPUT, f"{OUTPUT}: {target} is there already; choose another name, or move it away first"))
        try:
            built = flat.build(tool, {**values, **settled})
        except OptionError as err:
            raise OptionError([*problems, *err.problems]) from err
        refuse(problems)
        return built

    def confined(self, name: str, text: str, problems: list[Problem]) -> str:
        """The canonical path that an option's text names; what is wrong with it is added to the problems."""
        place = text.strip()
        if "/" not in place and "\\" not in place and not Path(place).exists():
            place = str(self._output_dir / place)
        try:
            return str(files.confine(place, self._roots))
        except OptionError as err:
            problems += [Problem(name, f"{name}: {problem.message}") for problem in err.problems]
            return place

    def start(self, tool_name: str, texts: Mapping[str, Any], secret: str = "") -> Started:
        """Starts a tool of the Tools tab. secret: the token that it takes, kept nowhere. Raises OptionError."""
        tool = TOOLS.get(tool_name)
        if tool is None or tool.family or tool.tab != "tools":
            raise OptionError(f"there is no tool {tool_name}; reload the page")
        environment = {tool.secret: secret} if tool.secret and secret else None
        return self._start(self._new_name(tool), tool, texts, self.options(tool, texts), environment=environment)

    def draw(self, tool: type[ToolOptions], run: Path, model: Path, texts: Mapping[str, Any], source: Path | None = None) -> Started:
        """Starts a drawing tool with a saved file of the run in this folder. Raises OptionError.

        source is the image that it works on; a copy of it is kept beside what becomes of it. None leaves it to what the form says.
        """
        name = self._new_name(tool)
        folder = run / DRAWN / name
        settled = {MODEL: str(model), IMAGES: str(folder), **({} if source is None else {IMAGE: str(folder / SOURCE)})}
        options = self.options(tool, texts, settled)
        if source is not None:
            try:
                folder.mkdir(parents=True)
                shutil.copyfile(source, folder / SOURCE)
            except OSError as err:
                raise OptionError(Problem(IMAGE, f"{IMAGE}: it cannot be copied to {folder}: {err.strerror}")) from err
        return self._start(name, tool, texts, options, run.name)

    def work_on_images(
        self,
        tool: type[ToolOptions],
        texts: Mapping[str, Any],
        images: ImageList,
        settled: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Started:
        """Starts a tool of the Data tab, or lets it wait for a device. settled: further options that the page decides. environment:
        secrets, kept nowhere. Raises OptionError."""
        name = self._new_name(tool)
        path = self._output_dir / FOLDER / name
        settled = {
            **(settled or {}),
            "image_dir": str(images.root),
            "image_list": str(path / IMAGE_LIST),
            **({HISTORY: name} if HISTORY in tool.settled else {}),
        }
        options = self.options(tool, texts, settled)
        try:
            path.mkdir(parents=True)
            write_atomically(path / IMAGE_LIST, images.text)
        except OSError as err:
            raise OptionError(f"the folder {path} cannot be made: {err.strerror}") from err
        return self._start(name, tool, texts, options, about=str(images.root), environment=environment)

    def _start(
        self,
        name: str,
        tool: type[ToolOptions],
        texts: Mapping[str, Any],
        options: ToolOptions,
        of_run: str = "",
        about: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Started:
        path = self._output_dir / FOLDER / name
        try:
            path.mkdir(parents=True, exist_ok=bool(about))
        except OSError as err:
            raise OptionError(f"the folder {path} cannot be made: {err.strerror}") from err
        argv = [sys.executable, str(SCRIPTS / tool.script), *command_line.to_argv(options), f"--{REPORT}={path / 'report.json'}"]
        output = flat.flatten(options).get(OUTPUT)
        kept = {name: text for name, text in texts.items() if isinstance(text, str | bool)}
        needs = options.needs_device
        order = ToolOrder(
            tool.name, uuid.uuid4().hex, time.time(), tuple(argv), kept, str(output or ""), of_run=of_run, needs_device=needs, about=about
        )
        return self._begin(path, order, environment)

    def _begin(self, path: Path, order: ToolOrder, environment: Mapping[str, str] | None = None) -> Started:
        """Starts the process, or leaves the order where the queue finds it."""
        if order.needs_device:
            _write(path, replace(order, queued=True))
        else:
            _launch(path, order, environment)
        return self.find(path.name)

    def resume(self, started: Started, environment: Mapping[str, str] | None = None) -> Started:
        """Goes on with one of the Data tab that was stopped, in its folder, with its own settings. Raises OptionError."""
        if started.state not in ("cancelled", "failed", "died") or not started.order.about:
            raise OptionError(f"{started.name} has nothing to go on with: it is {started.state}")
        for name in ("exit.json", "report.json", "launcher.json"):
            (started.path / name).unlink(missing_ok=True)
        return self._begin(started.path, replace(started.order, run_id=uuid.uuid4().hex, pid=0, cancelled=False, device=""), environment)

    # The supervisor's queue asks these, see supervisor.Guests.

    def held(self) -> list[str]:
        """The devices on which tools compute now."""
        return [each.order.device for each in self._with_devices() if each.state == "running" and each.order.device]

    def waiting(self) -> list[str]:
        """Those that wait for a device, the first one first."""
        return sorted(each.name for each in self._with_devices() if each.state == "queued")

    def start_on(self, name: str, device: str) -> None:
        """Starts one that waits."""
        path = self._output_dir / FOLDER / name
        with self._lock:
            order = _read(path)
            if order is None or not order.queued or order.cancelled:
                return
            order = replace(order, queued=False, device=device)
            try:
                _launch(path, order, {} if device == "cpu" else visible_gpus([device]))
            except OSError as err:
                (path / "console.log").write_text(f"{order.argv[0]} cannot be started: {err.strerror or err}\n", encoding="utf-8")
                _write(path, replace(order, pid=-1))

    def _with_devices(self) -> list[Started]:
        names = tuple(f"-{tool.name}" for tool in TOOLS.values() if tool.tab == "data")
        return [each for each in self._all() if each.name.endswith(names) and each.order.needs_device]

    @staticmethod
    def _new_name(tool: type[ToolOptions]) -> str:
        return f"{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}-{tool.name}"

    def find(self, name: str) -> Started:
        """The start with this folder name. Names are compared, never joined to a path. Raises KeyError."""
        return {started.name: started for started in self._all()}[name]

    def recent(self, of_run: str = "", about: str = "") -> list[Started]:
        """The newest starts, newest first: of the Tools tab, those that drew with the files of a run, or those for a folder of images."""
        return [started for started in self._all() if (started.order.of_run, started.order.about) == (of_run, about)][:MAX_LISTED]

    def _all(self) -> list[Started]:
        processes.collect()
        folder = self._output_dir / FOLDER
        names = sorted((path.name for path in folder.iterdir() if path.is_dir()), reverse=True) if folder.is_dir() else []
        found = []
        for name in names:
            order = _read(folder / name)
            if order is not None and order.tool in TOOLS:
                found.append(Started(name, order, _state(folder / name, order), folder / name))
        return found

    def cancel(self, started: Started) -> None:
        """Ends a tool's processes. What it was writing aside is left out; a file it had finished stays."""
        with self._lock:
            # It may have been started since somebody looked.
            order = _read(started.path)
            if order is None or _state(started.path, order) in ENDED:
                return
            _write(started.path, replace(order, cancelled=True, queued=False))
        members = {process.pid: process for process in processes.of_runs().get(order.run_id, [])}
        process = processes.living(order.pid) if order.pid > 0 else None
        if process is not None and abs(processes.created(process) - order.create_time) < 0.05:
            # One that was started a moment ago does not carry the run's id yet.
            members |= {each.pid: each for each in processes.tree(order.pid)}
        left = processes.end(list(members.values()))
        if left:
            raise TimeoutError("these processes cannot be ended: " + ", ".join(str(process.pid) for process in left))


def _launch(path: Path, order: ToolOrder, environment: Mapping[str, str] | None) -> None:
    pid = processes.start(path, list(order.argv), order.run_id, path / "console.log", environment)
    process = processes.living(pid)
    _write(path, replace(order, pid=pid, create_time=processes.created(process) if process else 0.0))


def _write(path: Path, order: ToolOrder) -> None:
    write_atomically(path / "tool.json", json.dumps(asdict(order), ensure_ascii=False))


def _read(path: Path) -> ToolOrder | None:
    try:
        return read_as(ToolOrder, (path / "tool.json").read_bytes())
    except (OSError, ValueError):
        return None


def _state(path: Path, order: ToolOrder) -> State:
    ended = object_in(path / "exit.json")
    code = ended.get("returncode") if ended.get("run_id") == order.run_id else None
    if code is None and processes.is_same(order.pid, order.create_time, order.run_id):
        return "running"
    if order.cancelled:
        return "cancelled"
    if order.queued:
        return "queued"
    return "died" if code is None else "finished" if code == 0 else "failed"


def drawing_tool(config: Path) -> type[ToolOptions] | None:
    """The tool that draws with the saved files of the run that has this config.toml; None for families without one."""
    try:
        family = flat.run_of(toml_files.read_toml(config)).family
    except OptionError:
        # Settings of another program, or of another version.
        return None
    return next((tool for tool in TOOLS.values() if tool.family == family), None)


def specification(output_dir: Path) -> dict[str, Any]:
    """The forms of the tools of the Tools tab, as tools.js draws them."""
    return {"tools": [form_of(tool) for tool in TOOLS.values() if not tool.family and tool.tab == "tools"], "folder": str(output_dir)}


def form_of(tool: type[ToolOptions], without: Collection[str] = ()) -> dict[str, Any]:
    """The form of a tool; the report's file is the studio's affair, and so are the options in `without`."""
    fields = [
        {**form.specification(field, tool.family), "basic": field.show.basic or field.required}
        for name, field in form.shown_fields(tool).items()
        if name != REPORT and name not in without and name not in tool.settled
    ]
    about = " ".join((tool.__doc__ or "").split())
    return {"name": tool.name, "label": tool.label, "about": about, "fields": fields, "secret": tool.secret}


def suggested(context: Context, bench: ToolBench) -> list[str]:
    """Files that runs and tools have written, newest first."""
    found: dict[Path, float] = {}
    for job in context.supervisor.jobs():
        for path in job.path.glob("*.safetensors"):
            found[path] = path.stat().st_mtime
    for started in bench.recent():
        path = Path(started.order.output)
        if started.state == "finished" and path.is_file():
            found[path] = path.stat().st_mtime
    return [str(path) for path in sorted(found, key=lambda path: -found[path])][:MAX_SUGGESTED]


def row(started: Started) -> dict[str, Any]:
    """A start as a line of a list."""
    order = started.order
    output = Path(order.output) if order.output else None
    return {
        "name": started.name,
        "tool": order.tool,
        "state": started.state,
        "started": order.started,
        "output": str(output) if output is not None and started.state == "finished" and output.is_file() else "",
    }


def report(started: Started) -> Any:
    """The report of a start that has ended; None when there is none, or one that is too large to show."""
    file = started.path / "report.json"
    small = file.is_file() and file.stat().st_size <= MAX_REPORT_BYTES
    return json_in(file) if small and started.state != "running" else None


def _why(started: Started) -> list[str]:
    """Why one has failed, in sentences: those in which it has said so, or what its console ends with."""
    lines = console.last_lines(started.path / "console.log")
    return [line.removeprefix("  - ") for line in lines if line.startswith("  - ")] or lines[-1:]


def detail(started: Started, offset: int) -> dict[str, Any]:
    """A start in full; offset: how far its console has been read, -1 for a first look."""
    chunk = console.read_console(started.path / "console.log", offset)
    percent = _PERCENT.findall(chunk.open)
    file = started.path / "report.json"
    return {
        **row(started),
        "console": asdict(chunk),
        "percent": min(100, int(percent[-1])) if percent else None,
        "report": report(started),
        "why": _why(started) if started.state in ("failed", "died") else [],
        "reportFile": str(file) if file.is_file() else "",
        "command": {shell: shown(list(started.order.argv), shell) for shell in ("sh", "powershell")},
        "texts": started.order.texts,
    }


def routes(context: Context) -> list[Route]:
    """The routes of the Tools tab. The guard asks all of them for the token of the page."""
    bench = ToolBench(context.output_dir, context.roots)
    context.supervisor.guests = bench

    def tools(_request: Request) -> Response:
        now = {"files": suggested(context, bench), "runs": [row(item) for item in bench.recent()]}
        return JsonAnswer({**specification(context.output_dir), **now})

    async def start(request: Request) -> Response:
        order = await order_of(request)
        if not isinstance(order.get("texts"), dict):
            return JsonAnswer({"detail": "This is not an order of the page."}, 400)
        try:
            secret = str(order.get("secret") or "").strip()
            started = await run_in_threadpool(bench.start, str(order.get("tool")), order["texts"], secret)
        except OptionError as err:
            return JsonAnswer({"problems": err.at_options()})
        return JsonAnswer({"run": row(started)})

    def one(request: Request) -> Response:
        try:
            offset = int(request.query_params.get("console", "-1"))
            return JsonAnswer(detail(bench.find(request.path_params["name"]), offset))
        except ValueError:
            return JsonAnswer({"detail": "console is a whole number."}, 400)
        except KeyError:
            return JsonAnswer({"detail": "This is not on disk any more."}, 404)

    def cancel(request: Request) -> Response:
        try:
            bench.cancel(bench.find(request.path_params["name"]))
        except KeyError:
            return JsonAnswer({"detail": "This is not on disk any more."}, 404)
        except TimeoutError as err:
            return JsonAnswer({"detail": f"Cancelling: {err}"}, 409)
        return JsonAnswer({"state": "cancelled"})

    return [
        Route("/kl/tools", tools),
        Route("/kl/tools/start", start, methods=["POST"]),
        Route("/kl/tools/run/{name}", one),
        Route("/kl/tools/run/{name}/cancel", cancel, methods=["POST"]),
    ]
