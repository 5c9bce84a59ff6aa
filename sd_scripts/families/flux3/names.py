"""Names of the layers of FLUX.3: the published ones in ComfyUI's and kohya's files, diffusers' in its own."""

from __future__ import annotations

import re
from typing import ClassVar

from sd_scripts.families.common import reader_rules as rules
from sd_scripts.families.common.plain_names import BlockNames, ranks_of_plain
from sd_scripts.library.adapters.readers import LORA, Rule

from .loading import LOADER


class Flux3Names(BlockNames):
    """The maps of one model; blocks of text, image and reference images with one number count as one, joint blocks follow them."""

    blocks: ClassVar[re.Pattern[str]] = re.compile(r"backbone\.(?:txt_mode_blocks|mode_blocks\.\w+|single_transformer_blocks)\.(\d+)\.(.+)")

    def block(self, name: str) -> int | None:
        """See BlockNames."""
        number = super().block(name)
        joint = number is not None and ".single_transformer_blocks." in name
        return self._num_early + number if joint and number is not None else number

    @property
    def _num_early(self) -> int:
        numbers = (BlockNames.block(self, name) for name in self.layers if "mode_blocks." in name)
        return max((number for number in numbers if number is not None), default=-1) + 1


_OUTER = r"(?!(txt_mode_blocks|mode_blocks|single_transformer_blocks)\.).*"

ARCHITECTURES = (
    rules.transformer_architecture(
        LOADER,
        label="FLUX.3",
        # Joint blocks alone have names that other models have.
        told_by=("flux_3", "flux-3", "flux3", "flux.3"),
        layer_names=Flux3Names,
        ranks=ranks_of_plain,
        # No other program's reader was found. What stands around the blocks, diffusers' reader leaves out under the published names.
        readers={
            "diffusers": (
                rules.TRANSFORMER_DIFFUSERS[0],
                Rule("backbone", ("diffusion_model.",), "published", LORA, _OUTER),
            )
        },
    ),
)
