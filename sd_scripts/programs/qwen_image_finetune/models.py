"""qwen-image-finetune's names of models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ..table import NamedModel

PROGRAM = "qwen-image-finetune"
DEFAULT = "qwenimageedit"
"""The trainer of a file that names none."""
IMAGE_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
"""Layers with an adapter where a file names none."""


def ends(names: Iterable[str]) -> list[str]:
    """Expressions for layers whose paths end in these names."""
    return [rf"(^|\.){re.escape(name)}$" for name in sorted(names)]


_BY_PRESET = {"lora_targets": "image_attention"}
_BY_NAMES = {"target_modules": ends(IMAGE_ATTENTION)}

MODELS: Mapping[str, NamedModel] = {
    "qwenimageedit": NamedModel("qwen_edit", "Qwen-Image-Edit", {"model_version": "edit"}, layers=_BY_PRESET),
    "qwenimageeditplus": NamedModel("qwen_edit", "Qwen-Image-Edit-2509 or 2511", {"model_version": "edit-2509"}, layers=_BY_PRESET),
    "fluxkontext": NamedModel("kontext", "FLUX.1 Kontext", layers=_BY_NAMES),
    "flux2klein": NamedModel("flux2", "FLUX.2 Klein", layers=_BY_NAMES),
    "dreamomni2": NamedModel("", "DreamOmni2"),
}
"""By its names of trainers, in small letters."""
BASES: Mapping[str, str] = {"qwen_edit": "Qwen/Qwen-Image-Edit"}
"""The base model where a file names none."""
PARTS: Mapping[str, Mapping[str, str]] = {
    "kontext": {"vae": "ae", "text_encoder": "clip_l", "text_encoder_2": "t5xxl"},
    "flux2": {"vae": "vae", "text_encoder": "text_encoder"},
}
"""The options of the parts that it may load from elsewhere, by its names of them."""


def name_of(given: Mapping[str, object]) -> str:
    """The trainer that a configuration is for, as `MODELS` has it."""
    said = str(given.get("trainer") or DEFAULT).lower().replace("_", "")
    return said if said in MODELS else said.removesuffix("trainer")
