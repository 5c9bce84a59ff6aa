"""What an image of another program was made with, read from its PNG, and which of it differs from what the page would draw.

Two forms are known: the line of text that A1111 and its relatives write (`parameters`, this program too), and ComfyUI's graph (`prompt`).
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PureWindowsPath
from typing import Any, Literal

from PIL import Image, UnidentifiedImageError

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.labels import label
from sd_scripts.schema.outside import json_of

MAX_BYTES = 8 << 20
"""Of the beginning of a file, where its texts stand."""
SAMPLERS = {
    "euler": "euler",
    "euler a": "euler_a",
    "euler_ancestral": "euler_a",
    "heun": "heun",
    "lms": "lms",
    "dpm2": "dpm_2",
    "dpm_2": "dpm_2",
    "dpm2 a": "dpm_2_a",
    "dpm_2_ancestral": "dpm_2_a",
    "dpm++ 2m": "dpmsolver++",
    "dpm++ 2m karras": "dpmsolver++",
    "dpmpp_2m": "dpmsolver++",
    "dpm++ 2m sde": "dpmpp_2m_sde",
    "ddim": "ddim",
    "plms": "pndm",
}
"""Their names of samplers, and ours."""
SCHEDULERS = {"sgm uniform": "sgm_uniform", "ddim": "ddim_uniform"}
"""Their names of schedulers, and ours, where they differ by more than capitals."""
_LINE = re.compile(r'\s*([\w][\w +/-]*):\s*("(?:\\.|[^"\\])*"|[^,]*)(?:,|$)')
_TAG = re.compile(r"<(?:lora|lyco):([^:>]+)((?::[^>]*)?)>")
_OF_LINE = {
    "Steps": "steps",
    "Sampler": "sampler",
    "Schedule type": "scheduler",
    "Shift": "shift",
    "CFG scale": "cfg_scale",
    "Distilled CFG Scale": "guidance",
    "Seed": "seed",
    "Size": "size",
}
_OF_GRAPH = {
    "steps": "steps",
    "cfg": "cfg_scale",
    "guidance": "guidance",
    "sampler_name": "sampler",
    "scheduler": "scheduler",
    "shift": "shift",
    "seed": "seed",
    "noise_seed": "seed",
}
_MODELS = ("ckpt_name", "unet_name")
_OWN_NODES = frozenset((*_OF_GRAPH, "width", "height", "denoise", "strength_model", "strength", "lora_name", *_MODELS))
"""Inputs whose value may stand in a node of its own, such as a seed that several samplers share."""
_BESIDE_LINE = ("Clip skip", "Denoising strength", "Hires upscale", "RNG", "ENSD", "Refiner", "Variation seed")
_BESIDE_GRAPH = {
    "denoise": "Denoising strength",
    "max_shift": "Largest shift",
    "stop_at_clip_layer": "CLIP layer",
}
_AS_USUAL = {"Denoising strength": ("1",), "CLIP layer": ("-1",), "Clip skip": ("1",), "RNG": ("CPU",)}
"""What these say where they change nothing."""

Verdict = Literal["same", "differs", "only there"]


@dataclass
class ForeignSettings:
    """Settings of an image by our options' names, as texts; what has no option here stands in beside."""

    program: str
    values: dict[str, str] = field(default_factory=dict)
    model: str = ""
    loras: list[tuple[str, float | None]] = field(default_factory=list)
    """Names or paths, and strengths; None where a file is named and its strength is not told."""
    beside: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """One setting of theirs beside ours."""

    setting: str
    """Name of our option, or what it is called there, or words of our own."""
    theirs: str
    ours: str
    verdict: Verdict
    there: str = ""
    """What is to be said in place of a value of theirs, in our own words."""
    here: str = ""
    """The same in place of a value of ours."""

    @property
    def label(self) -> str:
        """What the page calls it."""
        return label(self.setting) if self.setting in (*_OF_LINE.values(), "prompt", "negative_prompt") else self.setting


