"""Load Krea 2 from a diffusers folder, a hub id, or a transformer file with its VAE and Qwen3-VL; write it again."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Qwen3VLConfig, Qwen3VLModel

from sd_scripts.families.common import transformer_loading as transformer
from sd_scripts.families.common.double_stream_original import count
from sd_scripts.families.common.qwen3vl import QWEN3VL_PART
from sd_scripts.families.common.qwen3vl_signs import TEXT_ENCODER
from sd_scripts.families.common.qwen_vae import QWEN_VAE_PART
from sd_scripts.families.common.qwen_vae_signs import VAE
from sd_scripts.families.common.scheduled import DISTILLED
from sd_scripts.families.common.transformer_loading import Companion, Loader
from sd_scripts.library.core.protocols import Dtypes, Version
from sd_scripts.library.loading.common import BASE, Base, FamilySpec, PartSpec, config_of
from sd_scripts.library.loading.layouts import Stored

from .facts import TRANSFORMER
from .network import made
from .options import Krea2ModelOptions

TAPS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)
"""Which of Qwen3-VL's states are rows of text; 0 is the embedding (diffusers, pipeline_krea2.py)."""
_TAPS = "text_encoder_select_layers"
_ENDS = {
    "img_in.": "first.",
    "time_embed.linear_1.": "tmlp.0.",
    "time_embed.linear_2.": "tmlp.2.",
    "time_mod_proj.": "tproj.1.",
    "txt_in.norm.weight": "txtmlp.0.scale",
    "txt_in.linear_1.": "txtmlp.1.",
    "txt_in.linear_2.": "txtmlp.3.",
    "text_fusion.": "txtfusion.",
    "transformer_blocks.": "blocks.",
    "final_layer.linear.": "last.linear.",
    "final_layer.norm.weight": "last.norm.scale",
    "final_layer.scale_shift_table": "last.modulation.lin",
}
_INSIDE = {
    "attn.to_q.": "attn.wq.",
    "attn.to_k.": "attn.wk.",
    "attn.to_v.": "attn.wv.",
    "attn.to_out.0.": "attn.wo.",
    "attn.to_gate.": "attn.gate.",
    "attn.norm_q.weight": "attn.qknorm.qnorm.scale",
    "attn.norm_k.weight": "attn.qknorm.knorm.scale",
    "ff.": "mlp.",
    "norm1.weight": "prenorm.scale",
    "norm2.weight": "postnorm.scale",
    "scale_shift_table": "mod.lin",
}
_PIECE = re.compile(r"((?:transformer_blocks|text_fusion\.\w+_blocks)\.\d+\.)(.+)")


def layout(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """Where a transformer's tensors (diffusers names) stand in Krea's files, which are ComfyUI's; see layouts.Layout."""

    def stored(key: str) -> Stored:
        block = _PIECE.fullmatch(key)
        name = block[1] + _begun(block[2], _INSIDE) if block else key
        # A block's six vectors of modulation stand behind one another.
        flat = block is not None and block[2] == "scale_shift_table"
        return Stored(_begun(name, _ENDS), "flat", (6, 0, 0)) if flat else Stored(_begun(name, _ENDS))

    return stored


def _begun(name: str, table: Mapping[str, str]) -> str:
    return next((table[start] + name.removeprefix(start) for start in table if name.startswith(start)), name)


def transformer_config(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """See transformer_loading.config_in. The split of a head's rotary frequencies stands in no tensor: 1/4, 3/8, 3/8 as published."""
    rows = transformer.sides_in(shapes, layout)

    def blocks(own: str) -> int:
        return max(count(shapes, re.escape(name) + r"\.(\d+)\.") for name in (own, _begun(f"{own}.", _ENDS)[:-1]))

    main, fusion = "transformer_blocks.0", "text_fusion.layerwise_blocks.0"
    head, text_head = rows(f"{main}.attn.norm_q"), rows(f"{fusion}.attn.norm_q")
    side = 2 * (head * 3 // 16)
    return {
        "_class_name": "Krea2Transformer2DModel",
        "in_channels": rows("img_in", 1),
        "num_layers": blocks("transformer_blocks"),
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
        "num_layerwise_text_blocks": blocks("text_fusion.layerwise_blocks"),
        "num_refiner_text_blocks": blocks("text_fusion.refiner_blocks"),
        "axes_dims_rope": [head - 2 * side, side, side],
    }


def _problems(base: Base, given: Sequence[str], options: Krea2ModelOptions, dtype: Dtypes) -> list[str]:
    config, words = base.networks["backbone"].module.config, config_of(base.networks["te1"].module)["text_config"]
    problems = transformer.token_problems(base, base.networks["vae"].module.config.z_dim)
    reads = f"{SPEC.label} reads with Qwen3-VL-4B"
    problems += transformer.width_problems(given, words["hidden_size"], config.text_hidden_dim, reads)
    if words["num_hidden_layers"] <= TAPS[-1] or config.num_text_layers != len(TAPS) or tuple(base.index.get(_TAPS) or TAPS) != TAPS:
        option = "text_encoder" if "te1" in given else BASE
        problems.append(f"{option}: {SPEC.label} reads the states {TAPS} of an encoder of 36 layers; this model asks for others")
    return problems


def _words_layout(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """ComfyUI's names: the language model is `model`, and the visual part stands beside it."""
    return lambda key: Stored(key.replace("language_model.", "model.", 1))


SPEC = FamilySpec(
    name="krea2",
    label="Krea 2",
    needs="a Krea 2 transformer",
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
            layout=_words_layout,
            prefixes=("text_encoders.qwen3vl_4b.transformer.",),
            stand_ins={},
            unread=("lm_head.weight",),
        ),
    },
    belongs={VAE: "vae", TEXT_ENCODER: "text_encoder"},
)
LOADER = Loader(
    spec=SPEC,
    companions={
        "vae": Companion("vae", "the VAE", "qwen_image_vae.safetensors"),
        "te1": Companion("text_encoder", "the text encoder Qwen3-VL-4B", "qwen3vl_4b.safetensors"),
    },
    version=Version("krea_2", "Krea 2", "https://github.com/krea-ai/krea-2", is_v2=False),
    config_of=transformer_config,
    same=("attention_head_dim", "num_attention_heads"),
    untold=("axes_dims_rope", "rope_theta", "norm_eps"),
    problems=_problems,
    settings=lambda options, base: {"max_token_length": options.max_token_length, "model_version": SPEC.label},
    kept=(DISTILLED,),
)
