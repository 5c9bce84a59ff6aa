"""The Data tab: the images of the form's data set, their captions, and proposals. web/data draws it and talks with data_room/routes.py."""

from __future__ import annotations

from .. import page


def build() -> None:
    """Makes the tab inside the surrounding gr.Tab."""
    page.part("data", elem_id="kl-data")
