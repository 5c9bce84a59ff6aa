"""FLUX.3's network in any precision: diffusers holds the norms of queries and keys in float32, here they compute in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import Flux3Transformer2DModel
from torch import Tensor, nn

from sd_scripts.families.common.exact_norms import with_norms


class ExactNorm(nn.RMSNorm):
    """Computes in float32 whatever it holds."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalised (..., D), float32."""
        weight = None if self.weight is None else self.weight.float()
        return nn.functional.rms_norm(x.float(), self.normalized_shape, weight, self.eps)


def made(config: Mapping[str, Any]) -> Flux3Transformer2DModel:
    """diffusers' network of this configuration, with these norms."""
    network: Flux3Transformer2DModel = with_norms(Flux3Transformer2DModel.from_config(dict(config)), nn.RMSNorm, ExactNorm)
    # In the order in which they compute, which is that of blocks to swap.
    for name in ("mode_blocks", "single_transformer_blocks"):
        network._modules[name] = network._modules.pop(name)
    return network
