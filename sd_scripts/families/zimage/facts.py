"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.schema.facts import AdapterMarks, FamilyFacts

FACTS = FamilyFacts(
    label="Z-Image",
    place=4,
    evaluates=False,
    demo="toy-star-zimage",
    labels={},
    kohya=None,
    adapters=AdapterMarks(
        architectures=("z_image", "z-image"),
        text_widths=(),
        layers=r"(^|[._])(layers|(noise|context)_refiner)[._]\d+[._](attention|feed_forward|adaLN)",
    ),
)
