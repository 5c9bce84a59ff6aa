"""The original layout of transformers with double and single blocks, as FLUX.1 was published: where each tensor of the diffusers layout
stands, both ways.

Driven by the network's configuration, so it holds for any depth and width; knows names and shapes, not files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sd_scripts.library.loading.layouts import Stored

from .transformer_shapes import count, rotary_axes

# D: width of the transformer. Rows of packed matrices: q, k, v of D rows each; in single blocks 4 D rows of the MLP follow.

MLP_RATIO = 4
"""The MLPs are this many times wider than the transformer; no configuration says otherwise."""

ENDS = {"x_embedder": "img_in", "context_embedder": "txt_in", "proj_out": "final_layer.linear"}
"""Layers before and after the blocks."""
_DOUBLE = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
_DOUBLE_NORMS = {
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
}
_DOUBLE_PACKED = {
    "attn.to_q": ("img_attn.qkv", 0),
    "attn.to_k": ("img_attn.qkv", 1),
    "attn.to_v": ("img_attn.qkv", 2),
    "attn.add_q_proj": ("txt_attn.qkv", 0),
    "attn.add_k_proj": ("txt_attn.qkv", 1),
    "attn.add_v_proj": ("txt_attn.qkv", 2),
}
_SINGLE = {"norm.linear": "modulation.lin", "proj_out": "linear2"}
_SINGLE_NORMS = {"attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm"}
_SINGLE_PACKED = {"attn.to_q": ("linear1", 0), "attn.to_k": ("linear1", 1), "attn.to_v": ("linear1", 2), "proj_mlp": ("linear1", 3)}


NAMES = {
    "img_in.weight": "x_embedder.weight",
    "txt_in.weight": "context_embedder.weight",
    "final_layer.linear.weight": "proj_out.weight",
    "double_blocks.0.img_attn.norm.query_norm.scale": "transformer_blocks.0.attn.norm_q.weight",
}
"""Tensors that tell the configuration, in either layout."""


def width_of(config: Mapping[str, Any]) -> int:
    """D of a transformer with this configuration."""
    return int(config["num_attention_heads"]) * int(config["attention_head_dim"])


def places(
    config: Mapping[str, Any], ends: Callable[[str, str], Stored | None], inside: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], Stored]:
    """Where a transformer's tensors (diffusers names) stand in a published file; see layouts.Layout.

    ends: the place of a layer outside of the blocks, by its path and the kind of tensor (weight, bias); None where it has none. inside:
    places of layers within blocks that have other names than FLUX.1's.
    """
    width = width_of(config)

    def stored(key: str) -> Stored:
        layer, _, kind = key.rpartition(".")
        if layer in ENDS:
            return Stored(f"{ENDS[layer]}.{kind}")
        match = re.fullmatch(r"(single_)?transformer_blocks\.(\d+)\.(.+)", layer)
        if match is None:
            place = ends(layer, kind)
        elif match[3] in inside:
            place = Stored(f"{inside[match[3]]}.{kind}")
        else:
            place = _in_block(match[3], kind, bool(match[1]), width)
        if place is None:
            raise KeyError(f"{key} has no place in the original layout")
        if match is None:
            return place
        blocks = "single_blocks" if match[1] else "double_blocks"
        return replace(place, name=f"{blocks}.{match[2]}.{place.name}")

    return stored


def _in_block(layer: str, kind: str, single: bool, width: int) -> Stored | None:
    """Where a layer's tensor stands within its block."""
    plain, norms, packed = (_SINGLE, _SINGLE_NORMS, _SINGLE_PACKED) if single else (_DOUBLE, _DOUBLE_NORMS, _DOUBLE_PACKED)
    if layer in plain:
        return Stored(f"{plain[layer]}.{kind}")
    if layer in norms:
        return Stored(f"{norms[layer]}.scale")
    if layer not in packed:
        return None
    name, number = packed[layer]
    rows = MLP_RATIO * width if number == 3 else width
    total = (3 + MLP_RATIO) * width if single else 3 * width
    return Stored(f"{name}.{kind}", "rows", (number * width, number * width + rows, total))


def config_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What the shapes of a transformer's tensors (published or diffusers layout) tell of its configuration: depth and widths.

    Raises KeyError for a file that lacks a needed tensor, IndexError for one in another number of dimensions.
    """
    found = {ours: shape_of(shapes, ours, NAMES) for ours in NAMES}
    width, channels = found["img_in.weight"][0], found["img_in.weight"][1]
    head = found["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    return {
        "patch_size": 1,
        "in_channels": channels,
        "out_channels": found["final_layer.linear.weight"][0],
        "num_layers": count(shapes, r"(?:double_blocks|transformer_blocks)\.(\d+)\."),
        "num_single_layers": count(shapes, r"(?:single_blocks|single_transformer_blocks)\.(\d+)\."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": found["txt_in.weight"][1],
        "axes_dims_rope": rotary_axes(head),
    }


def shape_of(shapes: Mapping[str, tuple[int, ...]], name: str, names: Mapping[str, str]) -> tuple[int, ...]:
    """Shape of a tensor by its published name, from a file in either layout or as ComfyUI saves it. Raises KeyError."""
    found = shapes.get(name) or shapes.get(names[name]) or shapes.get(name.replace("_norm.scale", "_norm.weight"))
    if found is None:
        raise KeyError(name)
    return found
