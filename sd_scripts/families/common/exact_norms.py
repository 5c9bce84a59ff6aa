"""Networks in any precision, of which diffusers holds the norms in float32: here they compute in it, whatever they hold."""

from __future__ import annotations

from typing import TypeVar

from diffusers import ModelMixin
from torch import nn

Network = TypeVar("Network", bound=ModelMixin)


def with_norms(network: Network, known: type[nn.Module], exact: type[nn.Module]) -> Network:
    """The network with norms of the class `exact` in place of `known`. Then nothing is left that must be held in float32."""
    for module in network.modules():
        if type(module) is known:
            module.__class__ = exact
    network._keep_in_fp32_modules = None
    return network
