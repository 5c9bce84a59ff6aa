"""What families state alike whose models are a transformer with its companions. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sd_scripts.schema.facts import AdapterMarks, FamilyFacts, KohyaFacts, KohyaVersion, NetworkFacts


def _head_sizes(model: Any) -> tuple[int, ...]:
    return (128,)


@dataclass(frozen=True, kw_only=True)
class TransformerNetworkFacts(NetworkFacts):
    """Of a published transformer, whose heads all have 128 numbers."""

    head_sizes: Callable[[Any], tuple[int, ...]] = field(default_factory=lambda: _head_sizes, init=False)
    vae_in_16_bits: bool = field(default=True, init=False)


@dataclass(frozen=True, kw_only=True)
class TransformerMarks(AdapterMarks):
    """By what adapters are known to be on a transformer: it has no width of texts that tells."""

    text_widths: tuple[int, ...] = field(default=(), init=False)


@dataclass(frozen=True, kw_only=True)
class TransformerKohya(KohyaFacts):
    """What kohya's programs have for a family of transformers: nothing that they have for a UNet and what reads for it."""

    versions: tuple[KohyaVersion, ...] = field(default=(), init=False)
    side: int | None = field(default=None, init=False)
    text_rates: tuple[str, ...] = field(default=(), init=False)
    dreambooth_trains_text: bool = field(default=False, init=False)
    unet_blocks: tuple[int, int, int] | None = field(default=None, init=False)
    middle_parts: int = field(default=0, init=False)


@dataclass(frozen=True, kw_only=True)
class TransformerFacts(FamilyFacts):
    """Facts of a family whose files hold a transformer alone."""

    evaluates: bool = field(default=False, init=False)
    labels: Mapping[str, str] = field(default_factory=dict, init=False)
    whole_files: bool = field(default=False, init=False)
