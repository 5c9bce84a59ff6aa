"""Fixtures of the adapter tests."""

from __future__ import annotations

import pytest

from sd_scripts.families.flux.model import Flux
from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.sd.model import Sd
from sd_scripts.families.sdxl.model import Sdxl
from sd_scripts.families.zimage.model import ZImage
from sd_scripts.library.core.protocols import Parts


@pytest.fixture
def parts() -> Parts:
    return Sdxl().tiny()


@pytest.fixture
def twin() -> Parts:
    """The same model again, without the adapter that `parts` gets."""
    return Sdxl().tiny()


@pytest.fixture
def flux() -> Parts:
    return Flux().tiny()


@pytest.fixture
def flux_twin() -> Parts:
    """The same FLUX model again, without the adapter that `flux` gets."""
    return Flux().tiny()


@pytest.fixture
def qwen() -> Parts:
    return QwenEdit().tiny()


@pytest.fixture
def qwen_twin() -> Parts:
    """The same Qwen-Image model again, without the adapter that `qwen` gets."""
    return QwenEdit().tiny()


@pytest.fixture
def zimage() -> Parts:
    return ZImage().tiny()


@pytest.fixture
def zimage_twin() -> Parts:
    """The same Z-Image model again, without the adapter that `zimage` gets."""
    return ZImage().tiny()


@pytest.fixture(params=[False, True], ids=["1.x", "2.x"])
def sd_pair(request: pytest.FixtureRequest) -> tuple[Parts, Parts]:
    """A Stable Diffusion model twice."""
    return Sd().tiny(request.param), Sd().tiny(request.param)
