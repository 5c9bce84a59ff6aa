"""Names of the layers of Krea 2: Krea's own in ComfyUI's and kohya's files, diffusers' in its own."""

from __future__ import annotations

import re
from typing import ClassVar

from sd_scripts.families.common import reader_rules as rules
from sd_scripts.families.common.plain_names import BlockNames, ranks_of_plain
from sd_scripts.library.adapters.architectures import Architecture
from sd_scripts.library.adapters.readers import LORA, SUMS, Rule

from .facts import TRANSFORMER
from .loading import LOADER, SPEC, transformer_config


class Krea2Names(BlockNames):
    """The maps of one model; what fuses the text is not counted among its blocks."""

    blocks: ClassVar[re.Pattern[str]] = re.compile(r"backbone\.transformer_blocks\.(\d+)\.(.+)")


ARCHITECTURES = (
    Architecture(
        name="krea2",
        label="Krea 2",
        spec=SPEC,
        is_backbone=lambda config: True,
        config_of=lambda header, shapes: transformer_config(shapes),
        files=(TRANSFORMER,),
        encoders=(),
        version=LOADER.version,
        told_by=("krea2", "krea_2", "krea-2", "krea 2"),
        prefixes=rules.TRANSFORMER_PREFIXES,
        layer_names=Krea2Names,
        ranks=ranks_of_plain,
        has_one_alpha=False,
        # diffusers stops at an alpha under these names.
        comfyui_endings="peft without alpha",
        readers={
            "ComfyUI": rules.TRANSFORMER_COMFYUI,
            "musubi-tuner": (Rule("backbone", ("lora_unet_",), "published", SUMS),),
            "diffusers": (rules.TRANSFORMER_DIFFUSERS[0], Rule("backbone", ("diffusion_model.",), "published", LORA)),
        },
    ),
)
