"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.families.common.qwen3vl_signs import QWEN3VL_SIGN
from sd_scripts.families.common.square_vae_signs import SQUARE_VAE_SIGN
from sd_scripts.families.common.transformer_facts import TransformerFacts, TransformerMarks, TransformerNetworkFacts
from sd_scripts.schema.facts import PublishedBase, Sign

TRANSFORMER = "a FLUX.3 transformer"
_LICENCE = "FLUX Kommunity: the model and what is trained from it for non-commercial use; images are free under 5 million dollars a year"
FACTS = TransformerFacts(
    label="FLUX.3 Image Klein",
    place=35,
    edits=True,
    demo="toy-star-flux3",
    kohya=None,
    adapters=TransformerMarks(
        architectures=("flux_3", "flux-3", "flux3", "flux.3"), layers=r"content_mode_blocks|txt_mode_blocks|mode_blocks\."
    ),
    companions=("vae", "text_encoder"),
    network=TransformerNetworkFacts(
        text_lengths_vary=lambda model: True, always_masked=False, mostly_weights=True, guided_together=False, quantized_encoder="te1"
    ),
    lora_module="networks.lora_flux_3",
    signs=(Sign(TRANSFORMER, lambda names: names.has("early_stream_modulations.image.")), SQUARE_VAE_SIGN, QWEN3VL_SIGN),
    bases=(
        PublishedBase(pieces=("klein", "base"), licence=_LICENCE, undistilled=None),
        PublishedBase(pieces=("klein",), licence=_LICENCE, undistilled="black-forest-labs/flux-3-image-klein-base"),
        PublishedBase(pieces=(), licence=_LICENCE, undistilled=None),
    ),
)
