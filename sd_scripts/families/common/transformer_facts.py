"""What families state alike whose models are a transformer with its companions. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sd_scripts.schema.facts import FamilyFacts, KohyaFacts, NetworkFacts

_USUAL = NetworkFacts(
    head_sizes=lambda model: (128,),
    text_lengths_vary=lambda model: True,
    always_masked=False,
    mostly_weights=True,
    guided_together=False,
    quantized_encoder="te1",
    vae_in_16_bits=True,
)


def transformer_kohya(**own: Any) -> KohyaFacts:
    """The same of a family that kohya's programs train."""
    known: dict[str, Any] = {"versions": (), "side": None, "text_rates": (), "dreambooth_trains_text": False, "unet_blocks": None}
    return KohyaFacts(**(known | own))


def transformer_facts(network: Mapping[str, Any] = MappingProxyType({}), **own: Any) -> FamilyFacts:
    """Facts of a family whose files hold a transformer alone; network, own: entries of NetworkFacts and FamilyFacts that say something else
    or more."""
    known: dict[str, Any] = {"evaluates": False, "labels": {}, "kohya": None, "whole_files": False}
    return FamilyFacts(network=replace(_USUAL, **network), **(known | own))
