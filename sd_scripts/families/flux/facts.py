"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.schema.facts import FamilyFacts, Sign

TRANSFORMER = "a FLUX transformer"
FACTS = FamilyFacts(
    label="FLUX",
    place=2,
    edits=False,
    lora_module="networks.lora_flux",
    signs=(
        Sign("a FLUX.2 transformer", lambda names: names.has("double_stream_modulation_img.")),
        # Names are the same in bf16 and in fp8 files, which only add scales.
        Sign(TRANSFORMER, lambda names: names.has("double_blocks.0.", "single_transformer_blocks.0.")),
    ),
)
