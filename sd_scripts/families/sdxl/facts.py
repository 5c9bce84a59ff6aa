"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.families.common.unet_signs import text_width
from sd_scripts.schema.facts import AdapterMarks, FamilyFacts, KohyaFacts, NetworkFacts, PublishedBase, Sign, TensorNames

CHECKPOINT = "an SDXL checkpoint"
UNET = "the UNet of SDXL alone"


def _is_checkpoint(names: TensorNames) -> bool:
    # Detection of the whole checkpoint: its two encoders. The UNet alone is told apart below.
    return names.starts("conditioner.embedders.1.model.") and names.starts("conditioner.embedders.0.transformer.")


def _is_unet(names: TensorNames) -> bool:
    # SD 2.x's unCLIP models have embeddings by the same name, beside their text encoder.
    embeds_sizes = names.has("add_embedding.linear_1.weight", "label_emb.0.0.weight")
    return not names.starts("cond_stage_model.") and (text_width(names) == 2048 or embeds_sizes)


FACTS = FamilyFacts(
    label="SDXL",
    place=0,
    edits=False,
    evaluates=False,
    demo="toy-star",
    labels={},
    kohya=KohyaFacts(
        asked=2,
        boxes=("sdxl", "sdxl_checkbox"),
        versions=(),
        marks=("learning_rate_te2", "block_lr"),
        hints=("no_half_vae",),
        models=("xl", "pony", "illustrious"),
        side=1024,
        model_type=None,
        like=("sd3",),
        prefix="sdxl",
        names={"sdxl_cache_text_encoder_outputs": "cache_text_encoder_outputs", "sdxl_no_half_vae": "no_half_vae"},
        options={},
        types={},
        defaults={},
        text_rates=("learning_rate_te1", "learning_rate_te2"),
        dreambooth_trains_text=False,
        unet_blocks=(9, 1, 9),
        middle_parts=3,
        swaps_pairs=False,
    ),
    adapters=AdapterMarks(
        architectures=("sdxl", "stable-diffusion-xl"),
        text_widths=(2048,),
        layers=r"lora_te2_|text_encoder_2|^lora_te1_.*|conditioner_embedders",
    ),
    companions=("vae",),
    whole_files=True,
    network=NetworkFacts(
        head_sizes=lambda model: (64,),
        text_lengths_vary=lambda model: False,
        always_masked=False,
        mostly_weights=False,
        guided_together=True,
        quantized_encoder=None,
        vae_in_16_bits=False,
    ),
    lora_module="networks.lora",
    signs=(
        Sign(CHECKPOINT, _is_checkpoint),
        Sign("an SDXL refiner", lambda names: names.starts("conditioner.embedders.0.model.")),
        Sign(UNET, _is_unet),
    ),
    bases=(
        PublishedBase(
            pieces=("turbo",),
            licence="Stability's for SDXL Turbo: not for commercial use without their licence",
            undistilled="stabilityai/stable-diffusion-xl-base-1.0",
        ),
        PublishedBase(pieces=(), licence="CreativeML Open RAIL++-M: free to use but for what it lists as harmful", undistilled=None),
    ),
)
