"""Which blocks and layers the models of a family have, without loading one: the published ones by a table, others by their header.

tests/layer_tables.py makes the tables, and a test repeats that.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sd_scripts.schema.outside import read_as


@dataclass(frozen=True)
class LayerTable:
    """blocks: the most that a published model has. layers: paths of all that can carry an adapter, `{30}` for a number below 30."""

    blocks: int
    layers: tuple[str, ...]

    def finds(self, expression: str) -> bool:
        """Whether an expression may find a layer; numbers that no model has together count as well."""
        found = re.compile(expression)
        return any(found.search(path) for layer in self.layers for path in _spelled(layer))

    def with_blocks(self, blocks: int) -> LayerTable:
        """The table of a model that has so many blocks, whichever kind there are more of."""
        more = max(0, blocks - self.blocks)
        return LayerTable(blocks, tuple(_COUNT.sub(lambda count: f"{{{int(count[1]) + more}}}", layer, count=1) for layer in self.layers))


_COUNT = re.compile(r"\{(\d+)\}")
_BLOCK = re.compile(r"(?:(?:model\.)?diffusion_model\.|net\.|transformer\.|model\.)?(\w*blocks(?:\.[a-z]\w*)?|layers|\w*_refiner)\.(\d+)\.")


def blocks_in(names: Iterable[str]) -> int | None:
    """How many blocks a transformer has, by the names of its tensors in any layout; None for a U-Net, and for names of none."""
    found = {match.groups() for name in names if (match := _BLOCK.match(name))}
    if any(kind.startswith(("down_blocks", "up_blocks", "input_blocks", "output_blocks")) for kind, _ in found):
        return None
    return len(found) or None


def file_of(family: str) -> Path:
    """Where the table of a family stands; families without adapters have none."""
    return Path(__file__).resolve().parents[1] / "families" / family / "configs" / "layers.json"


@cache
def layers_of(family: str) -> LayerTable | None:
    """The table of a family; None for one whose runs make their model."""
    file = file_of(family)
    return read_as(LayerTable, file.read_bytes()) if file.is_file() else None


def examples(layers: Sequence[str], limit: int) -> str:
    """Some paths for a sentence, of different kinds."""
    by_ending: dict[str, str] = {}
    for layer in layers:
        by_ending.setdefault(layer.rpartition("}.")[2], re.sub(r"\{\d+\}", "0", layer))
    return ", ".join(list(by_ending.values())[:limit])


def _spelled(layer: str) -> Iterator[str]:
    counts = [int(number) for number in re.findall(r"\{(\d+)\}", layer)]
    text = re.sub(r"\{\d+\}", "{}", layer)
    return (text.format(*numbers) for numbers in itertools.product(*map(range, counts)))
