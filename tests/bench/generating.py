"""Drawing beside diffusers' own pipeline with the networks of a toy base: CPU seconds of the first image of a process's model and of the
next ones, in turns in one process, NUM_PAIRS pairs.

usage: generating.py [family ...]   default: sd sdxl flux zimage; predict.py measures edits
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from diffusers import DDIMScheduler
from report import median, report

from sd_scripts import families
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.render.remembering import KeptTensors, remembering
from sd_scripts.library.render.renderer import Renderer
from tests import small_models

NUM_PAIRS = 9
PROMPT = "a red circle at the top left"
SETTINGS = {"sd": (16, 2.0), "sdxl": (16, 1.5), "flux": (8, 1.0), "zimage": (8, 1.0)}
"""Steps and guidance, as the toy presets have them; flux with its own embedding of guidance, as people draw with it."""


def seconds(do: Callable[[], object]) -> float:
    """CPU time of one call: other programs on the machine do not count."""
    started = time.process_time()
    do()
    return time.process_time() - started


def pipeline_of(name: str, parts: Parts) -> Any:
    ddim = {"scheduler": DDIMScheduler.from_config(parts.scheduler_config)} if name in ("sd", "sdxl") else {}
    makers: dict[str, Any] = {
        "sd": small_models.sd_pipeline_of,
        "sdxl": small_models.pipeline_of,
        "flux": small_models.flux_pipeline_of,
        "zimage": small_models.zimage_pipeline_of,
    }
    return makers[name](parts, **ddim)


def encoded(name: str, pipeline: Any, guided: bool) -> dict[str, Any]:
    """The arguments that spare the pipeline its text encoders."""
    if name == "sd":
        text, negative = pipeline.encode_prompt(PROMPT, "cpu", 1, guided, "")
        return {"prompt_embeds": text, "negative_prompt_embeds": negative}
    if name == "sdxl":
        names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
        made = pipeline.encode_prompt(PROMPT, negative_prompt="", device="cpu", do_classifier_free_guidance=guided)
        return dict(zip(names, made, strict=True))
    if name == "flux":
        text, pooled, _ = pipeline.encode_prompt(PROMPT, PROMPT, max_sequence_length=24)
        return {"prompt_embeds": text, "pooled_prompt_embeds": pooled}
    text, _ = pipeline.encode_prompt(PROMPT, do_classifier_free_guidance=False)
    return {"prompt_embeds": text}


def measure(name: str) -> None:
    family, steps_and_scale = families.family(name), SETTINGS[name]
    options = small_models.model_options(name)(
        pretrained_model_name_or_path="toy", **({"t5xxl_max_token_length": 24} if name == "flux" else {})
    )
    parts = family.load(options, torch.device("cpu"), torch.float32)
    steps, scale = steps_and_scale
    pipeline, guided = pipeline_of(name, parts), scale > 1
    kept = KeptTensors(2**30)
    ours = Renderer(remembering(family, kept), parts)
    request = Preview(PROMPT, "", 64, 64, 1, steps, scale, "ddim" if name in ("sd", "sdxl") else "auto")
    own = {"guidance_scale": 3.5, "max_sequence_length": 24} if name == "flux" else {"guidance_scale": scale if guided else 0.0}
    asked = {"width": 64, "height": 64, "num_inference_steps": steps, **own}
    texts = {"prompt": PROMPT} | ({"negative_prompt": ""} if guided else {})
    known = encoded(name, pipeline, guided)

    def theirs(words: dict[str, Any]) -> object:
        return pipeline(**words, **asked, generator=torch.Generator().manual_seed(1))

    @torch.inference_mode()
    def drawn() -> object:
        """As predicting.work has it."""
        return ours.render([request])

    def cold() -> object:
        kept.clear()
        return drawn()

    ways: dict[str, Callable[[], object]] = {
        "diffusers": lambda: theirs(texts),
        "diffusers, texts known": lambda: theirs(known),
        "cold": cold,
        "warm": drawn,
    }
    first = {way: seconds(do) for way, do in ways.items()}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(NUM_PAIRS):
        for way, do in ways.items():
            found[way].append(seconds(do))
    ratio = {
        way: median([mine / other for mine, other in zip(found[way], found[other], strict=True)])
        for way, other in (("cold", "diffusers"), ("warm", "diffusers, texts known"))
    }
    whole = median([mine / other for mine, other in zip(found["warm"], found["diffusers"], strict=True)])
    # What a program would reach that does nothing but the pipeline's own work on known texts.
    floor = median([least / other for least, other in zip(found["diffusers, texts known"], found["diffusers"], strict=True)])
    report(
        "generating",
        "without text encoding 1.03, kept texts beside one that encodes 0.9",
        family=name,
        steps=steps,
        first_ratio=first["cold"] / first["diffusers"],
        seconds=median(found["warm"]),
        both_encode=ratio["cold"],
        neither_encodes=ratio["warm"],
        kept_texts=whole,
        kept_texts_floor=floor,
    )


if __name__ == "__main__":
    for each in sys.argv[1:] or SETTINGS:
        measure(each)
