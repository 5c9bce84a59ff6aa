"""Load Krea 2 from a diffusers folder, a hub id, or a transformer file with its VAE and Qwen3-VL; write it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Qwen3VLConfig, Qwen3VLModel

from sd_scripts.families.common import transformer_loading as transformer
from sd_scripts.families.common.qwen3vl import QWEN3VL_PART
from sd_scripts.families.common.qwen_vae import QWEN_VAE_PART
from sd_scripts.families.common.scheduled import DISTILLED
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.families.common.transformer_shapes import count, rotary_axes, sides_in
from sd_scripts.library.core.protocols import Dtypes, Version
from sd_scripts.library.loading.common import BASE, Base, FamilySpec, PartSpec, config_of
from sd_scripts.library.loading.layouts import Stored, renaming

from .facts import TRANSFORMER
from .network import made
from .options import Krea2ModelOptions

TAPS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)
"""Which of Qwen3-VL's states are rows of text; 0 is the embedding (diffusers, pipeline_krea2.py)."""
_NAMES = {
    r"^img_in\.": "first.",
    r"^time_embed\.linear_1\.": "tmlp.0.",
    r"^time_embed\.linear_2\.": "tmlp.2.",
    r"^time_mod_proj\.": "tproj.1.",
    r"^txt_in\.norm\.weight": "txtmlp.0.scale",
    r"^txt_in\.linear_1\.": "txtmlp.1.",
    r"^txt_in\.linear_2\.": "txtmlp.3.",
    r"^text_fusion\.": "txtfusion.",
    r"^transformer_blocks\.": "blocks.",
    r"^final_layer\.linear\.": "last.linear.",
    r"^final_layer\.norm\.weight": "last.norm.scale",
    r"^final_layer\.scale_shift_table": "last.modulation.lin",
    r"\.attn\.to_([qkv])\.": r".attn.w\1.",
    r"\.attn\.to_out\.0\.": ".attn.wo.",
    r"\.attn\.to_gate\.": ".attn.gate.",
    r"\.attn\.norm_([qk])\.weight": r".attn.qknorm.\1norm.scale",
    r"\.ff\.": ".mlp.",
    r"\.norm1\.weight": ".prenorm.scale",
    r"\.norm2\.weight": ".postnorm.scale",
    r"\.scale_shift_table": ".mod.lin",
}


layout = renaming(_NAMES, {r"\d\.scale_shift_table$": Stored("", "flat", (6, 0, 0))})
"""Where a transformer's tensors (diffusers names) stand in Krea's files, which are ComfyUI's: a block's six vectors of modulation stand
behind one another."""


def transformer_config(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """See transformer_loading.config_in."""
    rows = sides_in(shapes, layout)
    main, fusion = "transformer_blocks.0", "text_fusion.layerwise_blocks.0"
    head, text_head = rows(f"{main}.attn.norm_q"), rows(f"{fusion}.attn.norm_q")
    return {
        "in_channels": rows("img_in", 1),
        "num_layers": count(shapes, r"(?:transformer_)?blocks\.(\d+)\."),
        "attention_head_dim": head,
        "num_attention_heads": rows("img_in") // head,
        "num_key_value_heads": rows(f"{main}.attn.to_k") // head,
        "intermediate_size": rows(f"{main}.ff.up"),
        "timestep_embed_dim": rows("time_embed.linear_1", 1),
        "text_hidden_dim": rows("txt_in.linear_1", 1),
        "num_text_layers": rows("text_fusion.projector", 1),
        "text_num_attention_heads": rows(f"{fusion}.attn.to_q") // text_head,
        "text_num_key_value_heads": rows(f"{fusion}.attn.to_k") // text_head,
        "text_intermediate_size": rows(f"{fusion}.ff.up"),
        "num_layerwise_text_blocks": count(shapes, r"(?:text_fusion|txtfusion)\.layerwise_blocks\.(\d+)\."),
        "num_refiner_text_blocks": count(shapes, r"(?:text_fusion|txtfusion)\.refiner_blocks\.(\d+)\."),
        "axes_dims_rope": rotary_axes(head, 3 / 8),
    }


def _problems(base: Base, given: Sequence[str], options: Krea2ModelOptions, dtype: Dtypes) -> list[str]:
    config, words = base.networks["backbone"].module.config, config_of(base.networks["te1"].module)["text_config"]
    asked, reads = tuple(base.index.get("text_encoder_select_layers") or TAPS), f"{SPEC.label} reads with Qwen3-VL-4B"
    problems = transformer.token_problems(base)
    problems += transformer.width_problems(given, words["hidden_size"], config.text_hidden_dim, reads)
    if words["num_hidden_layers"] <= TAPS[-1] or config.num_text_layers != len(TAPS) or asked != TAPS:
        option = "text_encoder" if "te1" in given else BASE
        problems.append(f"{option}: {SPEC.label} reads the states {TAPS} of an encoder of 36 layers; this model asks for others")
    return problems


SPEC = FamilySpec(
    name="krea2",
    label="Krea 2",
    files=(TRANSFORMER,),
    pipelines=("Krea2",),
    configs=Path(__file__).parent / "configs",
    parts={
        "backbone": PartSpec("transformer", "Krea2Transformer2DModel", made, layout, transformer.PREFIXES),
        "vae": QWEN_VAE_PART,
        "te1": replace(
            QWEN3VL_PART,
            class_name="Qwen3VLModel",
            make=lambda config: Qwen3VLModel(Qwen3VLConfig.from_dict(config)),
            stand_ins={},
            unread=("lm_head.weight",),
        ),
    },
)
LOADER = Loader(
    spec=SPEC,
    options=Krea2ModelOptions,
    version=Version("krea_2", "Krea 2", "https://github.com/krea-ai/krea-2", is_v2=False),
    config_of=transformer_config,
    untold=("axes_dims_rope", "rope_theta", "norm_eps"),
    problems=_problems,
    kept=(DISTILLED,),
)
