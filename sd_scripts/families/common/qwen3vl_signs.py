"""Signs of files with a Qwen3-VL text encoder. Loads no torch."""

from __future__ import annotations

from sd_scripts.schema.facts import Sign

TEXT_ENCODER = "a Qwen3-VL text encoder"
QWEN3VL_SIGN = Sign(
    TEXT_ENCODER,
    lambda names: names.has("layers.0.self_attn.q_norm.weight") and names.has("visual.deepstack_merger_list.0.norm.weight"),
    companion=True,
)
