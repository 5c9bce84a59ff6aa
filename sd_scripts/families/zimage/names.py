"""Names of the layers of Z-Image, for any number of blocks.

All trainers name the layers after diffusers' own paths, and ComfyUI reads them there. The published files, and some older adapter files
with them, hold query, key and value as one matrix (`layers.0.attention.qkv`); their names are read too. The text encoder never carries an
adapter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Literal

from sd_scripts.families.common import reader_rules as rules
from sd_scripts.families.common.original_unet import Stored
from sd_scripts.library.adapters.architectures import Architecture, Prefixes
from sd_scripts.library.adapters.layer_names import LayerNames, Names, flat, matrices
from sd_scripts.library.adapters.ranks import ChosenParts
from sd_scripts.library.adapters.readers import Rule
from sd_scripts.library.loading.common import Config

from . import original
from .facts import TRANSFORMER
from .loading import SPEC, VERSION
from .options import ZImageNetworkOptions

Part = Literal["attention", "mlp", "modulation", "refiner"]

_PREFIXES = Prefixes(
    kohya={"backbone": ("lora_unet_", "lora_transformer_", "lycoris_")},
    diffusers={"backbone": ("transformer.",)},
    comfyui={"backbone": ("diffusion_model.", "model.diffusion_model.")},
)
# The parts of each choice of lora_targets; the last holds those of all others.
_CHOICES: dict[str, tuple[Part, ...]] = {
    "attention": ("attention",),
    "attention_and_mlp": ("attention", "mlp"),
    "all": ("attention", "mlp", "modulation", "refiner"),
}
_BLOCK = re.compile(r"backbone\.layers\.(\d+)\.(.+)")
_REFINER = re.compile(r"backbone\.(noise|context)_refiner\.\d+\..+")
_PARTS: tuple[tuple[str, Part], ...] = (("attention.", "attention"), ("feed_forward.", "mlp"), ("adaLN_modulation.", "modulation"))


class ZImageNames(LayerNames):
    """The maps of one Z-Image model."""

    def __init__(self, architecture: Architecture, config: Config, layers: Iterable[str]) -> None:
        super().__init__(architecture, config, layers)
        # Only which rows belong together is asked, so any width will do.
        published = matrices(original.transformer({"dim": 1}), self.layers)
        self._paths["backbone"] |= {flat(path): target for path, target in published.items()}
        self._published = {name: path for path, target in published.items() for name in target.layers}
        self._together = {name: target.layers for target in published.values() for name in target.layers}
        numbers = [number for name in self.layers if (number := self.block(name)) is not None]
        self._num_blocks = max(numbers, default=-1) + 1

    def _stored(self, config: Config) -> Callable[[str], Stored]:
        return Stored

    def published_path(self, name: str) -> str:
        """See LayerNames."""
        return self._published[name]

    def together(self, name: str) -> tuple[str, ...]:
        """See Names."""
        return self._together[name]

    @property
    def num_blocks(self) -> int:
        """The main blocks; the refiners are not counted."""
        return self._num_blocks

    def block(self, name: str) -> int | None:
        """Number of the block a layer stands in; None outside of the main blocks."""
        match = _BLOCK.fullmatch(name)
        return None if match is None else int(match[1])


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
        prefixes=_PREFIXES,
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
