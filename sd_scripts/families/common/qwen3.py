"""The text encoder Qwen3, as several families load it, and a small one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

from sd_scripts.library.loading.common import Companion, PartSpec
from sd_scripts.library.loading.layouts import renaming

from .qwen3_signs import TEXT_ENCODER
from .tiny_words import tiny_qwen_tokenizer
from .tokenizers import TokenizerSpec

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""What Qwen3's template makes of plain messages."""


def _extras(config: Mapping[str, Any]) -> dict[str, str | Tensor]:
    """The head, which nobody reads here; in small models it is the embedding once more."""
    return {"lm_head.weight": "model.embed_tokens.weight"}


QWEN3_PART = PartSpec(
    folder="text_encoder",
    class_name="Qwen3Model",
    make=lambda config: Qwen3Model(Qwen3Config.from_dict(config)),
    # Qwen3 with its head: the model alone is `model` in it.
    layout=renaming({"^": "model."}),
    prefixes=("text_encoders.qwen3_4b.transformer.", "text_encoders.qwen3_8b.transformer."),
    kinds=(TEXT_ENCODER,),
    extras=_extras,
    tokenizer=TokenizerSpec(
        "tokenizer",
        None,
        Qwen2Tokenizer,
        # The chat template that captions are put into stands in the tokenizer's configuration.
        ("vocab.json", "merges.txt", "tokenizer_config.json"),
        (("Qwen/Qwen3-4B", ""), ("Tongyi-MAI/Z-Image-Turbo", "tokenizer/")),
        "Qwen3's",
        "4.5 MB",
    ),
    stem="model",
    other_classes=("Qwen3ForCausalLM",),
    companion=Companion("text_encoder", "the text encoder Qwen3", "qwen_3_4b.safetensors"),
)


def told(tokenizer: Any, caption: str, thinking: bool) -> str:
    """A caption as what a user says in the chat template, with the beginning of the answer."""
    said = [{"role": "user", "content": caption}]
    text: str = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True, enable_thinking=thinking)
    return text


def template_problems(tokenizer: Any, option: str, label: str) -> list[str]:
    """What is wrong with a tokenizer that has no template; None is one that nobody reads with."""
    if tokenizer is None or tokenizer.chat_template is not None:
        return []
    return [
        f"{option}: the tokenizer has no chat template, into which {label}'s captions are put; take the tokenizer folder of {label} or of "
        "Qwen3, with its tokenizer_config.json and chat_template.jinja"
    ]


def tiny_qwen3_tokenizer() -> Qwen2Tokenizer:
    """A tokenizer of bytes and the pieces of its chat template."""
    tokenizer = tiny_qwen_tokenizer(["user\n", "assistant\n", "<think>\n\n</think>\n\n"])
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def tiny_qwen3(
    tokenizer: Any, width: int = 32, num_heads: int = 2, num_kv_heads: int = 1, num_positions: int = 2048, num_layers: int = 3
) -> Qwen3Model:
    """A Qwen3 with heads of 16; weights come from torch's generator as the caller has set it."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=16,
        max_position_embeddings=num_positions,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3Model(config)
