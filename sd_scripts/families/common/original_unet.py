"""The original single-file layout of UNet, VAE and CLIP: how each tensor of the diffusers layout is named and stored there, both ways.

Driven by the networks' configurations, so it holds for any depth; knows names and shapes, not files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sd_scripts.library.loading.layouts import Stored


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


def unet(config: Mapping[str, Any]) -> Callable[[str], Stored]:
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


def vae(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """The decoder's levels are numbered from the image inwards, against their order; attention is stored as 1x1 convolutions."""
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


def clip(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """CLIP-L keeps transformers' own names; transformers 5 has dropped their `text_model.` level, which the prefix carries."""
    return lambda key: Stored(key.removeprefix("text_model."))


def clip_in_folders(key: str) -> str:
    """transformers before 5.6 and other programs want the level `text_model.` of CLIP in folders, and newer ones read it too."""
    return f"text_model.{key.removeprefix('text_model.')}"


_OPEN_CLIP_ENDS = {
    "embeddings.token_embedding.weight": Stored("token_embedding.weight"),
    "embeddings.position_embedding.weight": Stored("positional_embedding"),
    "final_layer_norm.weight": Stored("ln_final.weight"),
    "final_layer_norm.bias": Stored("ln_final.bias"),
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


def open_clip(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """OpenCLIP's names: q, k and v in one tensor, the projection transposed."""
    width = config["hidden_size"]

    def stored(key: str) -> Stored:
        # transformers keeps the level `text_model.` in the encoder with a projection and dropped it in the one without.
        key = key.removeprefix("text_model.")
        if key in _OPEN_CLIP_ENDS:
            return _OPEN_CLIP_ENDS[key]
        if not key.startswith("encoder.layers."):
            raise KeyError(f"{key} has no place in the original layout")
        number, _, rest = key.removeprefix("encoder.layers.").partition(".")
        layer, _, kind = rest.rpartition(".")
        block = f"transformer.resblocks.{number}"
        if layer in _PACKED:
            third = _PACKED.index(layer)
            return Stored(f"{block}.attn.in_proj_{kind}", "rows", (third * width, (third + 1) * width, 3 * width))
        return Stored(f"{block}.{_renamed(rest, _OPEN_CLIP_LAYER)}")

    return stored
