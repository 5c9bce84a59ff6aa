"""Which layers of an adapter file other programs read: by the names that their loaders look up. See docs/adapter-files.md.

Facts about ComfyUI (October 2025, Z-Image as of 2026), Forge (June 2025), sd-scripts (February 2026), musubi-tuner (June 2026) and
diffusers 0.42. Their loaders were given every layer of every family in every layout and kind, and the tests compare with what they read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from .layer_names import Family, LayerNames, flat, text_encoder_name
from .maths import Kind

Path = Literal["published", "diffusers", "processor"]
"""Paths of layers in the published files, in diffusers' classes, or there as before peft (`attn1.processor.to_q`)."""

_UNETS: tuple[Family, ...] = ("sd1", "sd2", "sdxl")
_CLIPS: tuple[Family, ...] = (*_UNETS, "flux")
_ALL: tuple[Family, ...] = (*_CLIPS, "qwen_edit", "zimage")
_LORA: tuple[Kind, ...] = ("lora",)
_SUMS: tuple[Kind, ...] = ("lora", "loha", "lokr")
_MOST: tuple[Kind, ...] = (*_SUMS, "dora")


@dataclass(frozen=True)
class Rule:
    """Layers that a program finds: of these families and this network, by these beginnings, the path of the layer behind it."""

    families: tuple[Family, ...]
    module: str
    starts: tuple[str, ...]
    """One that ends with _ is followed by the path with _ in place of every dot."""
    path: Path = "diffusers"
    kinds: tuple[Kind, ...] = _MOST
    without: str = r"(?!)"
    """Expression on the layer's own path: these it does not know."""


@dataclass(frozen=True)
class Program:
    """A program, what it finds, and by which endings. lengths: the ending of a dora's lengths that it reads."""

    rules: tuple[Rule, ...]
    lengths: str = "dora_scale"
    endings: str = r".*"
    """Expression on the endings of a layer's tensors."""


def _of_comfyui(text_encoders: bool) -> tuple[Rule, ...]:
    """What ComfyUI and Forge have in common; Forge does not know ComfyUI's own names of text encoders."""
    own = {"te1": ("text_encoders.clip_l.transformer.", "text_encoders.clip_h.transformer."), "te2": ("text_encoders.clip_g.transformer.",)}
    return (
        Rule(_CLIPS, "backbone", ("lora_unet_", "diffusion_model."), "published"),
        Rule(_UNETS, "backbone", ("lora_unet_", "lycoris_")),
        Rule(_UNETS, "backbone", ("unet.", ""), "processor"),
        Rule(("flux",), "backbone", ("transformer.", "lycoris_", "lora_transformer_")),
        Rule(_CLIPS, "te1", ("lora_te1_", "lora_te_", "text_encoder.", *(own["te1"] if text_encoders else ()))),
        Rule(("sdxl",), "te2", ("lora_te2_", *(own["te2"] if text_encoders else ()))),
        Rule(("sdxl",), "te2", ("text_encoder_2.",), without="text_projection"),
        Rule(("flux",), "te3", ("lora_te3_", "lora_te2_", *(("text_encoders.t5xxl.transformer.",) if text_encoders else ("lora_te1_",)))),
    )


