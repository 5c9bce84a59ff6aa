"""What the Generate tab may ask for, and its JSON routes. inference.js draws the tab; predictions.py does the asking.

A Menu says what one page offers: the studio's draws with every run, file and model, with the options of its family; a Space's has one base,
its own LoRA files and no path of the computer.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import LocalContext
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from sd_scripts.families import FACTS, PREDICTS, bases
from sd_scripts.runs import drawing
from sd_scripts.schema import flat, toml_files
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.generate import FAMILIES, USUAL_PROMPT, GenerateOptions, generate_options, grid_of, samples_of
from sd_scripts.schema.model import is_hub_id
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.predict import PredictOptions
from sd_scripts.schema.prompts import OPTION, Defaults, controls_in, off_grid, read_prompts

from . import answers, desk, files, foreign_images, form, gpu, memory
from .answers import JsonAnswer, as_lines
from .context import Context
from .dropped import MAX_BYTES as MAX_DROP_BYTES
from .dropped import Dropped
from .files import modified
from .inference import offered
from .predictions import MAX_UPLOAD_BYTES, Prediction, PredictionOrder, PredictionQueue, as_page, is_session

FIRST = ("prompt", "negative_prompt", "steps", "cfg_scale", "true_cfg_scale", "guidance", "sampler", "scheduler", "seed", "size")
"""Options that stand open on the page, besides images, base model and LoRA files, which have controls of their own."""
MODEL = ("pretrained_model_name_or_path", "model_version")
OWN_CONTROLS = ("images", "lora", "lora_weight")
UNSEEN = ("out", "report", "draw_with", "family", "base_weights", "base_weights_multiplier", *OWN_CONTROLS)
"""Options that the page does not have: where files go is the queue's business, and `lora` does what `base_weights` does."""
PREFILLED = {"pretrained_model_name_or_path": "toy"}
"""Where the schema has no default, so that the tab works at once."""
LABELS = {
    "cfg_scale": "CFG scale",
    "true_cfg_scale": "CFG scale",
    "prompt_list": "Several prompts",
    "num_images": "Number of images",
}
"""Where the name of an option says less than a word."""
DEVICES = ("transformer_device", "vae_device", "text_encoder_device")
TOY = next((name for name, facts in FACTS.items() if facts.demo is not None), "")
"""The family whose built-in model is drawn with where nothing else is there."""
THUMBNAIL_PIXELS = 256
_ANY_SIZE = (512, 512)
MAX_LORAS = 8
MAX_VARIANTS = 12
MAX_LISTED_FILES = 300
MAX_CARD_GIB = 10_000
MEMORY = "Devices and memory"
"""The accordion that has the forecast."""


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file that the page offers. name is what the page says for it: a path, or on a Space a name alone."""

    name: str
    path: Path
    run: str
    label: str
    family: str = ""
    called: Mapping[str, Any] = field(default_factory=desk.Said().names)
    """What the page calls the run by, beside its own name."""


@dataclass(frozen=True)
class Saved:
    """Something that a run has saved, to draw with. name is its path."""

    name: str
    run: str
    label: str
    family: str
    image: str
    """Name of the newest preview of the run; empty where it has none."""
    called: Mapping[str, Any] = field(default_factory=desk.Said().names)
    """What the page calls the run by, beside its own name."""


@dataclass(frozen=True)
class Choice:
    """What is drawn with, and what follows from it."""

    draw_with: str
    family: str
    kind: type[PredictOptions]
    values: Mapping[str, Any]
    """Options that are filled in."""
    prompts: str = ""
    """What the previews of a run were asked for."""


@dataclass(frozen=True)
class Menu:
    """What a page offers."""

    loras: Callable[[], list[LoraFile]]
    roots: tuple[Path, ...] | None
    """Folders that typed paths may lie in; None for a page on which no path may be typed."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Options that the page cannot change, by their flat names."""
    shown: frozenset[str] | None = None
    """Options that the page has; None for all."""
    most: Mapping[str, int] = field(default_factory=dict)
    """Upper bounds that are lower than the schema's."""
    saved: Callable[[], list[Saved]] | None = None
    """What there is to draw with; None for a page of one base."""
    training: Callable[[], list[tuple[str, list[str]]]] = list
    """Runs under way, each with its devices."""

    def chosen(self, draw_with: str = "", family: str = "", base: str = "") -> Choice:
        """What is drawn with: what somebody chose, or else the newest that was saved, or the built-in toy. Raises OptionError."""
        if self.saved is None:
            return Choice("", offered().family, offered(), {})
        if not draw_with and not base:
            newest = next(iter(self.saved()), None)
            draw_with, family = (newest.name, newest.family) if newest is not None else ("toy", family or TOY)
        draw_with = self._confined(draw_with)
        found = drawing.material(draw_with, family or None) if draw_with else None
        asked: dict[str, object] = {"draw_with": draw_with, "family": family or None, "pretrained_model_name_or_path": base or None}
        return _choice(draw_with, asked, found.prompts if found is not None else "")

    def untrained(self, draw_with: str, family: str) -> Choice | None:
        """The base of what somebody trained; None for what has none. Raises OptionError."""
        found = drawing.untrained(self._confined(draw_with), family or None)
        return None if found is None else _choice("", {**found.values, "family": found.family})

    def _confined(self, draw_with: str) -> str:
        if not draw_with or draw_with == "toy" or self.roots is None or is_hub_id(draw_with):
            return draw_with
        try:
            return str(files.confine(draw_with, self.roots))
        except OptionError as err:
            raise OptionError([Problem("draw_with", f"draw_with: {one.message}") for one in err.problems]) from err

    def fields(self, kind: type[PredictOptions] | None = None) -> dict[str, flat.FlatField]:
        """The options that stand on the page, in the order of the schema."""
        known = form.shown_fields(kind or offered())
        return {
            name: known[name]
            for name in known
            if name not in UNSEEN and name not in self.fixed and (self.shown is None or name in self.shown)
        }

    def lora_path(self, name: str) -> str:
        """The file behind a LoRA's name. Raises OptionError."""
        for file in self.loras():
            if file.name == name:
                return str(file.path)
        if self.roots is None:
            raise OptionError(Problem("lora", f"lora: there is no file {name!r} here; choose one of the list"))
        path = files.confine(name, self.roots)
        if not path.is_file():
            raise OptionError(Problem("lora", f"lora: {path} is not a file; choose one of the list, or give a .safetensors file"))
        return str(path)


