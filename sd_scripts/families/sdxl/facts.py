"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.schema.facts import FamilyFacts, NetworkFacts

FACTS = FamilyFacts(
    label="SDXL",
    place=0,
    edits=False,
    companions=("vae",),
    whole_files=True,
    network=NetworkFacts(
        head_sizes=lambda model: (64,),
        text_lengths_vary=lambda model: False,
        always_masked=False,
        mostly_weights=False,
        guided_together=True,
        quantized_encoder=None,
        vae_in_16_bits=False,
    ),
)
