"""Names of the layers; see flux2_names."""

from __future__ import annotations

from sd_scripts.families.common.flux2_names import architecture

from .loading import LOADER

ARCHITECTURES = (architecture(LOADER),)
