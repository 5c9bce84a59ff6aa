"""Names of the layers of Z-Image, for any number of blocks.

All trainers name the layers after diffusers' own paths, and ComfyUI reads them there. The published files, and some older adapter files
with them, hold query, key and value as one matrix (`layers.0.attention.qkv`); their names are read too. The text encoder never carries an
adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from sd_scripts.families.common.original_unet import Stored
from sd_scripts.library.adapters.layer_names import LayerNames, Prefixes, flat, matrices

from . import original as original_zimage

Part = Literal["attention", "mlp", "modulation", "refiner"]

_PREFIXES = Prefixes(
    kohya={"backbone": ("lora_unet_", "lora_transformer_", "lycoris_")},
    diffusers={"backbone": ("transformer.",)},
    comfyui={"backbone": ("diffusion_model.", "model.diffusion_model.")},
)
_BLOCK = re.compile(r"backbone\.layers\.(\d+)\.(.+)")
_REFINER = re.compile(r"backbone\.(noise|context)_refiner\.\d+\..+")
_PARTS: tuple[tuple[str, Part], ...] = (("attention.", "attention"), ("feed_forward.", "mlp"), ("adaLN_modulation.", "modulation"))


class ZImageNames(LayerNames):
    """The maps of one Z-Image model."""

    def __init__(self, layers: Iterable[str]) -> None:
        """layers are names `<module>.<layer>` of the model; only the transformer's may carry an adapter."""
        own = [name for name in layers if name.startswith("backbone.")]
        super().__init__("zimage", Stored, own, _PREFIXES)
        # Only which rows belong together is asked, so any width will do.
        published = matrices(original_zimage.transformer({"dim": 1}), own)
        self._paths["backbone"] |= {flat(path): target for path, target in published.items()}
        self._published = {name: path for path, target in published.items() for name in target.layers}
        self._together = {name: target.layers for target in published.values() for name in target.layers}
        numbers = [number for name in own if (number := self.block(name)) is not None]
        self._num_blocks = max(numbers, default=-1) + 1

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
