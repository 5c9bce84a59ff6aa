"""The guided start: four answers (what, which model, which card, where the images are) become the settings of a LoRA, each with its reason.

It begins with the preset that fits model, card and purpose best, and sets what depends on the images. web/guide asks and shows.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sd_scripts.dataset.images import EXTENSIONS
from sd_scripts.families import FACTS, RUNS
from sd_scripts.runs import drawing
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.labels import label
from sd_scripts.schema.model import only_on_hub
from sd_scripts.schema.runs import RunOptions

from . import browsing, dataset_view, datasets, files, form, gpu, presets
from .answers import JsonAnswer, as_lines, order_of
from .context import Context

Line = dict[str, Any]
"""{"say": sentence} while it looks at the images, then {"run", "texts", "rows", "notes"} or {"problems": [sentence]}."""

BASE = "pretrained_model_name_or_path"
PRIOR = "base_prior_weight"
TOY = "toy"
CARDS = (8, 12, 16, 24, 32, 48, 80)
"""Sizes of cards in GB to choose from where the machine's is not meant."""
SMALL_SIDE = 256
DRAWN_SIDE = 128
"""Pixels; the worlds of the built-in models are drawn, and smaller."""
FEW = 10
"""With fewer images none is held out."""
MAX_CAPTION = 200
NUM_PROMPTS = 2
_GIB_OF_A_GB_CARD = 0.93
"""A card sold with 24 GB tells 22.5 to 24 GiB."""
_MEMORY = re.compile(r"(\d+) GB\b(?! of)")


@dataclass(frozen=True)
class Purpose:
    """What somebody wants the model to learn."""

    label: str
    about: str
    words: tuple[str, ...]
    """Of titles of presets that are meant for it."""
    passes: int
    """How often each image is shown, about."""
    phrase: str
    """What images without a caption are told as."""


EDIT = "edit"
PURPOSES = {
    "person": Purpose("A person", "One face, from 10 to 40 photos", ("character", "person"), 100, "ohwx person"),
    "style": Purpose("A style", "How images look, from 20 to 200 images", ("style",), 60, "ohwx style"),
    "object": Purpose("An object", "One thing, an animal or a product, from 8 to 30 photos", ("character", "person"), 100, "ohwx object"),
    EDIT: Purpose("An edit", "A change, from pairs before and after", ("edit",), 60, ""),
}


@dataclass(frozen=True)
class Model:
    """A base model that the guide offers. value is what the form takes for it."""

    value: str
    label: str
    family: str
    where: str
    edits: bool
    """Whether an edit can be learned with it."""


def models(context: Context) -> list[Model]:
    """The built-in models, what lies on this computer and tells its family, and what presets fetch."""
    found = [
        Model(TOY, f"Built-in small model ({facts.label})", name, "No download, for any computer", facts.edits)
        for name, facts in FACTS.items()
        if facts.demo is not None and (name, "network") in RUNS
    ]
    for each in browsing.models(context.roots):
        try:
            family = drawing.of_model(each["value"], None, BASE).family
        except OptionError:
            continue  # a LoRA file, or one that cannot be read
        if family is not None and (family, "network") in RUNS:
            found.append(Model(each["value"], f"{each['label']} ({FACTS[family].label})", family, each["where"], FACTS[family].edits))
    there = {model.value for model in found}
    for preset in presets.available(context.output_dir)[0]:
        base = str(preset.values.get(BASE) or TOY)
        if preset.run.method == "network" and base not in there:
            there.add(base)
            edits = FACTS[preset.run.family].edits and _takes_controls(_built(preset, {**preset.values, "train_data_dir": "."}, context))
            found.append(Model(base, f"{base} ({FACTS[preset.run.family].label})", preset.run.family, "To be fetched from the hub", edits))
    return found


