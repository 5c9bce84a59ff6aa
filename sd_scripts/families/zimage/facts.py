"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.families.common.qwen3_signs import QWEN3_SIGN
from sd_scripts.families.common.transformer_facts import TransformerFacts, TransformerMarks, TransformerNetworkFacts
from sd_scripts.schema.facts import PublishedBase, Sign

TRANSFORMER = "a Z-Image transformer"
FACTS = TransformerFacts(
    label="Z-Image",
    place=60,
    edits=False,
    demo="toy-star-zimage",
    kohya=None,
    adapters=TransformerMarks(
        architectures=("z_image", "z-image"),
        layers=r"(^|[._])(layers|(noise|context)_refiner)[._]\d+[._](attention|feed_forward|adaLN)",
    ),
    companions=("vae", "text_encoder"),
    network=TransformerNetworkFacts(
        text_lengths_vary=lambda model: True, always_masked=False, mostly_weights=True, guided_together=True, quantized_encoder="te1"
    ),
    lora_module="networks.lora_zimage",
    signs=(
        Sign(TRANSFORMER, lambda names: names.has("noise_refiner.0.") and names.has("cap_pad_token", "all_x_embedder")),
        QWEN3_SIGN,
    ),
    bases=(
        PublishedBase(pieces=("turbo",), licence="Apache-2.0", undistilled="Tongyi-MAI/Z-Image"),
        PublishedBase(pieces=(), licence="Apache-2.0", undistilled=None),
    ),
)
