"""Signs of files with a UNet. Loads no torch."""

from __future__ import annotations

from sd_scripts.schema.facts import TensorNames

_TO_K = "transformer_blocks.0.attn2.to_k.weight"
_CROSS_ATTENTION = tuple(
    prefix + block + _TO_K
    for prefix, blocks in (
        ("model.diffusion_model.", ("input_blocks.1.1.", "input_blocks.4.1.")),
        ("", ("input_blocks.1.1.", "input_blocks.4.1.", "down_blocks.0.attentions.0.", "down_blocks.1.attentions.0.")),
    )
    for block in blocks
)


def text_width(names: TensorNames) -> int:
    """Width of the text that the UNet's first cross-attention reads; 0 where there is none."""
    return next((names.shapes[key][-1] for key in _CROSS_ATTENTION if names.shapes.get(key)), 0)