def _choice(draw_with: str, asked: Mapping[str, object], prompts: str = "") -> Choice:
    values, kind = drawing.filled(asked)
    # Of a run's prompts the first is shown, and seeds are drawn anew.
    shown = {name: value for name, value in values.items() if name not in ("prompt_list", "seed")}
    return Choice(draw_with, kind.family, kind, shown, prompts)


def studio_menu(context: Context) -> Menu:
    """Everything, with the files of the runs on disk."""
    return Menu(
        loras=lambda: run_files(context), roots=context.roots, saved=lambda: saved_by_runs(context), training=context.supervisor.at_work
    )


def saved_by_runs(context: Context) -> list[Saved]:
    """What runs that draw from a prompt have saved, newest run first, in a run the newest file first."""
    found: list[Saved] = []
    for job in context.supervisor.jobs():
        family, _ = _kind_of(job.run.config, modified(job.run.config))
        if family not in FAMILIES:
            continue
        made = sorted(job.run.samples.glob("*.png"), key=lambda path: (-modified(path), path.name)) if job.run.samples.is_dir() else []
        image = made[0].name if made else ""
        called = desk.read(job.path).names()
        found += [Saved(str(path), job.name, path.stem, family, image, called) for path in drawing.saved_files(job.path)]
    return found[:MAX_LISTED_FILES]


