"""Names of the layers of FLUX.1, for any number of blocks.

kohya, ComfyUI and the published files name the transformer's layers after the original layout, in which query, key and value of a double
block are one matrix (`double_blocks.0.img_attn.qkv`), and with the MLP's first layer also those of a single block
(`single_blocks.0.linear1`).
"""

from __future__ import annotations

from sd_scripts.families.common import pooled_original
from sd_scripts.families.common import reader_rules as rules
from sd_scripts.families.common.double_stream_names import DoubleStreamNames
from sd_scripts.families.common.double_stream_signs import TRANSFORMER
from sd_scripts.library.adapters.architectures import Architecture, Prefixes
from sd_scripts.library.adapters.layer_names import Target
from sd_scripts.library.adapters.readers import LORA, SUMS, Rule

from .loading import DEV_VERSION, SPEC
from .ranks import ranks_of

_PREFIXES = rules.TRANSFORMER_PREFIXES | Prefixes(
    # OneTrainer counts T5 as the second encoder, kohya as the third; their paths have nothing in common with CLIP's.
    kohya={"te1": ("lora_te1_", "lora_te_"), "te3": ("lora_te3_", "lora_te2_")},
    diffusers={"te1": ("text_encoder.",), "te3": ("text_encoder_2.",)},
    comfyui={"te1": (rules.CLIP_L,), "te3": ("text_encoders.t5xxl.transformer.",)},
)

# x-flux (src/flux/modules/layers.py): 1 is the image's side, 2 the text's; a single block adapts only query, key and value of linear1.
_XLABS = {"qkv_lora1": "img_attn.qkv", "proj_lora1": "img_attn.proj", "qkv_lora2": "txt_attn.qkv", "proj_lora2": "txt_attn.proj"}
_XLABS_SINGLE = {"qkv_lora": "linear1_qkv", "proj_lora": "linear2"}


class FluxNames(DoubleStreamNames):
    """The maps of one FLUX model."""

    def find(self, stem: str) -> Target | None:
        """See Names. Also takes x-flux's names, `double_blocks.0.processor.qkv_lora1`."""
        block, processor, which = stem.rpartition(".processor.")
        if processor:
            path = (_XLABS if "double_blocks" in block else _XLABS_SINGLE).get(which)
            return None if path is None else super().find(f"{block}.{path}")
        return super().find(stem)


_OUTER = r"(time_text_embed\.|context_embedder|x_embedder|norm_out|proj_out).*"
_DIFFUSERS_PATHS = Rule("backbone", ("transformer.", "lycoris_", "lora_transformer_"))

ARCHITECTURES = (
    Architecture(
        name="flux",
        label="FLUX.1",
        spec=SPEC,
        is_backbone=lambda config: True,
        config_of=lambda header, shapes: pooled_original.config_of(shapes),
        files=(TRANSFORMER,),
        encoders=("te1", "te3"),
        version=DEV_VERSION,
        # Attention in double blocks has the names and the width of Qwen-Image's.
        told_by=("flux",),
        prefixes=_PREFIXES,
        layer_names=FluxNames,
        ranks=ranks_of,
        has_one_alpha=False,
        comfyui_endings="kohya",
        readers={
            "ComfyUI": (
                rules.PUBLISHED,
                _DIFFUSERS_PATHS,
                rules.COMFYUI_TE1,
                Rule("te3", ("lora_te3_", "lora_te2_", "text_encoders.t5xxl.transformer.")),
            ),
            "Forge": (rules.PUBLISHED, _DIFFUSERS_PATHS, rules.FORGE_TE1, Rule("te3", ("lora_te3_", "lora_te2_", "lora_te1_"))),
            "sd-scripts": (
                Rule("backbone", ("lora_unet_",), "published", LORA, r"(norm_out|proj_out).*"),
                Rule("te1", ("lora_te1_",), kinds=LORA),
                Rule("te3", ("lora_te3_",), kinds=LORA),
            ),
            "musubi-tuner": (Rule("backbone", ("lora_unet_",), "published", SUMS),),
            "diffusers": (
                Rule("backbone", ("lora_unet_", "diffusion_model."), "published", LORA, _OUTER),
                Rule("backbone", ("transformer.",), kinds=("lora", "dora")),
                rules.DIFFUSERS_TE1,
                Rule("te1", ("lora_te1_", rules.CLIP_L), kinds=LORA),
            ),
        },
    ),
)
