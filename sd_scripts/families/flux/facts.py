"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.schema.facts import FamilyFacts

FACTS = FamilyFacts(label="FLUX", place=2)
