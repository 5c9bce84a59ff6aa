"""Names of the layers of Qwen-Image, for any number of blocks.

The published files have diffusers' own paths, so all trainers name the same layers and none of them stands for several. The text encoder
never carries an adapter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from sd_scripts.families.common import reader_rules as rules
from sd_scripts.families.common.plain_names import BlockNames, ranks_of_parts
from sd_scripts.library.adapters.architectures import Architecture
from sd_scripts.library.loading.common import Config

from . import original
from .facts import TRANSFORMER
from .loading import SPEC, VERSIONS

Part = Literal["image_attention", "text_attention", "mlp", "modulation"]

_PARTS: dict[str, Part] = {
    **dict.fromkeys(("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"), "image_attention"),
    **dict.fromkeys(("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"), "text_attention"),
    **dict.fromkeys(("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"), "mlp"),
    **dict.fromkeys(("img_mod.1", "txt_mod.1"), "modulation"),
}
# The parts of each choice of lora_targets; the last holds those of all others.
_CHOICES: dict[str, tuple[Part, ...]] = {
    "image_attention": ("image_attention",),
    "attention": ("image_attention", "text_attention"),
    "all": ("image_attention", "text_attention", "mlp"),
    "all_with_modulation": ("image_attention", "text_attention", "mlp", "modulation"),
}
_IDLE = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")


class QwenImageNames(BlockNames):
    """The maps of one Qwen-Image model."""

    def __init__(self, architecture: Architecture, config: Config, layers: Iterable[str]) -> None:
        super().__init__(architecture, config, layers)
        last = f"backbone.transformer_blocks.{self.num_blocks - 1}"
        # Of the last block only the image's side is read: its text queries and everything after its text attention go nowhere.
        self.idle = frozenset(f"{last}.{path}" for path in _IDLE) & frozenset(self.layers)


def part_of(name: str) -> Part | None:
    """Which part of its block `backbone.<layer>` belongs to; None outside of all blocks."""
    match = BlockNames.blocks.fullmatch(name)
    return None if match is None else _PARTS.get(match[2])


ARCHITECTURES = (
    Architecture(
        name="qwen_edit",
        label="Qwen-Image",
        spec=SPEC,
        is_backbone=lambda config: True,
        config_of=lambda header, shapes: original.config_of(shapes, header.has(original.CONTROLS_AT_ZERO)),
        files=(TRANSFORMER,),
        encoders=(),
        version=VERSIONS["image"],
        # Attention has the names and the width of that in FLUX's double blocks.
        told_by=("qwen",),
        prefixes=rules.TRANSFORMER_PREFIXES,
        layer_names=QwenImageNames,
        ranks=ranks_of_parts(part_of, _CHOICES),
        has_one_alpha=False,
        comfyui_endings="kohya",
        readers={
            "ComfyUI": rules.TRANSFORMER_COMFYUI,
            "musubi-tuner": rules.TRANSFORMER_MUSUBI,
            "diffusers": rules.TRANSFORMER_DIFFUSERS,
        },
    ),
)
