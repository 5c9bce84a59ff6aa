"""Names of the layers of Z-Image, for any number of blocks.

All trainers name the layers after diffusers' own paths, and ComfyUI reads them there. The published files, and some older adapter files
with them, hold query, key and value as one matrix (`layers.0.attention.qkv`); their names are read too. The text encoder never carries an
adapter.
"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from sd_scripts.families.common import reader_rules as rules
from sd_scripts.families.common.plain_names import PlainNames, ranks_of_parts
from sd_scripts.library.adapters.readers import Rule

from .loading import LOADER

Part = Literal["attention", "mlp", "modulation", "refiner"]

# The parts of each choice of lora_targets; the last holds those of all others.
_CHOICES: dict[str, tuple[Part, ...]] = {
    "attention": ("attention",),
    "attention_and_mlp": ("attention", "mlp"),
    "all": ("attention", "mlp", "modulation", "refiner"),
}
_BLOCK = re.compile(r"backbone\.layers\.(\d+)\.(.+)")
_REFINER = re.compile(r"backbone\.(noise|context)_refiner\.\d+\..+")
_PARTS: tuple[tuple[str, Part], ...] = (("attention.", "attention"), ("feed_forward.", "mlp"), ("adaLN_modulation.", "modulation"))


class ZImageNames(PlainNames):
    """The maps of one Z-Image model; the refiners are not counted among its blocks."""

    blocks: ClassVar[re.Pattern[str]] = _BLOCK


def part_of(name: str) -> Part | None:
    """Which part of the transformer `backbone.<layer>` belongs to; None outside of all blocks."""
    if _REFINER.fullmatch(name):
        return "refiner"
    match = _BLOCK.fullmatch(name)
    return None if match is None else next((part for start, part in _PARTS if match[2].startswith(start)), None)


ARCHITECTURES = (
    rules.transformer_architecture(
        LOADER,
        told_by=(),
        layer_names=ZImageNames,
        ranks=ranks_of_parts(part_of, _CHOICES),
        # As most files are written.
        comfyui_endings="peft",
        readers={
            "ComfyUI": (*rules.TRANSFORMER_COMFYUI, Rule("backbone", ("diffusion_model.",))),
            "musubi-tuner": rules.TRANSFORMER_MUSUBI,
            "diffusers": (*rules.TRANSFORMER_DIFFUSERS, Rule("backbone", ("transformer.", "diffusion_model."), kinds=("lokr",))),
        },
    ),
)
