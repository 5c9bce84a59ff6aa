"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.schema.facts import AdapterMarks, FamilyFacts

FACTS = FamilyFacts(
    label="Qwen-Image-Edit",
    place=3,
    evaluates=False,
    demo=None,
    labels={},
    kohya=None,
    adapters=AdapterMarks(
        architectures=("qwen_image", "qwen-image"), text_widths=(), layers=r"transformer_blocks[._]\d+[._](img|txt)_(mlp|mod)"
    ),
)
