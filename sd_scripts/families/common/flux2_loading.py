"""FLUX.2's transformer in files: the published layouts are those of `double_stream_original` and of other VAEs, with names of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diffusers import Flux2Transformer2DModel

from sd_scripts.library.loading.common import Base, PartSpec
from sd_scripts.library.loading.layouts import Stored

from . import double_stream_original as double_stream
from . import transformer_loading as transformer
from .flux2_options import Flux2ModelOptions

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
        **found,
        "axes_dims_rope": [found["attention_head_dim"] // 4] * 4,
        # Rows of query, key and value, then twice those of the MLP.
        "mlp_ratio": (rows - 3 * width) / (2 * width),
        "guidance_embeds": any(name.startswith(guidance) for name in shapes),
    }


def problems(base: Base, given: Sequence[str], reads: str) -> list[str]:
    """Why the transformer does not work on the VAE's latents or on three layers of the text encoder; reads: what the model reads with. See
    Loader.problems."""
    widths = 3 * transformer.text_width(base), base.networks["backbone"].module.config.joint_attention_dim
    return transformer.token_problems(base) + transformer.width_problems(given, *widths, reads)


def settings(options: Flux2ModelOptions, base: Base | None) -> dict[str, Any]:
    """See Loader.settings."""
    words = None if base is None else base.tokenizers.get("te1")
    length = options.max_token_length if words is None else min(options.max_token_length, words.model_max_length)
    return transformer.usual_settings(options, options.own_controls.model) | {"max_token_length": length}


TRANSFORMER_PART = PartSpec("transformer", "Flux2Transformer2DModel", Flux2Transformer2DModel.from_config, _layout, transformer.PREFIXES)
UNTOLD = ("axes_dims_rope", "rope_theta", "eps", "timestep_guidance_channels")
"""See Loader."""
