"""A new adapter on a model, from the options alone or from a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.core.rng import rng_for
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.network import AdapterOptions

from .files import read
from .fusing import SHARED
from .inject import inject, plain_weight, share_downs, take_shapes
from .layer_names import Names, layers_of, split_rest
from .layers import LayerPlan, plan_layers, plan_of_file
from .maths import AdapterLayer, output_norm
from .names import names_of
from .network import ADAPTER, AdapterNetwork
from .ranks import ranks_for
from .rates import Rates


def attach(parts: Parts, options: AdapterOptions, targets: Mapping[str, list[str]], seed: int) -> AdapterNetwork:
    """Puts a new adapter on the model, or the one of options.network_weights.

    targets: names of the layers that get one by default, by module, as family.adapter_targets gives them (with convolutions when
    conv_dim or conv_block_dims are set). Without a file the adapter changes nothing at the start, and its values follow from seed and
    layer names alone; torch's global random state stays as it was. Raises OptionError with every problem.
    """
    names = names_of(parts)
    given = None
    if options.network_weights is not None:
        # Files of other trainers also have layers that nothing reads; without gradient they would only stop several processes.
        given = {name: adapter for name, adapter in read(Path(options.network_weights), parts).items() if name not in names.idle}
        _check_kind(given, options)
    if given is not None and options.dim_from_weights:
        plans = plan_of_file(given, layers_of(parts))
        _check_switches(plans, options)
        if problems := ranks_for(options, names).problems():
            raise OptionError(problems)
    else:
        plans = plan_layers(parts, options, targets, names)
    inject(parts, options.network_type, plans, options, ADAPTER)
    if given is not None and options.dim_from_weights:
        take_shapes(parts, given, ADAPTER)
    if options.shares_downs:
        share_downs(_sharing(plans, given if options.dim_from_weights else None, names), names, parts, options.network_type, ADAPTER)
    network = AdapterNetwork(parts, options.network_type, plans, names)
    initialise(network, seed)
    network.limit_norms(options.scale_weight_norms)
    if given is not None:
        try:
            network.set_adapters(given)
        except OptionError:
            network.detach()
            raise
    _freeze(network, options)
    if not network.parameters():
        network.detach()
        raise OptionError("every part of the network has learning rate 0, so nothing would be trained; give one of them a value")
    return network


def _sharing(plans: list[LayerPlan], given: Mapping[str, AdapterLayer] | None, names: Names) -> list[LayerPlan]:
    """The layers that may share a down matrix: all, or those that share one in the file that decides."""
    if given is None:
        return plans
    kept = []
    for plan in plans:
        target = names.fused(plan.name)
        members = [given[layer] for layer in target.layers if layer in given] if target else []
        downs = SHARED.get(given[plan.name].kind, ())
        if all(torch.equal(member.tensors[down], members[0].tensors[down]) for member in members for down in downs):
            kept.append(plan)
    return kept


def initialise(network: AdapterNetwork, seed: int) -> None:
    """Draws every tensor from a generator of its own, seeded by `seed` and the tensor's name: nothing else moves it.

    lora: kaiming uniform down, zero up. loha, lokr: LyCORIS's distributions, for which its users' learning rates are known. oft: zero.
    """
    with torch.no_grad():
        for key, tensor in network.named_parameters().items():
            if tensor.is_meta:
                continue
            name, rest = split_rest(key)
            if rest == "lora_magnitude_vector.weight":
                base = network.base_layer(name)
                tensor.copy_(output_norm(plain_weight(base).float()).reshape(tensor.shape))
                continue
            rng = rng_for(seed, 0, f"network/{key}")
            values = torch.empty(tensor.shape, dtype=torch.float32)
            if rest in _NORMAL:
                values.normal_(std=_NORMAL[rest], generator=rng)
            elif rest in _ZERO or (rest == "lokr_w2_b" and f"{name}.lokr_w2_a" in network.named_parameters()):
                values.zero_()
            else:
                nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=rng)
            tensor.copy_(values)


_ZERO = ("lora_B.weight", "hada_w2_a", "lokr_w2", "oft_R.weight")
_NORMAL = {"hada_w1_a": 0.1, "hada_w1_b": 1.0, "hada_w2_b": 1.0}


def _check_kind(given: Mapping[str, AdapterLayer], options: AdapterOptions) -> None:
    kinds = sorted({adapter.kind for adapter in given.values()})
    if kinds != [options.network_type]:
        raise OptionError(
            f"network_weights holds {' and '.join(kinds)}, but network_type is {options.network_type}; "
            + (f"set network_type = {kinds[0]}" if len(kinds) == 1 else "a file of several kinds can be merged, but not trained on")
        )


def _check_switches(plans: list[LayerPlan], options: AdapterOptions) -> None:
    """A part of the file that would not be attached would silently be missing from the result."""
    problems = []
    for what, switch, rate, on, held in (
        (options.backbone, "train_unet", "unet_lr", options.train_unet, any(plan.module == "backbone" for plan in plans)),
        (
            "the text encoders",
            "train_text_encoder",
            "text_encoder_lr",
            options.train_text_encoder,
            any(plan.module != "backbone" for plan in plans),
        ),
    ):
        if held and not on and switch not in type(options).model_fields:
            problems.append(
                Problem(
                    "network_weights",
                    f"network_weights holds layers of {what}, which are not trained here. Name the file in base_weights, which merges it "
                    "whole, and train a new adapter on that",
                )
            )
        elif held and not on:
            problems.append(
                Problem(
                    switch, f"network_weights holds layers of {what}, but {switch} is off; turn it on ({rate} = 0 keeps them as they are)"
                )
            )
        if on and not held:
            problems.append(
                Problem(switch, f"network_weights holds no layer of {what}, but {switch} and dim_from_weights are on; turn one of them off")
            )
    refuse(problems)


def _freeze(network: AdapterNetwork, options: AdapterOptions) -> None:
    """Parts with learning rate 0 stay at the values of the file they came from."""
    rates = Rates(options, network.names, learning_rate=1.0)
    for key, tensor in network.named_parameters().items():
        tensor.requires_grad_(network.learns(key, rates))
