"""Latents as the tokens of a transformer, in squares of 2 x 2, and back: FLUX's and Qwen-Image's way.

Shapes: B samples, C latent channels, h w latent sides, N = h/2 * w/2 tokens.
"""

from __future__ import annotations

from torch import Tensor


def by_rows(latents: Tensor) -> Tensor:
    """Latents (B, C, h, w) as image tokens (B, h w, C), each by itself, row by row."""
    return latents.flatten(2).transpose(1, 2)


def packed(latents: Tensor) -> Tensor:
    """Latents (B, C, h, w) as image tokens (B, N, 4C): squares of 2 x 2, row by row, the numbers of a channel side by side."""
    batch, channels, height, width = latents.shape
    squares = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, height * width // 4, 4 * channels)


def unpacked(tokens: Tensor, height: int, width: int) -> Tensor:
    """The latents (B, C, height, width) whose `packed` these are."""
    batch, _, numbers = tokens.shape
    squares = tokens.reshape(batch, height // 2, width // 2, numbers // 4, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(batch, numbers // 4, height, width)
