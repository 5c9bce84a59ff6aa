"""Gradient checkpointing: for each block of a network, whether its activations are kept or computed again in the backward pass, and whether
what a recomputed block begins with waits in main memory. The result is the same to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.memory import MemoryOptions

from .swapping import hooks_outside, spread


def switch(parts: Parts, memory: MemoryOptions, encoders: bool) -> None:
    """Has the backbone, and with `encoders` the text encoders too, recompute what the options ask for, from the next forward pass on.

    A network may be switched as often as one likes between two steps.
    """
    if not memory.gradient_checkpointing:
        parts.backbone.disable_gradient_checkpointing()
    elif memory.gradient_checkpointing_share == 1.0 and not memory.gradient_checkpointing_cpu_offload:
        # diffusers' own way, which a compiler of the whole network follows.
        parts.backbone.enable_gradient_checkpointing()
    else:
        names = recomputed(parts.backbone, memory.gradient_checkpointing_share)
        way = _Offload() if memory.gradient_checkpointing_cpu_offload else _again
        parts.backbone.enable_gradient_checkpointing(_of(names, parts.backbone, way))
    for encoder in parts.text_encoders.values() if encoders else ():
        if memory.gradient_checkpointing:
            encoder.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        else:
            encoder.activation_checkpointing_disable()


def recomputed(network: nn.Module, share: float) -> list[str]:
    """Names of the blocks that are recomputed: this share of them, at least one, spread evenly."""
    names = list(blocks_of(network))
    return [names[index] for index in spread(max(1, round(share * len(names))), len(names))]


def _of(names: Iterable[str], network: nn.Module, recompute: Callable[..., Any]) -> Callable[..., Any]:
    """(module, *arguments) -> what the module makes of them; the named blocks are recomputed, others called plainly."""
    chosen = {network.get_submodule(name) for name in names}
    return lambda module, *arguments: recompute(module, *arguments) if module in chosen else module(*arguments)


def _again(module: nn.Module, *arguments: Any) -> Any:
    # The call, not forward: compiled code and what brings weights stand there.
    return checkpoint(module.__call__, *arguments, use_reentrant=False)


class _Offload:
    """Recomputes a block from arguments that wait in main memory, on a GPU pinned; blocks with the same argument share its copy."""

    def __init__(self) -> None:
        self._homes = WeakTensorKeyDictionary()
        """Of each argument that is still somewhere: its version and its copy."""

    @torch.compiler.disable(recursive=False)
    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        keep, give = hooks_outside()
        # What carries a note (see families.modulation) would come back without it, so it stays.
        leaves = [isinstance(argument, Tensor) and not vars(argument) for argument in arguments]
        staying = [None if away else argument for argument, away in zip(arguments, leaves, strict=True)]
        leaving = [argument for argument, away in zip(arguments, leaves, strict=True) if away]

        def call(*back: Any) -> Any:
            given = iter(back)
            return module(*(next(given) if away else argument for argument, away in zip(staying, leaves, strict=True)))

        def pack(tensor: Tensor) -> Any:
            # A network without numbers is measured, and what it would have in main memory is not on the device.
            return tensor if tensor.is_meta else (tensor.device, keep(self._home(tensor, leaving)))

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            device, home = kept
            return give(home).to(device, non_blocking=True)

        # Of the block's own tensors the checkpoint keeps nothing, so these hooks see its arguments alone.
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            result = checkpoint(call, *leaving, use_reentrant=False)
        # autograd may keep the hooks, and with them this list.
        leaving.clear()
        return result

    def _home(self, tensor: Tensor, arguments: Sequence[Tensor]) -> Tensor:
        """The copy of a tensor, which is one of the arguments under another name."""
        for argument in arguments:
            if _is_same(argument, tensor):
                version, home = self._homes.get(argument, (None, None))
                if version != argument._version:
                    home = _copied(tensor)
                    self._homes[argument] = argument._version, home
                return home
        return _copied(tensor)


def _is_same(a: Tensor, b: Tensor) -> bool:
    same: bool = a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    return same


@torch.no_grad()
def _copied(tensor: Tensor) -> Tensor:
    """In main memory. On a GPU both ways are queued behind what computes the tensor and before what needs it."""
    # In the same order in memory: kernels, and with them the last bits, depend on it.
    home = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return home.copy_(tensor, non_blocking=True)