def questions(context: Context) -> dict[str, Any]:
    """What can be answered on this machine, and what is answered already."""
    readings = gpu.read()
    cards = [
        {"gib": device.memory_total_gib, "label": f"{device.name}, {device.memory_total_gib:.0f} GiB, in this machine"}
        for device in readings.devices
        if device.memory_total_gib is not None
    ]
    sets = []
    kept = datasets.Datasets(context.output_dir)
    for name in kept.names():
        folder = kept.root / name
        sets.append({"label": name, "path": str(folder), "images": _count(folder), "changed": folder.stat().st_mtime})
    return {
        "purposes": [{"name": name, "label": each.label, "about": each.about, "edits": name == EDIT} for name, each in PURPOSES.items()],
        "models": [vars(model) for model in models(context)],
        "families": [{"name": family, "label": FACTS[family].label} for family, method in RUNS if method == "network"],
        "cards": cards + [{"gib": None, "label": "No GPU: the processor"}] + [{"gib": gb, "label": f"A card of {gb} GB"} for gb in CARDS],
        "sets": sorted(sets, key=lambda each: -each["changed"]),
        "folder": str(kept.root),
    }


def _count(folder: Path) -> int:
    return sum(path.suffix.lower() in EXTENSIONS for path in folder.rglob("*"))


def settings(context: Context, answers: Mapping[str, Any]) -> Iterator[Line]:
    """The form that four answers lead to."""
    try:
        yield from _settings(context, answers)
    except OptionError as err:
        yield {"problems": [_without_option(problem) for problem in err.problems]}


def _without_option(problem: Problem) -> str:
    return problem.message.removeprefix(f"{problem.option}: ") if problem.option else problem.message


def _settings(context: Context, answers: Mapping[str, Any]) -> Iterator[Line]:
    purpose = PURPOSES.get(str(answers.get("purpose")))
    if purpose is None:
        raise OptionError("Say what the model shall learn.")
    base, family, notes = _base(context, str(answers.get("model") or "").strip(), str(answers.get("family") or ""))
    if purpose is PURPOSES[EDIT] and not FACTS[family].edits:
        raise _draws_alone(FACTS[family].label)
    folder = _folder(context, str(answers.get("folder") or "").strip())
    card = answers.get("card")
    gib = float(card) if isinstance(card, int | float) and card > 0 else None
    preset, why = _preset(context, family, base, purpose, gib)
    name = files.safe_name(folder.name).replace(" ", "-")
    values: dict[str, Any] = {**preset.values, BASE: base, "train_data_dir": str(folder), "output_name": name}
    rows = [
        _Row("Recipe", preset.title, why),
        _Row(BASE, base, "the model that you chose"),
        _Row("train_data_dir", str(folder), "where your images are"),
        _Row("output_name", name, "after the folder of the images"),
    ]
    values |= {"sample_prompts": "", "validation_split": 0}
    if values.get(PRIOR):
        values[PRIOR] = 0
        rows.append(_Row(PRIOR, "0", "it needs regularisation images, and you have given none"))
    built = _built(preset, values, context)
    if purpose is PURPOSES[EDIT] and not _takes_controls(built):
        raise _draws_alone(base)
    view = None
    for seen in dataset_view.look_at(built, context.output_dir):
        if isinstance(seen, str):
            yield {"say": seen}
        else:
            view = seen
    assert view is not None
    if purpose is PURPOSES[EDIT] and not any(image.controls for image in view.plan.images):
        raise OptionError(
            "An edit is learned from pairs, and no image here has one before the edit. Add images takes a folder with the folders before "
            "and after in it and images of the same names, or photo_before.png and photo_after.png; photo.txt tells what was done. In a "
            "folder on the studio's computer they are called control and target."
        )
    rows += _about_captions(view, purpose, values)
    rows += _about_steps(view, purpose, preset, values)
    rows += _about_held_out(view, preset, values)
    if view.bad:
        values["on_bad_image"] = "skip"
        rows.append(_Row("on_bad_image", "skip", f"{_images(len(view.bad))} cannot be read: {'; '.join(view.bad[:3])}"))
    notes += _remarks(view, base)
    run = preset.run
    shown = [
        {"label": row.setting if row.setting == "Recipe" else label(row.setting, run.family), "option": row.setting} | vars(row)
        for row in rows
    ]
    yield {"run": form.run_key(run), "texts": form.texts(run, values), "rows": shown, "notes": notes}


