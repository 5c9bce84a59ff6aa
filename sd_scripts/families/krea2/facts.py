"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.families.common.qwen3vl_signs import QWEN3VL_SIGN
from sd_scripts.families.common.qwen_vae_signs import QWEN_VAE_SIGN
from sd_scripts.families.common.transformer_facts import TransformerFacts, TransformerMarks, TransformerNetworkFacts
from sd_scripts.schema.facts import PublishedBase, Sign

TRANSFORMER = "a Krea 2 transformer"
_LICENCE = "Krea's: free for those who earn less than a million dollars a year"
FACTS = TransformerFacts(
    label="Krea 2",
    place=52,
    edits=False,
    demo="toy-star-krea2",
    kohya=None,
    adapters=TransformerMarks(
        architectures=("krea2", "krea_2", "krea-2", "krea 2"),
        layers=r"((^|[._])(txtfusion|text_fusion)|[._]attn[._](wq|wk|wv|wo|to_gate))([._]|$)",
    ),
    companions=("vae", "text_encoder"),
    network=TransformerNetworkFacts(
        text_lengths_vary=lambda model: True, always_masked=False, mostly_weights=True, guided_together=False, quantized_encoder="te1"
    ),
    lora_module="networks.lora_krea2",
    signs=(
        Sign(TRANSFORMER, lambda names: names.has("txtfusion.projector.weight") or names.has("text_fusion.projector.weight")),
        QWEN_VAE_SIGN,
        QWEN3VL_SIGN,
    ),
    bases=(
        PublishedBase(pieces=("turbo",), licence=_LICENCE, undistilled="krea/Krea-2-Raw"),
        PublishedBase(pieces=(), licence=_LICENCE, undistilled=None),
    ),
)
