"""Krea 2's network in any precision: its norms are centred on zero, and 1 is added to their weights in float32.

diffusers adds it in the precision of the weights, and bfloat16 has 8 bits for the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import Krea2Transformer2DModel
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm
from torch import Tensor, nn

from sd_scripts.families.common.exact_norms import with_norms


class ExactNorm(Krea2RMSNorm):
    """Computes in float32 whatever it holds."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalised (..., D), in the precision of what is given."""
        weight = self.weight.float() + 1.0
        return nn.functional.rms_norm(hidden_states.float(), (self.dim,), weight=weight, eps=self.eps).to(hidden_states.dtype)


def made(config: Mapping[str, Any]) -> Krea2Transformer2DModel:
    """diffusers' network of this configuration, with these norms."""
    return with_norms(Krea2Transformer2DModel.from_config(dict(config)), Krea2RMSNorm, ExactNorm)
