"""What the Inference tab may ask for, and its JSON routes. inference.js draws the tab; predictions.py does the asking.

A Menu says what one page offers: the studio's has every option of the schema and the LoRA files of all runs, a Space's has one base, its
own LoRA files and no path of the computer.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import LocalContext
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from sd_scripts.families.qwen_edit.predict_options import LoadingSection, QwenImagePredict
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.model import ModelOptions

from . import files, form, gpu
from .context import Context
from .predictions import MAX_UPLOAD_BYTES, Desk, Order, Prediction, as_page, is_session

FIRST = ("prompt", "negative_prompt", "steps", "true_cfg_scale", "seed", "size")
"""Options that stand open on the page, besides pictures, base model and LoRA files, which have controls of their own."""
MODEL = ("pretrained_model_name_or_path", "model_version")
OWN_CONTROLS = ("images", "lora", "lora_weight")
UNSEEN = ("out", "report", "base_weights", "base_weights_multiplier", *OWN_CONTROLS)
"""Options that the page does not have: where files go is the desk's business, and `lora` does what `base_weights` does."""
PREFILLED = {"pretrained_model_name_or_path": "toy"}
"""Where the schema has no default, so that the tab works at once."""
LABELS = {
    "prompt": "Instruction",
    "true_cfg_scale": "CFG scale",
    "num_images": "Number of pictures",
}
"""Where the name of an option says less than a word."""
DEVICES = ("transformer_device", "vae_device", "text_encoder_device")
THUMBNAIL_PIXELS = 256
MAX_LORAS = 8
MAX_VARIANTS = 12
MAX_LISTED_FILES = 300


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file that the page offers. name is what the page says for it: a path, or on a Space a name alone."""

    name: str
    path: Path
    run: str
    label: str


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

    def fields(self) -> dict[str, flat.FlatField]:
        """The options that stand on the page, in the order of the schema."""
        known = form.shown_fields(QwenImagePredict)
        return {
            name: known[name]
            for name in known
            if name not in UNSEEN and name not in self.fixed and (self.shown is None or name in self.shown)
        }

    def lora_path(self, name: str) -> str:
        """The file behind a LoRA's name. Raises OptionError."""
        for offered in self.loras():
            if offered.name == name:
                return str(offered.path)
        if self.roots is None:
            raise OptionError(Problem("lora", f"lora: there is no file {name!r} here; choose one of the list"))
        path = files.confine(name, self.roots)
        if not path.is_file():
            raise OptionError(Problem("lora", f"lora: {path} is not a file; choose one of the list, or give a .safetensors file"))
        return str(path)


def studio_menu(context: Context) -> Menu:
    """Everything, with the LoRA files of the runs on disk."""
    return Menu(loras=lambda: run_files(context), roots=context.roots)


def run_files(context: Context) -> list[LoraFile]:
    """LoRA files that runs of this family have saved, newest run first, in a run the newest file first."""
    found: list[LoraFile] = []
    for job in context.supervisor.jobs():
        if _family_of(job.run.config, _modified(job.run.config)) != QwenImagePredict.family:
            continue
        saved = sorted(job.path.glob("*.safetensors"), key=lambda path: (-_modified(path), path.name))
        found += [LoraFile(str(path), path, job.name, path.stem) for path in saved if not path.name.startswith(".")]
    return found[:MAX_LISTED_FILES]


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


@lru_cache(maxsize=1000)
def _family_of(config: Path, _modified: float) -> str:
    try:
        return flat.run_of(flat.read_toml(config)).family
    except OptionError:
        # A run of a newer studio, or damaged: its files may still be typed.
        return ""


