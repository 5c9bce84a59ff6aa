"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.schema.facts import FamilyFacts, NetworkFacts

FACTS = FamilyFacts(
    label="Style transfer",
    place=6,
    edits=False,
    companions=("vae",),
    whole_files=True,
    network=NetworkFacts(
        head_sizes=lambda model: (model.attention_head_dim,),
        text_lengths_vary=lambda model: False,
        always_masked=False,
        mostly_weights=False,
        guided_together=True,
        quantized_encoder=None,
        vae_in_16_bits=True,
    ),
    lora_module=None,
    signs=(),
)
