"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.families.common.flux2_signs import KLEIN, is_flux2
from sd_scripts.families.common.qwen3_signs import QWEN3_SIGN
from sd_scripts.families.common.square_vae_signs import SQUARE_VAE_SIGN
from sd_scripts.families.common.transformer_facts import TransformerFacts, TransformerMarks, TransformerNetworkFacts
from sd_scripts.schema.facts import PublishedBase, Sign

FACTS = TransformerFacts(
    label="FLUX.2 Klein",
    place=30,
    edits=True,
    demo="toy-star-flux2",
    kohya=None,
    adapters=TransformerMarks(architectures=("flux_2", "flux-2", "flux2", "flux.2"), layers="double_stream_modulation_"),
    companions=("vae", "text_encoder"),
    network=TransformerNetworkFacts(
        text_lengths_vary=lambda model: False, always_masked=False, mostly_weights=True, guided_together=False, quantized_encoder="te1"
    ),
    lora_module="networks.lora_flux_2",
    signs=(
        Sign(KLEIN, lambda names: is_flux2(names, guided=False)),
        SQUARE_VAE_SIGN,
        QWEN3_SIGN,
    ),
    bases=(
        PublishedBase(pieces=("klein", "base", "4b"), licence="Apache-2.0", undistilled=None),
        PublishedBase(
            pieces=("klein", "base", "9b"), licence="FLUX's: the model and what is trained from it for non-commercial use", undistilled=None
        ),
        PublishedBase(pieces=("klein", "4b"), licence="Apache-2.0", undistilled="black-forest-labs/FLUX.2-klein-base-4B"),
        PublishedBase(
            pieces=("klein", "9b"),
            licence="FLUX's: the model and what is trained from it for non-commercial use",
            undistilled="black-forest-labs/FLUX.2-klein-base-9B",
        ),
        PublishedBase(pieces=(), licence="Apache-2.0 if it is made from Klein 4B, non-commercial if from 9B", undistilled=None),
    ),
)
