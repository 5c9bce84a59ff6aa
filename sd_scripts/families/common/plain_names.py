"""Names of the layers of transformers that all trainers name after diffusers' own paths, for any number of blocks.

Published files hold some of these layers together as one matrix; adapters under such names are read too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from sd_scripts.library.adapters.architectures import Architecture
from sd_scripts.library.adapters.layer_names import LayerNames, Names, flat, matrices
from sd_scripts.library.adapters.ranks import ChosenParts
from sd_scripts.library.loading.common import Config
from sd_scripts.library.loading.layouts import Stored
from sd_scripts.schema.network import BlocksNetworkOptions


class BlockNames(LayerNames):
    """The maps of one model whose layers have the published names in other programs' files."""

    blocks: ClassVar[re.Pattern[str]] = re.compile(r"backbone\.transformer_blocks\.(\d+)\.(.+)")
    """The number of the block in the name of a layer."""

    def __init__(self, architecture: Architecture, config: Config, layers: Iterable[str]) -> None:
        super().__init__(architecture, config, layers)
        numbers = [number for name in self.layers if (number := self.block(name)) is not None]
        self._num_blocks = max(numbers, default=-1) + 1

    @property
    def num_blocks(self) -> int:
        """Those in which `block` places layers."""
        return self._num_blocks

    def block(self, name: str) -> int | None:
        """Number of the block a layer stands in; None outside of all blocks."""
        match = self.blocks.fullmatch(name)
        return None if match is None else int(match[1])


class PlainNames(BlockNames):
    """The maps of one model whose layers have diffusers' names everywhere."""

    def __init__(self, architecture: Architecture, config: Config, layers: Iterable[str]) -> None:
        super().__init__(architecture, config, layers)
        published = matrices(architecture.spec.parts["backbone"].layout(config), self.layers)
        self._paths["backbone"] |= {flat(path): target for path, target in published.items()}
        self._published = {name: path for path, target in published.items() for name in target.layers}
        self._together = {name: target.layers for target in published.values() for name in target.layers}

    def _stored(self, config: Config) -> Callable[[str], Stored]:
        return Stored

    def published_path(self, name: str) -> str:
        """See LayerNames."""
        return self._published[name]

    def together(self, name: str) -> tuple[str, ...]:
        """See Names."""
        return self._together[name]


def ranks_of_parts(part_of: Callable[[str], str | None], choices: Mapping[str, tuple[str, ...]]) -> Callable[[Any, Names], ChosenParts]:
    """Ranks of an adapter on the parts of blocks that lora_targets chooses; choices: the parts of each of its values."""
    return lambda options, names: ChosenParts(options, names, options.train_block_indices, part_of, choices, options.lora_targets)


def ranks_of_plain(options: BlocksNetworkOptions, names: Names) -> ChosenParts:
    """Ranks of an adapter on whole blocks."""

    def part_of(name: str) -> str | None:
        return None if names.block(name) is None else "block"

    return ChosenParts(options, names, options.train_block_indices, part_of, {"all": ("block",)}, "all")
