"""Signs of files with a FLUX.1 transformer. Loads no torch."""

from __future__ import annotations

from sd_scripts.schema.facts import Sign

TRANSFORMER = "a FLUX transformer"

TRANSFORMER_SIGN = Sign(
    TRANSFORMER,
    lambda names: (
        names.has("double_blocks.0.", "single_transformer_blocks.0.")
        and not names.has("distilled_guidance_layer.", "double_stream_modulation_img.")
    ),
)
"""Names are the same in bf16 and in fp8 files, which only add scales. Other models have these blocks, and one network for their modulation.
That its tensors tell no family is right: the same network was trained for text to image and for editing."""
