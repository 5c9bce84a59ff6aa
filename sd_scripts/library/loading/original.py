"""The original single-file layout of SDXL: how each tensor of the diffusers layout is named and stored there, both ways.

Driven by the networks' configurations, so it holds for any depth; knows names and shapes, not files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sd_scripts.library.protocols import StateDict

PREFIXES = {
    "backbone": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "te1": "conditioner.embedders.0.transformer.text_model.",
    "te2": "conditioner.embedders.1.model.",
}
"""Where each network stands in a single file."""

TOLERATED = ("position_ids", "logit_scale")
"""Tensors of published files that no network needs."""


@dataclass(frozen=True)
class Stored:
    """Name and form of a tensor in the original layout, without the prefix of its network.

    transposed: the matrix is stored the other way round; convolution: a linear layer is stored as a 1x1 convolution; third: it is one of
    q, k, v (number `third`) of a packed tensor.
    """

    name: str
    form: Literal["same", "transposed", "convolution", "third"] = "same"
    third: int = 0


def layout(part: str, keys: Iterable[str], config: Mapping[str, Any]) -> dict[str, Stored]:
    """Where each of a network's tensors (diffusers names) stands in the original layout. part is backbone, vae, te1 or te2."""
    stored = {"backbone": _unet, "vae": _vae, "te1": _clip, "te2": _open_clip}[part](config)
    return {key: stored(key) for key in keys}


def to_original(part: str, state: StateDict, config: Mapping[str, Any]) -> StateDict:
    """A network's state in the original layout, with its prefix."""
    original: StateDict = {}
    packed: dict[str, dict[int, Tensor]] = {}
    for key, where in layout(part, state, config).items():
        name, tensor = PREFIXES[part] + where.name, state[key]
        if where.form == "third":
            packed.setdefault(name, {})[where.third] = tensor
            continue
        if where.form == "transposed":
            tensor = tensor.T
        elif where.form == "convolution":
            tensor = tensor[..., None, None]
        original[name] = tensor.contiguous()
    for name, thirds in packed.items():
        original[name] = torch.cat([thirds[number] for number in range(3)])
    return original


def from_original(where: Stored, tensor: Tensor) -> Tensor:
    """A tensor of the diffusers layout from what the original layout stores in its place."""
    if where.form == "third":
        return tensor.chunk(3)[where.third]
    if where.form == "transposed":
        return tensor.T
    if where.form == "convolution" and tensor.ndim == 4:
        return tensor[..., 0, 0]
    return tensor


