"""The Generate tab: images and an instruction in, images out. inference.js draws it and talks with the routes of predict_routes.py."""

from __future__ import annotations

from .. import page


def build() -> None:
    """Makes the tab inside the surrounding gr.Tab, or on a page of its own."""
    page.part("inference", elem_id="kl-inference")
