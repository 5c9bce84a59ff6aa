"""The text encoder T5-XXL, as several families load it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import T5Config, T5EncoderModel, T5Tokenizer

from sd_scripts.library.core.protocols import Dtypes
from sd_scripts.library.loading import layouts
from sd_scripts.library.loading.common import Base, Companion, PartSpec, config_of, dtypes_of
from sd_scripts.runs.model_headers import T5

from .tokenizers import TokenizerSpec

_PUBLISHED_T5 = (
    ("google/t5-v1_1-xxl", ""),
    ("black-forest-labs/FLUX.1-schnell", "tokenizer_2/"),
    ("black-forest-labs/FLUX.1-dev", "tokenizer_2/"),
)

T5_WORDS = TokenizerSpec("tokenizer_2", None, T5Tokenizer, ("spiece.model",), _PUBLISHED_T5, "T5's", "0.8 MB")
T5_PART = PartSpec(
    folder="text_encoder_2",
    class_name="T5EncoderModel",
    # Published configurations have dropout, which would draw from torch's global generator when the encoder is trained.
    make=lambda config: T5EncoderModel(T5Config.from_dict({**config, "dropout_rate": 0.0})),
    layout=lambda config: layouts.Stored,
    prefixes=("text_encoders.t5xxl.transformer.", "cond_stage_model.t5xxl.transformer."),
    kinds=(T5,),
    tokenizer=T5_WORDS,
    stem="model",
    companion=Companion("t5xxl", "the text encoder T5-XXL", "t5xxl_fp16.safetensors"),
)


def settle_t5(encoder: nn.Module) -> None:
    """One embedding instead of two equal ones; in fp16, which T5's MLPs overflow, their last layers in float32, as in transformers."""
    encoder.encoder.embed_tokens.weight = encoder.shared.weight
    if encoder.shared.weight.dtype == torch.float16:
        for name, layer in encoder.named_modules():
            if name.endswith(".wo"):
                layer.float()


def t5_problems(base: Base, option: str, options: Any, dtype: Dtypes) -> list[str]:
    """What is wrong with T5, which `option` names, in front of the transformer, and with how it is to be held."""
    width, wanted = config_of(base.networks["te3"].module)["d_model"], base.networks["backbone"].module.config.joint_attention_dim
    problems = []
    if width != wanted:
        problems.append(f"{option}: the text encoder T5-XXL makes vectors of {width} numbers, but the transformer takes {wanted}")
    if options.text_encoder_quantization != "none" and dtypes_of(["te3"], dtype, options.vae_dtype)["te3"] is torch.float16:
        problems.append(
            "text_encoder_quantization: T5 overflows in fp16 unless some of its layers are float32; take mixed_precision bf16, or none"
        )
    return problems
