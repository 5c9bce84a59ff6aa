"""The Runs tab: all runs on disk, and one of them in full. web/runs/runs.js draws it."""

from __future__ import annotations

from .. import page


def build() -> None:
    """Makes the tab inside the surrounding gr.Tab."""
    page.part("runs", look="kl-live", elem_id="kl-runs")
