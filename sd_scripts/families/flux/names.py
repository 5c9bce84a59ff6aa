"""Names of the layers of FLUX.1, for any number of blocks.

kohya, ComfyUI and the published files name the transformer's layers after the original layout, in which query, key and value of a double
block are one matrix (`double_blocks.0.img_attn.qkv`), and with the MLP's first layer also those of a single block
(`single_blocks.0.linear1`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from sd_scripts.library.adapters.layer_names import LayerNames, Prefixes, Target

from . import original as original_flux

_PREFIXES = Prefixes(
    # OneTrainer counts T5 as the second encoder, kohya as the third; their paths have nothing in common with CLIP's.
    kohya={
        "backbone": ("lora_unet_", "lora_transformer_", "lycoris_"),
        "te1": ("lora_te1_", "lora_te_"),
        "te3": ("lora_te3_", "lora_te2_"),
    },
    diffusers={"backbone": ("transformer.",), "te1": ("text_encoder.",), "te3": ("text_encoder_2.",)},
    comfyui={
        "backbone": ("diffusion_model.", "model.diffusion_model."),
        "te1": ("text_encoders.clip_l.transformer.",),
        "te3": ("text_encoders.t5xxl.transformer.",),
    },
)
_BLOCK = re.compile(r"(single_)?transformer_blocks\.(\d+)\.(.+)")

# x-flux (src/flux/modules/layers.py): 1 is the picture's side, 2 the text's; a single block adapts only query, key and value of linear1.
_XLABS = {"qkv_lora1": "img_attn.qkv", "proj_lora1": "img_attn.proj", "qkv_lora2": "txt_attn.qkv", "proj_lora2": "txt_attn.proj"}
_XLABS_SINGLE = {"qkv_lora": "linear1_qkv", "proj_lora": "linear2"}

_DOUBLE_PARTS: tuple[tuple[str, str], ...] = (
    ("norm1.", "img_mod"),
    ("norm1_context.", "txt_mod"),
    ("attn.add_", "txt_attn"),
    ("attn.to_add_out", "txt_attn"),
    ("attn.", "img_attn"),
    ("ff.", "img_mlp"),
    ("ff_context.", "txt_mlp"),
)
INPUTS = ("img", "time", "vector", "guidance", "txt")
"""The layers before the blocks, in the order of in_dims."""
_INPUT_LAYERS = {
    "x_embedder": "img",
    "time_text_embed.timestep_embedder": "time",
    "time_text_embed.text_embedder": "vector",
    "time_text_embed.guidance_embedder": "guidance",
    "context_embedder": "txt",
}


class FluxNames(LayerNames):
    """The maps of one FLUX model."""

    def __init__(self, transformer_config: Mapping[str, Any], layers: Iterable[str]) -> None:
        """layers are names `<module>.<layer>` of everything that may carry an adapter."""
        super().__init__("flux", original_flux.transformer(transformer_config), layers, _PREFIXES)
        backbone = self._paths["backbone"]
        for path, target in list(backbone.items()):
            if path.endswith("_linear1") and len(target.layers) == 4:
                # As other trainers write an adapter of the attention alone.
                backbone[f"{path}_qkv"] = Target(target.layers[:3], target.shares[:3])
        self._num_double, self._num_single = int(transformer_config["num_layers"]), int(transformer_config["num_single_layers"])

    def find(self, stem: str) -> Target | None:
        """See Names. Also takes x-flux's names, `double_blocks.0.processor.qkv_lora1`."""
        block, processor, which = stem.rpartition(".processor.")
        if processor:
            path = (_XLABS if "double_blocks" in block else _XLABS_SINGLE).get(which)
            return None if path is None else super().find(f"{block}.{path}")
        return super().find(stem)

    @property
    def num_blocks(self) -> int:
        """Double and single blocks."""
        return self._num_double + self._num_single

    @property
    def num_double(self) -> int:
        return self._num_double

    def block(self, name: str) -> int | None:
        """Number of the block a layer stands in, double blocks first; None outside of all blocks."""
        module, _, layer = name.partition(".")
        match = _BLOCK.fullmatch(layer) if module == "backbone" else None
        if match is None:
            return None
        return int(match[2]) + (self._num_double if match[1] else 0)


def part_of(layer: str) -> str | None:
    """Which of kohya's groups of ranks a transformer layer belongs to; None for the last layers, which have no rank of their own."""
    match = _BLOCK.fullmatch(layer)
    if match is None:
        return next((part for start, part in _INPUT_LAYERS.items() if layer == start or layer.startswith(f"{start}.")), None)
    if match[1]:
        return "single_mod" if match[3].startswith("norm.") else "single"
    return next(part for start, part in _DOUBLE_PARTS if match[3].startswith(start))
