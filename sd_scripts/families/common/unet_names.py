"""Names of a UNet's layers, for any number of blocks."""

from __future__ import annotations

from collections.abc import Iterable

from sd_scripts.library.adapters.architectures import Architecture
from sd_scripts.library.adapters.layer_names import LayerNames
from sd_scripts.library.loading.common import Config

DIFFUSERS = {"backbone": ("unet.",), "te1": ("text_encoder.",), "te2": ("text_encoder_2.",)}
COMFYUI = ("diffusion_model.", "model.diffusion_model.")
KOHYA = ("lora_unet_", "lycoris_")


class UNetNames(LayerNames):
    """The maps of one model with a UNet, which kohya's files name after the original layout."""

    def __init__(self, architecture: Architecture, config: Config, layers: Iterable[str]) -> None:
        super().__init__(architecture, config, layers)
        numbers: dict[str, int] = {"input_blocks": 0, "middle_block": 0, "output_blocks": 0}
        for path in self._original.values():
            head, number, *_ = path.split(".")
            if head in numbers:
                numbers[head] = max(numbers[head], int(number) + 1)
        self._inputs, self._outputs = numbers["input_blocks"], numbers["output_blocks"]

    @property
    def num_blocks(self) -> int:
        """Input blocks, the middle, output blocks of the original layout: 9 + 1 + 9 for SDXL, 12 + 1 + 12 for SD."""
        return self._inputs + 1 + self._outputs

    def block(self, name: str) -> int | None:
        """Number of the UNet block a layer stands in, in the order of kohya's block lists; None outside of all blocks."""
        if name not in self._original:
            return None
        head, number, *_ = self._original[name].split(".")
        places = {"input_blocks": 0, "middle_block": self._inputs, "output_blocks": self._inputs + 1}
        return None if head not in places else places[head] + (0 if head == "middle_block" else int(number))
