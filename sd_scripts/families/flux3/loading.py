"""Load FLUX.3 Image Klein from a diffusers folder, a hub id, or a transformer file with its VAE and Qwen3-VL; write it again."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sd_scripts.families.common import transformer_loading as transformer
from sd_scripts.families.common.double_stream_original import count
from sd_scripts.families.common.editing import AREA, control_area
from sd_scripts.families.common.qwen3vl import QWEN3VL_PART
from sd_scripts.families.common.qwen3vl_signs import TEXT_ENCODER
from sd_scripts.families.common.square_vae import SQUARE_VAE
from sd_scripts.families.common.square_vae_signs import VAE
from sd_scripts.families.common.transformer_loading import Companion, Loader
from sd_scripts.library.core.protocols import Dtypes, Version
from sd_scripts.library.loading.common import BASE, Base, FamilySpec, PartSpec, config_of
from sd_scripts.library.loading.layouts import Stored

from .facts import FACTS, TRANSFORMER
from .network import made
from .options import Flux3ModelOptions

TAPS = (4, 8, 12, 16, 20, 24, 28, 32)
"""Which of Qwen3-VL's states are rows of text; 0 is the embedding (diffusers, modular_pipelines/flux3/encoders.py)."""
_ENDS = {
    "x_embedders": "emb_in",
    "context_embedder": "txt_in",
    "timestep_embedder.linear_1": "time_in.in_layer",
    "timestep_embedder.linear_2": "time_in.out_layer",
    "target_timestep_embedder.linear_1": "ref_time_in.in_layer",
    "target_timestep_embedder.linear_2": "ref_time_in.out_layer",
    "norm_out.linear": "final_layer.image.adaLN_modulation.1",
    "proj_out": "final_layer.image.linear",
}
_BLOCKS = {"mode_blocks": "content_mode_blocks", "txt_mode_blocks": "txt_mode_blocks", "single_transformer_blocks": "single_blocks"}
_INSIDE = {
    "attn.to_q.weight": "q_proj.weight",
    "attn.to_k.weight": "k_proj.weight",
    "attn.to_v.weight": "v_proj.weight",
    "attn.to_out.0.weight": "attn_out.weight",
    "attn.norm_q.weight": "norm.query_norm.scale",
    "attn.norm_k.weight": "norm.key_norm.scale",
    "ff.linear_in.weight": "mlp_in.weight",
    "ff.linear_out.weight": "mlp_out.weight",
}
_BLOCK = re.compile(r"(mode_blocks|txt_mode_blocks|single_transformer_blocks)((?:\.\w+)?\.\d+)\.(.+)")
_MODULATION = re.compile(r"((?:early|single)_stream_modulations\.\w+)\.linear\.weight")


def layout(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """Where a transformer's tensors (diffusers names) stand in the published file, which is ComfyUI's; see layouts.Layout."""

    def stored(key: str) -> Stored:
        if block := _BLOCK.fullmatch(key):
            return Stored(f"{_BLOCKS[block[1]]}{block[2]}.{_INSIDE[block[3]]}")
        if modulation := _MODULATION.fullmatch(key):
            return Stored(f"{modulation[1]}.lin.weight")
        start = next(start for start in _ENDS if key.startswith(f"{start}."))
        # diffusers' last modulation gives scale, then shift; the published one shift, then scale.
        return Stored(_ENDS[start] + key.removeprefix(start), "swapped" if start == "norm_out.linear" else "same")

    return stored


def transformer_config(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """See transformer_loading.config_in. The split of a head's rotary frequencies stands in no tensor: a quarter each, as published."""
    rows = transformer.sides_in(shapes, layout)

    main = "single_transformer_blocks.0"
    width, head = rows("context_embedder"), rows(f"{main}.attn.norm_q")
    return {
        "_class_name": "Flux3Transformer2DModel",
        "in_channels": rows("x_embedders.image", 1),
        "cond_in_channels": rows("x_embedders.image_cond", 1),
        "num_layers": count(shapes, r"txt_mode_blocks\.(\d+)\."),
        "num_single_layers": max(count(shapes, rf"{blocks}\.(\d+)\.") for blocks in ("single_blocks", "single_transformer_blocks")),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": rows("context_embedder", 1),
        "timestep_channels": rows("timestep_embedder.linear_1", 1),
        "mlp_ratio": rows(f"{main}.ff.linear_out", 1) / width,
        "axes_dims_rope": [head // 4] * 4,
        "flow_map": any(name.startswith(("ref_time_in.", "target_timestep_embedder.")) for name in shapes),
    }


def _problems(base: Base, given: Sequence[str], options: Flux3ModelOptions, dtype: Dtypes) -> list[str]:
    config, words = base.networks["backbone"].module.config, config_of(base.networks["te1"].module)["text_config"]
    if config.flow_map:
        return [
            f"{BASE}: {base.source.label} is the distilled FLUX.3 Image Klein, a flow map, which is told the time it jumps to and trained "
            "otherwise. Train black-forest-labs/flux-3-image-klein-base; its adapters can be drawn with on the distilled one elsewhere"
        ]
    option, problems = (
        "text_encoder" if "te1" in given else BASE,
        transformer.token_problems(base, base.networks["vae"].module.config.latent_channels),
    )
    if config.joint_attention_dim != len(TAPS) * words["hidden_size"]:
        problems.append(
            f"{option}: eight states of the text encoder are {len(TAPS) * words['hidden_size']} numbers, but the transformer takes "
            f"{config.joint_attention_dim}; {FACTS.label} reads with Qwen3-VL-4B"
        )
    if words["num_hidden_layers"] < TAPS[-1]:
        problems.append(f"{option}: {FACTS.label} reads the states {TAPS} of an encoder of 36 layers; this one has fewer")
    return problems


def _settings(options: Flux3ModelOptions, base: Base | None) -> dict[str, Any]:
    length, areas = options.max_token_length, {"area": AREA, "control_area": control_area(options)}
    return {"max_token_length": length, "model_version": FACTS.label, **areas, "whole_reference": options.control_resolution is None}


SPEC = FamilySpec(
    name="flux3",
    label=FACTS.label,
    needs="a FLUX.3 Image Klein base transformer",
    files=(TRANSFORMER,),
    pipelines=("Flux3",),
    configs=Path(__file__).parent / "configs",
    parts={
        # Some files hold heads that were of use in the model's own training alone.
        "backbone": PartSpec("transformer", "Flux3Transformer2DModel", made, layout, transformer.PREFIXES, unread=("repa_projectors.",)),
        "vae": SQUARE_VAE,
        "te1": replace(QWEN3VL_PART, prefixes=("text_encoders.qwen3vl_4b.transformer.",)),
    },
    belongs={VAE: "vae", TEXT_ENCODER: "text_encoder"},
)
LOADER = Loader(
    spec=SPEC,
    companions={
        "vae": Companion("vae", "the VAE", "flux2-vae.safetensors"),
        "te1": Companion("text_encoder", "the text encoder Qwen3-VL-4B", "qwen3vl_4b.safetensors"),
    },
    version=Version("flux_3_klein", "FLUX.3-image-klein", "https://github.com/black-forest-labs/flux-3-image-klein", is_v2=False),
    config_of=transformer_config,
    same=("attention_head_dim", "num_attention_heads"),
    untold=("axes_dims_rope", "rope_theta", "eps"),
    problems=_problems,
    settings=_settings,
)
