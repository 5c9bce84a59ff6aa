"""The Train tab: kind of run, presets, the form, and the side panel that prints, saves, loads, checks, starts and stops."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import secrets
import threading
import time
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import gradio as gr
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sd_scripts.families import RUNS, bases
from sd_scripts.programs import UnclearOwner, exports
from sd_scripts.runs import cluster
from sd_scripts.runs.command import launch_command, launch_environment, shown
from sd_scripts.runs.early_checks import check_early
from sd_scripts.runs.events import Warned
from sd_scripts.schema import flat, toml_files
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import write_atomically
from sd_scripts.schema.runs import RunOptions

from .. import dataset_view, desk, files, form, gpu, importers, memory, page, presets, resuming, sweep_routes, theme
from ..answers import JsonAnswer, as_lines, order_of
from ..context import Context
from ..supervisor import Job

Answer = dict[str, Any]
"""What the side panel shows next; web/train/answers.js draws it. `seq` makes two equal answers different, so that both are shown."""

MAX_TEXT_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20
OPENED = (".toml", ".json", ".yaml", ".yml", ".safetensors", ".sh", ".bat", ".cmd", ".ps1", ".txt")
"""Endings of files that fill the form."""
MAX_CARD_GIB = 4096
PRINTED = ".printed"
"""Folder inside the folder of runs for the files that printed commands name."""


def answer(note: str = "", **content: Any) -> Answer:
    """One answer: a sentence for the status line, and what else changes."""
    return {"seq": secrets.token_hex(6), "note": note, **content}


def refusal(err: OptionError) -> Answer:
    """The problems of an OptionError, for the list and the fields."""
    return answer(problems=err.at_options())


def _taken(outlook: resuming.Outlook) -> Answer:
    """The refusal of a start, with the run that has these settings already, so that the page can offer what else to do."""
    problem = {"option": "resume", "message": f"resume: {outlook.text}"}
    return answer(problems=[problem | ({"run": outlook.run.name} if outlook.run is not None else {})])


@dataclass(frozen=True)
class TrainTab:
    """What the buttons do, free of gradio: fieldset values in, answers out."""

    context: Context

    def options(self, payloads: Iterable[Any], sections: Collection[str] = ()) -> RunOptions:
        """The options on the page, with paths from the root; the output folder, left at its default, is the studio's own.

        sections: see form.options. Raises OptionError.
        """
        built = form.options(payloads, self.context.roots, sections)
        values = flat.flatten(built)
        if values["output_dir"] == flat.fields(type(built))["output_dir"].default:
            built = flat.build(type(built), {**values, "output_dir": str(self.context.output_dir)})
        return flat.with_absolute_paths(built)

    def of_images(self, payloads: Iterable[Any]) -> RunOptions:
        """The options by which images are looked at. Where the form cannot be started yet, its data set and what its model asks of images
        count alone, so that captions can be written before a base model is chosen. Raises OptionError for what is wrong with these.
        """
        payloads = list(payloads)
        try:
            return self.options(payloads)
        except OptionError:
            return self.options(payloads, ("dataset", "model"))

    def printed(self, payloads: Iterable[Any], download: bool = False) -> Answer:
        """The command and the TOML, or what is wrong."""
        try:
            options = self.options(payloads)
            toml = toml_files.to_toml(options)
            config = self._written(options, toml)
        except OptionError as err:
            return refusal(err)
        command, environment = launch_command(options, config=config), launch_environment(options)
        output = {
            "commands": {shell: shown(command, shell, environment) for shell in ("sh", "powershell")},
            "toml": toml,
            "name": f"{flat.flatten(options)['output_name']}.toml",
            "about": "Start runs exactly this, with the config.toml of the run's own folder. The file in the command is there already.",
        }
        return answer("Saved to your downloads" if download else "", problems=[], output=output, download=download)

    def rewritten(self, program: str, payloads: Iterable[Any]) -> Answer:
        """The settings as a file of another program, with what cannot be said there; or what is wrong."""
        try:
            made = exports.PROGRAMS[program](self.options(payloads))
        except OptionError as err:
            return refusal(err)
        lost = f" It cannot say {', '.join(made.unsaid)}." if made.unsaid else " It says everything."
        files = {made.name: made.text, **made.beside}
        note = f"Saved {' and '.join(files)} for {made.program} to your downloads.{lost}"
        return answer(note, problems=[], save=[{"name": name, "text": text} for name, text in files.items()])

    def _written(self, options: RunOptions, toml: str) -> Path:
        """The file that the printed command reads; equal settings share one, so printing often leaves no heap."""
        digest = hashlib.sha256(toml.encode()).hexdigest()[:8]
        path = self.context.output_dir / PRINTED / f"{files.safe_name(str(flat.flatten(options)['output_name']))}-{digest}.toml"
        try:
            if not path.is_file():
                write_atomically(path, toml)
        except OSError as err:
            raise OptionError(f"output_dir: the settings cannot be written to {path}: {err.strerror}") from err
        return path

    def start(self, payloads: Iterable[Any]) -> tuple[Answer, Job | None]:
        """Starts the run on the page, or says what is wrong. Where it begins is what the page has shown."""
        try:
            options = self.options(payloads)
            check_early(options)
            outlook = resuming.outlook(options, self._under_way)
            if not outlook.starts:
                return _taken(outlook), None
            dataset_view.check(options, self.context.output_dir)
            if outlook.kind == "from state":
                options = flat.build(type(options), {**_given(options), "resume": str(outlook.state)})
            job = self.context.supervisor.start(options.script, options, resume=outlook.run)
        except OptionError as err:
            return refusal(err), None
        return answer(f"{outlook.text} {_begun(job)}", problems=[], output=None, report=None, imported=None, seen=True), job

    def _under_way(self, run: Path) -> str:
        job = self.context.supervisor.find(run.name)
        return job.state if job is not None and job.path == run.resolve() and job.state in ("running", "queued") else ""

    def foresight(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """What Start would do with the form as it is. Nothing while something is wrong in it, unless it is the field resume."""
        try:
            found = resuming.foresight(self.options([payload]), self._under_way)
        except OptionError as err:
            text = " ".join(str(problem) for problem in err.problems if problem.option == "resume")
            found = resuming.Foresight("refused" if text else "", text)
        return replace(found, base=_about_base(payload)).as_page()

    def exported(self, texts: Mapping[str, Any], payloads: Iterable[Any]) -> dict[str, Any]:
        """The files that train what is in the form on a cluster, and the same as a .zip; or what is wrong. Nothing is started."""
        try:
            options = self.options(payloads)
            known = form.shown_fields(cluster.ClusterOptions)
            values = {name: form.from_text(known[name], text) for name, text in texts.items() if name in known}
            made = cluster.files(options, flat.build(cluster.ClusterOptions, values).cluster)
        except OptionError as err:
            return {"problems": err.at_options()}
        name = f"{files.safe_name(options.output.output_name)}-{values.get('kind', 'slurm')}"
        packed = base64.b64encode(_zipped(made, name)).decode()
        return {"files": [{"name": file, "text": text} for file, text in made.items()], "name": f"{name}.zip", "zip": packed}

    def memory(self, payload: Mapping[str, Any], card_gib: float | None) -> Iterator[memory.Line]:
        """What memory the run in the form would take, and with a card what makes it fit there; lines come while it is measured."""
        try:
            options = self.options([payload])
        except OptionError as err:
            yield {"problem": " ".join(str(problem) for problem in err.problems)}
            return
        yield from memory.ask(options, card_gib, payload)

    def stop(self, name: str) -> Answer:
        """Asks a run to stop and goes on at once; the end shows in the live view."""
        job = self.context.supervisor.find(name) if name else None
        if job is None or job.state not in ("running", "queued"):
            return answer("No run from this page is running; the Runs tab lists all runs.")
        self.context.supervisor.request_stop(job)
        if job.state == "running":
            # The rest of the order (wait, terminate, kill) takes up to minutes: nobody waits for it here.
            threading.Thread(target=self._end, args=(job,), name=f"stop {name}", daemon=True).start()
        return answer(f"{desk.called(job.path)} was asked to stop: it finishes its step, saves its state and ends.")

    def _end(self, job: Job) -> None:
        try:
            self.context.supervisor.stop(job)
        except TimeoutError as err:
            job.run.log(Warned(text=f"Stopping: {err}; they may hang in a driver. Restarting the machine frees the GPU."))

    def load(self, request: Mapping[str, Any]) -> Answer:
        """Fills the form from a file that the browser read ({name, text} or {name, head, header}), a path on this computer ({where}), a
        {run} of this studio, or the {demo}.

        form is what is in the form, for files that describe data alone; program is the answer to whose file it is."""
        present = form.run_of_key(request.get("form", {}).get("run"))
        opened = importers.Opened(present, str(request.get("program", "")), allowed=self._allowed)
        try:
            if request.get("demo"):
                preset = presets.find(presets.DEMO, self.context.output_dir, own=False)
                return self._filled({**preset.values, "script": preset.run.script}, preset.title)
            if request.get("run"):
                job = self.context.supervisor.find(str(request["run"]))
                if job is None:
                    raise OptionError(f"there is no run {request['run']} any more")
                return self._filled(toml_files.read_toml(job.run.config), job.name)
            if request.get("where"):
                return self.load_path(self._allowed(request["where"]), opened)
            name, text = str(request.get("name", "the file")), str(request.get("text", ""))
            head, size = request.get("head"), request.get("bytes")
            if head is not None:
                return self._opened(name, _header(name, head, str(request.get("header", ""))), opened)
            if len(text.encode()) > MAX_TEXT_BYTES or (isinstance(size, int) and size > MAX_TEXT_BYTES):
                raise OptionError(f"{name} is larger than 1 MiB; a file of settings is a few KiB")
            return self._opened(name, text.encode(), opened)
        except OptionError as err:
            return refusal(err)

    def _allowed(self, path: object) -> Path:
        return files.confine(str(path), self.context.roots)

    def load_path(self, path: Path, opened: importers.Opened = importers.Opened()) -> Answer:  # noqa: B008
        """Fills the form from a file on this computer, and from the files of data that it names."""
        try:
            if path.suffix.lower() not in OPENED:
                raise OptionError(f"{path} does not end in {', '.join(OPENED)}; give a file of settings or a LoRA file")
            try:
                return self._opened(path.name, _head_of(path), replace(opened, path=path, allowed=self._allowed))
            except OSError as err:
                raise OptionError(f"{path} cannot be read: {err.strerror or err}") from err
        except OptionError as err:
            return refusal(err)

    def _opened(self, name: str, data: bytes, opened: importers.Opened) -> Answer:
        """The form with what is in a file. Our own settings are filled in as they stand, with their mistakes; the rest is imported."""
        if name.lower().endswith(".toml"):
            try:
                values = importers.own(name, data.decode("utf-8-sig"))
            except UnicodeDecodeError as err:
                raise OptionError(f"{name} is not text in UTF-8: {err}") from err
            if values is not None:
                return self._filled(values, name)
        try:
            found = importers.read(name, data, opened)
        except UnclearOwner as err:
            return answer(problems=[], ask={"name": name, "programs": err.programs})
        texts = form.texts(found.run, found.values)
        texts = {option: text for option, text in texts.items() if option in found.values} if found.adds else texts
        fill = {"run": form.run_key(found.run), "texts": texts, "adds": found.adds}
        missing = [{"option": sentence.partition(":")[0], "message": sentence} for sentence in found.missing]
        rows = [{"key": row.key, "value": _brief(row.value), "verdict": row.verdict, "text": row.text} for row in found.rows]
        report = {
            "name": name,
            "origin": found.origin,
            "label": found.run.label,
            "rows": rows,
            "missing": missing,
            "conflicts": found.conflicts,
            "further": name.lower().endswith(".safetensors") and "network_weights" in form.shown_fields(found.run),
            "path": str(opened.path or ""),
        }
        return answer(f"Settings read: {name}", problems=[], fill=fill, imported=report, seen=True)

    def _filled(self, values: Mapping[str, Any], origin: str) -> Answer:
        """The form with a file's values. What is wrong in the file is shown, the rest is filled in."""
        run = flat.run_of(values)
        problems: list[Problem] = []
        settled = dict(values)
        try:
            settled = flat.flatten(flat.build(run, values, origin))
        except OptionError as err:
            problems = err.problems
        known = form.shown_fields(run)
        settled |= {name: values[name] for name in flat.asleep(run, values) if name in values}
        texts = form.texts(run, {})
        for name, field in known.items():
            if name in settled:
                texts[name] = _as_text(field, settled[name])
        listed = [{"option": problem.option, "message": str(problem)} for problem in problems]
        return answer(f"Settings loaded: {origin}", problems=listed, fill={"run": form.run_key(run), "texts": texts}, seen=True)

    def check(self, payloads: Iterable[Any]) -> Iterator[Answer]:
        """What training would see of the data set, in steps: a sentence while it looks, then the report."""
        yield answer("Looking at the images …")
        try:
            options = self.of_images(payloads)
            for progress in dataset_view.look_at(options, self.context.output_dir):
                if isinstance(progress, str):
                    yield answer(progress)
                else:
                    yield answer("", problems=[], report=progress.as_page())
        except OptionError as err:
            yield refusal(err)

    # Presets

    def preset_list(self) -> dict[str, Any]:
        found, broken = presets.available(self.context.output_dir)
        listed = [{"name": _preset_id(item), "title": item.title, "run": form.run_key(item.run), "own": item.own} for item in found]
        return {"seq": secrets.token_hex(6), "presets": listed, "message": " ".join(broken), "chosen": None}

    def choose_preset(self, request: Mapping[str, Any], payloads: Iterable[Any]) -> dict[str, Any]:
        """The list, with what one preset would change."""
        state = self.preset_list()
        own, _, name = str(request.get("name", "")).partition(":")
        try:
            preset = presets.find(name, self.context.output_dir, own == "own")
        except OptionError as err:
            return {**state, "message": str(err)}
        now: dict[str, form.Text] = {}
        for payload in payloads:
            if isinstance(payload, Mapping) and payload.get("run") == form.run_key(preset.run):
                now.update(payload.get("values") or {})
        after = presets.applied(preset, now)
        changes = [vars(change) for change in presets.difference(preset.run, now, after)]
        chosen = {"name": _preset_id(preset), "title": preset.title, "about": preset.about, "changes": changes}
        texts = {"run": form.run_key(preset.run), "texts": after, "keeps": presets.kept(preset)}
        return {**state, "chosen": chosen | texts}

    def keep_preset(self, request: Mapping[str, Any], payloads: Iterable[Any]) -> tuple[dict[str, Any], Answer]:
        """Saves the form as a preset; what is wrong goes to the list of problems."""
        try:
            preset = presets.keep(str(request.get("name", "")), self.options(payloads), self.context.output_dir)
        except OptionError as err:
            return self.preset_list(), refusal(err)
        return {**self.preset_list(), "message": f"Saved as {preset.title}."}, answer(problems=[])


