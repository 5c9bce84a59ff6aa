"""Names of the layers of Qwen-Image-2.1: diffusers' own paths; those of ComfyUI's fused MLPs are read too."""

from __future__ import annotations

from sd_scripts.families.common import reader_rules as rules
from sd_scripts.families.common.plain_names import PlainNames, ranks_of_plain
from sd_scripts.library.adapters.readers import LORA, Rule

from .loading import LOADER

ARCHITECTURES = (
    rules.transformer_architecture(
        LOADER,
        told_by=("qwen_image_21", "qwen-image-2.1"),
        layer_names=PlainNames,
        ranks=ranks_of_plain,
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
