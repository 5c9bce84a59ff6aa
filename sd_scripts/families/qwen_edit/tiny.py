"""The small networks of a Qwen-Image model; weights come from torch's generator as the caller has set it.

Latents have the real 16 channels and statistics, 2 x 2 of them are a token, and the templates have the real number of tokens.
"""

from __future__ import annotations

from typing import Any

from diffusers import QwenImageTransformer2DModel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from sd_scripts.families.common.tiny_words import MARKS


def tiny_qwen_text_encoder(tokenizer: Any) -> Qwen2_5_VLForConditionalGeneration:
    """A Qwen2.5-VL of two layers that reads this tokenizer's tokens and images in patches of 14, four of which are a token."""
    marks = dict(zip(MARKS, tokenizer.convert_tokens_to_ids(list(MARKS)), strict=True))
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": len(tokenizer),
        # Half a head's numbers, for time, row and column: 1/4, 3/8 and 3/8 of them, as in the real one.
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": marks["<|im_end|>"],
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=marks["<|image_pad|>"],
        video_token_id=marks["<|video_pad|>"],
        vision_start_token_id=marks["<|vision_start|>"],
        vision_end_token_id=marks["<|vision_end|>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def tiny_qwen_transformer(zero_cond_t: bool) -> QwenImageTransformer2DModel:
    """A transformer of two blocks and two heads."""
    return QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=zero_cond_t,
    )