def shape_from_original(where: Stored, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that `from_original` gives a tensor of this stored shape."""
    if where.form == "third" and shape:
        return (shape[0] // 3, *shape[1:])
    if where.form == "transposed":
        return shape[::-1]
    if where.form == "convolution" and len(shape) == 4:
        return shape[:2]
    return shape


def _renamed(key: str, table: Mapping[str, str]) -> str:
    """The key with its longest known beginning replaced."""
    known = [start for start in table if key.startswith(start + ".")]
    if not known:
        raise KeyError(f"{key} has no place in the original layout")
    start = max(known, key=len)
    return table[start] + key[len(start) :]


def _resnets(table: dict[str, str], inner: Mapping[str, str], resnet: str, original: str) -> None:
    for name, original_name in inner.items():
        table[f"{resnet}.{name}"] = f"{original}.{original_name}"


_UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_UNET_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}


def _unet(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """Blocks are numbered through: a ResNet with its transformer counts one, a downsampler one; an upsampler belongs to the last ResNet."""
    table = dict(_UNET_ENDS)
    levels = len(config["block_out_channels"])
    layers = config["layers_per_block"]
    layers = [layers] * levels if isinstance(layers, int) else list(layers)
    number = 1
    for level in range(levels):
        for layer in range(layers[level]):
            _resnets(table, _UNET_RESNET, f"down_blocks.{level}.resnets.{layer}", f"input_blocks.{number}.0")
            table[f"down_blocks.{level}.attentions.{layer}"] = f"input_blocks.{number}.1"
            number += 1
        if level < levels - 1:
            table[f"down_blocks.{level}.downsamplers.0.conv"] = f"input_blocks.{number}.0.op"
            number += 1
    _resnets(table, _UNET_RESNET, "mid_block.resnets.0", "middle_block.0")
    table["mid_block.attentions.0"] = "middle_block.1"
    _resnets(table, _UNET_RESNET, "mid_block.resnets.1", "middle_block.2")
    number = 0
    for level, num_layers in enumerate(reversed(layers)):
        for layer in range(num_layers + 1):
            _resnets(table, _UNET_RESNET, f"up_blocks.{level}.resnets.{layer}", f"output_blocks.{number}.0")
            table[f"up_blocks.{level}.attentions.{layer}"] = f"output_blocks.{number}.1"
            number += 1
        place = 2 if "CrossAttn" in config["up_block_types"][level] else 1
        table[f"up_blocks.{level}.upsamplers.0.conv"] = f"output_blocks.{number - 1}.{place}.conv"
    return lambda key: Stored(_renamed(key, table))


_VAE_RESNET = {"norm1": "norm1", "conv1": "conv1", "norm2": "norm2", "conv2": "conv2", "conv_shortcut": "nin_shortcut"}
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def _vae(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """The decoder's levels are numbered from the picture inwards, against their order; attention is stored as 1x1 convolutions."""
    levels, layers = len(config["block_out_channels"]), config["layers_per_block"]
    table = {name: name for name in ("quant_conv", "post_quant_conv")}
    for coder in ("encoder", "decoder"):
        table |= {
            f"{coder}.conv_in": f"{coder}.conv_in",
            f"{coder}.conv_out": f"{coder}.conv_out",
            f"{coder}.conv_norm_out": f"{coder}.norm_out",
        }
        for number in (0, 1):
            _resnets(table, _VAE_RESNET, f"{coder}.mid_block.resnets.{number}", f"{coder}.mid.block_{number + 1}")
        for name, original in _VAE_ATTENTION.items():
            table[f"{coder}.mid_block.attentions.0.{name}"] = f"{coder}.mid.attn_1.{original}"
    for level in range(levels):
        back = levels - 1 - level
        for layer in range(layers + 1):
            _resnets(table, _VAE_RESNET, f"encoder.down_blocks.{level}.resnets.{layer}", f"encoder.down.{level}.block.{layer}")
            _resnets(table, _VAE_RESNET, f"decoder.up_blocks.{level}.resnets.{layer}", f"decoder.up.{back}.block.{layer}")
        table[f"encoder.down_blocks.{level}.downsamplers.0.conv"] = f"encoder.down.{level}.downsample.conv"
        table[f"decoder.up_blocks.{level}.upsamplers.0.conv"] = f"decoder.up.{back}.upsample.conv"

    def stored(key: str) -> Stored:
        matrix = ".attentions.0.to_" in key and key.endswith(".weight")
        return Stored(_renamed(key, table), "convolution" if matrix else "same")

    return stored


def _clip(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """Encoder 1 keeps transformers' own names; transformers 5 has dropped their `text_model.` level, which the prefix carries."""
    return lambda key: Stored(key.removeprefix("text_model."))


_OPEN_CLIP_ENDS = {
    "text_model.embeddings.token_embedding.weight": Stored("token_embedding.weight"),
    "text_model.embeddings.position_embedding.weight": Stored("positional_embedding"),
    "text_model.final_layer_norm.weight": Stored("ln_final.weight"),
    "text_model.final_layer_norm.bias": Stored("ln_final.bias"),
    "text_projection.weight": Stored("text_projection", "transposed"),
}
_OPEN_CLIP_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
_PACKED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _open_clip(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """Encoder 2 has OpenCLIP's names: q, k and v in one tensor, the projection transposed."""

    def stored(key: str) -> Stored:
        if key in _OPEN_CLIP_ENDS:
            return _OPEN_CLIP_ENDS[key]
        number, _, rest = key.removeprefix("text_model.encoder.layers.").partition(".")
        layer, _, kind = rest.rpartition(".")
        block = f"transformer.resblocks.{number}"
        if layer in _PACKED:
            return Stored(f"{block}.attn.in_proj_{kind}", "third", _PACKED.index(layer))
        return Stored(f"{block}.{_renamed(rest, _OPEN_CLIP_LAYER)}")

    return stored
