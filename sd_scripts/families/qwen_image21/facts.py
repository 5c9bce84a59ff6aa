"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.families.common.qwen3vl_signs import QWEN3VL_SIGN
from sd_scripts.families.common.transformer_facts import TransformerFacts, TransformerMarks, TransformerNetworkFacts
from sd_scripts.schema.facts import PublishedBase, Sign

TRANSFORMER = "a Qwen-Image-2.1 transformer"
VAE = "a VAE of Qwen-Image-2.1 alone"
FACTS = TransformerFacts(
    label="Qwen-Image-2.1",
    place=51,
    edits=True,
    demo="toy-star-qwen21",
    kohya=None,
    adapters=TransformerMarks(
        architectures=("qwen_image_21", "qwen-image-2.1"),
        layers=r"transformer_blocks[._]\d+[._]img_mlp[._](gate_layer|gate_up|proj|out)([._]|$)",
    ),
    companions=("vae", "text_encoder"),
    network=TransformerNetworkFacts(
        text_lengths_vary=lambda model: True, always_masked=True, mostly_weights=True, guided_together=False, quantized_encoder="te1"
    ),
    lora_module="networks.lora_qwen_image",
    signs=(
        Sign(TRANSFORMER, lambda names: names.has("txt_in.text_norm.weight")),
        Sign(
            VAE,
            lambda names: len(names.shapes.get("decoder.conv_in.weight", ())) == 5 and names.starts("decoder.up_blocks.3."),
            companion=True,
        ),
        QWEN3VL_SIGN,
    ),
    bases=(PublishedBase(pieces=(), licence="Qwen's own: read it where the model is published", undistilled=None),),
)
