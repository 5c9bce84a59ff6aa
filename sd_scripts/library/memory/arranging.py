"""Brings a network that is about to be trained to its device, with the options for memory and speed.

The order matters. Adapters are attached before; then

    attention   by the kernels that the options name
    layout      of weights with convolutions (channels_last)
    recomputing decides for each block whether its activations are kept
    compiling   makes code of blocks with their adapters, inside of what recomputes them
    swapping    brings the weights of a block before its code runs, outside of it, and leaves in host RAM what is swapped
    the device  for everything else
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.runs import RunOptions

from . import compiling, kernels, recomputing, swapping
from .swapping import BlockSwap

log = logging.getLogger("sd_scripts")


@dataclass
class Arranged:
    """What stands between a network and plain PyTorch."""

    parts: Parts
    swap: BlockSwap
    """The blocks that are in host RAM; none, unless blocks are swapped."""
    compilation: compiling.Compilation | None = None
    """The code of parts.backbone, if it is compiled."""


def arrange(parts: Parts, options: RunOptions, device: torch.device, sharded: bool = False) -> Arranged:
    """Does what the options say with parts.backbone, in place. sharded: each process has a share of its weights there already."""
    kernels.use_attention(parts.backbone, options.memory.attention_backend)
    if options.memory.in_channels_last:
        # Convolutions give the layout of their weights to what they make, so inputs need none.
        parts.backbone.to(memory_format=torch.channels_last)
    if options.memory.gradient_checkpointing:
        recomputing.switch(parts, options.memory, options.network.train_text_encoder)
    compilation = None
    if options.compile.compile:
        compilation = compiling.compile_network(parts.backbone, options.compile, device, options.memory.blocks_to_swap > 0)
    swap = BlockSwap(parts.backbone, device)
    if options.memory.blocks_to_swap:
        swapping.check(swap, sharded, options.optimizer.optimizer_type)
        swap.set(options.memory.blocks_to_swap)
        log.info("%s", swap.summary())
    if not sharded:
        # Everything else: swapped blocks stay in host RAM.
        parts.backbone.to(device)
    return Arranged(parts, swap, compilation)
