"""Signs of files with a Qwen3 text encoder. Loads no torch."""

from __future__ import annotations

from sd_scripts.schema.facts import Sign

TEXT_ENCODER = "a Qwen3 text encoder"
QWEN3_SIGN = Sign(
    TEXT_ENCODER,
    lambda names: (
        names.has("layers.0.self_attn.q_norm.weight")
        and names.has("layers.0.self_attn.q_proj.weight")
        and not names.has("visual.blocks.0.")
    ),
    companion=True,
)
