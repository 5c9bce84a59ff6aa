"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.schema.facts import FamilyFacts, NetworkFacts

FACTS = FamilyFacts(
    label="Qwen-Image-Edit",
    place=3,
    edits=True,
    companions=("vae", "text_encoder"),
    whole_files=False,
    network=NetworkFacts(
        head_sizes=lambda model: (128,),
        text_lengths_vary=lambda model: True,
        always_masked=False,
        mostly_weights=True,
        guided_together=False,
        quantized_encoder="te1",
        vae_in_16_bits=True,
    ),
)
