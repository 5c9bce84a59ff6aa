"""Names of the layers of Qwen-Image-2.1: diffusers' own paths; those of ComfyUI's fused MLPs are read too."""

from __future__ import annotations

import re
from typing import ClassVar

from sd_scripts.families.common import reader_rules as rules
from sd_scripts.families.common.plain_names import PlainNames, ranks_of_plain
from sd_scripts.library.adapters.architectures import Architecture
from sd_scripts.library.adapters.readers import LORA, Rule

from .facts import TRANSFORMER
from .loading import LOADER, SPEC, transformer_config


class QwenImage21Names(PlainNames):
    """The maps of one model."""

    blocks: ClassVar[re.Pattern[str]] = re.compile(r"backbone\.transformer_blocks\.(\d+)\.(.+)")


ARCHITECTURES = (
    Architecture(
        name="qwen_image21",
        label="Qwen-Image-2.1",
        spec=SPEC,
        is_backbone=lambda config: True,
        config_of=lambda header, shapes: transformer_config(shapes),
        files=(TRANSFORMER,),
        encoders=(),
        version=LOADER.version,
        told_by=("qwen_image_21", "qwen-image-2.1"),
        prefixes=rules.TRANSFORMER_PREFIXES,
        layer_names=QwenImage21Names,
        ranks=ranks_of_plain,
        has_one_alpha=False,
        comfyui_endings="peft",
        readers={
            # ComfyUI holds the two as one matrix, which it divides for diffusers' names alone.
            "ComfyUI": (
                Rule("backbone", ("lora_unet_", "diffusion_model."), without=r".*\.img_mlp\.(gate_layer|proj)"),
                Rule("backbone", ("transformer.", "lycoris_")),
            ),
            # Of kohya's names it takes some apart wrongly.
            "diffusers": (rules.TRANSFORMER_DIFFUSERS[0], Rule("backbone", ("diffusion_model.",), kinds=LORA)),
        },
    ),
)
