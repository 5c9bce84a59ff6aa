"""Load Anima from a diffusers folder, a hub id, or a transformer file with its VAE and Qwen3; write it again.

The published file of a transformer holds the text conditioner with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AnimaTextConditioner

from sd_scripts.families.common import transformer_loading as transformer
from sd_scripts.families.common.qwen3 import QWEN3_PART
from sd_scripts.families.common.qwen_vae import QWEN_VAE_PART
from sd_scripts.families.common.t5 import T5_WORDS
from sd_scripts.families.common.transformer_loading import PREFIXES, Loader, usual_settings
from sd_scripts.families.common.transformer_shapes import count, sides_in
from sd_scripts.library.core.protocols import Dtypes, Parts, Version
from sd_scripts.library.loading.common import BASE, Base, Companion, FamilySpec, PartSpec
from sd_scripts.library.loading.layouts import Stored, renaming
from sd_scripts.library.loading.writing import Lazy, original_tensors, write_file

from .facts import CONDITIONER, TRANSFORMER
from .network import made
from .options import AnimaModelOptions

_NAMES = {
    r"^patch_embed\.proj\.": "x_embedder.proj.1.",
    r"^time_embed\.t_embedder\.": "t_embedder.1.",
    r"^time_embed\.norm\.": "t_embedding_norm.",
    r"^norm_out\.linear_": "final_layer.adaln_modulation.",
    r"^proj_out\.": "final_layer.linear.",
    r"^transformer_blocks\.": "blocks.",
    r"\.norm1\.linear_": ".adaln_modulation_self_attn.",
    r"\.norm2\.linear_": ".adaln_modulation_cross_attn.",
    r"\.norm3\.linear_": ".adaln_modulation_mlp.",
    r"\.attn1\.": ".self_attn.",
    r"\.attn2\.": ".cross_attn.",
    r"\.to_([qkv])\.": r".\1_proj.",
    r"\.to_out\.0\.": ".output_proj.",
    r"\.norm_([qk])\.": r".\1_norm.",
    r"\.ff\.net\.0\.proj\.": ".mlp.layer1.",
    r"\.ff\.net\.2\.": ".mlp.layer2.",
}
_ADAPTER = "llm_adapter."
"""The text conditioner in the file of a transformer."""


layout = renaming(_NAMES)
"""Where a transformer's tensors (diffusers names) stand in the published file, which is ComfyUI's."""


def transformer_config(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """See transformer_loading.config_in; a token is 2 x 2 latents, and no tensor tells how positions are scaled."""
    rows = sides_in(shapes, layout)
    main = "transformer_blocks.0"
    width, head, entries = rows("patch_embed.proj"), rows(f"{main}.attn1.norm_q"), rows("patch_embed.proj", 1) // 4
    return {
        "out_channels": rows("proj_out") // 4,
        "in_channels": entries - 1,
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "num_layers": count(shapes, r"(?:transformer_)?blocks\.(\d+)\."),
        "mlp_ratio": rows(f"{main}.ff.net.0.proj") / width,
        "text_embed_dim": rows(f"{main}.attn2.to_k", 1),
        "adaln_lora_dim": rows(f"{main}.norm1.linear_1"),
        "rope_scale": [1.0, 4.0, 4.0],
        "concat_padding_mask": True,
        "extra_pos_embed_type": None,
    }


def _problems(base: Base, given: Sequence[str], options: AnimaModelOptions, dtype: Dtypes) -> list[str]:
    config, conditioner = base.networks["backbone"].module.config, base.networks["te2"].module.config
    widths, reads = (transformer.text_width(base), conditioner.source_dim), f"{SPEC.label} reads with Qwen3-0.6B"
    problems = transformer.channel_problems(base, given) + transformer.width_problems(given, *widths, reads, "text conditioner")
    if conditioner.target_dim != config.text_embed_dim:
        problems.append(
            f"{'text_conditioner' if 'te2' in given else BASE}: the text conditioner makes rows of {conditioner.target_dim} numbers, but "
            f"the transformer takes {config.text_embed_dim}"
        )
    return problems


def _settings(options: AnimaModelOptions, base: Base | None) -> dict[str, Any]:
    """Texts fill up a number of rows that is the conditioner's."""
    settings = usual_settings(options, SPEC.label)
    rows = settings["max_token_length"] if base is None else base.networks["te2"].module.config.min_sequence_length
    return settings | {"max_token_length": min(options.max_token_length, rows)}


SPEC = FamilySpec(
    name="anima",
    label="Anima",
    needed="an Anima transformer with its text conditioner",
    files=(TRANSFORMER,),
    pipelines=("Anima",),
    configs=Path(__file__).parent / "configs",
    parts={
        "backbone": PartSpec(
            "transformer",
            "CosmosTransformer3DModel",
            made,
            layout,
            ("net.", *PREFIXES),
            # Numbers of its positions, which follow from the configuration.
            unread=(_ADAPTER, "pos_embedder."),
        ),
        "vae": QWEN_VAE_PART,
        "te1": replace(
            QWEN3_PART,
            prefixes=("text_encoders.qwen3_06b.transformer.", "cond_stage_model.qwen3_06b.transformer."),
            companion=Companion("text_encoder", "the text encoder Qwen3-0.6B", "qwen_3_06b_base.safetensors"),
        ),
        "te2": PartSpec(
            "text_conditioner",
            "AnimaTextConditioner",
            AnimaTextConditioner.from_config,
            lambda config: Stored,
            (*(f"{prefix}{_ADAPTER}" for prefix in ("net.", *PREFIXES)), _ADAPTER),
            (CONDITIONER,),
            tokenizer=replace(T5_WORDS, folder="t5_tokenizer", vocab_size="target_vocab_size"),
            companion=Companion("text_conditioner", "the text conditioner", "llm_adapter.safetensors"),
        ),
    },
)


def _write(spec: FamilySpec, parts: Parts, path: Path, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
    """Writes transformer and text conditioner in one file, as they are published."""
    tensors: dict[str, Lazy] = {}
    for name in ("backbone", "te2"):
        tensors |= original_tensors(spec.parts[name], parts.modules()[name], dtype, prefix=spec.parts[name].prefixes[0])
    write_file(path, tensors, metadata)


LOADER = Loader(
    spec=SPEC,
    options=AnimaModelOptions,
    version=Version("anima", "Anima", "https://github.com/nvidia-cosmos/cosmos-predict2", is_v2=False),
    config_of=transformer_config,
    untold=("max_size", "rope_scale"),
    problems=_problems,
    settings=_settings,
    write=_write,
    # What diffusers reads.
    also=("modular_model_index.json",),
)