def read(data: bytes) -> ForeignSettings:
    """What the beginning of a PNG file tells of how the image was made. Raises OptionError where it tells nothing."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            texts = {name: text for name, text in image.info.items() if isinstance(text, str)}
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as err:
        raise OptionError("this file is no PNG that can be read; give the file as the program saved it") from err
    if "prompt" in texts and (found := _of_graph(texts["prompt"])) is not None:
        return found
    if "parameters" in texts and (found := _of_line(texts["parameters"])) is not None:
        return replace(found, program="kohya_like") if "request" in texts else found
    text = "this image does not say how it was made: it has neither ComfyUI's graph nor A1111's line"
    raise OptionError(f"{text}. Services and editors that save images anew take them out; give the file as the program saved it")


def _of_line(text: str) -> ForeignSettings | None:
    """A1111's text: the prompt, `Negative prompt:`, and a last line of settings."""
    head, _, last = text.strip().rpartition("\n")
    if not last.startswith("Steps:"):
        return None
    told = {name.strip(): value.strip().strip('"') for name, value in _LINE.findall(last)}
    prompt, _, negative = head.partition("Negative prompt:")
    found = ForeignSettings("A1111", {ours: told[theirs] for theirs, ours in _OF_LINE.items() if told.get(theirs)}, told.get("Model", ""))
    found.values |= {"prompt": _TAG.sub("", prompt).strip(), "negative_prompt": negative.strip()}
    found.loras = [(name, _strength(given)) for name, given in _TAG.findall(prompt)]
    tagged = {_stem(name) for name, _ in found.loras}
    hashes = (part.rpartition(":")[0].strip() for part in told.get("Lora hashes", "").split(","))
    found.loras += [(name, None) for name in hashes if name and _stem(name) not in tagged]
    found.beside = {name: told[name] for name in _BESIDE_LINE if name in told}
    sampler = found.values.get("sampler", "")
    if sampler.endswith(" Karras"):
        # Older versions have both in one name.
        found.values["sampler"], found.values["scheduler"] = sampler.removesuffix(" Karras"), "Karras"
    return found


def _strength(given: str) -> float:
    """Of the transformer, in a tag's `:0.8`, `:<text encoder>:<transformer>` or `:te=0.5:unet=0.8`."""
    parts = [part.strip() for part in given.split(":") if part.strip()]
    named = dict(part.split("=", 1) for part in parts if "=" in part)
    plain = [part for part in parts if "=" not in part]
    told = named.get("unet") or (plain[1] if len(plain) > 1 else None) or (plain[0] if plain else None) or named.get("te")
    number = _number(told)
    return 1.0 if number is None else number


def _of_graph(text: str) -> ForeignSettings | None:
    """ComfyUI's graph: nodes by number, each with its class and inputs; an input that comes from another node is [number, output]."""
    try:
        told = json_of(text)
    except ValueError:
        return None
    nodes = {str(name): node for name, node in told.items() if isinstance(node, dict)} if isinstance(told, dict) else {}
    linked = {name: node["inputs"] for name, node in nodes.items() if isinstance(node.get("inputs"), dict)}
    if not linked:
        return None
    inputs = {name: {key: _at_its_node(linked, key, value) for key, value in given.items()} for name, given in linked.items()}
    found = ForeignSettings("ComfyUI")
    for given in inputs.values():
        for name, value in _plain(given):
            if name in _OF_GRAPH:
                found.values.setdefault(_OF_GRAPH[name], value)
            elif name in _BESIDE_GRAPH:
                found.beside.setdefault(_BESIDE_GRAPH[name], value)
            elif name in _MODELS:
                found.model = found.model or value
        if "lora_name" in given:
            found.loras.append((str(given["lora_name"]), _number(given.get("strength_model", given.get("strength", 1.0))) or 0.0))
        if "batch_size" in given and not isinstance(given.get("width", []), list) and not isinstance(given.get("height", []), list):
            found.values.setdefault("size", f"{given['width']}x{given['height']}")
        for side, ours in (("positive", "prompt"), ("negative", "negative_prompt"), ("conditioning", "prompt")):
            if side in given and (words := _words(inputs, given[side])):
                found.values.setdefault(ours, words)
    return found


