"""Load FLUX.2 dev from a diffusers folder, a hub id, or a transformer file with its VAE and Mistral; write it again.

Mistral's states are taken after a quarter, a half and three quarters of its layers, so it is made with one layer more than that: the last
that is taken is not normalised then, wherever the network is run. What else its files hold, such as the part that sees, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import MistralConfig, MistralModel, PreTrainedTokenizerFast

from sd_scripts.families.common import flux2_loading as flux2
from sd_scripts.families.common.flux2_signs import DEV
from sd_scripts.families.common.square_vae import SQUARE_VAE
from sd_scripts.families.common.tokenizers import TokenizerSpec
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.library.core.protocols import Dtypes, Version
from sd_scripts.library.loading.common import BASE, Base, Companion, FamilySpec, PartSpec
from sd_scripts.library.loading.layouts import renaming

from .facts import FACTS, TEXT_ENCODER
from .options import Flux2DevModelOptions

_LAST, _NUM_LAYERS = 30, 40
"""The layer after the last whose states are taken, and layers of the published encoder."""
_LAYER = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


def mistral(config: Mapping[str, Any]) -> nn.Module:
    """From the configuration of a whole model, or of what was made of one here, which has num_whole_layers."""
    text = dict(config.get("text_config") or config)
    if "num_whole_layers" not in text:
        whole = text["num_hidden_layers"]
        text |= {"num_whole_layers": whole, "num_hidden_layers": 3 * whole // 4 + 1}
    return MistralModel(MistralConfig.from_dict(text))


MISTRAL_PART = PartSpec(
    folder="text_encoder",
    class_name="MistralModel",
    make=mistral,
    # ComfyUI's names.
    layout=renaming({"^": "model."}),
    prefixes=("text_encoders.mistral3_24b.transformer.",),
    kinds=(TEXT_ENCODER,),
    unread=tuple(f"layers.{number}." for number in range(_LAST + 1, _NUM_LAYERS)),
    inside=("language_model.model.", "model.language_model.", "model."),
    tokenizer=TokenizerSpec(
        "tokenizer",
        None,
        PreTrainedTokenizerFast,
        ("tokenizer.json", "tokenizer_config.json"),
        (("black-forest-labs/FLUX.2-dev", "tokenizer/"),),
        "Mistral's",
        "17 MB",
    ),
    stem="model",
    # A file for ComfyUI ends with the last layer that is taken.
    stand_ins={f"layers.{_LAST}.{name}": f"layers.{_LAST - 1}.{name}" for name in _LAYER}
    | {"norm.weight": f"layers.{_LAST - 1}.input_layernorm.weight"},
    other_classes=("Mistral3ForConditionalGeneration", "MistralForCausalLM"),
    companion=Companion("text_encoder", "the text encoder Mistral", "mistral_3_small_flux2_bf16.safetensors"),
)


def _problems(base: Base, given: Sequence[str], options: Flux2DevModelOptions, dtype: Dtypes) -> list[str]:
    problems = flux2.problems(base, given, "FLUX.2 dev reads with Mistral Small 3")
    if not base.networks["backbone"].module.config.guidance_embeds:
        problems.append(f"{BASE}: {base.source.label} embeds no guidance scale, so it is FLUX.2 Klein; choose its own family")
    return problems


SPEC = FamilySpec(
    name="flux2_dev",
    label=FACTS.label,
    files=(DEV,),
    pipelines=("Flux2Pipeline",),
    configs=Path(__file__).parent / "configs",
    parts={"backbone": flux2.TRANSFORMER_PART, "vae": SQUARE_VAE, "te1": MISTRAL_PART},
)
LOADER = Loader(
    spec=SPEC,
    options=Flux2DevModelOptions,
    version=Version("flux_2_dev", "FLUX.2-dev", "https://github.com/black-forest-labs/flux2", is_v2=False),
    config_of=flux2.transformer_config,
    untold=flux2.UNTOLD,
    problems=_problems,
    settings=flux2.settings,
    denoising=lambda options: {"guidance_scale": options.guidance_scale},
)
