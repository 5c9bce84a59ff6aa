"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.families.common.double_stream_signs import TRANSFORMER_SIGN
from sd_scripts.families.common.transformer_facts import TransformerFacts, TransformerMarks, TransformerNetworkFacts
from sd_scripts.schema.facts import PublishedBase

FACTS = TransformerFacts(
    label="FLUX.1 Kontext",
    place=25,
    edits=True,
    demo="toy-edit-border-kontext",
    kohya=None,
    # Layers have FLUX.1's names, so that they tell nothing.
    adapters=TransformerMarks(architectures=("flux_kontext", "flux-kontext", "flux-1-kontext"), layers=r"(?!)"),
    companions=("ae", "clip_l", "t5xxl"),
    network=TransformerNetworkFacts(
        text_lengths_vary=lambda model: False, always_masked=False, mostly_weights=True, guided_together=False, quantized_encoder="te3"
    ),
    lora_module="networks.lora_flux",
    signs=(TRANSFORMER_SIGN,),
    bases=(
        PublishedBase(
            pieces=(),
            licence="FLUX.1 Kontext dev's: the model and what is trained from it for non-commercial use, images are free",
            undistilled=None,
        ),
    ),
)
