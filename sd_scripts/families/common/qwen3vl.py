"""The text encoder Qwen3-VL, as several families load it and ask it, and a small one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from sd_scripts.library.loading.common import Companion, PartSpec
from sd_scripts.library.loading.layouts import Stored

from .qwen3vl_signs import TEXT_ENCODER
from .tiny_words import MARKS
from .tokenizers import TokenizerSpec


def _layout(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """ComfyUI's names: the language model is `model`, and the visual part stands beside it."""
    return lambda key: Stored(re.sub(r"^(model\.)?language_model\.", "model.", key).replace("model.visual.", "visual.", 1))


WORDS = TokenizerSpec(
    "tokenizer",
    None,
    Qwen2Tokenizer,
    ("vocab.json", "merges.txt", "tokenizer_config.json"),
    (("Qwen/Qwen3-VL-8B-Instruct", ""),),
    "Qwen3-VL's",
    "4.5 MB",
)
QWEN3VL_PART = PartSpec(
    folder="text_encoder",
    class_name="Qwen3VLForConditionalGeneration",
    make=lambda config: Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_dict(config)),
    layout=_layout,
    prefixes=("text_encoders.qwen3vl_4b.transformer.", "text_encoders.qwen3vl_8b.transformer."),
    kinds=(TEXT_ENCODER,),
    tokenizer=WORDS,
    stem="model",
    # Rows of text are taken before the head, which some files leave out.
    stand_ins={"lm_head.weight": "model.language_model.embed_tokens.weight"},
    companion=Companion("text_encoder", "the text encoder Qwen3-VL-4B", "qwen3vl_4b.safetensors"),
)


def tiny_qwen3vl(tokenizer: Any, width: int = 32, num_layers: int = 2) -> Qwen3VLForConditionalGeneration:
    """A Qwen3-VL with heads of 16 that reads this tokenizer's tokens; weights come from torch's generator as the caller has set it."""
    marks = dict(zip(MARKS, tokenizer.convert_tokens_to_ids(list(MARKS)), strict=True))
    text = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 3, 3], "mrope_interleaved": True},
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": marks["<|im_end|>"],
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": width,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=marks["<|image_pad|>"],
            video_token_id=marks["<|video_pad|>"],
            vision_start_token_id=marks["<|vision_start|>"],
            vision_end_token_id=marks["<|vision_end|>"],
        )
    )
