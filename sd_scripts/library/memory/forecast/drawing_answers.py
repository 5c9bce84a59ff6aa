"""Answers --estimate and --fit of drawing, for people and as lines of JSON for the page; and the plan that makes a choice fit on a card."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from sd_scripts.families import FACTS
from sd_scripts.library.render.predict import CPU
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.predict import PredictOptions

from .answers import plan_as_json, plan_lines, table
from .drawing import DrawingForecaster, card_of, devices_asked
from .fitting import WORTH_IT, FitPlan, Step
from .values import CARDS, GIB, Forecast

log = logging.getLogger("sd_scripts")

Tried = Iterator[tuple[dict[str, Any], str]]


def answer(options: PredictOptions, asked: flat.Question) -> str:
    """The forecast of drawing, with a plan where a card is named: for people, or its last line for programs. Raises OptionError."""

    def say(what: str) -> None:
        if asked.as_json:
            sys.stdout.write(json.dumps({"measuring": what}) + "\n")
            sys.stdout.flush()
        else:
            log.info("measuring %s", what)

    forecaster = DrawingForecaster(say)
    found, on_cpu = forecaster(options), card_of(devices_asked(options)) == CPU
    if asked.fit is not None and not on_cpu:
        plan = plan_for(int(asked.fit * GIB), options, forecaster)
        if asked.as_json:
            return json.dumps({"forecast": found.as_json(), "plan": plan_as_json(plan), "on_cpu": False})
        return "\n".join([table(found, _about(options, found)), "", *plan_lines(plan)])
    here = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    said = verdict(found, here, on_cpu)
    if asked.as_json:
        return json.dumps({"forecast": found.as_json(), "here": here, "verdict": said, "on_cpu": on_cpu})
    return "\n".join([table(found, _about(options, found)), "", said])


def _about(options: PredictOptions, forecast: Forecast) -> str:
    precision = "float32" if options.loading.precision == "no" else options.loading.precision
    return f"{options.model.pretrained_model_name_or_path}, drawing with {FACTS[options.family].label} ({precision})"


def verdict(forecast: Forecast, card: int | None, on_cpu: bool) -> str:
    """One sentence: whether it fits on a card of so many bytes, or which card it needs."""
    if on_cpu:
        enough = "it fits" if forecast.host <= forecast.host_there else "it does not fit"
        host, there = forecast.host / GIB, forecast.host_there / GIB
        return f"Drawing on the CPU needs {host:.1f} of this machine's {there:.1f} GiB of host RAM: {enough}."
    need = forecast.on_card
    if card is not None:
        fits = "it fits" if forecast.fits(card) else f"it does not fit; --fit {card / GIB:.0f}GB makes a plan"
        return f"Drawing needs {need / GIB:.1f} GiB of this GPU's {card / GIB:.1f} GiB, most of all in {forecast.worst.name}: {fits}."
    enough_card = next((size for size in CARDS if need <= size * GIB), None)
    text = f"a card of {enough_card} GB is enough" if enough_card is not None else f"more than the {CARDS[-1]} GB of the largest usual card"
    smaller = max((size for size in CARDS if size * GIB < need), default=None)
    advice = "" if smaller is None else f"; --fit {smaller}GB makes a plan for a smaller one"
    return f"Drawing needs {need / GIB:.1f} GiB, most of all in {forecast.worst.name}: {text}{advice}."


def plan_for(card: int, options: PredictOptions, predict: DrawingForecaster) -> FitPlan[PredictOptions]:
    """The plan for a card of so many bytes, what changes no image first; without steps where drawing fits as it is. It may not fit with
    every change made. Raises OptionError as a forecast does."""
    forecast = predict(options)
    steps: list[Step] = []
    for change in (_offload, _tiles, _swap, _text_encoder, _vae, _fewer_bits):
        for values, cost in change(options, forecast, predict, card):
            if forecast.fits(card):
                break
            changed = with_values(options, values)
            if changed is None:
                continue
            found = predict(changed)
            if not found.fits(card) and not _helps(forecast, found, card):
                continue
            steps.append(Step(dict(values), cost, forecast.on_card, found.on_card))
            options, forecast = changed, found
    return _relaxed(FitPlan(card, options, forecast, tuple(steps)), predict)


def _helps(before: Forecast, after: Forecast, card: int) -> bool:
    """Whether clearly less is needed of what is too little: the card, or else host RAM."""
    if before.on_card > card:
        return before.on_card - after.on_card > WORTH_IT
    return before.host - after.host > WORTH_IT


def _relaxed(plan: FitPlan[PredictOptions], predict: DrawingForecaster) -> FitPlan[PredictOptions]:
    """The same plan with as few swapped blocks as the changes that came later allow, each step counted with that number."""
    at = next((place for place, step in enumerate(plan.steps) if "blocks_to_swap" in step.options), None)
    if at is None or not plan.fits:
        return plan
    values = {"blocks_to_swap": _fewest(plan.options, predict, plan.card, 0, plan.options.loading.blocks_to_swap)}
    options = with_values(plan.options, values)
    if options is None or not predict(options).fits(plan.card):
        return plan
    steps = [*plan.steps[:at], replace(plan.steps[at], options=values), *plan.steps[at + 1 :]]
    if not values["blocks_to_swap"]:
        del steps[at]
    return FitPlan(plan.card, options, predict(options), tuple(_counted(options, steps, predict)))


def _counted(options: PredictOptions, steps: Sequence[Step], predict: DrawingForecaster) -> list[Step]:
    """The steps that lead to these options, with what each spares now."""
    found: list[Step] = []
    kind, after = type(options), predict(options).on_card
    for number in reversed(range(len(steps))):
        undone = {name: flat.fields(kind)[name].default for step in steps[number:] for name in step.options}
        undone |= {name: value for step in steps[:number] for name, value in step.options.items()}
        without = with_values(options, undone)
        before = steps[number].before if without is None else predict(without).on_card
        found.insert(0, replace(steps[number], before=before, after=after))
        after = before
    return found


def with_values(options: PredictOptions, values: dict[str, Any]) -> PredictOptions | None:
    """The options with these flat values; None where there is no such option, or they do not go with the others."""
    kind = type(options)
    if any(name not in flat.fields(kind) for name in values):
        return None
    try:
        return flat.build(kind, {**flat.flatten(options), **values}, from_cli=True)
    except OptionError:
        return None


def _offload(options: PredictOptions, forecast: Forecast, predict: DrawingForecaster, card: int) -> Tried:
    if not options.loading.offload:
        yield {"offload": True}, "the same image; networks travel for each one"


def _tiles(options: PredictOptions, forecast: Forecast, predict: DrawingForecaster, card: int) -> Tried:
    if forecast.worst.name == "decoding" and not options.loading.vae_tiling:
        yield {"vae_tiling": True}, "seams are blended: the image differs a little"


def _swap(options: PredictOptions, forecast: Forecast, predict: DrawingForecaster, card: int) -> Tried:
    low, high = options.loading.blocks_to_swap, predict.num_blocks(options)
    if forecast.worst.name != "drawing" or low >= high:
        return
    cost = "the same image; some of the speed, less with larger images"
    yield {"blocks_to_swap": _fewest(options, predict, card, low, high)}, cost


def _fewest(options: PredictOptions, predict: DrawingForecaster, card: int, low: int, high: int) -> int:
    """The smallest number of swapped blocks from low to high with which the steps fit; high where none is enough."""
    while low < high:
        middle = (low + high) // 2
        changed = with_values(options, {"blocks_to_swap": middle})
        # Other phases may still need more: as few as make this one fit.
        drawing = None if changed is None else predict(changed).of("drawing")
        if drawing is not None and Forecast((drawing,)).on_card <= card:
            high = middle
        else:
            low = middle + 1
    return low


def _text_encoder(options: PredictOptions, forecast: Forecast, predict: DrawingForecaster, card: int) -> Tried:
    if "text encoders" in forecast.worst.parts and getattr(options.model, "text_encoder_quantization", "") == "none":
        yield {"text_encoder_quantization": "qint8"}, "the text encoder in 8 bits: nearly the same image"


def _vae(options: PredictOptions, forecast: Forecast, predict: DrawingForecaster, card: int) -> Tried:
    if forecast.worst.name in ("decoding", "encoding") and FACTS[options.family].network.vae_in_16_bits:
        yield {"vae_dtype": "bf16"}, "the VAE in bf16: images change below what is seen"


def _fewer_bits(options: PredictOptions, forecast: Forecast, predict: DrawingForecaster, card: int) -> Tried:
    if getattr(options.model, "transformer_quantization", "") == "none":
        yield {"transformer_quantization": "qint8"}, "the network in 8 bits: nearly the same image"
        yield {"transformer_quantization": "nf4"}, "the network in 4 bits: a less exact image"
