"""Names of the layers of SDXL.

kohya trains it on the original UNet, so its files name the UNet's layers after the original layout (`lora_unet_middle_block_1_proj_in`).
Diffusers' paths are read, too.
"""

from __future__ import annotations

from sd_scripts.families.common import reader_rules as rules
from sd_scripts.families.common.unet_names import COMFYUI, DIFFUSERS, KOHYA, UNetNames
from sd_scripts.library.adapters.architectures import Architecture, Prefixes
from sd_scripts.library.adapters.ranks import UNetRanks
from sd_scripts.library.adapters.readers import LORA, Rule

from .facts import CHECKPOINT, UNET
from .loading import SPEC, VERSION

CLIP_G = "text_encoders.clip_g.transformer."
"""How ComfyUI names the larger text encoder."""
_OUTER = r"(conv_in|conv_out|time_embedding\.|add_embedding\.).*"

ARCHITECTURES = (
    Architecture(
        name="sdxl",
        label="SDXL",
        spec=SPEC,
        is_backbone=lambda config: config.get("addition_embed_type") == "text_time",
        config_of=None,
        files=(CHECKPOINT, UNET),
        encoders=("te1", "te2"),
        version=VERSION,
        told_by=(),
        prefixes=Prefixes(
            kohya={"backbone": KOHYA, "te1": ("lora_te1_",), "te2": ("lora_te2_",)},
            diffusers=DIFFUSERS,
            comfyui={"backbone": COMFYUI, "te1": (rules.CLIP_L,), "te2": (CLIP_G,)},
        ),
        layer_names=UNetNames,
        ranks=UNetRanks,
        has_one_alpha=True,
        comfyui_endings="kohya",
        readers={
            "ComfyUI": (
                *rules.UNET_COMFYUI,
                rules.COMFYUI_TE1,
                Rule("te2", ("lora_te2_", CLIP_G)),
                Rule("te2", ("text_encoder_2.",), without="text_projection"),
            ),
            "Forge": (
                *rules.UNET_COMFYUI,
                rules.FORGE_TE1,
                Rule("te2", ("lora_te2_",)),
                Rule("te2", ("text_encoder_2.",), without="text_projection"),
            ),
            "sd-scripts": (
                Rule("backbone", ("lora_unet_",), "published", LORA, _OUTER),
                Rule("te1", ("lora_te1_",), kinds=LORA),
                Rule("te2", ("lora_te2_",), kinds=LORA, without="text_projection"),
            ),
            "diffusers": (
                *rules.UNET_DIFFUSERS,
                Rule("backbone", ("lora_unet_",), "published", LORA),
                rules.DIFFUSERS_TE1,
                Rule("te1", ("lora_te1_",), kinds=LORA),
                Rule("te2", ("text_encoder_2.",), kinds=("lora", "dora")),
                Rule("te2", ("lora_te2_",), kinds=LORA),
            ),
        },
    ),
)
