"""The small transformer of a Z-Image model; weights come from torch's generator as the caller has set it.

Latents have the real 16 channels, 2 x 2 of them are a token.
"""

from __future__ import annotations

from diffusers import ZImageTransformer2DModel
from torch import nn


def tiny_zimage_transformer(
    text_width: int = 32,
    width: int = 48,
    num_layers: int = 2,
    num_heads: int = 3,
    axes_dims: tuple[int, int, int] = (4, 6, 6),
    num_text_positions: int = 1536,
) -> ZImageTransformer2DModel:
    """A transformer with one refiner block each for image and text; the numbers of axes_dims add up to the width of a head."""
    transformer = ZImageTransformer2DModel(
        in_channels=16,
        dim=width,
        n_layers=num_layers,
        n_refiner_layers=1,
        n_heads=num_heads,
        n_kv_heads=num_heads,
        cap_feat_dim=text_width,
        axes_dims=list(axes_dims),
        axes_lens=[num_text_positions, 512, 512],
    )
    # Zeros, or in older versions whatever was in memory, in a new model.
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        nn.init.normal_(token, std=0.02)
    return transformer
