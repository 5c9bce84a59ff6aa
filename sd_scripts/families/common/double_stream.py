"""What transformers with double and single blocks share: texts of T5, positions of tokens, times in full precision.

Shapes: B samples, h w latent sides, N = h/2 * w/2 image tokens, L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config, T5Tokenizer

from sd_scripts.library.core.protocols import Parts, dtype_of

BLOCKS = r"^(single_)?transformer_blocks\."
"""A regular expression for names of layers."""
TEXT_STEP = 64
"""Texts of a batch with padding hidden are padded to a multiple of this many tokens, so that few lengths occur."""


def t5_states(parts: Parts, captions: Sequence[str], max_length: int, masked: bool, num_padding: int = 0) -> list[Tensor]:
    """T5's last hidden states of each caption, (L, D), in the encoder's precision.

    Of max_length tokens with padding; masked: of the caption's own tokens and num_padding of padding after them, none of which has seen
    the padding. Runs with gradient when grad mode is on.
    """
    encoder, tokenizer = parts.text_encoders["te3"], parts.tokenizers["te3"]
    whole = not masked or num_padding > 0
    tokens = tokenizer(
        list(captions), padding="max_length" if whole else "longest", max_length=max_length, truncation=True, return_tensors="pt"
    )
    device = parts.bring(encoder)
    mask = tokens.attention_mask.to(device) if masked else None
    states = encoder(tokens.input_ids.to(device), attention_mask=mask).last_hidden_state
    lengths = (tokens.attention_mask.sum(dim=1) + num_padding).tolist() if masked else [states.shape[1]] * len(states)
    return [text[:length] for text, length in zip(states, lengths, strict=True)]


def positions(height: int, width: int, image: int = 0) -> Tensor:
    """Position (N, 3) of each token of latents of these sides, float32: number of the image, row, column. Text is at 0, 0, 0."""
    rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
    return torch.stack([torch.full_like(rows, image), rows, columns], dim=-1).reshape(-1, 3).float()


def batched_texts(texts: Sequence[Tensor], num_image_tokens: int) -> tuple[Tensor, Tensor | None]:
    """Texts (L_i, D) as one tensor (B, L, D), and which tokens attention may see, (B, L + N) bool; None where all have one length.

    With different lengths, L is the longest, rounded up to a multiple of TEXT_STEP.
    """
    lengths = torch.tensor([len(text) for text in texts])
    if (lengths == lengths[0]).all():
        return torch.stack(list(texts)), None
    longest = -(-int(lengths.max()) // TEXT_STEP) * TEXT_STEP
    padded = torch.stack([nn.functional.pad(text, (0, 0, 0, longest - len(text))) for text in texts])
    seen = torch.arange(longest) < lengths[:, None]
    images = torch.ones(len(texts), num_image_tokens, dtype=torch.bool)
    return padded, torch.cat([seen, images], dim=1)


@contextmanager
def exact_times(transformer: nn.Module, t: Tensor, guidance: Tensor | None) -> Iterator[None]:
    """Within the block the transformer embeds these times and guidance scales (B,).

    diffusers rounds both to the precision of the network before it embeds them: to three digits in bfloat16.
    """
    exact = (1000 * t,) if guidance is None else (1000 * t, 1000 * guidance)
    dtype = dtype_of(transformer)

    def given(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*exact, *arguments[len(exact) :])

    def embedded(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.to(dtype)

    embedding = transformer.time_text_embed
    handles = [embedding.register_forward_pre_hook(given), embedding.register_forward_hook(embedded)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tiny_t5_tokenizer() -> T5Tokenizer:
    """A T5 tokenizer whose tokens are single characters."""
    letters = [(chr(code), -3.0) for code in range(33, 127)]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *letters]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=32)


def tiny_t5_config(tokenizer: T5Tokenizer) -> T5Config:
    return T5Config(
        vocab_size=len(tokenizer),
        d_model=24,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
