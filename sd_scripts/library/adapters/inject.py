"""Lets peft wrap layers of a model: configurations out of plans, several adapters side by side, no trace in the global random state."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, PeftConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.memory.packed import PackedLinear
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.network import NetworkOptions

from .fusing import SHARED
from .layer_names import Names, Target
from .layers import LayerPlan, examples
from .maths import AdapterLayer, Kind


def inject(parts: Parts, kind: Kind, plans: Iterable[LayerPlan], options: NetworkOptions, adapter: str) -> None:
    """Lets peft wrap the layers, beside adapters that are there already; new tensors are float32. The global random state does not move."""
    everything = parts.modules()
    by_module: dict[str, list[LayerPlan]] = {}
    for plan in plans:
        by_module.setdefault(plan.module, []).append(plan)
    for module, wanted in by_module.items():
        model = everything[module]
        layers = {plan.layer: model.get_submodule(plan.layer) for plan in wanted}
        foreign = [
            f"{module}.{path}" for path, layer in layers.items() if isinstance(layer, BaseTunerLayer) and _kind_of(layer) != _FAMILY[kind]
        ]
        taken = [
            f"{module}.{path}" for path, layer in layers.items() if isinstance(layer, BaseTunerLayer) and adapter in layer.active_adapters
        ]
        if foreign:
            raise OptionError(
                f"a {kind} adapter cannot stand on a layer with one of another kind: {examples(foreign)}; merge one of them first"
            )
        if taken:
            raise ValueError(f"the model has an adapter named {adapter} already, on {examples(taken)}")
        # Of all layers: peft turns the other adapters off where the new one does not stand as well.
        before = {path: list(layer.active_adapters) for path, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}
        with torch.random.fork_rng(devices=[]):
            for config in _configs(kind, wanted, options, model):
                # peft warns about a model that has configurations already, so they are set aside while it works.
                known = model.__dict__.pop("peft_config", {})
                inject_adapter_in_model(config, model, adapter_name=adapter)
                model.peft_config = {**known, **model.peft_config}
        _activate(model, layers, before, adapter)


def _activate(model: nn.Module, layers: Collection[str], before: Mapping[str, list[str]], adapter: str) -> None:
    """Makes the new adapter active on its layers, in float32, beside the old ones, and leaves the old ones as trainable as they were."""
    for path in dict.fromkeys([*before, *layers]):
        layer = model.get_submodule(path)
        assert isinstance(layer, BaseTunerLayer)
        others = before.get(path, [])
        trained = [(tensor, tensor.requires_grad) for name in others for _, tensor in adapter_tensors(layer, name)]
        layer.set_adapter([*others, adapter] if path in layers else others)
        for tensor, requires_grad in trained:
            tensor.requires_grad_(requires_grad)
        if path not in layers:
            continue
        if others and any(tensor.is_meta for tensor in layer.get_base_layer().parameters()):
            # peft leaves a new adapter on the CPU where another one is on the meta device.
            layer.to("meta")
        for _, tensor in adapter_tensors(layer, adapter):
            tensor.data = tensor.data.float()
        if not _is_quantised(layer.get_base_layer()):
            continue
        layer.merge = _refuse_to_merge
        if adapter in getattr(layer, "lora_magnitude_vector", ()):
            layer.lora_magnitude_vector[adapter].register_forward_pre_hook(_on_plain_weight, with_kwargs=True)


def plain_weight(layer: nn.Module) -> Tensor:
    """The numbers that a layer multiplies with; those of a quantised one are made for this call."""
    if isinstance(layer, PackedLinear):
        return layer.unpacked()
    return layer.weight.dequantize() if _is_quantised(layer) else layer.weight


def _is_quantised(layer: nn.Module) -> bool:
    """Whether the weight is held in few bits: packed, or as one of quanto's tensors, which know the type that they are held in."""
    return isinstance(layer, PackedLinear) or hasattr(layer.weight, "qtype")


def _refuse_to_merge(*_arguments: object, **_named: object) -> None:
    """In place of peft's merge, which on some quantised layers does nothing at all."""
    raise OptionError(
        "an adapter cannot be merged into a quantised layer: the sum would be lost in rounding. Load the base model without quantisation, "
        "merge, and quantise afterwards"
    )


