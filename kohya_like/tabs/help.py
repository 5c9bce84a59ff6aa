"""The Help tab: a short guide, and every option with search, from the schema. web/help draws both."""

from __future__ import annotations

from sd_scripts.families import FACTS, RUNS

from .. import page


def _families(*methods: str) -> str:
    """The families with runs of these methods."""
    return ", ".join(facts.label for name, facts in FACTS.items() if any((name, method) in RUNS for method in methods))


def build() -> None:
    """Makes the tab inside the surrounding gr.Tab."""
    page.part("guide", {"bases": _families("network", "full"), "scratch": _families("scratch")})
    page.part("reference")
