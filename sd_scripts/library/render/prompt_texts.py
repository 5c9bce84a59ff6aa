"""Texts of previews, encoded once while the text encoders are on their device, so that no preview has to bring them back there."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import torch

from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.library.core.protocols import Condition, ModelFamily, Parts, Preview
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.prompts import PromptSpec

from .sample import request_of


@torch.no_grad()
def with_known_texts(family: ModelFamily, parts: Parts, prompts: Sequence[PromptSpec], encoders: Collection[str]) -> ModelFamily:
    """The family, which knows what the text encoders make of these prompts; it asks them for others.

    encoders: those whose outputs stay what they are, of all text encoders; the rest is asked every time. Families whose encoders make one
    entry together know nothing unless all of them stay.
    """
    some = set(encoders) != set(parts.text_encoders)
    if some and not family.separate_texts:
        return family
    requests = _readable(prompts)
    if isinstance(family, QwenEdit):
        known = {_key(request): _at_home(family.conditions_of(parts, [request])) for request in requests}
        return _with(family, conditions_of=_conditions_of(known))
    texts = {text for request in requests for text in (request.prompt, *([request.negative_prompt] if request.cfg_scale > 1 else []))}
    # One at a time: what a text becomes does not depend on the others.
    kept = {text: _at_home(family.encode_prompts(parts, [text], tuple(encoders) if some else None)[0]) for text in sorted(texts)}
    live = tuple(name for name in sorted(parts.text_encoders) if name not in encoders)
    return _with(family, encode_prompts=_encode_prompts(kept, live))


def _readable(prompts: Sequence[PromptSpec]) -> list[Preview]:
    found = []
    for spec in prompts:
        try:
            found.append(request_of(spec))
        except OptionError:
            # A control picture that is gone is told when the preview is due.
            continue
    return found


def _with(family: ModelFamily, **methods: Any) -> ModelFamily:
    """A family that differs from this one in these methods."""
    made: ModelFamily = type(type(family).__name__, (type(family),), methods)()
    return made


def _encode_prompts(kept: dict[str, Condition], live: tuple[str, ...]) -> Any:
    def encode_prompts(
        self: ModelFamily, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None
    ) -> list[Condition]:
        own = super(type(self), self).encode_prompts  # type: ignore[safe-super]
        if encoders is not None or not all(caption in kept for caption in captions):
            return own(parts, captions, encoders)
        rest = own(parts, captions, live) if live else [{} for _ in captions]
        return [{**kept[caption], **more} for caption, more in zip(captions, rest, strict=True)]

    return encode_prompts


Conditions = tuple[list[Condition], list[Condition] | None]


def _conditions_of(known: dict[tuple[Any, ...], Conditions]) -> Any:
    def conditions_of(self: QwenEdit, parts: Parts, requests: Sequence[Preview]) -> Conditions:
        found = [known.get(_key(request)) for request in requests]
        if None in found:
            return super(type(self), self).conditions_of(parts, requests)
        positive = [one[0][0] for one in found if one is not None]
        negative = [one[1][0] for one in found if one is not None and one[1] is not None]
        return positive, negative or None

    return conditions_of


def _key(request: Preview) -> tuple[Any, ...]:
    """What decides the condition of a request."""
    controls = tuple((picture.size, hashlib.blake2b(picture.tobytes()).digest()) for picture in request.controls)
    return request.prompt, request.negative_prompt, request.cfg_scale > 1, controls


def _at_home(value: Any) -> Any:
    """Tensors in main memory, in whatever holds them."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {name: _at_home(one) for name, one in value.items()}
    return type(value)(_at_home(one) for one in value) if isinstance(value, list | tuple) else value
