"""Writes what each family's `configs/layers.json` says of its published models: how many blocks they have, and names of their layers.

python -m tests.layer_tables
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from sd_scripts.families import NAMES
from sd_scripts.library.adapters.architectures import architecture_of
from sd_scripts.library.adapters.layer_names import adaptable_layers
from sd_scripts.library.adapters.names import networks_of
from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.runs.layers import file_of
from sd_scripts.schema.files import write_atomically


def table_of(family: str) -> str:
    """The table of a family; empty for one whose runs make their model."""
    blocks, names = 0, set[str]()
    for index in sorted((file_of(family).parent).rglob("model_index.json")):
        networks = _networks(index.parent)
        if networks:
            blocks = max(blocks, len(blocks_of(networks["backbone"])))
            names |= {layer for network in networks.values() for layer in adaptable_layers(network)}
    return json.dumps({"blocks": blocks, "layers": patterns(names)}, indent=0) + "\n" if names else ""


def _networks(folder: Path) -> dict[str, nn.Module]:
    """The networks of a published configuration that can carry adapters, on the meta device; none for a model of another kind."""
    for backbone in ("transformer", "unet"):
        if (folder / backbone / "config.json").is_file():
            config = json.loads((folder / backbone / "config.json").read_text())
            architecture = architecture_of([config["_class_name"]], config)
            return {} if architecture is None else networks_of(architecture, folder)
    return {}


def patterns(names: Iterable[str]) -> list[str]:
    """Names with how many numbers stand in each place, instead of the numbers: `layers.{30}.to_q`."""
    found: dict[str, list[int]] = {}
    for name in names:
        counts = [int(number) + 1 for number in re.findall(r"(?<=\.)\d+(?=\.|$)", name)]
        kept = found.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "{}", name), counts)
        kept[:] = map(max, kept, counts)
    return sorted(name.format(*(f"{{{count}}}" for count in counts)) for name, counts in found.items())


if __name__ == "__main__":
    for family in NAMES:
        if table := table_of(family):
            write_atomically(file_of(family), table)
