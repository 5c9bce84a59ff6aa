"""Adapter files on a model: merged into its weights for good, or put on beside others to be taken off again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.network import NetworkOptions

from .files import read
from .fusing import MAGNITUDE
from .inject import inject, take_shapes
from .layer_names import layers_of
from .layers import examples, plan_of_file
from .maths import AdapterLayer, merged_weight
from .names import names_of
from .network import AdapterNetwork

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def merge_into(parts: Parts, path: Path, multiplier: float = 1.0) -> int:
    """Adds an adapter file of any kind to the weights of backbone and text encoders; returns the number of layers changed.

    The sum is made in float32 and rounded once, to the weight's own precision. Raises OptionError for keys that fit no layer, for
    quantised layers, and for a multiplier other than 1 of an oft adapter; the model is then untouched.
    """
    adapters = read(path, parts)
    bases = layers_of(parts)
    quantised = [name for name in adapters if not is_plain(bases[name])]
    if quantised:
        raise OptionError(
            f"{path.name} cannot be merged into a quantised model ({examples(quantised)}): the sum would be lost in rounding. "
            "Load the base model without quantisation, merge, and quantise afterwards"
        )
    _check_strength(adapters, path, multiplier)
    for name, adapter in Bar(adapters.items(), desc=f"merging {path.name}", unit="layer", delay=2, leave=False):
        weight = bases[name].weight
        if weight.is_meta:
            # Of a network that was left out of loading: nobody will run it.
            continue
        weight.copy_(merged_weight(weight.float(), adapter, multiplier))
    return len(adapters)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer's weight is an ordinary floating-point tensor and not a quantised one."""
    weight = layer.weight
    return type(weight) is nn.Parameter and type(weight.data) is Tensor and weight.dtype in _FLOATS


def apply(parts: Parts, path: Path, weight: float = 1.0) -> AdapterNetwork:
    """Puts an adapter file on the model, beside adapters that are there, without changing weights; `Network.detach` takes it off.

    weight multiplies what the adapter adds (for dora, W' - W). Raises OptionError for a file of several kinds, one of another kind than
    an adapter on the same layer, or an oft adapter with a weight other than 1.
    """
    adapters = read(path, parts)
    kinds = sorted({adapter.kind for adapter in adapters.values()})
    if len(kinds) != 1:
        raise OptionError(f"{path.name} holds {' and '.join(kinds)} layers; merge it into the model instead")
    _check_strength(adapters, path, weight)
    return put_on(parts, adapters, path.name, weight)


def put_on(parts: Parts, adapters: Mapping[str, AdapterLayer], label: str, strength: float) -> AdapterNetwork:
    """As apply, for the adapters of one kind that were read from the file called label."""
    kind = next(iter(adapters.values())).kind
    by_input = [name for name, adapter in adapters.items() if kind == "dora" and adapter.tensors[MAGNITUDE].dim() > 1]
    if by_input:
        raise OptionError(f"{label} has dora lengths for each input channel ({examples(by_input)}); merge it into the model instead")
    name = _free_name(parts)
    plans = plan_of_file(adapters, layers_of(parts))
    inject(parts, kind, plans, NetworkOptions(network_type=kind), name)
    take_shapes(parts, adapters, name)
    network = AdapterNetwork(parts, kind, plans, names_of(parts), name)
    try:
        network.set_adapters(adapters)
    except OptionError:
        network.detach()
        raise
    network.freeze()
    network.set_strength(strength)
    return network


def _check_strength(adapters: Mapping[str, AdapterLayer], path: Path, strength: float) -> None:
    if strength != 1 and any(adapter.kind == "oft" for adapter in adapters.values()):
        raise OptionError(f"{path.name} is an oft adapter: it rotates weights and has no strength other than 1, not {strength:g}")


def _free_name(parts: Parts) -> str:
    """A name for peft that no adapter of this model has yet."""
    taken = {name for module in parts.modules().values() for name in getattr(module, "peft_config", {})}
    return next(name for number in range(len(taken) + 1) if (name := f"applied_{number}") not in taken)
