"""Names of the layers of Stable Diffusion 1.x, 2.x and SDXL.

kohya trains SD 1.x and 2.x on diffusers' UNet and SDXL on the original one, so its files name the UNet's layers after diffusers' paths
for the first two (`lora_unet_mid_block_attentions_0_proj_in`) and after the original layout for SDXL (`lora_unet_middle_block_1_proj_in`).
Both are read for all three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sd_scripts.library.adapters.layer_names import Family, LayerNames, Prefixes

from . import original_unet as original

_DIFFUSERS = {"backbone": ("unet.",), "te1": ("text_encoder.",), "te2": ("text_encoder_2.",)}
_COMFYUI = ("diffusion_model.", "model.diffusion_model.")
_BACKBONE = ("lora_unet_", "lycoris_")


def _one_encoder(comfyui: tuple[str, ...]) -> Prefixes:
    return Prefixes(
        kohya={"backbone": _BACKBONE, "te1": ("lora_te_", "lora_te1_")},
        diffusers=_DIFFUSERS,
        comfyui={"backbone": _COMFYUI, "te1": tuple(f"text_encoders.{clip}.transformer." for clip in comfyui)},
    )


_PREFIXES: dict[Family, Prefixes] = {
    "sd1": _one_encoder(("clip_l", "clip_h")),
    "sd2": _one_encoder(("clip_h", "clip_l")),
    "sdxl": Prefixes(
        kohya={"backbone": _BACKBONE, "te1": ("lora_te1_",), "te2": ("lora_te2_",)},
        diffusers=_DIFFUSERS,
        comfyui={"backbone": _COMFYUI, "te1": ("text_encoders.clip_l.transformer.",), "te2": ("text_encoders.clip_g.transformer.",)},
    ),
}


class UNetNames(LayerNames):
    """The maps of one model with a UNet."""

    def __init__(self, family: Family, unet_config: Mapping[str, Any], layers: Iterable[str]) -> None:
        """layers are names `<module>.<layer>` of everything that may carry an adapter."""
        super().__init__(family, original.unet(unet_config), layers, _PREFIXES[family])
        numbers: dict[str, int] = {"input_blocks": 0, "middle_block": 0, "output_blocks": 0}
        for path in self._original.values():
            head, number, *_ = path.split(".")
            if head in numbers:
                numbers[head] = max(numbers[head], int(number) + 1)
        self._inputs, self._outputs = numbers["input_blocks"], numbers["output_blocks"]

    def _kohya_path(self, name: str) -> str:
        module, _, layer = name.partition(".")
        return layer if module == "backbone" and self.family != "sdxl" else self.original_path(name)

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