def _given(options: RunOptions) -> dict[str, Any]:
    """All values but those that are None, which is always a default."""
    return {name: value for name, value in flat.flatten(options).items() if value is not None}


def _zipped(made: Mapping[str, str], folder: str) -> bytes:
    """A .zip with the texts in one folder; scripts may be run."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in made.items():
            entry = zipfile.ZipInfo(f"{folder}/{name}", time.localtime()[:6])
            entry.external_attr = (0o755 if name.endswith((".sh", ".sbatch")) else 0o644) << 16
            archive.writestr(entry, text)
    return stream.getvalue()


def _preset_id(preset: presets.Preset) -> str:
    return f"{'own' if preset.own else 'built'}:{preset.name}"


def _header(name: str, length: object, encoded: str) -> bytes:
    """The head of a .safetensors file as the browser sent it: its length, and its bytes in base64. Raises OptionError."""
    if isinstance(length, int) and length > MAX_HEADER_BYTES:
        raise OptionError(_too_long(name, length))
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as err:
        raise OptionError(f"{name} did not arrive whole; open it again") from err


def _head_of(path: Path) -> bytes:
    """What an importer needs of a file: all of a text, and of a .safetensors file its header. Raises OptionError and OSError."""
    with path.open("rb") as file:
        if path.suffix.lower() == ".safetensors":
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if length > MAX_HEADER_BYTES:
                raise OptionError(_too_long(path.name, length))
            return first + file.read(length)
        data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise OptionError(f"{path} is larger than 1 MiB; a file of settings is a few KiB")
    return data


def _too_long(name: str, length: int) -> str:
    return f"{name}: its header is {length} bytes long; no file of weights has more than 16 MiB, so it is damaged"


def _brief(value: object) -> str:
    """A value of a file for a table, cut where it is long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 200 else f"{text[:200]} …"


