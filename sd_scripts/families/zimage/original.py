"""The layouts of Z-Image's single files: where each tensor of the diffusers and transformers layouts stands, both ways.

The transformer is published with query, key and value as one matrix and other names for what is around the blocks; ComfyUI's files have
these names. The VAE is FLUX's, stored as those of other models are, see `original`. Knows names and shapes, not files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sd_scripts.families.common.transformer_shapes import count
from sd_scripts.library.loading.layouts import Stored

# D: width of the transformer. Rows of the packed matrix: q, k, v of D rows each.

UNREAD = "norm_final.weight"
"""A tensor of some published files that the transformer does not have."""

_PACKED = {"to_q": 0, "to_k": 1, "to_v": 2}
_ATTENTION = {"to_out.0": "out", "norm_q": "q_norm", "norm_k": "k_norm"}
_ENDS = {"all_x_embedder.2-1": "x_embedder", "all_final_layer.2-1": "final_layer"}
_SIDES = (1 / 4, 3 / 8, 3 / 8)
"""Shares of a head's rotary frequencies for text position, row and column: the published 32, 48, 48 of 128."""


def transformer(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """Where a transformer's tensors (diffusers names) stand in a published file; see layouts.Layout."""
    width = int(config["dim"])

    def stored(key: str) -> Stored:
        block, attention, rest = key.partition(".attention.")
        if attention:
            layer, _, kind = rest.rpartition(".")
            if layer in _PACKED:
                first = _PACKED[layer] * width
                return Stored(f"{block}.attention.qkv.{kind}", "rows", (first, first + width, 3 * width))
            return Stored(f"{block}.attention.{_ATTENTION[layer]}.{kind}")
        for own, published in _ENDS.items():
            if key.startswith(f"{own}."):
                return Stored(published + key.removeprefix(own))
        return Stored(key)

    return stored


def config_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Configuration of the transformer whose file (published or diffusers layout) has tensors of these shapes: depth and widths.

    Lengths of the rotary tables are the published ones; their split stands in no tensor and is taken to be as in the published model.
    Raises KeyError for a file that lacks one of the needed tensors, IndexError for one in another number of dimensions.
    """

    def shape(published: str, diffusers: str) -> tuple[int, ...]:
        found = shapes.get(published) or shapes.get(diffusers)
        if found is None:
            raise KeyError(published)
        return found

    width, numbers = shape("x_embedder.weight", "all_x_embedder.2-1.weight")[:2]
    head = shape("layers.0.attention.q_norm.weight", "layers.0.attention.norm_q.weight")[0]
    return {
        "all_patch_size": [2],
        "all_f_patch_size": [1],
        "in_channels": numbers // 4,
        "dim": width,
        "n_layers": count(shapes, r"layers\.(\d+)\."),
        "n_refiner_layers": count(shapes, r"noise_refiner\.(\d+)\."),
        "n_heads": width // head,
        "n_kv_heads": width // head,
        "norm_eps": 1e-5,
        "qk_norm": True,
        "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
        "rope_theta": 256.0,
        "t_scale": 1000.0,
        "axes_dims": [round(head * share) for share in _SIDES],
        "axes_lens": [1536, 512, 512],
    }
