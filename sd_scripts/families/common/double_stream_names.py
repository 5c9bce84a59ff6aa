"""Names of the layers of transformers with double and single blocks, for any number of them.

kohya, ComfyUI and the published files name the layers after the original layout, in which query, key and value of a double block are one
matrix (`double_blocks.0.img_attn.qkv`), and with the MLP's first layer also those of a single block (`single_blocks.0.linear1`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sd_scripts.library.adapters.architectures import Architecture
from sd_scripts.library.adapters.layer_names import LayerNames, Target
from sd_scripts.library.loading.common import Config

BLOCK = re.compile(r"backbone\.(single_)?transformer_blocks\.(\d+)\.(.+)")


class DoubleStreamNames(LayerNames):
    """The maps of one model."""

    def __init__(self, architecture: Architecture, config: Config, layers: Iterable[str]) -> None:
        super().__init__(architecture, config, layers)
        backbone = self._paths["backbone"]
        for path, target in list(backbone.items()):
            if path.endswith("_linear1") and len(target.layers) == 4:
                # As other trainers write an adapter of the attention alone.
                backbone[f"{path}_qkv"] = Target(target.layers[:3], target.shares[:3])
        self._num_double, self._num_single = int(config["num_layers"]), int(config["num_single_layers"])

    @property
    def num_blocks(self) -> int:
        """Double and single blocks."""
        return self._num_double + self._num_single

    @property
    def num_double(self) -> int:
        return self._num_double

    def block(self, name: str) -> int | None:
        """Number of the block a layer stands in, double blocks first; None outside of all blocks."""
        match = BLOCK.fullmatch(name)
        if match is None:
            return None
        return int(match[2]) + (self._num_double if match[1] else 0)