_OUTER = r"(time_text_embed\.|context_embedder|x_embedder|norm_out|proj_out).*"
PROGRAMS: dict[str, Program] = {
    "ComfyUI": Program(
        (
            *_of_comfyui(text_encoders=True),
            Rule(("qwen_edit", "zimage"), "backbone", ("lora_unet_", "diffusion_model."), "published"),
            Rule(("qwen_edit", "zimage"), "backbone", ("transformer.", "lycoris_", "")),
            Rule(("zimage",), "backbone", ("diffusion_model.",)),
        )
    ),
    "Forge": Program(_of_comfyui(text_encoders=False), endings=r"(?!lora_[AB](\.default.*)?$).*"),
    "sd-scripts": Program(
        (
            Rule(("sd1", "sd2"), "backbone", ("lora_unet_",), "diffusers", _LORA, r"(conv_in|conv_out|time_embedding\.).*"),
            Rule(("sdxl",), "backbone", ("lora_unet_",), "published", _LORA, r"(conv_in|conv_out|time_embedding\.|add_embedding\.).*"),
            Rule(("flux",), "backbone", ("lora_unet_",), "published", _LORA, r"(norm_out|proj_out).*"),
            Rule(("sd1", "sd2"), "te1", ("lora_te_",), kinds=_LORA),
            Rule(("sdxl", "flux"), "te1", ("lora_te1_",), kinds=_LORA),
            Rule(("sdxl",), "te2", ("lora_te2_",), kinds=_LORA, without="text_projection"),
            Rule(("flux",), "te3", ("lora_te3_",), kinds=_LORA),
        ),
        endings=r"lora_(down|up)\.weight|alpha",
    ),
    "musubi-tuner": Program(
        (
            Rule(("qwen_edit", "zimage"), "backbone", ("lora_unet_",), kinds=_SUMS),
            Rule(("flux",), "backbone", ("lora_unet_",), "published", _SUMS),
        ),
        endings=r"lora_(down|up)\.weight|alpha|(hada|lokr)_.*",
    ),
    "diffusers": Program(
        (
            Rule(_UNETS, "backbone", ("unet.",), kinds=("lora", "dora")),
            Rule(_UNETS, "backbone", ("lora_unet_",), kinds=_LORA),
            Rule(("sdxl",), "backbone", ("lora_unet_",), "published", _LORA),
            Rule(("flux",), "backbone", ("lora_unet_", "diffusion_model."), "published", _LORA, _OUTER),
            Rule(("flux", "qwen_edit", "zimage"), "backbone", ("transformer.",), kinds=("lora", "dora")),
            Rule(("zimage",), "backbone", ("transformer.", "diffusion_model."), kinds=("lokr",)),
            Rule(("qwen_edit", "zimage"), "backbone", ("lora_unet_", "diffusion_model."), kinds=_LORA),
            Rule(_CLIPS, "te1", ("text_encoder.",), kinds=("lora", "dora")),
            Rule(_CLIPS, "te1", ("lora_te1_",), kinds=_LORA),
            Rule(("sd1", "sd2"), "te1", ("lora_te_",), kinds=_LORA),
            Rule(("flux",), "te1", ("text_encoders.clip_l.transformer.",), kinds=_LORA),
            Rule(("sdxl",), "te2", ("text_encoder_2.",), kinds=("lora", "dora")),
            Rule(("sdxl",), "te2", ("lora_te2_",), kinds=_LORA),
        ),
        lengths="lora_magnitude_vector",
    ),
}


@dataclass(frozen=True)
class Stored:
    """A layer of a file: what its name stands for (the first of several layers), its kind, and the endings of its tensors."""

    name: str
    kind: Kind
    endings: Collection[str]


def layers_read(layers: Mapping[str, Stored], names: LayerNames) -> dict[str, list[str]]:
    """Which of a file's layers, by their names in the file, each program reads whole that knows the family."""
    read = {}
    for label, program in PROGRAMS.items():
        rules = [rule for rule in program.rules if names.family in rule.families]
        if rules:
            read[label] = [stem for stem, layer in layers.items() if _reads(program, rules, stem, layer, names)]
    return read


def _reads(program: Program, rules: Collection[Rule], stem: str, layer: Stored, names: LayerNames) -> bool:
    lengths = [ending for ending in layer.endings if ending.startswith(("dora_scale", "lora_magnitude"))]
    if layer.kind == "dora" and not any(ending.startswith(program.lengths) for ending in lengths):
        return False
    if not all(re.fullmatch(program.endings, ending) for ending in layer.endings if ending not in lengths):
        return False
    module, _, own = layer.name.partition(".")
    return any(
        module == rule.module
        and layer.kind in rule.kinds
        and re.fullmatch(rule.without, own) is None
        and any(stem == start + _path(rule.path, layer.name, names, start.endswith("_")) for start in rule.starts)
        for rule in rules
    )


def _path(path: Path, name: str, names: LayerNames, is_flat: bool) -> str:
    """The path of a layer as it stands behind a beginning."""
    module, _, own = name.partition(".")
    if module != "backbone":
        own = text_encoder_name(own)
    elif path == "published":
        own = names.published_path(name)
    elif path == "processor":
        own = own.replace(".to_", ".processor.to_").replace(".to_out.0", ".to_out")
    return flat(own) if is_flat else own