def run_files(context: Context) -> list[LoraFile]:
    """LoRA files that runs have saved, newest run first, in a run the newest file first."""
    found: list[LoraFile] = []
    for job in context.supervisor.jobs():
        family, method = _kind_of(job.run.config, modified(job.run.config))
        if method == "network":
            files, called = drawing.saved_files(job.path), desk.read(job.path).names()
            found += [LoraFile(str(path), path, job.name, path.stem, family, called) for path in files if path.is_file()]
    return found[:MAX_LISTED_FILES]


@lru_cache(maxsize=1000)
def _kind_of(config: Path, modified: float) -> tuple[str, str]:
    """Family and method of a run."""
    try:
        run = flat.run_of(toml_files.read_toml(config))
    except OptionError:
        # A run of a newer studio, or damaged: its files may still be typed.
        return "", ""
    return run.family, run.method


def specification(menu: Menu, choice: Choice | None = None) -> dict[str, Any]:
    """The form as inference.js draws it: what is drawn with, options that stand open, the model's, and the rest by accordion."""
    choice = choice or menu.chosen()
    known = menu.fields(choice.kind)
    drawn = {name: _drawn(menu, spec, choice.values) for name, spec in known.items()}
    rest: dict[str, list[dict[str, Any]]] = {}
    for name, spec in known.items():
        if name not in FIRST and name not in MODEL:
            rest.setdefault(_accordion(spec), []).append(drawn[name])
    options = flat.fields(choice.kind)
    help_of = {name: options[name].help for name in OWN_CONTROLS if name in options}
    return {
        "choice": {
            "with": choice.draw_with,
            "family": choice.family,
            "label": FACTS[choice.family].label,
            "words": drawing.first_words(choice.prompts),
            "prompts": choice.prompts if drawing.first_words(choice.prompts) else "",
            "hasBase": bool(choice.values.get("lora"))
            or (bool(choice.draw_with) and menu.untrained(choice.draw_with, choice.family) is not None),
            "loras": list(choice.values.get("lora") or ()),
            "edits": "images" in options,
            "draws": menu.saved is not None,
        },
        "families": [{"name": name, "label": FACTS[name].label, "toy": drawing.has_toy(name)} for name in FAMILIES],
        "former": offered().family if PREDICTS else "",
        "first": [drawn[name] for name in FIRST if name in drawn],
        "model": [drawn[name] for name in MODEL if name in drawn],
        "rest": [{"title": title, "name": "memory" if title == MEMORY else "", "fields": fields} for title, fields in rest.items()],
        "help": help_of,
        "mayType": menu.roots is not None,
        "mayFree": menu.roots is not None,
        "maxLoras": MAX_LORAS,
        "maxVariants": MAX_VARIANTS,
        "maxBytes": MAX_UPLOAD_BYTES,
        "maxDropBytes": MAX_DROP_BYTES,
    }


def _accordion(spec: flat.FlatField) -> str:
    if spec.name in DEVICES or spec.section == "loading" or "quantization" in spec.name:
        return MEMORY
    return "More of the model" if spec.section == "model" else "More"


def _drawn(menu: Menu, spec: flat.FlatField, filled: Mapping[str, Any]) -> dict[str, Any]:
    drawn = form.specification(spec)
    drawn["label"] = "Instruction" if menu.saved is None and spec.name == "prompt" else LABELS.get(spec.name, drawn["label"])
    if spec.name in filled:
        drawn["default"] = form.to_text(spec, filled[spec.name])
    elif spec.name in PREFILLED:
        drawn["default"] = PREFILLED[spec.name]
    if spec.name in DEVICES:
        drawn["suggestions"] = ["cpu", *(f"cuda:{index}" for index in range(gpu.count()))]
    if spec.name in menu.most:
        drawn["range"] = f"up to {menu.most[spec.name]}"
    return drawn


