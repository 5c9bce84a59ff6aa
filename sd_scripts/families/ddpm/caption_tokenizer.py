"""Byte-level tokenizers of models that are made by their run: made from captions, read, and used.

One tokenizer.json of the tokenizers library holds everything. The library's own trainer breaks ties differently in every process, so the
merges are found here; equal captions give equal bytes in every process and in every order.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

PAD, BOS, EOS = SPECIALS = ("<pad>", "<bos>", "<eos>")
"""Special tokens: padding, beginning and end of a caption; a tokenizer made here has them as numbers 0, 1, 2."""
FEWEST = 2
"""A pair of tokens that occurs less often is not joined: it would be learned from one caption and met never again."""

_Pair = tuple[str, str]


def make_tokenizer(captions: Collection[str], vocab_size: int, lowercase: bool) -> str:
    """The tokenizer.json of a byte pair encoding (Sennrich et al. 2016, arXiv 1508.07909) of at most vocab_size tokens, for these captions.

    Text is brought to Unicode's form NFKC, and to small letters where lowercase is on; every byte is a token, so no text is unknown. Ties
    between pairs go to the first in alphabetical order.
    """
    normalizer = normalizers.Sequence([normalizers.NFKC(), *([normalizers.Lowercase()] if lowercase else [])])
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = Counter(piece for caption in captions for piece, _ in splitter.pre_tokenize_str(normalizer.normalize_str(caption)))
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens, merges = _joined(words, tokens, vocab_size)
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, splitter, decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.post_processor = _template(tokenizer)
    return str(tokenizer.to_str())


def read_tokenizer(text: str, max_length: int) -> Tokenizer:
    """The tokenizer of a tokenizer.json, for captions of at most max_length tokens with beginning and end, padded to the longest.

    What looks like a special token in a caption is text like any other. Raises ValueError, with the reason, for a text that is none or that
    lacks a special token.
    """
    try:
        tokenizer = Tokenizer.from_str(text)
    # The library raises plain exceptions with its own messages.
    except Exception as err:
        raise ValueError(f"it is no tokenizer.json that can be read ({err})") from err
    missing = [token for token in SPECIALS if tokenizer.token_to_id(token) is None]
    if missing:
        raise ValueError(f"it has no token {' and no '.join(missing)}; padding, beginning and end are {', '.join(SPECIALS)}")
    tokenizer.encode_special_tokens = True
    tokenizer.post_processor = _template(tokenizer)
    tokenizer.enable_truncation(max_length)
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id(PAD), pad_token=PAD)
    return tokenizer


def num_tokens(tokenizer: Tokenizer) -> int:
    """Size of the table of tokens that every number of the tokenizer fits into."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def ids_of(tokenizer: Tokenizer, captions: Sequence[str]) -> tuple[list[list[int]], list[int]]:
    """Token numbers of captions, padded to the longest, and the length of each without padding."""
    encoded = tokenizer.encode_batch(list(captions))
    return [one.ids for one in encoded], [sum(one.attention_mask) for one in encoded]


def _template(tokenizer: Tokenizer) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
    )


def _joined(words: Mapping[str, int], tokens: Iterable[str], size: int) -> tuple[list[str], list[_Pair]]:
    """The tokens with those that joining pairs adds, up to size, and the pairs in their order."""
    order = sorted(words)
    pieces, counts = [list(word) for word in order], [words[word] for word in order]
    totals: Counter[_Pair] = Counter()
    where: defaultdict[_Pair, set[int]] = defaultdict(set)
    for index, word in enumerate(pieces):
        for pair in itertools.pairwise(word):
            totals[pair] += counts[index]
            where[pair].add(index)
    heap = [(-count, pair) for pair, count in totals.items()]
    heapq.heapify(heap)
    # A token such as abc can be joined in two ways, so a pair may come up again after it was joined everywhere; its first place counts.
    found, merges = dict.fromkeys(tokens), dict[_Pair, None]()
    while heap and len(found) < size:
        count, pair = heapq.heappop(heap)
        if -count != totals[pair]:
            # An entry from before a merge changed this pair's count; the new count has an entry of its own.
            continue
        if -count < FEWEST:
            break
        merges.setdefault(pair)
        found[pair[0] + pair[1]] = None
        changed: set[_Pair] = set()
        for index in where.pop(pair):
            old, new = pieces[index], _merged(pieces[index], pair)
            for one in itertools.pairwise(old):
                totals[one] -= counts[index]
                where[one].discard(index)
                changed.add(one)
            for one in itertools.pairwise(new):
                totals[one] += counts[index]
                where[one].add(index)
                changed.add(one)
            pieces[index] = new
        del totals[pair]
        for one in changed - {pair}:
            if totals[one] > 0:
                heapq.heappush(heap, (-totals[one], one))
    return list(found), list(merges)


def _merged(pieces: Sequence[str], pair: _Pair) -> list[str]:
    """The pieces of a word with every occurrence of the pair, from the left, made one."""
    merged: list[str] = []
    start = 0
    while start < len(pieces):
        both = tuple(pieces[start : start + 2]) == pair
        merged.append(pair[0] + pair[1] if both else pieces[start])
        start += 2 if both else 1
    return merged
