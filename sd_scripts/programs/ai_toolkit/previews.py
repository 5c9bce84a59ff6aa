"""What a job of ai-toolkit says of its previews."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sd_scripts.schema.sheet import is_empty, number

from ..table import ForeignSheet, Table, among, each, line_of_prompt, more_than_zero, to, unneeded
from .models import PREVIEW_GUIDANCE

_FLAGS = {
    "w": "width",
    "h": "height",
    "d": "seed",
    "seed": "seed",
    "l": "guidance_scale",
    "cfg": "guidance_scale",
    "s": "sample_steps",
    "steps": "sample_steps",
    "n": "neg",
    "ctrl_img": "ctrl_img",
}
"""What may stand in a prompt after two dashes, with the key that a sample has for it."""


def _prompts(sheet: ForeignSheet, key: str) -> None:
    """All previews stand in one option; its first prompt carries it."""
    samples = _samples(sheet)
    keys = [name for name in sheet.given if name == "sample.prompts" or name.startswith("sample.samples")]
    if sheet.on("train.disable_sampling") or not samples:
        sheet.skip(key, "no previews are drawn" if sheet.on("train.disable_sampling") else "there are no prompts")
    elif key != keys[0]:
        unused = key.rpartition(".")[2] in ("num_frames", "fps", "do_cfg_norm", "network_multiplier", "ctrl_idx")
        sheet.skip(key, "it is for videos, or has no counterpart in a preview" if unused else "it stands in sample_prompts")
    else:
        lines = [_line(sheet, sample, index) for index, sample in enumerate(samples)]
        left = sorted({f"--{flag}" for sample in samples for flag in _flags(sample["prompt"]) if flag not in _FLAGS})
        without = f", without {', '.join(left)}, which a preview has not here" if left else ""
        sheet.take(key, "sample_prompts", "\n".join(lines), f"{len(lines)} previews, one a line{without}")


def _samples(sheet: ForeignSheet) -> list[dict[str, object]]:
    prompts = sheet.value("sample.prompts")
    samples: dict[int, dict[str, object]] = {}
    for key, value in sheet.given.items():
        if found := re.fullmatch(r"sample\.samples\[(\d+)\]\.(\w+)", key):
            samples.setdefault(int(found[1]), {})[found[2]] = value
    plain: list[dict[str, object]] = [{"prompt": prompt} for prompt in prompts] if isinstance(prompts, list) else []
    return [sample for sample in (list(samples.values()) or plain) if str(sample.get("prompt") or "").strip()]


def _flags(prompt: object) -> dict[str, str]:
    """The flags in a prompt with what follows them; that program cuts it wherever two dashes stand."""
    flags = [piece.partition(" ") for piece in str(prompt).strip().split("--")[1:]]
    return {name.strip(): text.strip() for name, _, text in flags}


def _line(sheet: ForeignSheet, sample: Mapping[str, object], index: int) -> str:
    flags = _flags(sample["prompt"])
    said = {_FLAGS[flag]: text for flag, text in flags.items() if flag in _FLAGS}
    sample = {**sample, **said, "prompt": str(sample["prompt"]).strip().partition("--")[0]}
    seed = sample.get("seed", sheet.value("sample.seed"))
    walked = int(number(seed) or 0) + (index if sheet.on("sample.walk_seed") and "seed" not in sample else 0)
    images = [sample.get(name) for name in ("ctrl_img_1", "ctrl_img_2", "ctrl_img_3")]
    images[0] = images[0] or sample.get("ctrl_img")
    trigger = str(sheet.value("trigger_word") or "")
    prompt = str(sample["prompt"]).replace("[trigger]", trigger).replace("[name]", trigger)
    line = line_of_prompt(
        prompt,
        w=sample.get("width"),
        h=sample.get("height"),
        d=walked,
        l=_guidance(sheet, sample.get("guidance_scale")) if "sample_guidance_scale" not in sheet.known else None,
        g=sample.get("guidance_scale") if "sample_guidance_scale" in sheet.known else None,
        s=sample.get("sample_steps"),
        n=sample.get("neg"),
    )
    takes_images = "control_data_dir" in sheet.known
    return " ".join([line, *(f"--ci {image}" for image in images if takes_images and not is_empty(image))])


def _guidance(sheet: ForeignSheet, value: object) -> object:
    """The guidance of a preview by our measure."""
    more, found = PREVIEW_GUIDANCE.get(sheet.run.family, 0.0), number(value)
    return value if found is None else found if found <= 1 else found + more


def _preview_guidance(sheet: ForeignSheet, key: str) -> None:
    if "sample_guidance_scale" in sheet.known:
        sheet.take(key, "sample_guidance_scale", sheet.value(key), "told to the network's embedding")
    else:
        value = _guidance(sheet, sheet.value(key))
        sheet.take(key, "sample_cfg_scale", value, "one more than the pipeline's number" if value != number(sheet.value(key)) else "")


def _preview_size(sheet: ForeignSheet, key: str) -> None:
    if key == "sample.height" and "sample.width" in sheet.given:
        sheet.skip(key, "it stands in sample_size")
    else:
        sides = [int(number(sheet.value(f"sample.{name}")) or 512) for name in ("width", "height")]
        sheet.take(key, "sample_size", sides)


_OF_SAMPLES = """prompt width height neg seed guidance_scale sample_steps fps num_frames ctrl_img ctrl_idx ctrl_img_1 ctrl_img_2 ctrl_img_3
    network_multiplier do_cfg_norm"""
TABLE: Table = {
    "sample.sampler": unneeded("previews are drawn with the family's own sampler"),
    "sample.sample_every": more_than_zero("sample_every_n_steps"),
    "sample.sample_start_step": unneeded("previews begin with the first interval"),
    **each("sample.", "width height", _preview_size),
    "sample.prompts": _prompts,
    "sample.samples": _prompts,
    "sample.samples[].*": among(_OF_SAMPLES, _prompts),
    "sample.neg": to("sample_negative_prompt"),
    **each("sample.", "seed walk_seed", unneeded("it stands in sample_prompts, as --d")),
    "sample.guidance_scale": _preview_guidance,
    "sample.sample_steps": to("sample_steps"),
    **each(
        "sample.",
        """num_frames fps ext format network_multiplier guidance_rescale adapter_conditioning_scale refiner_start_at extra_values
        do_cfg_norm""",
        unneeded("it has no counterpart in a preview"),
    ),
}
