"""The published layout of transformers with double and single blocks that are told a pooled vector and mostly a guidance scale.

The blocks are as in `double_stream_original`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sd_scripts.library.loading.layouts import Stored

from . import double_stream_original as double_stream

_ENDS = {
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
}
_POOLED = {"vector_in.in_layer.weight": "time_text_embed.text_embedder.linear_1.weight"}


def transformer(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """Where a transformer's tensors (diffusers names) stand in a published file; see layouts.Layout."""
    return double_stream.places(config, _end)


def _end(layer: str, kind: str) -> Stored | None:
    if layer not in _ENDS:
        return None
    # diffusers' last modulation gives scale, then shift; the published one shift, then scale.
    return Stored(f"{_ENDS[layer]}.{kind}", "swapped" if layer == "norm_out.linear" else "same")


def config_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Configuration of the transformer whose file (published or diffusers layout) has tensors of these shapes: depth, widths, guidance.

    Raises KeyError for a file that lacks one of the needed tensors, IndexError for one in another number of dimensions.
    """
    return {
        **double_stream.config_of(shapes),
        "pooled_projection_dim": double_stream.shape_of(shapes, "vector_in.in_layer.weight", _POOLED)[1],
        "guidance_embeds": any(name.startswith(("guidance_in.", "time_text_embed.guidance_embedder.")) for name in shapes),
    }
