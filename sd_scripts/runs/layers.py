"""Which blocks and layers the published models of a family have, without loading one.

tests/layer_tables.py makes the tables, and a test repeats that.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
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