def specification(menu: Menu) -> dict[str, Any]:
    """The form as inference.js draws it: options that stand open, the model's, and the rest by accordion."""
    known = menu.fields()
    drawn = {name: _drawn(menu, spec) for name, spec in known.items()}
    rest: dict[str, list[dict[str, Any]]] = {}
    for name, spec in known.items():
        if name not in FIRST and name not in MODEL:
            rest.setdefault(_accordion(spec), []).append(drawn[name])
    help_of = {name: flat.fields(QwenImagePredict)[name].help for name in OWN_CONTROLS}
    return {
        "first": [drawn[name] for name in FIRST if name in drawn],
        "model": [drawn[name] for name in MODEL if name in drawn],
        "rest": [{"title": title, "fields": fields} for title, fields in rest.items()],
        "help": help_of,
        "mayType": menu.roots is not None,
        "mayFree": menu.roots is not None,
        "maxLoras": MAX_LORAS,
        "maxVariants": MAX_VARIANTS,
        "maxBytes": MAX_UPLOAD_BYTES,
    }


def _accordion(spec: flat.FlatField) -> str:
    section = QwenImagePredict.model_fields[spec.section].annotation
    if spec.name in DEVICES or section is LoadingSection or "quantization" in spec.name:
        return "Devices and memory"
    return "More of the model" if isinstance(section, type) and issubclass(section, ModelOptions) else "More"


def _drawn(menu: Menu, spec: flat.FlatField) -> dict[str, Any]:
    drawn = form.specification(spec)
    drawn["label"] = LABELS.get(spec.name, drawn["label"])
    if spec.name in PREFILLED:
        drawn["default"] = PREFILLED[spec.name]
    if spec.name in DEVICES:
        drawn["suggestions"] = ["cpu", *(f"cuda:{index}" for index in range(gpu.count()))]
    if spec.name in menu.most:
        drawn["range"] = f"up to {menu.most[spec.name]}"
    return drawn


def order_of(menu: Menu, desk: Desk, asked: Mapping[str, Any], session: str) -> Order:
    """The order that the page describes, with every path confined. Raises OptionError with every problem.

    asked: `texts` by option, `pictures` names, `loras` [{name, weight}], and for a comparison `variants` [{label, loras}].
    """
    problems: list[Problem] = []
    known = menu.fields()
    texts = {name: text for name, text in _mapping(asked.get("texts")).items() if name in known and isinstance(text, str | bool)}
    values = {name: form.from_text(known[name], text) for name, text in texts.items()}
    for name, value in PREFILLED.items():
        if not values.get(name):
            values[name] = value
    values |= menu.fixed
    if menu.roots is not None:
        problems += form.outside(QwenImagePredict, {name: values[name] for name in values if name in known}, menu.roots)
    problems += _too_much(menu, values)
    controls, names = _controls(desk, asked.get("pictures"), session, problems)
    loras = _loras(menu, asked.get("loras"), problems)
    variants = _variants(menu, asked.get("variants"), problems)
    checked = {**values, "images": [str(path) for path in controls], "lora": [path for path, _ in loras]}
    if loras:
        checked["lora_weight"] = [weight for _, weight in loras]
    try:
        options = flat.build(QwenImagePredict, {name: value for name, value in checked.items() if value is not None})
    except OptionError as err:
        raise OptionError([*problems, *err.problems]) from err
    if problems:
        raise OptionError(problems)
    request = {name: value for name, value in flat.changed(options).items() if name not in ("images", "out", "report")}
    if variants:
        request = {name: value for name, value in request.items() if name not in ("lora", "lora_weight")} | {"variants": variants}
    settings = {"texts": texts, "pictures": names, "loras": asked.get("loras") or [], "variants": asked.get("variants") or []}
    return Order(request, controls, settings)


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


def _controls(desk: Desk, names: object, session: str, problems: list[Problem]) -> tuple[tuple[Path, ...], list[str]]:
    found, kept = [], []
    for number, name in enumerate(_items(names)):
        try:
            found.append(desk.picture(str(name), session))
            kept.append(str(name))
        except KeyError:
            problems.append(Problem("images", f"images: picture {number + 1} is not kept any more; give it again"))
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
        problems.append(Problem("", f"{len(given)} pictures side by side are more than {MAX_VARIANTS}, which is the most"))
    return variants


def _small(path: Path) -> bytes:
    with Image.open(path) as picture:
        small = picture.convert("RGB")
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


def _problems(err: OptionError) -> JSONResponse:
    return JSONResponse({"problems": [{"option": problem.option, "message": str(problem)} for problem in err.problems]})


