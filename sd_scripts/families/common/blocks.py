"""Calling the blocks of a network of diffusers where its own call is not used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def through_blocks(network: Any, tokens: Tensor, *more: Any) -> Tensor:
    """What the network's blocks make of tokens (B, N, D) one after the other, recomputed backwards where that is switched on."""
    for block in network.transformer_blocks:
        kept = not (torch.is_grad_enabled() and network.gradient_checkpointing)
        tokens = block(tokens, *more) if kept else network._gradient_checkpointing_func(block, tokens, *more)
    return tokens
