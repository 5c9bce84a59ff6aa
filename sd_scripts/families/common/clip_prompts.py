"""Captions to CLIP token ids: chunks of the encoder's length, and attention weights in brackets. Knows tokenizers, not encoders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import CLIPTokenizer

# Shapes: B captions, N chunks, L tokens a chunk (start, text, end, padding).

_PIECE = re.compile(r"\\(?P<escaped>[\\()\[\]])|(?P<open>[(\[])|:\s*(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+))\s*\)|(?P<close>[)\]])")
_ROUND, _SQUARE = 1.1, 1 / 1.1


@dataclass(frozen=True)
class Tokens:
    """Token ids (B, N, L), int64, and the weight of each token, (B, N, L) float32."""

    ids: Tensor
    weights: Tensor


def tokenize(tokenizer: CLIPTokenizer, captions: Sequence[str], num_chunks: int, weighted: bool) -> Tokens:
    """Token ids of captions in num_chunks chunks of the tokenizer's length, each with its own start and end; what does not fit is cut off.

    With one chunk and without weights the ids are those of the tokenizer itself with padding and truncation.
    """
    room = tokenizer.model_max_length - 2
    ids, weights = [], []
    for caption in captions:
        pieces = parse_weights(caption) if weighted else [(caption, 1.0)]
        tokens: list[tuple[int, float]] = []
        for text, weight in pieces:
            # Longer texts than the encoder takes are meant here: chunks follow. verbose=False keeps the tokenizer from warning.
            numbers = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False).input_ids
            tokens += [(number, weight) for number in numbers]
        chunks = [tokens[start * room : (start + 1) * room] for start in range(num_chunks)]
        rows = [_framed(tokenizer, chunk) for chunk in chunks]
        ids.append([[number for number, _ in row] for row in rows])
        weights.append([[weight for _, weight in row] for row in rows])
    return Tokens(torch.tensor(ids, dtype=torch.long), torch.tensor(weights, dtype=torch.float32))


def _framed(tokenizer: CLIPTokenizer, tokens: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Start, tokens, end and padding up to the tokenizer's length; all but the tokens have weight 1."""
    row = [(tokenizer.bos_token_id, 1.0), *tokens, (tokenizer.eos_token_id, 1.0)]
    return row + [(tokenizer.pad_token_id, 1.0)] * (tokenizer.model_max_length - len(row))


def parse_weights(caption: str) -> list[tuple[str, float]]:
    r"""Pieces of a caption and their weights: (word) is 1.1, [word] is 1 / 1.1, (word:1.3) is 1.3; nested brackets multiply.

    \( \) \[ \] stand for the brackets themselves; a bracket without its partner is closed at the end, one without opening is text.
    """
    pieces: list[tuple[str, float]] = []
    opened: list[tuple[str, int]] = []  # kind of bracket and the first piece inside it

    def add(text: str) -> None:
        if text:
            pieces.append((text, 1.0))

    def close(factor: float) -> None:
        _, first = opened.pop()
        pieces[first:] = [(text, weight * factor) for text, weight in pieces[first:]]

    end = 0
    for match in _PIECE.finditer(caption):
        add(caption[end : match.start()])
        end = match.end()
        if match["escaped"]:
            add(match["escaped"])
        elif match["open"]:
            opened.append((match["open"], len(pieces)))
        elif match["weight"] and opened and opened[-1][0] == "(":
            close(float(match["weight"]))
        elif match["close"] and opened and opened[-1][0] == {")": "(", "]": "["}[match["close"]]:
            close(_ROUND if match["close"] == ")" else _SQUARE)
        else:
            add(match[0])
    add(caption[end:])
    while opened:
        close(_ROUND if opened[-1][0] == "(" else _SQUARE)
    return _joined(pieces) or [("", 1.0)]


def _joined(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Neighbours of equal weight become one piece, so that words are not cut where nothing changes."""
    joined: list[tuple[str, float]] = []
    for text, weight in pieces:
        if joined and joined[-1][1] == weight:
            joined[-1] = (joined[-1][0] + text, weight)
        else:
            joined.append((text, weight))
    return joined
