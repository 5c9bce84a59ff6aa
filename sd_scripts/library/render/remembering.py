"""What encoders make of texts and control images, kept from one rendering to the next, so that nobody has to be brought back for it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sd_scripts.families import editor_of
from sd_scripts.library.core.protocols import Condition, ModelFamily, Parts, Preview
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.prompts import PromptSpec

from .sample import request_of


class KeptTensors:
    """Tensors by key, in host RAM, within a limit of bytes; the least used go first. One above the limit is given out and not kept."""

    def __init__(self, max_bytes: float) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, Condition] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        return sum(tensor.nbytes for entry in self._entries.values() for tensor in entry.values())

    def get(self, key: Hashable, make: Callable[[], Condition]) -> Condition:
        """The tensors of this key; made and kept when they are not there."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        made = self._entries[key] = {name: tensor.cpu() for name, tensor in make().items()}
        while self.num_bytes > self.max_bytes:
            self._entries.popitem(last=False)
        return made

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()


def remembering(
    family: ModelFamily, kept: KeptTensors, encoders: Collection[str] | None = None, state: Callable[[], Hashable] = lambda: ()
) -> ModelFamily:
    """The family, which keeps what the text encoders make of texts, and the VAE of control images.

    encoders: those whose outputs stay what they are; the others are asked every time. None means all. state: what the text encoders'
    outputs depend on besides, such as the adapters that are on them.
    """
    methods: dict[str, Any] = {"encode_prompts": _encode_prompts(kept, encoders, state)}
    if editor_of(family) is not None:
        methods |= {"encode_images": _encode_controls(kept), "encode_instructions": _encode_instructions(kept, state)}
    made: ModelFamily = type(type(family).__name__, (type(family),), methods)()
    return made


@torch.no_grad()
def with_known_texts(family: ModelFamily, parts: Parts, prompts: Sequence[PromptSpec], encoders: Collection[str]) -> ModelFamily:
    """The family, which knows what the text encoders make of these prompts, and the VAE of their control images.

    encoders: those whose outputs stay what they are, of all text encoders; the rest is asked every time. Families whose encoders make one
    entry together know nothing unless all of them stay.
    """
    some = set(encoders) != set(parts.text_encoders)
    if some and not family.separate_texts:
        return family
    knowing = remembering(family, KeptTensors(float("inf")), encoders if some else None)
    editor = editor_of(knowing)
    for request in _readable(prompts):
        if editor is not None:
            editor.conditions_of(parts, [request])
        else:
            knowing.encode_prompts(parts, [request.prompt, *([request.negative_prompt] if request.cfg_scale > 1 else [])])
    return knowing


def _readable(prompts: Sequence[PromptSpec]) -> list[Preview]:
    found = []
    for spec in prompts:
        try:
            found.append(request_of(spec))
        except OptionError:
            # A control image that is gone is told when the preview is due.
            continue
    return found


def _encode_prompts(kept: KeptTensors, encoders: Collection[str] | None, state: Callable[[], Hashable]) -> Any:
    steady = None if encoders is None else tuple(sorted(encoders))

    def encode_prompts(self: Any, parts: Parts, captions: Sequence[str], asked: Collection[str] | None = None) -> list[Condition]:
        own = super(type(self), self).encode_prompts
        if asked is not None:
            conditions: list[Condition] = own(parts, captions, asked)
            return conditions
        rest = [{} for _ in captions] if steady is None else own(parts, captions, tuple(sorted(set(parts.text_encoders) - set(steady))))

        def alone(caption: str) -> Condition:
            made: Condition = own(parts, [caption], steady)[0]
            return made

        # One at a time: what a text becomes does not depend on the others.
        found = [kept.get(("text", state(), caption), partial(alone, caption)) for caption in captions]
        return [{**one, **more} for one, more in zip(found, rest, strict=True)]

    return encode_prompts


def _encode_controls(kept: KeptTensors) -> Any:
    def encode_images(self: Any, parts: Parts, pixels: Tensor) -> Tensor:
        key = "image", _digest(pixels)
        return kept.get(key, lambda: {"latents": super(type(self), self).encode_images(parts, pixels)})["latents"]

    return encode_images


def _encode_instructions(kept: KeptTensors, state: Callable[[], Hashable]) -> Any:
    def encode_instructions(self: Any, parts: Parts, controls: Sequence[Tensor], captions: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        shown = state(), tuple(map(_digest, controls))
        keys = [("instruction", *shown, caption) for caption in captions]
        missing = list(dict.fromkeys(caption for key, caption in zip(keys, captions, strict=True) if key not in kept))
        fresh: dict[str, Condition] = {}
        if missing:
            prefix, suffixes = super(type(self), self).encode_instructions(parts, controls, missing)
            fresh = {caption: {"text": torch.cat([prefix, suffix])} for caption, suffix in zip(missing, suffixes, strict=True)}
        found = [kept.get(key, partial(fresh.__getitem__, caption))["text"] for key, caption in zip(keys, captions, strict=True)]
        # Whole, so that each is good without the others.
        return found[0][:0], found

    return encode_instructions


def _digest(pixels: Tensor) -> tuple[Hashable, ...]:
    """Says whether two images are the same."""
    return tuple(pixels.shape), hashlib.blake2b(pixels.cpu().contiguous().numpy().tobytes()).digest()