def order_of(menu: Menu, queue: PredictionQueue, asked: Mapping[str, Any], session: str, chosen: Choice | None = None) -> PredictionOrder:
    """The order that the page describes, with every path confined. Raises OptionError with every problem.

    asked: `texts` by option, `images` names, `loras` [{name, weight}], and for a comparison `variants` [{label, loras}]. chosen: what is
    drawn with, where the texts do not say it.
    """
    problems: list[Problem] = []
    given = _mapping(asked.get("texts"))
    told = [str(given.get(name) or "").strip() for name in ("draw_with", "family", "pretrained_model_name_or_path")]
    try:
        choice = chosen or menu.chosen(*told)
    except OptionError as err:
        # The form is still that of the family.
        problems += err.problems
        choice = Choice("", told[1] or TOY, generate_options(told[1] if told[1] in FAMILIES else TOY), {})
    known = menu.fields(choice.kind)
    texts = {name: text for name, text in given.items() if name in known and isinstance(text, str | bool)}
    values = {**choice.values, **{name: form.from_text(known[name], text) for name, text in texts.items()}}
    for name, value in PREFILLED.items() if menu.saved is None else ():
        if not values.get(name):
            values[name] = value
    values |= menu.fixed
    if menu.roots is not None:
        problems += form.outside(choice.kind, {name: values[name] for name in texts}, menu.roots)
    if menu.saved is not None:
        # What it leads to is filled in; the worker is told that.
        values |= {"draw_with": "", "family": choice.family}
        if not any(str(values.get(name) or "").strip() for name in ("prompt", "prompt_list")):
            values["prompt_list"] = choice.prompts
        texts |= {"draw_with": choice.draw_with, "family": choice.family}
    problems += _too_much(menu, values)
    controls, names = _controls(queue, asked.get("images"), session, problems)
    loras = _loras(menu, asked.get("loras"), problems)
    variants = _variants(menu, asked.get("variants"), problems)
    checked = {**values, "lora": [path for path, _ in loras]} | ({"images": [str(path) for path in controls]} if controls else {})
    if loras:
        checked["lora_weight"] = [weight for _, weight in loras]
    try:
        options = flat.build(choice.kind, {name: value for name, value in checked.items() if value is not None})
    except OptionError as err:
        raise OptionError([*problems, *err.problems]) from err
    if options.predict.size is not None:
        problems += off_grid(options.predict.size, options.model.grid)
    if prompt_list := str(texts.get("prompt_list") or ""):
        problems += prompt_problems("prompt_list", prompt_list, choice.family, menu.roots)
    refuse(problems)
    request = {name: value for name, value in flat.changed(options).items() if name not in ("images", "out", "report")}
    if variants:
        request = {name: value for name, value in request.items() if name not in ("lora", "lora_weight")} | {"variants": variants}
    settings = {"texts": texts, "images": names, "loras": asked.get("loras") or [], "variants": asked.get("variants") or []}
    return PredictionOrder(request, controls, settings)


def prompt_problems(option: str, text: str, family: str, roots: tuple[Path, ...] | None) -> list[Problem]:
    """What is wrong with prompts in kohya's form, as far as it can be told without the model: flags, sizes, and control images."""
    if family not in FAMILIES:
        return []
    problems: list[Problem] = []
    for file in controls_in(text):
        try:
            files.confine(file, roots or ())
        except OptionError as err:
            problems += [Problem(option, f"{option}: --ci {one.message}") for one in err.problems]
    if problems:
        # Whether a file outside is there is nobody's business.
        return problems
    options = samples_of(family).model_construct(sample_prompts=text)
    try:
        read_prompts(Defaults(options, _ANY_SIZE, grid_of(family), 0))
    except OptionError as err:
        return [Problem(option, one.message.replace(OPTION, option, 1)) for one in err.problems]
    return []


