"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.schema.facts import AdapterMarks, FamilyFacts, KohyaFacts

FACTS = FamilyFacts(
    label="SDXL",
    place=0,
    evaluates=False,
    demo="toy-star",
    labels={},
    kohya=KohyaFacts(
        asked=1,
        boxes=("sdxl", "sdxl_checkbox"),
        versions=(),
        marks=("learning_rate_te2", "no_half_vae", "block_lr"),
        models=("xl", "pony", "illustrious"),
        side=1024,
        model_type=None,
        like=("sd3",),
        prefix="sdxl",
        names={"sdxl_cache_text_encoder_outputs": "cache_text_encoder_outputs", "sdxl_no_half_vae": "no_half_vae"},
        types={},
        defaults={},
        text_rates=("learning_rate_te1", "learning_rate_te2"),
        dreambooth_trains_text=False,
        unet_blocks=(9, 1, 9),
        swaps_pairs=False,
    ),
    adapters=AdapterMarks(
        architectures=("sdxl", "stable-diffusion-xl"),
        text_widths=(2048,),
        layers=r"lora_te2_|text_encoder_2|^lora_te1_.*|conditioner_embedders",
    ),
)
