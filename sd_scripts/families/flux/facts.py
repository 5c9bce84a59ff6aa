"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.families.common.double_stream_signs import TRANSFORMER_SIGN
from sd_scripts.families.common.transformer_facts import TransformerFacts, TransformerKohya, TransformerMarks, TransformerNetworkFacts
from sd_scripts.schema.facts import PublishedBase

FACTS = TransformerFacts(
    label="FLUX",
    place=20,
    edits=False,
    demo="toy-star-flux",
    kohya=TransformerKohya(
        asked=1,
        boxes=("flux1_checkbox",),
        marks=("ae", "t5xxl", "model_prediction_type", "guidance_scale", "t5xxl_max_token_length", "apply_t5_attn_mask"),
        hints=(),
        models=("flux",),
        model_type="flux",
        like=("hunyuan_image", "lumina"),
        prefix="flux",
        names={
            "flux1_cache_text_encoder_outputs": "cache_text_encoder_outputs",
            "flux1_cache_text_encoder_outputs_to_disk": "cache_text_encoder_outputs_to_disk",
            "flux1_clip_l": "clip_l",
            "flux1_t5xxl": "t5xxl",
            "flux_fused_backward_pass": "fused_backward_pass",
        },
        options={},
        types={
            "networks.lora_flux": "transformer",
            "networks.oft_flux": "transformer oft",
            "flux1": "transformer",
            "flux1 oft": "transformer oft",
        },
        defaults={"timestep_sampling": "sigma", "discrete_flow_shift": 3.0, "model_prediction_type": "sigma_scaled", "guidance_scale": 3.5},
        swaps_pairs=True,
    ),
    adapters=TransformerMarks(architectures=("flux",), layers=r"double_blocks|single_blocks|single_transformer_blocks|lora_te3_"),
    companions=("ae", "clip_l", "t5xxl"),
    network=TransformerNetworkFacts(
        text_lengths_vary=lambda model: model.apply_t5_attn_mask,
        always_masked=False,
        mostly_weights=True,
        guided_together=False,
        quantized_encoder="te3",
    ),
    lora_module="networks.lora_flux",
    signs=(TRANSFORMER_SIGN,),
    bases=(
        PublishedBase(pieces=("schnell",), licence="Apache-2.0", undistilled="black-forest-labs/FLUX.1-dev"),
        PublishedBase(
            pieces=(),
            licence="FLUX.1 dev's: the model and what is trained from it for non-commercial use, images are free",
            undistilled=None,
        ),
    ),
)
