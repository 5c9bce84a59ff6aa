"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.schema.facts import AdapterMarks, FamilyFacts, KohyaFacts

FACTS = FamilyFacts(
    label="SD 1.5 / 2.x",
    place=1,
    evaluates=False,
    demo="toy-star-sd",
    labels={},
    kohya=KohyaFacts(
        asked=2,
        boxes=(),
        versions=("v2",),
        marks=(),
        models=("sd15", "v1-5", "sd-v1", "v2-1"),
        side=0,
        model_type=None,
        like=(),
        prefix="",
        names={},
        types={},
        defaults={},
        text_rates=("learning_rate_te",),
        dreambooth_trains_text=True,
        unet_blocks=(12, 1, 12),
        swaps_pairs=False,
    ),
    # 768 in 1.x, 1024 in 2.x.
    adapters=AdapterMarks(
        architectures=("sd_v1", "sd_v2", "stable-diffusion-v1", "stable-diffusion-v2"), text_widths=(768, 1024), layers=r"^lora_te_"
    ),
)
