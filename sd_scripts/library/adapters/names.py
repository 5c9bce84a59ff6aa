"""The layer names of a model: from its loaded networks, or from its published configuration alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import nn

from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.common import BASE, config_of, read_json

from .architectures import Architecture, architecture_of, architectures
from .layer_names import LayerNames, Names, Target, layers_in, layers_of

__all__ = ["Names", "Target", "names_for", "names_of", "networks_of"]


def names_of(parts: Parts) -> LayerNames:
    """The names of a loaded model. Raises ValueError for a backbone whose names nobody has written down."""
    config, kind = config_of(parts.backbone), type(parts.backbone)
    # Sharing a network out gives it a class of its own below the one it had.
    architecture = architecture_of((one.__name__ for one in kind.__mro__), config)
    if architecture is None:
        raise ValueError(f"no adapter names are known for a {kind.__name__}")
    return architecture.layer_names(architecture, config, layers_of(parts))


def names_for(architecture: str, folder: Path | None = None) -> LayerNames:
    """The names of a model that is not loaded, by the name of its architecture; takes under a second, and no memory for weights.

    folder: a diffusers folder whose configurations describe the networks; None takes those of the published model.
    """
    return _published(architecture) if folder is None else _described(architectures()[architecture], folder)


@cache
def _published(architecture: str) -> LayerNames:
    found = architectures()[architecture]
    return _described(found, found.spec.configs)


def _described(architecture: Architecture, folder: Path) -> LayerNames:
    networks = networks_of(architecture, folder)
    return architecture.layer_names(architecture, config_of(networks["backbone"]), layers_in(networks))


def networks_of(architecture: Architecture, folder: Path) -> dict[str, nn.Module]:
    """The networks that carry adapters, on the meta device, from the configurations in a diffusers folder."""
    parts = {name: part for name, part in architecture.spec.parts.items() if architecture.carries_adapters(name)}
    with torch.device("meta"):
        return {name: part.make(read_json(folder / part.folder / "config.json", BASE)) for name, part in parts.items()}
