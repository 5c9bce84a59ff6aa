"""The layer names of a model: from its loaded networks, or from its family's published configuration alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, UNet2DConditionModel, ZImageTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from sd_scripts.families.common.unet_names import UNetNames
from sd_scripts.families.flux.names import FluxNames
from sd_scripts.families.qwen_edit.names import QwenImageNames
from sd_scripts.families.zimage.names import ZImageNames
from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.outside import json_of

from .layer_names import LABELS, Family, LayerNames, Names, Target, adaptable_layers, layers_of

__all__ = ["Family", "Names", "Target", "names_for", "names_of"]


def names_of(parts: Parts) -> LayerNames:
    """The names of a loaded model. Raises ValueError for a backbone whose names nobody has written down."""
    layers = layers_of(parts)
    if isinstance(parts.backbone, FluxTransformer2DModel):
        return _names("flux", dict(parts.backbone.config), layers)
    if isinstance(parts.backbone, QwenImageTransformer2DModel):
        return QwenImageNames(layers)
    if isinstance(parts.backbone, ZImageTransformer2DModel):
        return ZImageNames(layers)
    if isinstance(parts.backbone, UNet2DConditionModel):
        config = dict(parts.backbone.config)
        return _names(_unet_family(config), config, layers)
    raise ValueError(f"no adapter names are known for a {type(parts.backbone).__name__}")


def names_for(family: Family, folder: Path | None = None) -> LayerNames:
    """The names of a model that is not loaded; takes under a second, and no memory for weights.

    folder: a diffusers folder whose configurations describe the networks; None takes those of the published model.
    """
    return _published(family) if folder is None else _described(family, folder)


@lru_cache(maxsize=len(LABELS))
def _published(family: Family) -> LayerNames:
    return _described(family, _FAMILIES / _FOLDERS.get(family, f"{family}/configs"))


_FAMILIES = Path(__file__).parents[2] / "families"
_FOLDERS: dict[Family, str] = {"flux": "flux/configs/dev", "sd1": "sd/configs/sd1", "sd2": "sd/configs/sd2"}
"""Folders of published configurations that are not named as their family."""
_ALONE: dict[Family, tuple[type[nn.Module], type[LayerNames]]] = {
    "qwen_edit": (QwenImageTransformer2DModel, QwenImageNames),
    "zimage": (ZImageTransformer2DModel, ZImageNames),
}
"""Transformers whose text encoders never carry an adapter, and their names."""


def _described(family: Family, folder: Path) -> LayerNames:
    """Builds the networks without values, for the names of their layers."""
    if family in _ALONE:
        transformer, names = _ALONE[family]
        with torch.device("meta"):
            made = transformer.from_config(_config(folder, "transformer"))
        return names(f"backbone.{layer}" for layer in adaptable_layers(made))
    backbone = _config(folder, "transformer" if family == "flux" else "unet")
    encoders = {"te1": _config(folder, "text_encoder")}
    if family in ("sdxl", "flux"):
        encoders["te2" if family == "sdxl" else "te3"] = _config(folder, "text_encoder_2")
    with torch.device("meta"):
        model = FluxTransformer2DModel if family == "flux" else UNet2DConditionModel
        modules: dict[str, nn.Module] = {"backbone": model.from_config(backbone)}
        for module, config in encoders.items():
            modules[module] = _encoder(config)
    layers = [f"{module}.{layer}" for module, network in modules.items() for layer in adaptable_layers(network)]
    return _names(family, dict(modules["backbone"].config), layers)


def _encoder(config: dict[str, Any]) -> nn.Module:
    kind = config["architectures"][0]
    if kind == "T5EncoderModel":
        return T5EncoderModel(T5Config.from_dict(config))
    classes = {"CLIPTextModel": CLIPTextModel, "CLIPTextModelWithProjection": CLIPTextModelWithProjection}
    return classes[kind](CLIPTextConfig.from_dict(config))


def _config(folder: Path, part: str) -> dict[str, Any]:
    return json_of((folder / part / "config.json").read_text(encoding="utf-8"))


def _names(family: Family, backbone_config: Mapping[str, Any], layers: Iterable[str]) -> LayerNames:
    return FluxNames(backbone_config, layers) if family == "flux" else UNetNames(family, backbone_config, layers)


def _unet_family(config: Mapping[str, Any]) -> Family:
    """SDXL's UNet takes sizes as well as times; SD 2.x's has linear projections where SD 1.x's has convolutions."""
    if config.get("addition_embed_type") == "text_time":
        return "sdxl"
    return "sd2" if config.get("use_linear_projection") else "sd1"
