"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.schema.facts import AdapterMarks, FamilyFacts, NetworkFacts, Sign, TensorNames

TRANSFORMER = "a Qwen-Image transformer"
VAE = "a VAE of Qwen-Image alone"
TEXT_ENCODER = "a Qwen2.5-VL text encoder"


def _is_vae(names: TensorNames) -> bool:
    """Convolutions over time as well, in either layout; Wan's first VAE is of the same form."""
    film = len(names.shapes.get("decoder.conv_in.weight", ())) == 5 and names.starts("encoder.down_blocks.0.conv1.")
    return film or (names.starts("encoder.downsamples.") and names.starts("decoder.upsamples."))


FACTS = FamilyFacts(
    label="Qwen-Image-Edit",
    place=3,
    edits=True,
    evaluates=False,
    demo=None,
    labels={},
    kohya=None,
    adapters=AdapterMarks(
        architectures=("qwen_image", "qwen-image"), text_widths=(), layers=r"transformer_blocks[._]\d+[._](img|txt)_(mlp|mod)"
    ),
    companions=("vae", "text_encoder"),
    whole_files=False,
    network=NetworkFacts(
        head_sizes=lambda model: (128,),
        text_lengths_vary=lambda model: True,
        always_masked=False,
        mostly_weights=True,
        guided_together=False,
        quantized_encoder="te1",
        vae_in_16_bits=True,
    ),
    lora_module="networks.lora_qwen_image",
    signs=(
        Sign(TRANSFORMER, lambda names: names.has("transformer_blocks.0.img_mod.1.")),
        Sign(VAE, _is_vae),
        Sign(TEXT_ENCODER, lambda names: names.has("visual.blocks.0.attn.qkv.weight") and names.has("layers.0.self_attn.q_proj.weight")),
    ),
)
