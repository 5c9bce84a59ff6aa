"""Names of the layers of Chroma: FLUX's, without the modulation. The text encoder never carries an adapter."""

from __future__ import annotations

from sd_scripts.families.common import reader_rules as rules
from sd_scripts.families.common.double_stream_names import DoubleStreamNames
from sd_scripts.families.common.plain_names import ranks_of_plain
from sd_scripts.library.adapters.readers import LORA, Rule

from .loading import LOADER

_GUIDANCE = r"distilled_guidance_layer\..*"
_OUTER = rf"{_GUIDANCE}|x_embedder|context_embedder|proj_out"

ARCHITECTURES = (
    rules.transformer_architecture(
        LOADER,
        # All layers that carry an adapter have FLUX's names and widths.
        told_by=("chroma",),
        layer_names=DoubleStreamNames,
        ranks=ranks_of_plain,
        comfyui_endings="kohya",
        readers={
            "ComfyUI": (rules.PUBLISHED, Rule("backbone", ("transformer.", "lycoris_"), without=_GUIDANCE)),
            "sd-scripts": (Rule("backbone", ("lora_unet_",), "published", LORA, rf"{_GUIDANCE}|proj_out"),),
            "diffusers": (
                rules.TRANSFORMER_DIFFUSERS[0],
                # FLUX.1's conversion, which stops at a layer that FLUX.1 does not have.
                Rule(
                    "backbone",
                    ("lora_unet_", "diffusion_model."),
                    "published",
                    LORA,
                    _OUTER,
                    refuses_others=True,
                ),
            ),
        },
    ),
)
