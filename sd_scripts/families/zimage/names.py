"""Names of the layers of Z-Image, for any number of blocks.

All trainers name the layers after diffusers' own paths, and ComfyUI reads them there. The published files, and some older adapter files
with them, hold query, key and value as one matrix (`layers.0.attention.qkv`); their names are read too. The text encoder never carries an
adapter.
"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from sd_scripts.families.common import reader_rules as rules
from sd_scripts.families.common.plain_names import PlainNames
from sd_scripts.library.adapters.architectures import Architecture
from sd_scripts.library.adapters.layer_names import Names
from sd_scripts.library.adapters.ranks import ChosenParts
from sd_scripts.library.adapters.readers import Rule

from . import original
from .facts import TRANSFORMER
from .loading import SPEC, VERSION
from .options import ZImageNetworkOptions

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


def _ranks(options: ZImageNetworkOptions, names: Names) -> ChosenParts:
    return ChosenParts(options, names, options.train_block_indices, part_of, _CHOICES, options.lora_targets)


ARCHITECTURES = (
    Architecture(
        name="zimage",
        label="Z-Image",
        spec=SPEC,
        is_backbone=lambda config: True,
        config_of=lambda header, shapes: original.config_of(shapes),
        files=(TRANSFORMER,),
        encoders=(),
        version=VERSION,
        told_by=(),
        prefixes=rules.TRANSFORMER_PREFIXES,
        layer_names=ZImageNames,
        ranks=_ranks,
        has_one_alpha=False,
        # As most files are written.
        comfyui_endings="peft",
        readers={
            "ComfyUI": (*rules.TRANSFORMER_COMFYUI, Rule("backbone", ("diffusion_model.",))),
            "musubi-tuner": rules.TRANSFORMER_MUSUBI,
            "diffusers": (*rules.TRANSFORMER_DIFFUSERS, Rule("backbone", ("transformer.", "diffusion_model."), kinds=("lokr",))),
        },
    ),
)
