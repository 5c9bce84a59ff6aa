"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.families.common.qwen_vae_signs import QWEN_VAE_SIGN
from sd_scripts.families.common.transformer_facts import TransformerFacts, TransformerMarks, TransformerNetworkFacts
from sd_scripts.schema.facts import PublishedBase, Sign

TRANSFORMER = "a Qwen-Image transformer"
TEXT_ENCODER = "a Qwen2.5-VL text encoder"
FACTS = TransformerFacts(
    label="Qwen-Image-Edit",
    place=50,
    edits=True,
    demo="toy-edit-border",
    kohya=None,
    adapters=TransformerMarks(architectures=("qwen_image", "qwen-image"), layers=r"transformer_blocks[._]\d+[._](img|txt)_(mlp|mod)"),
    companions=("vae", "text_encoder"),
    network=TransformerNetworkFacts(
        text_lengths_vary=lambda model: True, always_masked=False, mostly_weights=True, guided_together=False, quantized_encoder="te1"
    ),
    lora_module="networks.lora_qwen_image",
    signs=(
        Sign(TRANSFORMER, lambda names: names.has("transformer_blocks.0.img_mod.1.")),
        QWEN_VAE_SIGN,
        Sign(
            TEXT_ENCODER,
            lambda names: names.has("visual.blocks.0.attn.qkv.weight") and names.has("layers.0.self_attn.q_proj.bias"),
            companion=True,
        ),
    ),
    bases=(PublishedBase(pieces=(), licence="Apache-2.0", undistilled=None),),
)
