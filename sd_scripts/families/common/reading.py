"""How large language models read captions: tokens up to a limit, and states between their layers.

Shapes: L text tokens, D text width.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def tokens_of(tokenizer: Any, text: str, limit: int, further: int = 0) -> list[int]:
    """Tokens of a text, as many as the limit and those of the template that are further; says once that longer captions are cut."""
    ids: list[int] = tokenizer(text).input_ids
    if len(ids) > limit + further:
        _tell_of_cut(limit)
    return ids[: limit + further]


@functools.cache
def _tell_of_cut(limit: int) -> None:
    logger.warning("captions longer than %d tokens are cut there; max_token_length sets the limit (this is said once)", limit)


def states_of_layers(language: Any, layers: Sequence[int], tokens: Tensor, **more: Tensor) -> Tensor:
    """Hidden states (L, D) of one text (1, L) after these layers, side by side; 0 is the embedding, negative numbers count from the end."""
    states = language(input_ids=tokens, output_hidden_states=True, use_cache=False, **more).hidden_states
    return torch.cat([states[layer][0] for layer in layers], dim=-1)


def expanded(ids: Sequence[int], mark: int, counts: Sequence[int]) -> list[int]:
    """The tokens with each image's mark repeated for every vision token it has."""
    found, left = [], iter(counts)
    for token in ids:
        found += [token] * (next(left) if token == mark else 1)
    return found
