"""Names of SDXL layers in three worlds: diffusers modules, kohya's files (original layout) and diffusers' LoRA files.

Inside this package a layer is called `<module>.<layer>`: module is backbone, te1 or te2, layer is the path of the module in the
diffusers or transformers class, for example `backbone.mid_block.attentions.0.proj_in`. kohya's files name UNet layers after the
original single-file layout (`lora_unet_middle_block_1_proj_in`), so the map follows from the UNet's configuration alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from diffusers import UNet2DConditionModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from sd_scripts.library.protocols import Parts, StateDict

KOHYA_PREFIXES = {"backbone": "lora_unet", "te1": "lora_te1", "te2": "lora_te2"}
DIFFUSERS_PREFIXES = {"backbone": "unet", "te1": "text_encoder", "te2": "text_encoder_2"}

_OUTSIDE = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_PATH = re.compile(r"(down_blocks|up_blocks)\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)")
_MIDDLE = re.compile(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)")


class Names(Protocol):
    """What export and reading need to know about a family's layer names."""

    def to_kohya(self, name: str) -> str: ...
    def from_kohya(self, name: str) -> str | None: ...
    def to_diffusers(self, name: str) -> str: ...
    def from_diffusers(self, name: str) -> str | None: ...
    def block(self, name: str) -> int | None: ...
    @property
    def num_blocks(self) -> int: ...


@dataclass(frozen=True)
class UNetShape:
    """The part of a UNet's configuration that its original names depend on. The defaults are SDXL's."""

    down_layers: tuple[int, ...] = (2, 2, 2)
    """ResNets of each down block; an up block has one more."""
    up_attention: tuple[bool, ...] = (True, True, False)
    """Whether each up block, in running order, has attention: its upsampler then stands third in the original block, else second."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> UNetShape:
        """The shape of a diffusers UNet2DConditionModel configuration."""
        blocks = len(config["down_block_types"])
        layers = config["layers_per_block"]
        return cls(
            down_layers=(layers,) * blocks if isinstance(layers, int) else tuple(layers),
            up_attention=tuple("CrossAttn" in kind for kind in config["up_block_types"]),
        )

    @property
    def num_input_blocks(self) -> int:
        # conv_in, the ResNets, and a downsampler after every block but the last.
        return 1 + sum(self.down_layers) + len(self.down_layers) - 1

    @property
    def num_output_blocks(self) -> int:
        return sum(self.down_layers) + len(self.down_layers)

    def first_input(self, block: int) -> int:
        """Number of the original input block that holds the first ResNet of a down block."""
        return 1 + sum(layers + 1 for layers in self.down_layers[:block])

    def first_output(self, block: int) -> int:
        """Number of the original output block that holds the first ResNet of an up block."""
        return sum(layers + 1 for layers in reversed(self.down_layers[len(self.down_layers) - block :]))


SDXL = UNetShape()
"""SDXL's own UNet."""


def original_unet_name(layer: str, shape: UNetShape) -> str:
    """`down_blocks.1.attentions.0.proj_in` -> `input_blocks.4.1.proj_in`. Raises KeyError for a path that SDXL's UNet does not have."""
    if layer in _OUTSIDE:
        return _OUTSIDE[layer]
    middle = _MIDDLE.fullmatch(layer)
    if middle:
        part, index, rest = middle[1], int(middle[2]), middle[3]
        place = 2 * index if part == "resnets" else 2 * index + 1
        return f"middle_block.{place}.{_RESNET[rest] if part == 'resnets' else rest}"
    path = _PATH.fullmatch(layer)
    if path is None:
        raise KeyError(layer)
    side, block, part, index, rest = path[1], int(path[2]), path[3], int(path[4]), path[5]
    down = side == "down_blocks"
    first = shape.first_input(block) if down else shape.first_output(block)
    stem = "input_blocks" if down else "output_blocks"
    if part == "resnets":
        return f"{stem}.{first + index}.0.{_RESNET[rest]}"
    if part == "attentions":
        return f"{stem}.{first + index}.1.{rest}"
    if part == "downsamplers":
        return f"{stem}.{first + shape.down_layers[block]}.0.op"
    last = first + shape.down_layers[len(shape.down_layers) - 1 - block]
    return f"{stem}.{last}.{2 if shape.up_attention[block] else 1}.{rest}"


def text_encoder_name(layer: str) -> str:
    """The path that every other tool uses: transformers 5 dropped the `text_model.` level of te1, files keep it."""
    return layer if layer.startswith(("text_model.", "text_projection")) else f"text_model.{layer}"