@dataclass(frozen=True)
class _Row:
    """A value, and why it was chosen."""

    setting: str
    value: str
    why: str


def _built(preset: presets.Preset, values: Mapping[str, Any], context: Context) -> RunOptions:
    built = flat.build(preset.run, {**values, "output_dir": str(context.output_dir)})
    return flat.with_absolute_paths(built)


def _takes_controls(options: RunOptions) -> bool:
    """Whether samples of the model have images that they are an edit of."""
    return options.model.controls.most > 0


def _draws_alone(model: str) -> OptionError:
    able = ", ".join(facts.label for name, facts in FACTS.items() if facts.edits and (name, "network") in RUNS)
    return OptionError(f"{model} draws from words alone and cannot learn an edit; choose a model that edits: {able}.")


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count} images"


def _base(context: Context, model: str, family: str) -> tuple[str, str, list[str]]:
    """The model, its family by its own file, and what to say of that. Raises OptionError."""
    if not model:
        raise OptionError("Choose a model, or give the file, folder or hub id of one.")
    known = family if (family, "network") in RUNS else ""
    if model == TOY:
        return TOY, known or next(name for name, facts in FACTS.items() if facts.demo is not None), []
    if not only_on_hub(model):
        model = str(files.confine(model, context.roots))
    told = drawing.of_model(model, known or None, BASE).family
    if told is None or (told, "network") not in RUNS:
        able = ", ".join(FACTS[name].label for name, method in RUNS if method == "network")
        raise OptionError(f"{model} does not say what kind of model it is; choose its family beside it ({able}).")
    if known and told != known:
        return model, told, [f"{model} is a model of {FACTS[told].label}, not of {FACTS[known].label}; the form is for that."]
    return model, told, []


def _folder(context: Context, text: str) -> Path:
    """The folder of images. Raises OptionError, with names that are near to one that is not there."""
    if not text:
        raise OptionError("Say where the images are: add them, choose a data set, or give a folder.")
    folder = files.confine(text, context.roots)
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise OptionError(f"{folder} is a file; give the folder that it lies in.")
    above = next(path for path in folder.parents if path.is_dir())
    beside = [path.name for path in above.iterdir() if path.is_dir() and not path.name.startswith(".")]
    near = difflib.get_close_matches(folder.relative_to(above).parts[0], beside, n=3)
    meant = f" Is {' or '.join(str(above / name) for name in near)} meant?" if near else " Use Browse to find it, or Add images."
    raise OptionError(f"There is no folder {folder}.{meant}")


def _preset(context: Context, family: str, base: str, purpose: Purpose, gib: float | None) -> tuple[presets.Preset, str]:
    """The recipe that fits best, and why. Raises OptionError where there is none."""
    found = [each for each in presets.available(context.output_dir)[0] if each.run is RUNS[family, "network"] and not each.own]
    if base == TOY:
        toys = [each for each in found if each.values.get(BASE) == TOY]
        demo = FACTS[family].demo
        return next(each for each in toys if each.name == demo), "the recipe of the built-in model: small images, a few minutes"
    sized = [(int(match[1]), each) for each in found if each.values.get(BASE) != TOY and (match := _MEMORY.search(each.title))]
    same = [(size, each) for size, each in sized if each.values.get(BASE, base) == base] or sized
    if not same:
        raise OptionError(f"There is no recipe for {FACTS[family].label}; choose another model.")
    if gib is None:
        raise OptionError(f"{FACTS[family].label} needs a GPU. Choose a card, or the built-in small model, which trains on a processor.")
    fitting = [(size, each) for size, each in same if size * _GIB_OF_A_GB_CARD <= gib]
    if not fitting:
        size, preset = min(same, key=lambda pair: pair[0])
        return preset, f"no recipe is made for so small a card; this one is for {size} GB. Press Estimate memory, then Make it fit"
    meant = [pair for pair in fitting if any(word in pair[1].title.lower() for word in purpose.words)]
    size, preset = max(meant or fitting, key=lambda pair: pair[0])
    what = purpose.label.lower() if meant else f"this model on this card, the nearest to {purpose.label.lower()}"
    return preset, f"made for {what}, with up to {size} GB"


