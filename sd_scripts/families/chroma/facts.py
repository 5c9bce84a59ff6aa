"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.families.common.transformer_facts import transformer_facts
from sd_scripts.schema.facts import AdapterMarks, PublishedBase, Sign

TRANSFORMER = "a Chroma transformer"
FACTS = transformer_facts(
    label="Chroma",
    place=40,
    edits=False,
    demo="toy-star-chroma",
    kohya=None,
    adapters=AdapterMarks(architectures=("chroma",), text_widths=(), layers="distilled_guidance_layer"),
    companions=("ae", "t5xxl"),
    head_sizes=lambda model: (128,),
    text_lengths_vary=lambda model: True,
    always_masked=False,
    mostly_weights=True,
    guided_together=False,
    quantized_encoder="te3",
    vae_in_16_bits=True,
    lora_module="networks.lora_flux",
    signs=(Sign(TRANSFORMER, lambda names: names.has("distilled_guidance_layer.")),),
    bases=(PublishedBase(pieces=(), licence="Apache-2.0", undistilled=None),),
)
