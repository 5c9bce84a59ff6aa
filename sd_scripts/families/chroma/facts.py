"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.families.common.transformer_facts import TransformerFacts, TransformerMarks, TransformerNetworkFacts
from sd_scripts.schema.facts import PublishedBase, Sign

TRANSFORMER = "a Chroma transformer"
FACTS = TransformerFacts(
    label="Chroma",
    place=40,
    edits=False,
    demo="toy-star-chroma",
    kohya=None,
    adapters=TransformerMarks(architectures=("chroma",), layers="distilled_guidance_layer"),
    companions=("ae", "t5xxl"),
    network=TransformerNetworkFacts(
        text_lengths_vary=lambda model: True, always_masked=False, mostly_weights=True, guided_together=False, quantized_encoder="te3"
    ),
    lora_module="networks.lora_flux",
    signs=(Sign(TRANSFORMER, lambda names: names.has("distilled_guidance_layer.")),),
    bases=(PublishedBase(pieces=(), licence="Apache-2.0", undistilled=None),),
)
