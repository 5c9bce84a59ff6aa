"""Files as a run of this project leaves them: written by the trainer's own exporter, on the tiny network of a family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.full import WholeNetwork, train_whole
from sd_scripts.library.adapters.network import AdapterNetwork
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.parallel.peers import Peers
from sd_scripts.library.train.exporting import Exporter
from sd_scripts.library.train.metadata import DatasetFacts
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat
from sd_scripts.schema.network import NetworkOptions
from sd_scripts.schema.runs import RunOptions

NETWORK_FAMILIES = tuple(family for family, method in RUNS if method == "network")
"""Families that LoRA files are made for."""


def lora_of(family: str, path: Path, base: str = "toy", parts: Parts | None = None, **values: Any) -> Path:
    """Writes the LoRA file of a run of a family after 3 steps; base is what the run names as its base model.

    parts: the networks that the file is for; None makes tiny ones. Adapters are not at zero.
    """
    needed = {"pretrained_model_name_or_path": base, "train_data_dir": "toy:star", "output_name": path.stem, "output_dir": str(path.parent)}
    options = flat.build(RUNS[family, "network"], {**needed, "network_dim": 4, **values})
    return exported(options, path, parts)


def exported(options: RunOptions, path: Path, parts: Parts | None = None) -> Path:
    """The file of a run with these options: an adapter, or a whole model."""
    chosen, wanted = families.family(options.family), options.network
    parts = parts or chosen.tiny()
    base = options.model.pretrained_model_name_or_path or ""
    # As loading calls it: a hub id as it is, a file by its name.
    parts.source = Path(base).name if base.endswith(".safetensors") else base
    run, peers = RunDirectory(path.parent), Peers()
    network: AdapterNetwork | WholeNetwork
    if isinstance(wanted, NetworkOptions):
        network = attach(parts, wanted, chosen.adapter_targets(parts, wanted.wants_convolutions), options.training.seed)
        draw = torch.Generator().manual_seed(0)
        network.load({name: value + 0.1 * torch.randn(value.shape, generator=draw) for name, value in network.state().items()})
    else:
        network = train_whole(parts, wanted, chosen, torch.float32)
    Exporter(options, chosen, parts, network, DatasetFacts(), lambda step: 0, run, peers, print)(path, 3)
    if isinstance(network, AdapterNetwork):
        network.detach()
    return path