def _at_its_node(inputs: Mapping[str, Mapping[str, Any]], name: str, value: object, depth: int = 5) -> object:
    """A number or a word that stands in a node of its own, whose output is this input; what else a link leads to stays a link."""
    node = inputs.get(str(value[0])) if isinstance(value, list) and len(value) == 2 else None
    if node is None or depth == 0 or name not in _OWN_NODES:
        return value
    wanted = next((key for key in (name, "value", "seed", "int", "float", "number") if key in node), None)
    return value if wanted is None else _at_its_node(inputs, name, node[wanted], depth - 1)


def _plain(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in given.items():
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            yield name, f"{value:g}" if isinstance(value, float) else str(value)


def _words(inputs: Mapping[str, Mapping[str, Any]], link: object, depth: int = 20) -> str:
    """The text that a link leads to, through nodes that pass conditions on."""
    node = inputs.get(str(link[0])) if isinstance(link, list) and link else None
    if node is None or depth == 0:
        return ""
    own = next((node[name] for name in ("text", "clip_l", "t5xxl", "text_g", "prompt") if isinstance(node.get(name), str)), "")
    further = (_words(inputs, value, depth - 1) for value in node.values() if isinstance(value, list))
    return own.strip() or next((words for words in further if words), "")


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


def differences(found: ForeignSettings, texts: Mapping[str, Any], loras: Sequence[tuple[str, float]]) -> list[Difference]:
    """Their settings beside those of the page, what differs first. texts: the form's, by option; loras: names or paths, and strengths."""
    rows = []
    for name, theirs in found.values.items():
        ours = texts.get(name)
        if ours is None:
            rows.append(Difference(name, theirs, "", "only there" if theirs else "same", here="no such setting of this model"))
        else:
            verdict: Verdict = "same" if _same(name, theirs, str(ours)) else "differs"
            rows.append(Difference(name, theirs, str(ours), verdict, here=_EMPTY.get(name, "")))
    model = str(texts.get("pretrained_model_name_or_path") or "")
    if found.model:
        rows.append(Difference("Base model", found.model, model, "same" if _stem(found.model) == _stem(model) else "differs"))
    there, here = (_listed(each) for each in (found.loras, loras))
    if there or here:
        rows.append(
            Difference(
                "LoRA files", ", ".join(there), ", ".join(here), "same" if there == here else "differs", "without any", "without any"
            )
        )
    for name, value in found.beside.items():
        if value not in _AS_USUAL.get(name, ()):
            rows.append(Difference(name, value, "", "only there", here="as the model's own sampler has it"))
    if found.program == "A1111" and "RNG" not in found.beside:
        rows.append(Difference("First noise", "", "", "only there", _GPU_NOISE, "of the CPU: the same seed gives another image"))
    order = ("differs", "only there", "same")
    return sorted(rows, key=lambda row: order.index(row.verdict))


def _listed(loras: Sequence[tuple[str, float | None]]) -> list[str]:
    """Files by name with their strengths; ? for one that is not told."""
    return sorted(f"{_stem(name)}: {'?' if weight is None else f'{weight:g}'}" for name, weight in loras)


_GPU_NOISE = "of the GPU, unless its settings said CPU"
_EMPTY = {"seed": "drawn anew", "size": "of the model's own choice", "shift": "as usual for this model"}
"""What an option does where it is left empty."""


def _same(name: str, theirs: str, ours: str) -> bool:
    if name == "sampler":
        return SAMPLERS.get(theirs.lower(), theirs) == ours
    if name == "scheduler":
        return SCHEDULERS.get(theirs.lower(), theirs.lower()) == ours
    if name == "size":
        # One number is a square.
        there, here = ([*sides, *sides][:2] for sides in (re.findall(r"\d+", theirs), re.findall(r"\d+", ours)))
        return there == here
    if (number := _number(theirs)) is not None:
        return number == _number(ours)
    return " ".join(theirs.split()) == " ".join(_TAG.sub("", ours).split())


def _stem(name: str) -> str:
    """A file's name without folders and ending, whichever system wrote it."""
    last = PureWindowsPath(name).name
    return re.sub(r"\.(safetensors|ckpt|sft|gguf|pt)$", "", last)
