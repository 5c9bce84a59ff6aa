"""Names of the layers of Krea 2: Krea's own in ComfyUI's and kohya's files, diffusers' in its own."""

from __future__ import annotations

from sd_scripts.families.common import reader_rules as rules
from sd_scripts.families.common.plain_names import BlockNames, ranks_of_plain

from .loading import LOADER

ARCHITECTURES = (
    rules.transformer_architecture(
        LOADER,
        told_by=("krea2", "krea_2", "krea-2", "krea 2"),
        # What fuses the text is not counted among the blocks.
        layer_names=BlockNames,
        ranks=ranks_of_plain,
        readers={
            "ComfyUI": rules.TRANSFORMER_COMFYUI,
            "musubi-tuner": rules.PUBLISHED_MUSUBI,
            "diffusers": rules.PUBLISHED_DIFFUSERS,
        },
    ),
)