def _begun(job: Job) -> str:
    name = desk.called(job.path)
    return f"{name} waits for a free device." if job.state == "queued" else f"{name} has started."


def _as_text(field: flat.FlatField, value: Any) -> form.Text:
    """A value for its control, even one that does not belong there, so that the person can see and correct it."""
    try:
        return form.to_text(field, value)
    except (TypeError, ValueError):
        return str(value)


def build(context: Context, demo: gr.Blocks) -> None:
    """Makes the tab inside the surrounding gr.Tab of a page."""
    tab = TrainTab(context)
    with gr.Row(elem_classes=["kl-columns"]):
        with gr.Column(scale=7, min_width=300, elem_classes=["kl-main"]):
            page.part("welcome")
            with gr.Column(elem_classes=["kl-card", "kl-start"]):
                page.part("kinds")
                picker = page.part("presets", None, ("choose_preset", "keep_preset"))
            fieldsets = [page.fieldset(theme.BASICS)]
            page.part("toolbar")
            fieldsets += [page.fieldset(group) for group in theme.GROUPS if _is_used(group)]
        with gr.Column(scale=5, min_width=300, elem_classes=["kl-side"]):
            with gr.Row(elem_classes=["kl-buttons"]):
                start = gr.Button("Start training", variant="primary", elem_id="kl-start")
                page.part("foresight", elem_classes=["kl-foresight"])
                stop = gr.Button("Stop", elem_id="kl-stop")
                show = gr.Button("Print command", elem_id="kl-print")
                check = gr.Button("Check data set", elem_id="kl-check")
            page.part("memory")
            page.part("cluster", cluster_fields())
            page.part("sweep")
            board = page.part("answers", None, elem_id="kl-answers")
            following = page.part("panel", {"run": ""}, look="kl-live", elem_id="kl-live")
            keeper = page.part("keep", None, ("save_file",))
    _wire(
        tab,
        _Parts(tuple(fieldsets), picker, board, following, keeper),
        {"start": start, "stop": stop, "print": show, "check": check},
        demo,
    )


