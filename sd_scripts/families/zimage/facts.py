"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.families.common.qwen3_signs import QWEN3_SIGN
from sd_scripts.families.common.transformer_facts import transformer_facts
from sd_scripts.schema.facts import AdapterMarks, PublishedBase, Sign

TRANSFORMER = "a Z-Image transformer"
FACTS = transformer_facts(
    label="Z-Image",
    place=60,
    edits=False,
    demo="toy-star-zimage",
    kohya=None,
    adapters=AdapterMarks(
        architectures=("z_image", "z-image"),
        text_widths=(),
        layers=r"(^|[._])(layers|(noise|context)_refiner)[._]\d+[._](attention|feed_forward|adaLN)",
    ),
    companions=("vae", "text_encoder"),
    head_sizes=lambda model: (128,),
    text_lengths_vary=lambda model: True,
    always_masked=False,
    mostly_weights=True,
    guided_together=True,
    quantized_encoder="te1",
    vae_in_16_bits=True,
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
