"""Sharing out a frozen network over the processes of a run, with PyTorch's FSDP2 (fully_shard).

Only what is frozen is shared out. The adapter stays whole in every process, so its gradients are summed and its files written as ever.
A network that is shared out computes only when all processes call it together.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

log = logging.getLogger("sd_scripts")


def shard(backbone: nn.Module, trained: Collection[nn.Parameter], device: torch.device, num_processes: int) -> None:
    """Leaves each process with its share of the backbone's frozen weights, on `device`; trained parameters are moved there whole.

    Repeated blocks are gathered one at a time. backbone: on the CPU, adapters attached. Does nothing with one process but move it.
    """
    if num_processes == 1:
        backbone.to(device)
        return
    mesh = init_device_mesh(device.type, (num_processes,))
    for parameter in trained:
        parameter.data = parameter.data.to(device)
    repeated = set(getattr(backbone, "_repeated_blocks", None) or ())
    for block in backbone.modules():
        if type(block).__name__ in repeated:
            fully_shard(block, mesh=mesh, ignored_params=set(trained))
    fully_shard(backbone, mesh=mesh, ignored_params=set(trained))
    # diffusers' networks end in a reshaped tensor, which nothing here changes in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    log.info("the base is shared out over %d processes", num_processes)


def is_sharded(network: nn.Module) -> bool:
    """Whether the weights are shared out, so that all processes must call it together."""
    return isinstance(network, FSDPModule)
