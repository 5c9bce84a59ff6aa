"""The Tools tab: merge, extract, resize, convert, verify, metadata. tools.js draws it and talks with the routes of kohya_like/tools.py."""

from __future__ import annotations

from .. import page


def build() -> None:
    """Makes the tab inside the surrounding gr.Tab."""
    page.part("tools", elem_id="kl-tools")
