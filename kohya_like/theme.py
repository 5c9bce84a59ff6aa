"""How the studio looks: the order of the accordions, and the theme."""

from __future__ import annotations

import gradio as gr

GROUPS = (
    "Model",
    "Dataset",
    "Network",
    "Optimizer",
    "Advanced Training",
    "Torch Compile",
    "Memory",
    "Resume & Distributed",
    "Samples",
    "Evaluation",
    "Saving",
)
"""Accordions in the order of the page. A kind of run shows those that one of its sections names as its title."""

BASICS = "Basics"
"""The group at the top, which has no accordion: the fields whose Show is basic."""

_ACCENT = gr.themes.Color(
    name="kl",
    c50="#effaf8",
    c100="#d3f1ec",
    c200="#a8e3da",
    c300="#72cdc1",
    c400="#3fb0a4",
    c500="#229488",
    c600="#0f766e",
    c700="#0b5f59",
    c800="#0a4b47",
    c900="#083d3a",
    c950="#042523",
)


def make() -> gr.themes.Base:
    """The stock theme with colours that pass WCAG AA in light and dark, and only fonts that the computer has."""
    base = gr.themes.Default(
        primary_hue=_ACCENT,
        neutral_hue=gr.themes.colors.slate,
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
        radius_size=gr.themes.sizes.radius_md,
    )
    return base.set(
        body_background_fill="#f6f7f9",
        body_background_fill_dark="#0e1320",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_400",
        block_label_text_color="*neutral_700",
        block_label_text_color_dark="*neutral_300",
        block_title_text_color="*neutral_800",
        block_title_text_color_dark="*neutral_200",
        block_background_fill="#ffffff",
        block_background_fill_dark="#161d2c",
        block_border_color_dark="#293245",
        input_background_fill_dark="#0e1320",
        input_border_color="*neutral_400",
        input_border_color_dark="*neutral_600",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        # As --kl-accent, --kl-accent-strong and --kl-on-accent of web/common/common.css.
        button_primary_background_fill_dark="#4fd1c1",
        button_primary_background_fill_hover_dark="#7be0d3",
        button_primary_text_color="#ffffff",
        button_primary_text_color_dark="#06211f",
        button_secondary_text_color="*neutral_800",
        button_secondary_background_fill="#ffffff",
        button_secondary_border_color="*neutral_300",
        button_secondary_border_color_dark="#3a455c",
        button_secondary_background_fill_dark="#1e2738",
        link_text_color="*primary_700",
        link_text_color_dark="*primary_300",
    )
