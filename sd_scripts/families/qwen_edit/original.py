"""The layouts of Qwen-Image's single files: where each tensor of the diffusers and transformers layouts stands, both ways.

The transformer is published with diffusers' names; the text encoder with those of its first transformers. Knows
names and shapes, not files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from sd_scripts.families.common.transformer_shapes import count, rotary_axes
from sd_scripts.library.loading.layouts import Stored

CONTROLS_AT_ZERO = "__index_timestep_zero__"
"""An empty tensor by which ComfyUI's files of edit-2511 say that control images are at time 0."""


def transformer(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """The transformer's names are diffusers' own in all files; see layouts.Layout."""
    return Stored


def text_encoder(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """Qwen2.5-VL's names before transformers 4.52: the language model is `model`, and the visual part stands beside it."""

    def stored(key: str) -> Stored:
        key = re.sub(r"^model\.language_model\.", "model.", key)
        return Stored(re.sub(r"^model\.visual\.", "visual.", key))

    return stored


def config_of(shapes: Mapping[str, tuple[int, ...]], zero_cond_t: bool) -> dict[str, Any]:
    """Configuration of the transformer whose file has tensors of these shapes: depth and widths.

    Raises KeyError for a file that lacks one of the needed tensors, IndexError for one in another number of dimensions.
    """
    width, channels = shapes["img_in.weight"][0], shapes["img_in.weight"][1]
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return {
        "patch_size": 2,
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // 4,
        "num_layers": count(shapes, r"transformer_blocks\.(\d+)\."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "guidance_embeds": False,
        "axes_dims_rope": rotary_axes(head),
        "zero_cond_t": zero_cond_t,
    }
