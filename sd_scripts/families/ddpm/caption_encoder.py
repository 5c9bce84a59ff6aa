"""The small transformer that reads captions for models that are made by their run; trained with the U-Net.

Shapes: B captions, L tokens, D width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

_INIT_STD = 0.02
"""Standard deviation of new embeddings, as in GPT-2 and CLIP."""


class CaptionEncoder(ModelMixin, ConfigMixin):
    """Token table, learned positions, and pre-norm transformer blocks in which every token sees every other that is no padding."""

    @register_to_config
    def __init__(
        self, vocab_size: int, max_length: int = 64, width: int = 256, num_layers: int = 4, num_heads: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(max_length, width)
        self.layers = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)
        self.gradient_checkpointing = False
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=_INIT_STD)

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Computes each block again in the backward pass instead of keeping what it made; names are those of transformers' models."""
        self.gradient_checkpointing = True
        self._recompute = partial(checkpoint, **(activation_checkpointing_kwargs or {"use_reentrant": False}))

    def activation_checkpointing_disable(self) -> None:
        """Keeps what blocks make."""
        self.gradient_checkpointing = False

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """States (B, L, D) of token numbers (B, L); mask (B, L) is True at tokens that may be seen, and one of each row must be."""
        states = self.drop(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        # scaled_dot_product_attention takes a boolean mask as: True takes part.
        seen = mask[:, None, None, :]
        for block in self.layers:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                states = self._recompute(block, states, seen)
            else:
                states = block(states, seen)
        output: Tensor = self.norm(states)
        return output


class Block(nn.Module):
    """Self-attention and a perceptron, each on normalised input and added to it (Xiong et al. 2020, arXiv 2002.04745)."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, states: Tensor, seen: Tensor) -> Tensor:
        """States (B, L, D) of states and a mask (B, 1, 1, L)."""
        q, k, v = self.to_qkv(self.norm1(states)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        states = states + self.drop(self.to_out(heads.transpose(1, 2).flatten(2)))
        output: Tensor = states + self.drop(self.mlp(self.norm2(states)))
        return output
