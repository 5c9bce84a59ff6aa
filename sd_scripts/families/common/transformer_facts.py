"""What families state alike whose models are a transformer with its companions. Loads no torch."""

from __future__ import annotations

from typing import Any

from sd_scripts.schema.facts import FamilyFacts, KohyaFacts, NetworkFacts


def transformer_kohya(**own: Any) -> KohyaFacts:
    """The facts of a family that kohya's programs train; own: entries that say something else or more."""
    known: dict[str, Any] = {"versions": (), "side": None, "text_rates": (), "dreambooth_trains_text": False, "unet_blocks": None}
    return KohyaFacts(**(known | own))


def transformer_facts(**own: Any) -> FamilyFacts:
    """Facts of a family whose files hold a transformer alone; own: all else of FamilyFacts and NetworkFacts."""
    known: dict[str, Any] = {"evaluates": False, "labels": {}, "whole_files": False}
    network = {name: own.pop(name) for name in NetworkFacts.__dataclass_fields__ if name in own}
    return FamilyFacts(network=NetworkFacts(**network), **(known | own))