def _gone(what: str) -> JSONResponse:
    return JSONResponse({"detail": what}, 404)


def _session(request: Request) -> str:
    text = request.query_params.get("session", "")
    return text if is_session(text) else ""


def routes(menu: Menu, desk: Desk) -> list[Route]:
    """The routes of the Inference tab. The guard asks all of them for the token of the page."""

    def state(session: str) -> dict[str, Any]:
        offered = [{"name": item.name, "run": item.run, "label": item.label} for item in menu.loras()]
        return {
            "loras": offered,
            "history": desk.history(session),
            "jobs": desk.of_session(session),
            "busy": desk.busy,
            "holdsMemory": desk.backend.holds_memory(),
        }

    def look(request: Request) -> Response:
        return JSONResponse({**specification(menu), **state(_session(request))})

    def now(request: Request) -> Response:
        return JSONResponse(state(_session(request)))

    async def upload(request: Request) -> Response:
        try:
            data = await _body(request)
            name, (width, height) = await run_in_threadpool(desk.take_picture, data)
        except OptionError as err:
            return _problems(err)
        return JSONResponse({"picture": {"name": name, "width": width, "height": height}})

    async def start(request: Request) -> Response:
        session = _session(request)
        try:
            asked = await request.json()
        except ValueError:
            asked = None
        if not isinstance(asked, dict) or not session:
            return JSONResponse({"detail": "This is not an order of the page. Reload the page."}, 400)
        # Where devices are shared out by visitor, the backend asks who this is.
        LocalContext.request.set(gr.Request(request))
        try:
            prediction = await run_in_threadpool(lambda: desk.submit(order_of(menu, desk, asked, session), session))
        except OptionError as err:
            return _problems(err)
        return JSONResponse(as_page(desk, prediction, 0))

    def one(request: Request) -> Response:
        prediction = _find(desk, request)
        try:
            previews = int(request.query_params.get("previews", "0"))
        except ValueError:
            return JSONResponse({"detail": "previews is a whole number."}, 400)
        return JSONResponse(as_page(desk, prediction, previews)) if prediction else _gone("This prediction is not known any more.")

    def cancel(request: Request) -> Response:
        prediction = _find(desk, request)
        if prediction is None:
            return _gone("This prediction is not known any more.")
        desk.cancel(prediction)
        return JSONResponse(as_page(desk, prediction, prediction.previews))

    def free(_request: Request) -> Response:
        try:
            desk.free()
        except OptionError as err:
            return JSONResponse({"detail": str(err).removeprefix(": ")}, 409)
        return JSONResponse({"holdsMemory": desk.backend.holds_memory()})

    def picture(request: Request) -> Response:
        """An upload or a file of a prediction: small, whole, or to keep."""
        try:
            path = desk.picture(request.query_params.get("name", ""), _session(request))
            size = request.query_params.get("size", "full")
            cached = {"cache-control": "private, max-age=3600"}
            if size == "thumb":
                return Response(_small(path), media_type="image/webp", headers=cached)
            if size == "file":
                name = f"{path.parent.name}-{path.name}"
                return FileResponse(path, filename=name, media_type="image/png")
            return FileResponse(path, media_type="image/png", headers=cached)
        except (KeyError, OSError):
            return _gone("This picture is not on disk any more.")

    return [
        Route("/kl/predict", look),
        Route("/kl/predict/now", now),
        Route("/kl/predict/picture", picture),
        Route("/kl/predict/upload", upload, methods=["POST"]),
        Route("/kl/predict/start", start, methods=["POST"]),
        Route("/kl/predict/job/{ident}", one),
        Route("/kl/predict/job/{ident}/cancel", cancel, methods=["POST"]),
        Route("/kl/predict/free", free, methods=["POST"]),
    ]


def _find(desk: Desk, request: Request) -> Prediction | None:
    """The order with the id of the address, when it is of the session that asks."""
    try:
        prediction = desk.find(str(request.path_params["ident"]))
    except KeyError:
        return None
    return prediction if prediction.session == _session(request) else None
