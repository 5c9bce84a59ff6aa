"""Answers --estimate and --fit of drawing, for people and as lines of JSON for the page; and the plan that makes a choice fit on a card."""

from __future__ import annotations

from functools import partial

from sd_scripts.families import FACTS
from sd_scripts.library.core.devices import CPU
from sd_scripts.schema import command_line
from sd_scripts.schema.predict import PredictOptions

from . import answers
from .answers import said, say
from .drawing import DrawingForecaster, card_of, devices_asked
from .fitting import FitPlan, Predict, Tried, fewest_blocks, plan_of
from .values import GIB, Forecast


def answer(options: PredictOptions, asked: command_line.Question) -> str:
    """The forecast of drawing, with a plan where a card is named: for people, or its last line for programs. Raises OptionError."""
    forecaster = DrawingForecaster(partial(say, asked.as_json))
    found, on_cpu = forecaster(options), card_of(devices_asked(options)) == CPU
    plan = plan_for(int(asked.fit * GIB), options, forecaster) if asked.fit is not None and not on_cpu else None
    return said(found, plan, _about(options, found), asked.as_json, verdict_on_cpu if on_cpu else verdict, on_cpu=on_cpu)


def verdict(forecast: Forecast, card: int | None) -> str:
    """One sentence: whether it fits on a card of so many bytes, or which card it needs."""
    return answers.verdict(forecast, card, "Drawing")


def verdict_on_cpu(forecast: Forecast, card: int | None) -> str:
    """One sentence: whether it fits into this machine."""
    enough = "it fits" if forecast.host <= forecast.host_there else "it does not fit"
    return (
        f"Drawing on the CPU needs {forecast.host / GIB:.1f} of this machine's {forecast.host_there / GIB:.1f} GiB of host RAM: {enough}."
    )


def _about(options: PredictOptions, forecast: Forecast) -> str:
    precision = "float32" if options.loading.precision == "no" else options.loading.precision
    return f"{options.model.pretrained_model_name_or_path}, drawing with {FACTS[options.family].label} ({precision})"


def plan_for(card: int, options: PredictOptions, predict: DrawingForecaster) -> FitPlan[PredictOptions]:
    """The plan for a card of so many bytes, what changes no image first; without steps where drawing fits as it is. It may not fit with
    every change made. Raises OptionError as a forecast does."""

    def _swap(options: PredictOptions, forecast: Forecast, found: Predict[PredictOptions], card: int) -> Tried:
        low, high = options.loading.blocks_to_swap, predict.num_blocks(options)
        if forecast.worst.name == "drawing" and low < high:
            yield (
                {"blocks_to_swap": fewest_blocks(options, found, low, high, draws)},
                "the same image; some of the speed, less with larger images",
            )

    def draws(found: Forecast) -> bool:
        """Whether the steps fit; other phases may still need more."""
        drawing = found.of("drawing")
        return drawing is not None and Forecast((drawing,)).on_card <= card

    return plan_of(card, options, predict, (_offload, _tiles, _swap, *_OF_NETWORKS), _OF_NETWORKS)


def _offload(options: PredictOptions, forecast: Forecast, predict: Predict[PredictOptions], card: int) -> Tried:
    if not options.loading.offload:
        yield {"offload": True}, "the same image; networks travel for each one"


def _tiles(options: PredictOptions, forecast: Forecast, predict: Predict[PredictOptions], card: int) -> Tried:
    if forecast.worst.name == "decoding" and not options.loading.vae_tiling:
        yield {"vae_tiling": True}, "seams are blended: the image differs a little"


def _text_encoder(options: PredictOptions, forecast: Forecast, predict: Predict[PredictOptions], card: int) -> Tried:
    if "text encoders" in forecast.worst.parts and getattr(options.model, "text_encoder_quantization", "") == "none":
        yield {"text_encoder_quantization": "qint8"}, "the text encoder in 8 bits: nearly the same image"


def _vae(options: PredictOptions, forecast: Forecast, predict: Predict[PredictOptions], card: int) -> Tried:
    if forecast.worst.name in ("decoding", "encoding") and FACTS[options.family].network.vae_in_16_bits:
        yield {"vae_dtype": "bf16"}, "the VAE in bf16: images change below what is seen"


def _fewer_bits(options: PredictOptions, forecast: Forecast, predict: Predict[PredictOptions], card: int) -> Tried:
    if getattr(options.model, "transformer_quantization", "") == "none":
        yield {"transformer_quantization": "qint8"}, "the network in 8 bits: nearly the same image"
        yield {"transformer_quantization": "nf4"}, "the network in 4 bits: a less exact image"


_OF_NETWORKS = (_text_encoder, _vae, _fewer_bits)
"""Changes that spare host RAM, too."""