def forecast_of(menu: Menu, queue: PredictionQueue, asked: Mapping[str, Any], session: str) -> GenerateOptions:
    """The options of drawing that the page describes, for a forecast: a prompt may be missing. Raises OptionError."""
    texts = dict(_mapping(asked.get("texts")))
    if not any(str(texts.get(name) or "").strip() for name in ("prompt", "prompt_list")):
        texts["prompt"] = USUAL_PROMPT
    if asked.get("cpu"):
        texts["transformer_device"] = "cpu"
    order = order_of(menu, queue, {**asked, "texts": texts, "variants": []}, session)
    images = {"images": [str(path) for path in order.controls]} if order.controls else {}
    return drawing.completed({**order.request, **images})


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _items(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _too_much(menu: Menu, values: Mapping[str, Any]) -> list[Problem]:
    """Problems for numbers above what this page allows; what is no number is the schema's to say."""
    problems = []
    for name, most in menu.most.items():
        given = values.get(name)
        for text in given if isinstance(given, list | tuple) else [given]:
            try:
                is_more = float(str(text)) > most
            except ValueError:
                continue
            if is_more:
                problems.append(Problem(name, f"{name}: {text} is more than {most}, the most that this page makes"))
    return problems


def _controls(queue: PredictionQueue, names: object, session: str, problems: list[Problem]) -> tuple[tuple[Path, ...], list[str]]:
    found, kept = [], []
    for number, name in enumerate(_items(names)):
        try:
            found.append(queue.image(str(name), session))
            kept.append(str(name))
        except KeyError:
            problems.append(Problem("images", f"images: image {number + 1} is not kept any more; give it again"))
    return tuple(found), kept


def _loras(menu: Menu, rows: object, problems: list[Problem]) -> list[tuple[str, float]]:
    """Paths and strengths; rows without a file are left out."""
    found: list[tuple[str, float]] = []
    given = [_mapping(row) for row in _items(rows)]
    for row in given[:MAX_LORAS]:
        name = str(row.get("name") or "").strip()
        if not name:
            continue
        try:
            found.append((menu.lora_path(name), float(str(row.get("weight", 1.0)).replace(",", ".") or 1.0)))
        except OptionError as err:
            problems += [Problem("lora", problem.message) for problem in err.problems]
        except ValueError:
            problems.append(Problem("lora", f"lora_weight: {row.get('weight')!r} is not a number, such as 0.8"))
    if len(given) > MAX_LORAS:
        problems.append(Problem("lora", f"lora: {len(given)} files are more than {MAX_LORAS}, the most that this page takes"))
    return found


def _variants(menu: Menu, rows: object, problems: list[Problem]) -> list[dict[str, Any]]:
    variants = []
    given = [_mapping(row) for row in _items(rows)]
    for row in given[:MAX_VARIANTS]:
        loras = _loras(menu, row.get("loras"), problems)
        variant: dict[str, Any] = {"label": str(row.get("label") or "")[:80]}
        if loras:
            variant |= {"lora": [path for path, _ in loras], "lora_weight": [weight for _, weight in loras]}
        variants.append(variant)
    if len(given) > MAX_VARIANTS:
        problems.append(Problem("", f"{len(given)} images side by side are more than {MAX_VARIANTS}, which is the most"))
    return variants


def thumbnail(path: Path) -> bytes:
    """A small WEBP of an image. Raises OSError."""
    with Image.open(path) as image:
        small = image.convert("RGB")
    small.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    stream = io.BytesIO()
    small.save(stream, format="WEBP", quality=85)
    return stream.getvalue()


async def _body(request: Request) -> bytes:
    """The whole body, or OptionError when it is too large; never more of it is held."""
    held = bytearray()
    async for chunk in request.stream():
        held += chunk
        if len(held) > MAX_UPLOAD_BYTES:
            raise OptionError(Problem("images", f"images: the file is larger than {MAX_UPLOAD_BYTES >> 20} MiB, which is the most"))
    return bytes(held)


def problems_of(err: OptionError) -> JsonAnswer:
    """The answer that says what is wrong, at its options."""
    return JsonAnswer({"problems": err.at_options()})


def _gone(what: str) -> JsonAnswer:
    return JsonAnswer({"detail": what}, 404)


def session_of(request: Request) -> str:
    """The session that asks; "" for none."""
    text = request.query_params.get("session", "")
    return text if is_session(text) else ""


def image_routes(queue: PredictionQueue) -> list[Route]:
    """Images that people give and get; tools of a run take them too. The guard asks for the token of the page."""

    async def upload(request: Request) -> Response:
        try:
            data = await _body(request)
            name, (width, height) = await run_in_threadpool(queue.take_image, data)
        except OptionError as err:
            return problems_of(err)
        return JsonAnswer({"image": {"name": name, "width": width, "height": height}})

    def image(request: Request) -> Response:
        """An upload or a file of a prediction: small, whole, or to keep."""
        try:
            path = queue.image(request.query_params.get("name", ""), session_of(request))
            size = request.query_params.get("size", "full")
            cached = {"cache-control": "private, max-age=3600"}
            if size == "thumb":
                return Response(thumbnail(path), media_type="image/webp", headers=cached)
            if size == "file":
                name = f"{path.parent.name}-{path.name}"
                return FileResponse(path, filename=name, media_type="image/png")
            return FileResponse(path, media_type="image/png", headers=cached)
        except (KeyError, OSError):
            return _gone("This image is not on disk any more.")

    return [Route("/kl/predict/image", image), Route("/kl/predict/upload", upload, methods=["POST"])]


def routes(menu: Menu, queue: PredictionQueue) -> list[Route]:
    """The routes of the Generate tab. The guard asks all of them for the token of the page."""
    dropped = Dropped(queue.results.parent)

    def state(session: str) -> dict[str, Any]:
        offered = [
            {"name": item.name, "run": item.run, "label": item.label, "family": item.family, "called": item.called} for item in menu.loras()
        ]
        return {
            "loras": offered,
            "saved": [asdict(item) for item in menu.saved()] if menu.saved is not None else [],
            "history": queue.history(session),
            "jobs": queue.of_session(session),
            "busy": queue.busy,
            "holdsMemory": queue.backend.holds_memory(),
            "training": [{"run": run, "devices": devices} for run, devices in menu.training()],
            "home": "cuda:0" if gpu.count() else "cpu",
        }

    def look(request: Request) -> Response:
        asked = request.query_params
        try:
            choice = menu.chosen(asked.get("with", "").strip(), asked.get("family", "").strip())
        except OptionError as err:
            if asked.get("with") or menu.saved is None:
                return problems_of(err)
            # The newest run is damaged.
            choice = menu.chosen("toy", TOY)
        return JsonAnswer({**specification(menu, choice), **state(session_of(request))})

    def now(request: Request) -> Response:
        return JsonAnswer(state(session_of(request)))

    async def start(request: Request) -> Response:
        session, asked = session_of(request), await answers.sent(request)
        if asked is None or not session:
            return JsonAnswer({"detail": "This is not an order of the page. Reload the page."}, 400)
        # Where devices are shared out by visitor, the backend asks who this is.
        LocalContext.request.set(gr.Request(request))
        try:
            prediction = await run_in_threadpool(lambda: queue.submit(order_of(menu, queue, asked, session), session))
        except OptionError as err:
            return problems_of(err)
        return JsonAnswer(as_page(queue, prediction, 0))

    def one(request: Request) -> Response:
        prediction = _find(queue, request)
        try:
            previews = int(request.query_params.get("previews", "0"))
        except ValueError:
            return JsonAnswer({"detail": "previews is a whole number."}, 400)
        return JsonAnswer(as_page(queue, prediction, previews)) if prediction else _gone("This prediction is not known any more.")

    def cancel(request: Request) -> Response:
        prediction = _find(queue, request)
        if prediction is None:
            return _gone("This prediction is not known any more.")
        queue.cancel(prediction)
        return JsonAnswer(as_page(queue, prediction, prediction.previews))

    def free(_request: Request) -> Response:
        try:
            queue.free()
        except OptionError as err:
            return JsonAnswer({"detail": str(err)}, 409)
        return JsonAnswer({"holdsMemory": queue.backend.holds_memory()})

    async def drop(request: Request) -> Response:
        """Keeps a file that is dropped on the tab."""
        try:
            size = int(request.headers.get("content-length", ""))
        except ValueError:
            size = None
        try:
            path = await dropped.take(request.query_params.get("name", ""), size, request.stream())
        except OptionError as err:
            return problems_of(err)
        return JsonAnswer({"path": str(path)})

    async def forecast(request: Request) -> Response:
        """What memory the order in the form would take, in lines while it is measured. Beside the order: `card`, GiB of the one that a plan
        is wanted for, and `cpu`, whether it is to compute there."""
        asked = await answers.order_of(request)
        card = asked.get("card")
        gib = float(card) if isinstance(card, int | float) and 0 < card < MAX_CARD_GIB else None
        try:
            options = await run_in_threadpool(forecast_of, menu, queue, asked, session_of(request))
        except OptionError as err:
            said: Iterable[memory.Line] = [{"problem": " ".join(map(str, err.problems))}]
        else:
            said = memory.ask_of_drawing(options, gib)
        return as_lines(said)

    async def why(request: Request) -> Response:
        """What an image of another program was made with beside the form: a line of JSON (texts, loras), then the file's beginning."""
        try:
            said, _, data = (await _body(request)).partition(b"\n")
            asked = json_of(said)
            given = [_mapping(row) for row in _items(_mapping(asked).get("loras"))]
            loras = [
                (str(row.get("name") or ""), float(str(row.get("weight") or 1.0).replace(",", "."))) for row in given if row.get("name")
            ]
            found = foreign_images.read(data)
            rows = foreign_images.differences(found, _mapping(_mapping(asked).get("texts")), loras)
        except OptionError as err:
            return problems_of(err)
        except ValueError:
            return JsonAnswer({"detail": "This is not an order of the page. Reload the page."}, 400)
        return JsonAnswer({"program": found.program, "rows": [{**asdict(row), "label": row.label} for row in rows]})

    def base(request: Request) -> Response:
        """The licence of a base that somebody names."""
        family = request.query_params.get("family", "")
        return JsonAnswer({"licence": bases.licence(family, request.query_params.get("name", "")) if family in FAMILIES else ""})

    of_the_studio = [
        Route("/kl/predict/base", base),
        Route("/kl/predict/memory", forecast, methods=["POST"]),
        Route("/kl/predict/gpus", lambda _: JsonAnswer(gpu.as_page())),
        Route("/kl/predict/drop", drop, methods=["POST"]),
    ]
    return [
        Route("/kl/predict/why", why, methods=["POST"]),
        Route("/kl/predict", look),
        Route("/kl/predict/now", now),
        *image_routes(queue),
        Route("/kl/predict/start", start, methods=["POST"]),
        Route("/kl/predict/job/{ident}", one),
        Route("/kl/predict/job/{ident}/cancel", cancel, methods=["POST"]),
        Route("/kl/predict/free", free, methods=["POST"]),
        *(of_the_studio if menu.saved is not None else []),
    ]


def _find(queue: PredictionQueue, request: Request) -> Prediction | None:
    """The order with the id of the address, when it is of the session that asks."""
    try:
        prediction = queue.find(str(request.path_params["ident"]))
    except KeyError:
        return None
    return prediction if prediction.session == session_of(request) else None
