"""Load FLUX.2 Klein from a diffusers folder, a hub id, or a transformer file with its VAE and Qwen3; write it again.

The published layouts are those of `double_stream_original` and of other VAEs, with names of FLUX.2's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffusers import Flux2Transformer2DModel

from sd_scripts.families.common import double_stream_original as double_stream
from sd_scripts.families.common import transformer_loading as transformer
from sd_scripts.families.common.editing import AREA, control_area
from sd_scripts.families.common.qwen3 import QWEN3_PART, template_problems
from sd_scripts.families.common.qwen3_signs import TEXT_ENCODER
from sd_scripts.families.common.square_vae import SQUARE_VAE
from sd_scripts.families.common.square_vae_signs import VAE
from sd_scripts.families.common.transformer_loading import Companion, Loader
from sd_scripts.library.core.protocols import Dtypes, Version
from sd_scripts.library.loading.common import BASE, Base, FamilySpec, PartSpec, config_of
from sd_scripts.library.loading.layouts import Stored

from .facts import TRANSFORMER
from .options import Flux2ModelOptions

_KLEIN_4B, _KLEIN_9B = (Path(__file__).parent / "configs" / version for version in ("klein_4b", "klein_9b"))
_ENDS = {
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_guidance_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_guidance_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
}
_INSIDE = {
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
    "attn.to_qkv_mlp_proj": "linear1",
    "attn.to_out": "linear2",
}


def _layout(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    return double_stream.places(config, _end, _INSIDE)


def _end(layer: str, kind: str) -> Stored | None:
    # diffusers' last modulation gives scale, then shift; the published one shift, then scale.
    return Stored(f"{_ENDS[layer]}.{kind}", "swapped" if layer == "norm_out.linear" else "same") if layer in _ENDS else None


def transformer_config(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """See transformer_loading.config_in."""
    found = double_stream.config_of(shapes)
    width, names = double_stream.width_of(found), ("single_blocks.0.linear1", "single_transformer_blocks.0.attn.to_qkv_mlp_proj")
    rows = next(shapes[f"{name}.weight"] for name in names if f"{name}.weight" in shapes)[0]
    guidance = ("guidance_in.", "time_guidance_embed.guidance_embedder.")
    return {
        "_class_name": "Flux2Transformer2DModel",
        **found,
        "axes_dims_rope": [found["attention_head_dim"] // 4] * 4,
        # Rows of query, key and value, then twice those of the MLP.
        "mlp_ratio": (rows - 3 * width) / (2 * width),
        "guidance_embeds": any(name.startswith(guidance) for name in shapes),
    }


def _problems(base: Base, given: Sequence[str], options: Flux2ModelOptions, dtype: Dtypes) -> list[str]:
    config = base.networks["backbone"].module.config
    if config.guidance_embeds:
        return [f"{BASE}: {base.source.label} is FLUX.2 dev, which reads with Mistral and cannot be trained here; take a Klein model"]
    option, problems = (
        "text_encoder" if "te1" in given else BASE,
        transformer.token_problems(base, base.networks["vae"].module.config.latent_channels),
    )
    width = config_of(base.networks["te1"].module)["hidden_size"]
    if 3 * width != config.joint_attention_dim:
        problems.append(
            f"{option}: three layers of the text encoder make rows of {3 * width} numbers, but the transformer takes "
            f"{config.joint_attention_dim}; Klein 4B reads with Qwen3-4B, Klein 9B with Qwen3-8B"
        )
    return problems + template_problems(base.tokenizers.get("te1"), option, SPEC.label)


def _settings(options: Flux2ModelOptions, base: Base | None) -> dict[str, Any]:
    words = None if base is None else base.tokenizers.get("te1")
    length = options.max_token_length if words is None else min(options.max_token_length, words.model_max_length)
    return {"max_token_length": length, "model_version": SPEC.label, "area": AREA, "control_area": control_area(options)}


SPEC = FamilySpec(
    name="flux2",
    label="FLUX.2 Klein",
    needs="a FLUX.2 Klein transformer",
    files=(TRANSFORMER,),
    pipelines=("Flux2Klein",),
    configs=_KLEIN_4B,
    parts={
        "backbone": PartSpec("transformer", "Flux2Transformer2DModel", Flux2Transformer2DModel.from_config, _layout, transformer.PREFIXES),
        "vae": SQUARE_VAE,
        "te1": QWEN3_PART,
    },
    belongs={VAE: "vae", TEXT_ENCODER: "text_encoder"},
)
LOADER = Loader(
    spec=SPEC,
    companions={
        "vae": Companion("vae", "the VAE", "flux2-vae.safetensors"),
        "te1": Companion("text_encoder", "the text encoder Qwen3", "qwen_3_4b.safetensors"),
    },
    version=Version("flux_2_klein", "FLUX.2-klein", "https://github.com/black-forest-labs/flux2", is_v2=False),
    config_of=transformer_config,
    same=("attention_head_dim", "num_attention_heads"),
    untold=("axes_dims_rope", "rope_theta", "eps", "timestep_guidance_channels"),
    problems=_problems,
    settings=_settings,
    versions={"9b": _KLEIN_9B},
    kept=("is_distilled",),
)
