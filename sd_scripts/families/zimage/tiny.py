"""The small networks of a Z-Image model; weights come from torch's generator as the caller has set it.

Latents have the real 16 channels, 2 x 2 of them are a token, and captions are put into the template that Z-Image's tokenizer has for them.
"""

from __future__ import annotations

from typing import Any

from diffusers import ZImageTransformer2DModel
from torch import nn
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

from sd_scripts.families.qwen_edit.tiny import tiny_qwen_tokenizer

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""What Qwen3's template makes of plain messages."""


def tiny_zimage_tokenizer() -> Qwen2Tokenizer:
    """A tokenizer of bytes and the pieces of its chat template."""
    tokenizer = tiny_qwen_tokenizer(["user\n", "assistant\n", "<think>\n\n</think>\n\n"])
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def tiny_zimage_text_encoder(
    tokenizer: Any, width: int = 32, num_heads: int = 2, num_kv_heads: int = 1, num_positions: int = 2048
) -> Qwen3Model:
    """A Qwen3 of three layers, of which the last is not read, with heads of 16."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=16,
        max_position_embeddings=num_positions,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3Model(config)


def tiny_zimage_transformer(
    text_width: int = 32,
    width: int = 48,
    num_layers: int = 2,
    num_heads: int = 3,
    axes_dims: tuple[int, int, int] = (4, 6, 6),
    num_text_positions: int = 1536,
) -> ZImageTransformer2DModel:
    """A transformer with one refiner block each for picture and text; the numbers of axes_dims add up to the width of a head."""
    transformer = ZImageTransformer2DModel(
        in_channels=16,
        dim=width,
        n_layers=num_layers,
        n_refiner_layers=1,
        n_heads=num_heads,
        n_kv_heads=num_heads,
        cap_feat_dim=text_width,
        axes_dims=list(axes_dims),
        axes_lens=[num_text_positions, 512, 512],
    )
    # Zeros, or in older versions whatever was in memory, in a new model.
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        nn.init.normal_(token, std=0.02)
    return transformer
