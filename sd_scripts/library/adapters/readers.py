"""Which layers of an adapter file other programs read: by the names that their loaders look up. See docs/adapter-files.md.

Which layers those are, architectures say in their `readers`. Facts about ComfyUI (October 2025; newer models August 2026), Forge (June
2025), sd-scripts (February 2026), musubi-tuner (June 2026) and diffusers 0.42. Their loaders were given every layer of every architecture
in every layout and kind, and the tests compare with what they read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from .layer_names import LayerNames, flat, text_encoder_name
from .maths import Kind

Path = Literal["published", "diffusers", "processor"]
"""Paths of layers in the published files, in diffusers' classes, or there as before peft (`attn1.processor.to_q`)."""

LORA: tuple[Kind, ...] = ("lora",)
SUMS: tuple[Kind, ...] = ("lora", "loha", "lokr")
_MOST: tuple[Kind, ...] = (*SUMS, "dora")


@dataclass(frozen=True)
class Rule:
    """Layers of a network that a program finds: by these beginnings, the path of the layer behind it."""

    module: str
    starts: tuple[str, ...]
    """One that ends with _ is followed by the path with _ in place of every dot."""
    path: Path = "diffusers"
    kinds: tuple[Kind, ...] = _MOST
    without: str = r"(?!)"
    """Expression on the layer's own path: these it does not know."""
    refuses_others: bool = False
    """Whether the program reads nothing of a file with a layer that it does not know."""


@dataclass(frozen=True)
class Program:
    """By which endings a program finds tensors. lengths: the ending of a dora's lengths that it reads."""

    lengths: str = "dora_scale"
    endings: str = r".*"
    """Expression on the endings of a layer's tensors."""


PROGRAMS: dict[str, Program] = {
    "ComfyUI": Program(),
    "Forge": Program(endings=r"(?!lora_[AB](\.default.*)?$).*"),
    "sd-scripts": Program(endings=r"lora_(down|up)\.weight|alpha"),
    "musubi-tuner": Program(endings=r"lora_(down|up)\.weight|alpha|(hada|lokr)_.*"),
    "diffusers": Program(lengths="lora_magnitude_vector"),
}


@dataclass(frozen=True)
class StoredAdapter:
    """A layer of a file: what its name stands for (the first of several layers), its kind, and the endings of its tensors."""

    name: str
    kind: Kind
    endings: Collection[str]


def layers_read(layers: Mapping[str, StoredAdapter], names: LayerNames) -> dict[str, list[str]]:
    """Which of a file's layers, by their names in the file, each program reads whole that knows the architecture."""
    read: dict[str, list[str]] = {}
    for label, program in PROGRAMS.items():
        rules = names.architecture.readers.get(label)
        if rules is None:
            continue
        found = {stem: rule for stem, layer in layers.items() if (rule := _reading(program, rules, stem, layer, names)) is not None}
        refused = len(found) < len(layers) and any(rule.refuses_others for rule in found.values())
        read[label] = [] if refused else list(found)
    return read


def _reading(program: Program, rules: Collection[Rule], stem: str, layer: StoredAdapter, names: LayerNames) -> Rule | None:
    """The rule by which a program reads a layer whole."""
    lengths = [ending for ending in layer.endings if ending.startswith(("dora_scale", "lora_magnitude"))]
    if layer.kind == "dora" and not any(ending.startswith(program.lengths) for ending in lengths):
        return None
    if not all(re.fullmatch(program.endings, ending) for ending in layer.endings if ending not in lengths):
        return None
    module, _, own = layer.name.partition(".")
    return next(
        (
            rule
            for rule in rules
            if module == rule.module
            and layer.kind in rule.kinds
            and re.fullmatch(rule.without, own) is None
            and any(stem == start + _path(rule.path, layer.name, names, start.endswith("_")) for start in rule.starts)
        ),
        None,
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
