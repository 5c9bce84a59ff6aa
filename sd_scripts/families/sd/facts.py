"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.families.common.unet_signs import text_width
from sd_scripts.schema.facts import AdapterMarks, FamilyFacts, KohyaFacts, KohyaVersion, NetworkFacts, PublishedBase, Sign, TensorNames

FIRST, SECOND = "an SD 1.x model", "an SD 2.x model"
_NAMES_OF_SECOND = r"(stable-?diffusion|sd)[-_ ]?v?2[01]?(?!\d)|v2[-_.][01](?!\d)"
FIRST_UNET, SECOND_UNET = "the UNet of SD 1.x alone", "the UNet of SD 2.x alone"


def _is_third(names: TensorNames) -> bool:
    """SD3 in the published layout or in diffusers', whose attention has the names of other transformers' double blocks."""
    others = names.has("double_blocks.0.", "single_transformer_blocks.0.", "transformer_blocks.0.img_mod.1.")
    return names.has("joint_blocks.0.") or (names.has("transformer_blocks.0.attn.add_q_proj.") and not others)


FACTS = FamilyFacts(
    label="SD 1.5 / 2.x",
    place=10,
    edits=False,
    evaluates=False,
    demo="toy-star-sd",
    labels={},
    kohya=KohyaFacts(
        asked=3,
        boxes=(),
        versions=(KohyaVersion("v2", lambda names: text_width(names) == 1024, 1024, _NAMES_OF_SECOND),),
        marks=(),
        hints=(),
        models=("sd15", "v1-5", "sd-v1", "v2-1"),
        side=0,
        model_type=None,
        like=(),
        prefix="",
        names={},
        options={},
        types={},
        defaults={},
        text_rates=("learning_rate_te",),
        dreambooth_trains_text=True,
        unet_blocks=(12, 1, 12),
        middle_parts=1,
        swaps_pairs=False,
    ),
    # 768 in 1.x, 1024 in 2.x.
    adapters=AdapterMarks(
        architectures=("sd_v1", "sd_v2", "stable-diffusion-v1", "stable-diffusion-v2"), text_widths=(768, 1024), layers=r"^lora_te_"
    ),
    companions=("vae",),
    whole_files=True,
    network=NetworkFacts(
        # SD 1.x has eight heads on every level.
        head_sizes=lambda model: (40, 80, 160),
        text_lengths_vary=lambda model: False,
        always_masked=False,
        mostly_weights=False,
        guided_together=True,
        quantized_encoder=None,
        vae_in_16_bits=True,
    ),
    lora_module="networks.lora",
    signs=(
        Sign("an SD3 model", _is_third),
        Sign(FIRST, lambda names: names.starts("cond_stage_model.transformer.")),
        Sign(SECOND, lambda names: names.starts("cond_stage_model.model.")),
        Sign(FIRST_UNET, lambda names: text_width(names) == 768),
        Sign(SECOND_UNET, lambda names: text_width(names) == 1024),
    ),
    bases=(PublishedBase(pieces=(), licence="CreativeML Open RAIL-M: free to use but for what it lists as harmful", undistilled=None),),
)
