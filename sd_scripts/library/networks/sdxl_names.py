"""kohya keys of SDXL adapters; see `names`."""

from __future__ import annotations

from sd_scripts.library.protocols import StateDict

from .names import kohya_keys


def to_kohya(state: StateDict) -> StateDict:
    """See names.kohya_keys."""
    return kohya_keys("sdxl", state)
