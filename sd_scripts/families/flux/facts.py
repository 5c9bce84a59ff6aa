"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.schema.facts import FamilyFacts, NetworkFacts, Sign

TRANSFORMER = "a FLUX transformer"
FACTS = FamilyFacts(
    label="FLUX",
    place=2,
    edits=False,
    companions=("ae", "clip_l", "t5xxl"),
    whole_files=False,
    network=NetworkFacts(
        head_sizes=lambda model: (128,),
        text_lengths_vary=lambda model: model.apply_t5_attn_mask,
        always_masked=False,
        mostly_weights=True,
        guided_together=False,
        quantized_encoder="te3",
        vae_in_16_bits=True,
    ),
    lora_module="networks.lora_flux",
    signs=(
        Sign("a FLUX.2 transformer", lambda names: names.has("double_stream_modulation_img.")),
        # Names are the same in bf16 and in fp8 files, which only add scales.
        Sign(TRANSFORMER, lambda names: names.has("double_blocks.0.", "single_transformer_blocks.0.")),
    ),
)
