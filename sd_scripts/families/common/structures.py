"""Networks without weights: the published model on the meta device, and calls of its text encoders. What a forecast measures.

Shapes: B captions, L tokens, D text width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sd_scripts.library.core.copying import copied
from sd_scripts.library.core.devices import META
from sd_scripts.library.core.protocols import Condition, Parts
from sd_scripts.library.loading.common import BASE, Config, FamilySpec, check_kind, read_json
from sd_scripts.library.loading.source import find
from sd_scripts.library.loading.weights import empty, leave_out
from sd_scripts.runs.importing import building
from sd_scripts.runs.model_headers import Header
from sd_scripts.schema.model import BaseModelOptions


def published(
    spec: FamilySpec,
    like: Parts,
    options: BaseModelOptions,
    header: Header | None,
    settings: Mapping[str, Any],
    changes: Mapping[str, Config] | None = None,
) -> tuple[Parts, str]:
    """The parts of `like` with networks of the published configuration, on the meta device, and what the model is called.

    header: of the file that the options name, if it is one. settings: what differs from those of `like`. changes: entries of a network's
    configuration that differ. Raises OptionError for a file of another family.
    """
    if header is not None:
        check_kind(spec, header, find(BASE, options.pretrained_model_name_or_path, spec.name))
    networks: dict[str, nn.Module] = {}
    for name, part in spec.parts.items():
        config = {**read_json(spec.configs / part.folder / "config.json", BASE), **(changes or {}).get(name, {})}
        networks[name] = _network(part.make, json.dumps(config))
    parts = replace(
        like,
        backbone=networks["backbone"],
        vae=networks["vae"],
        text_encoders={name: networks[name] for name in spec.tokenizers},
        processor=None,
        source=options.pretrained_model_name_or_path,
        settings={**like.settings, **settings},
    )
    return parts, spec.label


_ASKED: set[tuple[Callable[[Config], nn.Module], str]] = set()
"""What networks were made of. Most forecasts ask for each once; one that asks again gets copies, which take a third of the time."""


def _network(make: Callable[[Config], nn.Module], config: str) -> nn.Module:
    """A network of this configuration, as JSON, on the meta device, which the caller may change."""
    with building():
        if (make, config) not in _ASKED:
            _ASKED.add((make, config))
            return _built(make, config)
        kept = _kept(make, config)
        return copied(kept, [kept])


@cache
def _kept(make: Callable[[Config], nn.Module], config: str) -> nn.Module:
    return _built(make, config)


def _built(make: Callable[[Config], nn.Module], config: str) -> nn.Module:
    network = empty(lambda: make(json.loads(config)))
    leave_out(network)
    return network


def num_tokens(caption: str) -> int:
    """Tokens of a caption, without its tokenizer: the most that English prose has, one for each three letters."""
    return len(caption) // 3 + 2


def texts_of(parts: Parts, batch: int, shapes: Mapping[str, tuple[int, ...]]) -> list[Condition]:
    """Conditions with entries of these shapes, in the precision of the denoising network, on the meta device."""
    dtype = next(parts.backbone.parameters()).dtype
    return [{name: torch.empty(shape, device=META, dtype=dtype) for name, shape in shapes.items()} for _ in range(batch)]


def read(encoder: nn.Module, batch: int, tokens: int) -> Tensor:
    """States (B, L, D) that a text encoder of transformers makes of so many captions of so many tokens."""
    language: Any = getattr(getattr(encoder, "model", None), "language_model", encoder)
    found = language(input_ids=torch.zeros(batch, tokens, dtype=torch.long, device=META), output_hidden_states=True)
    return found.last_hidden_state if "last_hidden_state" in found else found.hidden_states[-1]


def read_clip(encoder: nn.Module, batch: int) -> Tensor:
    """States that a CLIP text encoder makes of one chunk of so many captions."""
    config: Any = encoder.config
    return read(encoder, batch, min(77, int(config.max_position_embeddings)))


def clip_tokens(parts: Parts) -> int:
    """Rows of text that a U-Net is given: chunks of 75 tokens, each with its beginning and end."""
    chunks: int = parts.settings["max_token_length"] // 75
    return 77 * chunks
