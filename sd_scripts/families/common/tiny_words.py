"""A small tokenizer in place of Qwen's, which several families' text encoders read with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX, Qwen2Tokenizer

MARKS = tuple(f"<|{name}|>" for name in ("im_start", "im_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"))
"""Tokens of their own, which no other text makes."""


def tiny_qwen_tokenizer(templates: Iterable[str]) -> Qwen2Tokenizer:
    """A tokenizer of bytes and the pieces that occur in these templates, split as Qwen's splits.

    Trained on the templates alone it cuts them as the real one does: the system part has 64 tokens in those for editing, 34 in that for
    text to image.
    """
    texts = (re.sub(r"<\|\w+\|>", "", template) for template in templates)
    vocab, merges = _learned((*texts, "Picture 1: Picture 2: Picture 3: "))
    return Qwen2Tokenizer(vocab=dict(vocab), merges=list(merges), additional_special_tokens=list(MARKS))


@cache
def _learned(texts: tuple[str, ...]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The pieces of these texts and how they are put together. Tests make some thousand tiny models."""
    pieces: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False)]
    pieces.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=2000, min_frequency=1, show_progress=False, initial_alphabet=sorted(alphabet))
    )
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]
