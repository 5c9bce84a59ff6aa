"""Reading of a base model whose blocks are held in few bits as soon as they are there: what all families share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from torch import nn

from sd_scripts.families import FACTS
from sd_scripts.library.core.devices import META
from sd_scripts.library.core.protocols import DeviceMap, Dtypes, Parts, mapped
from sd_scripts.library.memory import quantize
from sd_scripts.schema.model import BaseModelOptions

from .common import Base, dtypes_of, merge_adapters, read_networks


def read_quantized(
    base: Base,
    options: BaseModelOptions,
    device: DeviceMap,
    dtype: Dtypes,
    without: Collection[str],
    adapters: Sequence[Path],
    parts_of: Callable[[Mapping[str, nn.Module]], Parts],
) -> Parts:
    """Reads the weights, but not of the networks named in `without`, merges adapters, and holds in few bits what the options say.

    parts_of makes the parts of the networks. Without adapters each block is quantised as soon as it is read; with them afterwards, because
    what is added to few bits is lost in rounding.
    """
    unread = [name for name in base.networks if name in without or mapped(device, name) == META]
    chosen = quantize.chosen(options, FACTS[base.spec.name].network.quantized_encoder, unread)
    at_once = {} if adapters else chosen
    with quantize.while_reading({name: found.module for name, found in base.networks.items()}, at_once) as finishing:
        dtypes = dtypes_of(base.networks, dtype, options.vae_dtype)
        parts = parts_of(read_networks(base.networks, base.source.label, device, dtypes, without, finishing))
    if adapters:
        merge_adapters(parts, adapters, options.base_weights_multiplier)
        quantize.quantize_chosen(parts.modules(), chosen)
    return parts


def check_whole(*networks: nn.Module) -> None:
    """Networks that are written have all their weights; one in few bits has lost them."""
    assert not any(quantize.is_quantized(network) for network in networks), "a quantised model has lost its weights"