def _on_plain_weight(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Lets peft's dora measure a quantised layer: it asks for the weight in another precision, which quanto's tensors refuse, and it keeps
    what it is given until the backward pass."""
    base = named["base_layer"]
    weight = nn.Parameter(plain_weight(base), requires_grad=False)
    return inputs, {**named, "base_layer": SimpleNamespace(weight=weight, bias=base.bias)}


def take_shapes(parts: Parts, adapters: Mapping[str, AdapterLayer], adapter: str) -> None:
    """Gives injected lokr layers the factors of a file, whose sizes follow from no rank; other kinds have their sizes already."""
    everything = parts.modules()
    for name, given in adapters.items():
        if given.kind != "lokr":
            continue
        module, _, path = name.partition(".")
        layer = everything[module].get_submodule(path)
        device = layer.get_base_layer().weight.device
        for attribute in layer.adapter_layer_names:
            held = getattr(layer, attribute)
            if adapter in held:
                del held[adapter]
            if attribute in given.tensors:
                held[adapter] = nn.Parameter(torch.zeros(given.tensors[attribute].shape, device=device))


_FAMILY = {"lora": "lora", "dora": "lora", "loha": "hada", "lokr": "lokr", "oft": "oft"}


def _kind_of(layer: BaseTunerLayer) -> str:
    return layer.adapter_layer_names[0].partition("_")[0]


def adapter_tensors(layer: BaseTunerLayer, adapter: str) -> Iterator[tuple[str, nn.Parameter]]:
    """An adapter's tensors on one layer, by peft's name without the adapter's: lora_A.weight, hada_w1_a."""
    for attribute in layer.adapter_layer_names:
        held = getattr(layer, attribute)
        if adapter not in held:
            continue
        if isinstance(held[adapter], nn.Module):
            yield from ((f"{attribute}.{name}", tensor) for name, tensor in held[adapter].named_parameters())
        else:
            yield attribute, held[adapter]


def all_adapter_tensors(network: nn.Module) -> Iterator[nn.Parameter]:
    """The tensors of all adapters on a network."""
    for layer in network.modules():
        if isinstance(layer, BaseTunerLayer):
            for adapter in adapters_on(layer):
                yield from (tensor for _, tensor in adapter_tensors(layer, adapter))


def adapters_on(layer: BaseTunerLayer) -> list[str]:
    """peft's names of all adapters on a layer, active or not, in the order in which they were put on."""
    return list(dict.fromkeys(name for attribute in layer.adapter_layer_names for name in getattr(layer, attribute)))


def share_downs(plans: Iterable[LayerPlan], names: Names, parts: Parts, kind: Kind, adapter: str) -> None:
    """Gives the layers of each fused target one down matrix, the first layer's, where their ranks and scales are the same."""
    together: dict[tuple[Target, int, float], list[LayerPlan]] = {}
    for plan in plans:
        target = names.fused(plan.name)
        if target is not None:
            together.setdefault((target, plan.rank, plan.scale), []).append(plan)
    everything = parts.modules()
    for members in together.values():
        first, *others = (everything[plan.module].get_submodule(plan.layer) for plan in members)
        for rest in SHARED.get(kind, ()):
            attribute, _, inner = rest.partition(".")
            for other in others:
                if inner:
                    setattr(getattr(other, attribute)[adapter], inner, getattr(getattr(first, attribute)[adapter], inner))
                else:
                    getattr(other, attribute)[adapter] = getattr(first, attribute)[adapter]


def _pattern(values: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """The commonest value, and peft's patterns for the others: one expression for each value, because 700 are slow to match.

    Anchored at the start, because peft takes `proj_out` for every layer whose path ends so.
    """
    distinct = sorted(set(values.values()), key=lambda value: (-list(values.values()).count(value), value))
    common = distinct[0]
    return common, {"|".join(f"^{re.escape(name)}" for name, own in values.items() if own == value): value for value in distinct[1:]}


def _only(layers: list[str], model: nn.Module) -> list[str] | str:
    """What peft calls these layers and no others: it also takes layers whose path ends with a given one."""
    given, endings = set(layers), tuple(f".{layer}" for layer in layers)
    longer = any(path.endswith(endings) for path, _ in model.named_modules() if path not in given)
    return "|".join(re.escape(layer) for layer in layers) if longer else layers


def _configs(kind: Kind, plans: list[LayerPlan], options: NetworkOptions, model: nn.Module) -> list[PeftConfig]:
    """peft's configurations for the layers of one module; oft needs one for each block side."""
    targets = _only([plan.layer for plan in plans], model)
    if kind == "oft":
        sides = sorted({plan.rank for plan in plans})
        return [
            OFTConfig(
                r=0,
                oft_block_size=side,
                module_dropout=options.module_dropout,
                # The Neumann series is only nearly orthogonal; the exact transform costs little at this block size.
                use_cayley_neumann=False,
                target_modules=_only([plan.layer for plan in plans if plan.rank == side], model),
            )
            for side in sides
        ]
    rank, ranks = _pattern({plan.layer: plan.rank for plan in plans})
    alpha, alphas = _pattern({plan.layer: plan.scale * plan.rank for plan in plans})
    if kind in ("lora", "dora"):
        return [
            LoraConfig(
                r=int(rank),
                lora_alpha=alpha,
                rank_pattern=ranks,
                alpha_pattern=alphas,
                target_modules=targets,
                lora_dropout=options.network_dropout,
                use_dora=kind == "dora",
            )
        ]
    shared = {"r": int(rank), "alpha": alpha, "rank_pattern": ranks, "alpha_pattern": alphas, "target_modules": targets}
    drops = {"rank_dropout": options.rank_dropout, "module_dropout": options.module_dropout}
    if kind == "loha":
        return [LoHaConfig(**shared, **drops)]
    return [LoKrConfig(**shared, **drops, decompose_both=options.lokr_decompose_both, decompose_factor=options.lokr_factor)]
