"""Load FLUX.3 Image Klein from a diffusers folder, a hub id, or a transformer file with its VAE and Qwen3-VL; write it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sd_scripts.families.common import transformer_loading as transformer
from sd_scripts.families.common.qwen3vl import QWEN3VL_PART
from sd_scripts.families.common.square_vae import SQUARE_VAE
from sd_scripts.families.common.transformer_loading import Loader, usual_settings
from sd_scripts.families.common.transformer_shapes import count, sides_in
from sd_scripts.library.core.protocols import Dtypes, Version
from sd_scripts.library.loading.common import BASE, Base, FamilySpec, PartSpec, config_of
from sd_scripts.library.loading.layouts import Stored, renaming

from .facts import FACTS, TRANSFORMER
from .network import made
from .options import Flux3ModelOptions

TAPS = (4, 8, 12, 16, 20, 24, 28, 32)
"""Which of Qwen3-VL's states are rows of text; 0 is the embedding (diffusers, modular_pipelines/flux3/encoders.py)."""
_NAMES = {
    r"^x_embedders\.": "emb_in.",
    r"^context_embedder\.": "txt_in.",
    r"^timestep_embedder\.linear_1\.": "time_in.in_layer.",
    r"^timestep_embedder\.linear_2\.": "time_in.out_layer.",
    r"^target_timestep_embedder\.linear_1\.": "ref_time_in.in_layer.",
    r"^target_timestep_embedder\.linear_2\.": "ref_time_in.out_layer.",
    r"^norm_out\.linear\.": "final_layer.image.adaLN_modulation.1.",
    r"^proj_out\.": "final_layer.image.linear.",
    r"(_stream_modulations\.\w+)\.linear\.": r"\1.lin.",
    r"^mode_blocks\.": "content_mode_blocks.",
    r"^single_transformer_blocks\.": "single_blocks.",
    r"\.attn\.to_([qkv])\.": r".\1_proj.",
    r"\.attn\.to_out\.0\.": ".attn_out.",
    r"\.attn\.norm_q\.weight": ".norm.query_norm.scale",
    r"\.attn\.norm_k\.weight": ".norm.key_norm.scale",
    r"\.ff\.linear_(in|out)\.": r".mlp_\1.",
}


layout = renaming(_NAMES, {r"^norm_out\.linear\.": Stored("", "swapped")})
"""Where a transformer's tensors (diffusers names) stand in the published file, which is ComfyUI's. diffusers' last modulation gives scale,
then shift; the published one shift, then scale."""


def transformer_config(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """See transformer_loading.config_in. The split of a head's rotary frequencies stands in no tensor: a quarter each, as published."""
    rows = sides_in(shapes, layout)
    main = "single_transformer_blocks.0"
    width, head = rows("context_embedder"), rows(f"{main}.attn.norm_q")
    return {
        "in_channels": rows("x_embedders.image", 1),
        "cond_in_channels": rows("x_embedders.image_cond", 1),
        "num_layers": count(shapes, r"txt_mode_blocks\.(\d+)\."),
        "num_single_layers": count(shapes, r"single_(?:transformer_)?blocks\.(\d+)\."),
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
    option, problems = "text_encoder" if "te1" in given else BASE, transformer.token_problems(base)
    if config.joint_attention_dim != len(TAPS) * words["hidden_size"]:
        problems.append(
            f"{option}: eight states of the text encoder are {len(TAPS) * words['hidden_size']} numbers, but the transformer takes "
            f"{config.joint_attention_dim}; {FACTS.label} reads with Qwen3-VL-4B"
        )
    if words["num_hidden_layers"] < TAPS[-1]:
        problems.append(f"{option}: {FACTS.label} reads the states {TAPS} of an encoder of 36 layers; this one has fewer")
    return problems


SPEC = FamilySpec(
    name="flux3",
    label=FACTS.label,
    needed="a FLUX.3 Image Klein base transformer",
    files=(TRANSFORMER,),
    pipelines=("Flux3",),
    configs=Path(__file__).parent / "configs",
    parts={
        # Some files hold heads that were of use in the model's own training alone.
        "backbone": PartSpec("transformer", "Flux3Transformer2DModel", made, layout, transformer.PREFIXES, unread=("repa_projectors.",)),
        "vae": SQUARE_VAE,
        "te1": QWEN3VL_PART,
    },
)
LOADER = Loader(
    spec=SPEC,
    options=Flux3ModelOptions,
    version=Version("flux_3_klein", "FLUX.3-image-klein", "https://github.com/black-forest-labs/flux-3-image-klein", is_v2=False),
    config_of=transformer_config,
    untold=("axes_dims_rope", "rope_theta", "eps"),
    problems=_problems,
    settings=lambda options, base: usual_settings(options, SPEC.label) | {"whole_reference": options.control_resolution is None},
)
