"""Make the toy tokenizers: real tokenizer classes over a few hundred words. Needs no torch."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter

from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

from . import worlds

CLIP_MAX_TOKENS = 24
"""Longest prompt in tokens, start and end included: the longest caption needs 12, a user's may add a few."""

_OTHER_WORDS = """
a an and the of in on at to with without from by for as is are it its into this that one two three
picture photo image drawing painting illustration sketch style shape color colour background
left right top bottom center centre middle upper lower corner side above below beside near under over
small large big tiny huge round sharp bright dark light white black gray grey
orange pink brown cyan magenta lime navy gold silver violet indigo
star cross ring heart diamond moon arrow ellipse oval hexagon pentagon plus
make move turn change swap replace add remove keep put paint shift grow shrink
person man woman child dog cat horse bird tree flower house car boat mountain sea sky sun cloud
sks ohwx zwx toy new old best worst good bad low high quality blurry masterpiece
""".split()
# Words of concepts that come later are single tokens from the start; their embeddings stay untrained.

WORDS = tuple(
    dict.fromkeys(
        [word for words in (worlds.SHAPES, worlds.COLORS, worlds.PLACES) for name in words for word in name.split()] + _OTHER_WORDS
    )
)
"""Words that are one token each."""

_START, _END = "<|startoftext|>", "<|endoftext|>"


def clip_tokenizer(pad_token: str = _END) -> CLIPTokenizer:
    """A CLIP tokenizer that knows WORDS as single tokens and any other text as pieces or bytes.

    SDXL's first tokenizer pads with the end token, its second with "!", whose id is 0 as in the real one.
    """
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    # As in the real vocabulary, a byte that ends a word is a token of its own.
    tokens += [f"{token}</w>" for token in tokens]
    merges = _merges(tuple((*word[:-1], f"{word[-1]}</w>") for word in WORDS))
    tokens += [left + right for left, right in merges]
    vocab = {token: number for number, token in enumerate([*tokens, _START, _END])}
    return CLIPTokenizer(vocab=vocab, merges=list(merges), pad_token=pad_token, model_max_length=CLIP_MAX_TOKENS)


@functools.cache
def _merges(pieces: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, str], ...]:
    # Byte pair encoding until every word, given letter by letter, is whole. The tokenizers library's own trainer breaks
    # ties differently in every process; here the first pair in the alphabet wins, so a base can be rebuilt.
    merges = []
    while counts := Counter(pair for word in pieces for pair in itertools.pairwise(word)):
        left, right = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append((left, right))
        pieces = tuple(_merged(word, left, right) for word in pieces)
    return tuple(merges)


def _merged(pieces: tuple[str, ...], left: str, right: str) -> tuple[str, ...]:
    merged: list[str] = []
    for piece in pieces:
        if merged and merged[-1] == left and piece == right:
            merged[-1] = left + right
        else:
            merged.append(piece)
    return tuple(merged)


T5_MAX_TOKENS = 24
"""Tokens of a prompt that the toy FLUX base is mostly trained with, the end included; see flux.py for longer ones."""

_T5_PAD, _T5_END, _T5_UNKNOWN = "<pad>", "</s>", "<unk>"


def t5_tokenizer() -> T5Tokenizer:
    """A T5 tokenizer that knows WORDS, small or capitalised, as single tokens and any other text as letters.

    The vocabulary is written down, not trained: a Unigram model whose words cost less than any spelling of them.
    Letters beyond Latin become the unknown token.
    """
    words = [f"▁{word}" for word in WORDS] + [f"▁{word.capitalize()}" for word in WORDS]
    letters = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0x180))]
    # Real ids: pad 0, end 1, unknown 2. A single letter such as "a" is a word and a letter in other words.
    vocab = [(token, 0.0) for token in (_T5_PAD, _T5_END, _T5_UNKNOWN)]
    vocab += [(token, -5.0) for token in dict.fromkeys(words)]
    vocab += [(token, -10.0) for token in ("▁", *letters)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=T5_MAX_TOKENS)


_QWEN_SPECIALS = ("<|endoftext|>",) + tuple(
    f"<|{name}|>" for name in ("im_start", "im_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
)


def qwen_tokenizer(templates: tuple[str, ...], further: tuple[str, ...] = ()) -> Qwen2Tokenizer:
    """A Qwen tokenizer that knows what is in these texts and WORDS, alone and after a space, as single tokens; the rest in pieces or bytes.

    With the pipelines' prompt templates their fixed beginnings have as many tokens as in the real vocabulary, one for each
    word and mark, so the number of rows that the pipelines drop is right. further: special tokens besides Qwen2.5's.
    """
    empty = Qwen2Tokenizer(vocab={}, merges=[])
    texts = [re.sub(r"<\|\w+\|>", "", text) for text in templates] + [f"{word} {word}" for word in WORDS]
    split = empty.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    pieces = dict.fromkeys(piece for text in texts for piece, _ in split(text))
    merges = _merges(tuple(tuple(piece) for piece in pieces))
    tokens = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)])
    vocab = {token: number for number, token in enumerate(tokens)}
    return Qwen2Tokenizer(vocab=vocab, merges=list(merges), additional_special_tokens=[*_QWEN_SPECIALS[1:], *further])


ZIMAGE_MAX_TOKENS = 64
"""Longest prompt in tokens while the toy is measured, with its template: the longest caption needs 18."""

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""What Qwen3 makes of plain messages; with thinking enabled, as Z-Image asks, nothing follows the assistant's line."""


def zimage_tokenizer() -> Qwen2Tokenizer:
    """A Qwen3 tokenizer with its chat template, which Z-Image wraps prompts in; WORDS are single tokens, alone and after a space."""
    tokenizer = qwen_tokenizer(("user\n", "assistant\n"), further=("<think>", "</think>"))
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


KLEIN_MAX_TOKENS = 32
"""Tokens of a prompt of the toy Klein base, with its template and padding, which the transformer sees."""


KREA2_MAX_TOKENS = 24
"""Tokens of a prompt of the toy Krea 2 base while it is measured, with the five behind it: the longest caption needs 15."""


def klein_tokenizer() -> Qwen2Tokenizer:
    """The same tokenizer for prompts of KLEIN_MAX_TOKENS."""
    tokenizer = zimage_tokenizer()
    tokenizer.model_max_length = KLEIN_MAX_TOKENS
    tokenizer.init_kwargs["model_max_length"] = KLEIN_MAX_TOKENS
    return tokenizer
