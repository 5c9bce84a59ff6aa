"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.schema.facts import FamilyFacts, NetworkFacts

FACTS = FamilyFacts(
    label="Small DDPM",
    place=70,
    edits=False,
    evaluates=False,
    demo=None,
    labels={},
    kohya=None,
    adapters=None,
    companions=("vae",),
    whole_files=True,
    network=NetworkFacts(
        head_sizes=lambda model: (model.attention_head_dim,),
        text_lengths_vary=lambda model: True,
        always_masked=True,
        mostly_weights=False,
        guided_together=True,
        quantized_encoder=None,
        vae_in_16_bits=True,
    ),
    lora_module=None,
    signs=(),
    bases=(),
)