def kohya_name(name: str, shape: UNetShape = SDXL) -> str:
    """`backbone.down_blocks.1.attentions.0.proj_in` -> `lora_unet_input_blocks_4_1_proj_in`; te1 gets `text_model_` back."""
    module, _, layer = name.partition(".")
    original = original_unet_name(layer, shape) if module == "backbone" else text_encoder_name(layer)
    return f"{KOHYA_PREFIXES[module]}_{original.replace('.', '_')}"


def adaptable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Linear and convolution layers of a model by path, the plain ones, whether or not they carry an adapter."""
    found: dict[str, nn.Module] = {}
    carriers: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            carriers.append(f"{name}.")
            found[name] = module.get_base_layer()
        elif carriers and name.startswith(carriers[-1]):
            continue
        elif isinstance(module, nn.Linear | nn.Conv2d):
            found[name] = module
    return found


class SdxlNames:
    """The maps of one loaded SDXL model, both ways; the way back is a look-up among the layers that the model really has."""

    def __init__(self, unet_config: Mapping[str, Any], layers: Iterable[str]) -> None:
        """layers are names `<module>.<layer>` of everything that may carry an adapter."""
        self.shape = UNetShape.of(unet_config)
        self._from_kohya: dict[str, str] = {}
        self._from_diffusers: dict[str, str] = {}
        for name in layers:
            module, _, layer = name.partition(".")
            self._from_kohya[self.to_kohya(name)] = name
            # Foreign files also use kohya's prefix with diffusers' own paths, and te1 without text_model.
            self._from_kohya.setdefault(f"{KOHYA_PREFIXES[module]}_{layer.replace('.', '_')}", name)
            self._from_diffusers[self.to_diffusers(name)] = name
            self._from_diffusers[f"{DIFFUSERS_PREFIXES[module]}.{layer}"] = name

    @classmethod
    def of(cls, parts: Parts) -> SdxlNames:
        modules = {"backbone": parts.backbone, **parts.text_encoders}
        layers = [f"{module}.{layer}" for module, model in modules.items() for layer in adaptable_layers(model)]
        return cls(dict(parts.backbone.config), layers)

    def to_kohya(self, name: str) -> str:
        return kohya_name(name, self.shape)

    def from_kohya(self, name: str) -> str | None:
        """The layer of a kohya name, or None for one that this model does not have."""
        return self._from_kohya.get(name)

    def to_diffusers(self, name: str) -> str:
        module, _, layer = name.partition(".")
        return f"{DIFFUSERS_PREFIXES[module]}.{layer if module == 'backbone' else text_encoder_name(layer)}"

    def from_diffusers(self, name: str) -> str | None:
        return self._from_diffusers.get(name)

    @property
    def num_blocks(self) -> int:
        """Input blocks, the middle, output blocks of the original layout: 9 + 1 + 9 = 19 for SDXL."""
        return self.shape.num_input_blocks + 1 + self.shape.num_output_blocks

    def block(self, name: str) -> int | None:
        """Number of the UNet block a layer stands in, in the order of kohya's block lists; None outside of all blocks."""
        module, _, layer = name.partition(".")
        if module != "backbone":
            return None
        head, number, *_ = original_unet_name(layer, self.shape).split(".")
        inputs = self.shape.num_input_blocks
        return {"input_blocks": int(number), "middle_block": inputs, "output_blocks": inputs + 1 + int(number)}.get(head)


def names_of(parts: Parts) -> SdxlNames:
    """The names of a loaded model. Raises ValueError for a backbone whose names nobody has written down."""
    if not isinstance(parts.backbone, UNet2DConditionModel):
        raise ValueError(f"no adapter names are known for a {type(parts.backbone).__name__}")
    return SdxlNames.of(parts)


_KOHYA_REST = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight"}


def to_kohya(state: StateDict, shape: UNetShape = SDXL) -> StateDict:
    """kohya keys for adapter tensors named `<module>.<layer>.<rest>`; alphas are written by `files.export`."""
    renamed = {}
    for key, tensor in state.items():
        name, rest = split_rest(key)
        renamed[f"{kohya_name(name, shape)}.{_KOHYA_REST.get(rest, rest)}"] = tensor
    return renamed


_REST = re.compile(r"\.((?:lora|hada|lokr|oft)_[A-Za-z0-9_]+(?:\.weight)?)$")


def split_rest(key: str) -> tuple[str, str]:
    """`backbone.conv_in.lora_A.weight` -> (`backbone.conv_in`, `lora_A.weight`)."""
    match = _REST.search(key)
    if match is None:
        raise KeyError(key)
    return key[: match.start()], match[1]
