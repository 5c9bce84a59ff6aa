"""Sharing out a network over the processes of a run, with PyTorch's FSDP2 (fully_shard).

Of an adapter run only what is frozen is sharded: the adapter stays whole in every process, so its gradients are summed and its files
written as ever. Of a run that trains the network itself each process holds its share of weights, gradients, averages and optimizer state;
states and files are written whole, so that they do not depend on the number of processes. A network that is sharded computes only
when all processes call it together.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.optimizer import ZOO

log = logging.getLogger("sd_scripts")

WHOLE_TENSORS_ONLY = ("Adafactor", "AdamW8bit", "PagedAdamW8bit", "Lion8bit", "Prodigy", *ZOO)
"""Optimizers that look at rows, columns, blocks or all of a weight at once, which no process has."""


def shard(backbone: nn.Module, whole: Collection[nn.Parameter], device: torch.device, num_processes: int) -> None:
    """Leaves each process with its share of the backbone's weights, on `device`; those in `whole` are moved there as they are.

    Repeated blocks are gathered one at a time. backbone: on the CPU, adapters attached. Gradients of shared weights are summed over the
    processes by the backward pass. Does nothing with one process but move it.
    """
    if num_processes == 1:
        backbone.to(device)
        return
    mesh = init_device_mesh(device.type, (num_processes,))
    for parameter in whole:
        parameter.data = parameter.data.to(device)
    blocks = {*(getattr(backbone, "_repeated_blocks", None) or ()), *(getattr(backbone, "_no_split_modules", None) or ())}
    # Inner blocks first: an outer one takes what they have left. All are let go after the forward pass too: the average of the weights,
    # shown to previews in their place, would otherwise stay behind in the gathered copy.
    for block in reversed(list(backbone.modules())):
        if block is backbone or type(block).__name__ in blocks:
            fully_shard(block, mesh=mesh, ignored_params=set(whole), reshard_after_forward=True)
            # Each process has divided by the size of the global batch already, so its gradients are added up, not averaged.
            block.set_gradient_divide_factor(1.0)
            block.set_force_sum_reduction_for_comms(True)
    # diffusers' networks end in a reshaped tensor, which nothing here changes in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    log.info("the base is sharded over %d processes", num_processes)


def is_sharded(network: nn.Module) -> bool:
    """Whether the weights are sharded, so that all processes must call it together."""
    return isinstance(network, FSDPModule)


def check_optimizer(name: str) -> None:
    """Raises OptionError for an optimizer that cannot work on shares of weights."""
    if name in WHOLE_TENSORS_ONLY:
        text = f"optimizer_type: {name} cannot work on weights that fsdp2 shards; take AdamW, Lion or SGD, or distributed_strategy ddp"
        raise OptionError(Problem("optimizer_type", text))


def own(tensor: Tensor) -> Tensor:
    """This process's share of a tensor that is sharded, in the same memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all gradients together, float32, on the device of the first; shares are summed over the processes."""
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    shares = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    if not shares:
        return _norm(whole)
    squared = _norm(shares) ** 2
    torch.distributed.all_reduce(squared)
    return (squared + _norm(whole).to(squared.device) ** 2).sqrt()


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), device=tensors[0].device if tensors else None)
    # Gradients of blocks that wait in host RAM are there, the others' on a GPU; each group is one call.
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in filled:
        groups.setdefault(tensor.device, []).append(tensor)
    norms = [torch.linalg.vector_norm(torch.stack([norm.float() for norm in torch._foreach_norm(group)])) for group in groups.values()]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def gathered(value: Any, keep: bool) -> Any:
    """A nested value whose shared tensors are whole, on the CPU; None in their place where `keep` is off.

    All processes must call it together, with values of the same structure.
    """
    if isinstance(value, DTensor):
        whole = value.detach().full_tensor()
        return whole.cpu() if keep else None
    if isinstance(value, Mapping):
        return {key: gathered(item, keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gathered(item, keep) for item in value)
    return value


def sharded(whole: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, sharded as `like` is; itself where `like` is not. Every process gives the same whole tensor."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def sharded_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A whole optimizer's state with the tensors of each weight sharded as the weight is, or laid out in memory as it is.

    torch's fused optimizers go through weights and their state number by number as they lie in memory, whatever their strides.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]

    def fitted(weight: Tensor, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != weight.shape:
            return value
        if isinstance(weight, DTensor) or value.stride() == weight.stride():
            return sharded(value, weight)
        return torch.empty_like(weight, dtype=value.dtype, device=value.device).copy_(value)

    own_state = {
        number: {name: fitted(weights[number], value) for name, value in values.items()} if number < len(weights) else values
        for number, values in state["state"].items()
    }
    return {**state, "state": own_state}


def skeleton_of(network: nn.Module) -> Callable[[Iterable[tuple[str, Tensor]]], nn.Module]:
    """What builds a whole network of the same kind from named weights, for a diffusers model; asked for before it is sharded."""
    kind, config = type(network), dict(network.config)

    def build(weights: Iterable[tuple[str, Tensor]]) -> nn.Module:
        with torch.device("meta"):
            made = kind.from_config(config)
        made.load_state_dict(dict(weights), assign=True)
        return made

    return build
