"""Fixtures of the adapter tests."""

from __future__ import annotations

import pytest

from sd_scripts.library.families.sdxl import Sdxl
from sd_scripts.library.protocols import Parts


@pytest.fixture
def parts() -> Parts:
    return Sdxl().tiny()


@pytest.fixture
def twin() -> Parts:
    """The same model again, without the adapter that `parts` gets."""
    return Sdxl().tiny()
