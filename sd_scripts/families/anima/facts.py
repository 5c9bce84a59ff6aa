"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.families.common.qwen3_signs import QWEN3_SIGN
from sd_scripts.families.common.qwen_vae_signs import QWEN_VAE_SIGN
from sd_scripts.families.common.transformer_facts import TransformerFacts, TransformerKohya, TransformerMarks, TransformerNetworkFacts
from sd_scripts.schema.facts import PublishedBase, Sign

TRANSFORMER = "an Anima transformer"
CONDITIONER = "a text conditioner of Anima alone"
_LICENCE = "CircleStone's: the model and what is trained from it for non-commercial use, images are free"
_ON_THE_PAGE = """cache_text_encoder_outputs cache_text_encoder_outputs_to_disk qwen3 vae llm_adapter_path t5_tokenizer_path
    discrete_flow_shift timestep_sampling sigmoid_scale qwen3_max_token_length t5_max_token_length attn_mode split_attn vae_chunk_size
    vae_disable_cache unsloth_offload_checkpointing qwen_image_vae_2d compile torch_compile compile_backend compile_mode compile_dynamic
    compile_fullgraph compile_cache_size_limit""".split()
"""What has a widget of its own for this family on kohya_ss's page."""
FACTS = TransformerFacts(
    label="Anima",
    place=54,
    edits=False,
    demo="toy-star-anima",
    kohya=TransformerKohya(
        asked=0,
        boxes=("anima_checkbox",),
        marks=("qwen3", "llm_adapter_path", "qwen3_max_token_length", "t5_max_token_length", "llm_adapter_lr"),
        hints=(),
        # Animagine is a model of SDXL.
        models=("anima-base", "anima_base", "anima-preview", "anima_preview", "circlestone"),
        model_type=None,
        like=(),
        prefix="anima",
        names={f"anima_{name}": name for name in _ON_THE_PAGE},
        options={
            "text_encoder": ("qwen3",),
            "text_conditioner": ("llm_adapter_path",),
            "max_token_length": ("qwen3_max_token_length", "t5_max_token_length"),
        },
        types={"networks.lora_anima": "transformer", "anima": "transformer"},
        defaults={"timestep_sampling": "sigmoid", "discrete_flow_shift": 1.0},
        swaps_pairs=False,
    ),
    adapters=TransformerMarks(
        architectures=("anima",),
        layers=(
            r"(llm_adapter|text_conditioner)[._]|(^|[._])blocks[._]\d+[._]((self|cross)_attn[._](q|k|v|output)_proj|mlp[._]layer[12]|adaln_mod)"
            r"|^transformer[._]transformer_blocks[._]\d+[._](attn[12]|ff)[._]"
        ),
    ),
    companions=("vae", "text_encoder", "text_conditioner"),
    network=TransformerNetworkFacts(
        text_lengths_vary=lambda model: False, always_masked=False, mostly_weights=False, guided_together=False, quantized_encoder="te1"
    ),
    lora_module="networks.lora_anima",
    signs=(
        Sign(TRANSFORMER, lambda names: names.has("llm_adapter.out_proj.") and names.has("blocks.0.adaln_modulation_self_attn.")),
        Sign(
            CONDITIONER, lambda names: names.has("blocks.0.norm_cross_attn") and not names.has("adaln_modulation_self_attn"), companion=True
        ),
        QWEN_VAE_SIGN,
        QWEN3_SIGN,
    ),
    bases=(
        PublishedBase(pieces=("anima", "turbo"), licence=_LICENCE, undistilled="circlestone-labs/Anima-Base-v1.0-Diffusers"),
        PublishedBase(pieces=(), licence=_LICENCE, undistilled=None),
    ),
)
