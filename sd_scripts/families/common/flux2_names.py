"""Names of the layers of FLUX.2: FLUX.1's, with query, key, value and MLP of a single block as one layer, and without modulation."""

from __future__ import annotations

from dataclasses import replace

from sd_scripts.library.adapters.architectures import Architecture
from sd_scripts.library.adapters.readers import LORA, Rule

from . import reader_rules as rules
from .double_stream_names import DoubleStreamNames
from .flux2_signs import DEV, KLEIN
from .plain_names import ranks_of_plain
from .transformer_loading import Loader

_MODULATION = r"(double_stream_modulation_(img|txt)|single_stream_modulation)\.linear"


def architecture(loader: Loader) -> Architecture:
    """What adapters are for on a FLUX.2 transformer, whichever family's."""
    one = rules.transformer_architecture(
        loader,
        label="FLUX.2",
        # Layers have FLUX.1's names, and Klein 4B its width.
        told_by=("flux_2", "flux-2", "flux2", "flux.2"),
        layer_names=DoubleStreamNames,
        ranks=ranks_of_plain,
        readers={
            "ComfyUI": (rules.PUBLISHED, Rule("backbone", ("transformer.", "lycoris_"), without=rf"{_MODULATION}|time_guidance_embed\..*")),
            "musubi-tuner": rules.PUBLISHED_MUSUBI,
            "diffusers": (
                Rule("backbone", ("transformer.",), kinds=("lora", "dora", "lokr")),
                Rule("backbone", ("diffusion_model.",), "published", LORA),
                Rule("backbone", ("lora_unet_",), "published", LORA, rf"{_MODULATION}|norm_out\.linear"),
            ),
        },
    )
    return replace(one, name="flux2", files=(KLEIN, DEV))