def _about_captions(view: dataset_view.View, purpose: Purpose, values: dict[str, Any]) -> list[_Row]:
    """Words for images without any, and prompts for previews."""
    trained = [image for image in view.plan.images if not view.plan.subsets[image.subset].is_reg]
    silent = sum(not image.caption.strip() for image in trained)
    rows = []
    if silent and purpose.phrase:
        values["instance_prompt"] = purpose.phrase
        rows.append(
            _Row(
                "instance_prompt",
                purpose.phrase,
                f"{silent} of {_images(len(trained))} have no caption and are told as this; prompts need it",
            )
        )
    told = dict.fromkeys(" ".join((image.caption.strip() or purpose.phrase).replace("--", "-").split())[:MAX_CAPTION] for image in trained)
    prompts = [text for text in told if text][:NUM_PROMPTS]
    if prompts:
        values["sample_prompts"] = "\n".join(f"{text} --d {number}" for number, text in enumerate(prompts, 1))
        rows.append(_Row("sample_prompts", " · ".join(prompts), "from your captions, so that previews show what is learned"))
    return rows


def _about_steps(view: dataset_view.View, purpose: Purpose, preset: presets.Preset, values: dict[str, Any]) -> list[_Row]:
    """How long to train, by the number of images."""
    run = flat.fields(preset.run)
    usual = int(preset.values.get("max_train_steps", run["max_train_steps"].default))
    if values[BASE] == TOY:
        return [_Row("max_train_steps", str(usual), "what the built-in model needs")]
    samples = sum(not view.plan.subsets[image.subset].is_reg for image in view.plan.images) * purpose.passes
    wanted = round(samples / view.plan.global_batch_size / 50) * 50
    steps = min(max(wanted, usual // 3), usual)
    values["max_train_steps"] = steps
    return [_Row("max_train_steps", str(steps), f"about {purpose.passes} times each image, between {usual // 3} and the recipe's {usual}")]


def _about_held_out(view: dataset_view.View, preset: presets.Preset, values: dict[str, Any]) -> list[_Row]:
    """What the recipe holds out, where there are images enough."""
    split = preset.values.get("validation_split")
    if not split:
        return []
    if len(view.plan.images) < FEW:
        return [_Row("validation_split", "0", f"with fewer than {FEW} images all are trained on")]
    values["validation_split"] = split
    return [_Row("validation_split", str(split), "the loss of held-out images tells which checkpoint to keep")]


def _remarks(view: dataset_view.View, base: str) -> list[str]:
    """What the images lack."""
    trained = [image for image in view.plan.images if not view.plan.subsets[image.subset].is_reg]
    notes = []
    small = [image.name for image in trained if min(image.width, image.height) < SMALL_SIDE]
    if small and base != TOY:
        named = ", ".join(small[:3])
        notes.append(f"{_images(len(small))} have fewer than {SMALL_SIDE} pixels on a side and teach little: {named}. Take larger ones.")
    if base == TOY and any(min(image.width, image.height) > DRAWN_SIDE for image in trained):
        notes.append(
            "The built-in model knows small drawings of coloured shapes and cannot learn photographs: the run shows how training goes. "
            "For a result choose a real model."
        )
    if len(trained) < 5:
        notes.append(f"{_images(len(trained))} is very few: the model may learn them by heart. 10 and more are better.")
    return notes


def routes(context: Context) -> list[Route]:
    """The routes of the guide; the guard asks both for the token of the page."""

    async def ask(_request: Request) -> Response:
        return JsonAnswer(await run_in_threadpool(questions, context))

    async def fill(request: Request) -> Response:
        return as_lines(settings(context, await order_of(request)))

    return [Route("/kl/guide", ask), Route("/kl/guide/settings", fill, methods=["POST"])]