def cluster_fields() -> list[dict[str, Any]]:
    """The fields of the export, as the page draws them."""
    return [form.specification(field) | {"basic": field.show.basic} for field in form.shown_fields(cluster.ClusterOptions).values()]


def routes(context: Context) -> list[Route]:
    """What the Train tab asks beside its buttons; the guard asks all of them for the token of the page."""
    tab = TrainTab(context)

    def answered(work: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Callable[[Request], Any]:
        async def answer_to(request: Request) -> Response:
            order = await _order_of(request)
            if order is None:
                return JsonAnswer({"detail": "This is not an order of the page."}, 400)
            return JsonAnswer(await run_in_threadpool(work, order))

        return answer_to

    def export(order: Mapping[str, Any]) -> dict[str, Any]:
        texts = order.get("texts")
        return tab.exported(texts if isinstance(texts, dict) else {}, [order["form"]])

    async def remember(request: Request) -> Response:
        order = await _order_of(request)
        if order is None:
            return JsonAnswer({"detail": "This is not an order of the page."}, 400)
        card = order.get("card")
        size = float(card) if isinstance(card, int | float) and 0 < card < MAX_CARD_GIB else None
        return as_lines(tab.memory(order["form"], size))

    def here(_request: Request) -> Response:
        return JsonAnswer(gpu.as_page())

    return [
        Route("/kl/train/foresight", answered(lambda order: tab.foresight(order["form"])), methods=["POST"]),
        Route("/kl/train/memory", remember, methods=["POST"]),
        Route("/kl/train/cluster", answered(export), methods=["POST"]),
        Route("/kl/train/open", answered(tab.load), methods=["POST"]),
        Route("/kl/train/gpus", here),
        *sweep_routes.routes(context, lambda payload: tab.options([payload])),
    ]


def _about_base(payload: Mapping[str, Any]) -> str:
    """What is known of the base model that the form names, whatever else is wrong in it."""
    try:
        run, said = form.read([payload])
    except OptionError:
        return ""
    return bases.about(run.family, str(said.get("pretrained_model_name_or_path") or ""))


async def _order_of(request: Request) -> dict[str, Any] | None:
    """What the page has sent, with the values of its form; None for anything else."""
    order = await order_of(request)
    return order if isinstance(order.get("form"), dict) else None


def _is_used(group: str) -> bool:
    """Whether a kind of run has this accordion; one without options would only cost time."""
    return any(form.group_of(run, field) == group for run in RUNS.values() for field in form.shown_fields(run).values())


@dataclass(frozen=True)
class _Parts:
    fieldsets: tuple[gr.HTML, ...]
    picker: gr.HTML
    board: gr.HTML
    following: gr.HTML
    keeper: gr.HTML


def _wire(tab: TrainTab, parts: _Parts, buttons: Mapping[str, gr.Button], demo: gr.Blocks) -> None:
    """Events. Inputs are a set of fieldsets, so values arrive by name; answers go to the tab, never back into a control."""
    inputs = set(parts.fieldsets)
    board, picker, following = parts.board, parts.picker, parts.following

    def payloads(data: Mapping[Any, Any]) -> list[Any]:
        return [data[fieldset] for fieldset in parts.fieldsets]

    def on(
        event: Callable[..., Any],
        work: Callable[..., Any],
        outputs: Any,
        inputs: Any = None,
        queue: bool = False,
        meanwhile: Literal["once", "always_last", "multiple"] = "once",
    ) -> None:
        """meanwhile: what is asked for while an answer is awaited is dropped, comes next, without what was sent along, or goes at once."""
        event(work, inputs=inputs, outputs=outputs, queue=queue, show_progress="hidden", api_visibility="private", trigger_mode=meanwhile)

    def followed(result: tuple[Answer, Job | None]) -> tuple[Any, Any]:
        said, job = result
        return said, gr.skip() if job is None else {"run": job.name}

    def saved(data: dict[Any, Any], event: gr.EventData) -> Answer:
        program = str(_request(event).get("program") or "")
        return tab.rewritten(program, payloads(data)) if program in exports.PROGRAMS else tab.printed(payloads(data), download=True)

    def chosen(data: dict[Any, Any], event: gr.EventData) -> dict[str, Any]:
        return tab.choose_preset(_request(event), payloads(data))

    def kept(data: dict[Any, Any], event: gr.EventData) -> tuple[dict[str, Any], Answer]:
        return tab.keep_preset(_request(event), payloads(data))

    def checked(data: dict[Any, Any]) -> Iterator[Answer]:
        yield from tab.check(payloads(data))

    on(buttons["print"].click, lambda data: tab.printed(payloads(data)), board, inputs, meanwhile="always_last")
    on(buttons["start"].click, lambda data: followed(tab.start(payloads(data))), [board, following], inputs)
    on(buttons["stop"].click, lambda value: tab.stop(str((value or {}).get("run", ""))), board, following)
    on(buttons["check"].click, checked, board, inputs, queue=True)
    on(parts.keeper.save_file, saved, board, inputs)
    # Not as the part's value, which waits in Gradio's queue and has it tell screen readers "common.complete".
    on(demo.load, tab.preset_list, picker)
    on(picker.choose_preset, chosen, picker, inputs, meanwhile="multiple")
    on(picker.keep_preset, kept, [picker, board], inputs)


def _request(event: gr.EventData) -> Mapping[str, Any]:
    """What the page sent along with an event of its own."""
    data = event._data
    return data if isinstance(data, Mapping) else {}
