"""Names of the layers of Stable Diffusion 1.x and 2.x.

kohya trains them on diffusers' UNet, so its files name the UNet's layers after diffusers' paths
(`lora_unet_mid_block_attentions_0_proj_in`). Those of the original layout are read, too.
"""

from __future__ import annotations

from dataclasses import replace

from sd_scripts.families.common import reader_rules as rules
from sd_scripts.families.common.unet_names import COMFYUI, DIFFUSERS, KOHYA, UNetNames
from sd_scripts.library.adapters.architectures import Architecture, Prefixes
from sd_scripts.library.adapters.ranks import UNetRanks
from sd_scripts.library.adapters.readers import LORA, Rule
from sd_scripts.library.loading.common import Config

from .facts import FIRST, FIRST_UNET, SECOND, SECOND_UNET
from .loading import SPEC, SPEC2, VERSION1, VERSION2, VERSION2_V, is_second


class SdNames(UNetNames):
    """The maps of one model, whose layers kohya's files name after diffusers' paths."""

    def _kohya_path(self, name: str) -> str:
        module, _, layer = name.partition(".")
        return layer if module == "backbone" else self.original_path(name)


def _is_first(config: Config) -> bool:
    return config.get("addition_embed_type") != "text_time" and not is_second(config)


_FIRST = Architecture(
    name="sd1",
    label="SD 1.x",
    spec=SPEC,
    is_backbone=_is_first,
    config_of=None,
    files=(FIRST, FIRST_UNET),
    encoders=("te1",),
    version=VERSION1,
    told_by=(),
    prefixes=Prefixes(
        kohya={"backbone": KOHYA, "te1": ("lora_te_", "lora_te1_")},
        diffusers=DIFFUSERS,
        comfyui={"backbone": COMFYUI, "te1": (rules.CLIP_L, rules.CLIP_H)},
    ),
    layer_names=SdNames,
    ranks=UNetRanks,
    has_one_alpha=True,
    comfyui_endings="kohya",
    readers={
        "ComfyUI": (*rules.UNET_COMFYUI, rules.COMFYUI_TE1),
        "Forge": (*rules.UNET_COMFYUI, rules.FORGE_TE1),
        "sd-scripts": (
            Rule("backbone", ("lora_unet_",), "diffusers", LORA, r"(conv_in|conv_out|time_embedding\.).*"),
            Rule("te1", ("lora_te_",), kinds=LORA),
        ),
        "diffusers": (*rules.UNET_DIFFUSERS, rules.DIFFUSERS_TE1, Rule("te1", ("lora_te1_", "lora_te_"), kinds=LORA)),
    },
)
ARCHITECTURES = (
    _FIRST,
    replace(
        _FIRST,
        name="sd2",
        label="SD 2.x",
        spec=SPEC2,
        is_backbone=lambda config: config.get("addition_embed_type") != "text_time" and is_second(config),
        files=(SECOND, SECOND_UNET),
        # Tools do not know what the model predicts; most models are made from the larger one.
        version=replace(VERSION2, modelspec=VERSION2_V.modelspec),
        prefixes=replace(_FIRST.prefixes, comfyui={"backbone": COMFYUI, "te1": (rules.CLIP_H, rules.CLIP_L)}),
    ),
)
