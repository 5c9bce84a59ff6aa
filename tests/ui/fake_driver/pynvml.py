"""NVML's binding as it is installed, with a driver made of the cards in the file that FAKE_GPUS names. For studios under test."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

from tests.ui.fake_nvml import FakeFromFile

_elsewhere = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]
_spec = importlib.machinery.PathFinder.find_spec("pynvml", _elsewhere)
assert _spec is not None and _spec.loader is not None
_real = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_real)
globals().update({name: value for name, value in vars(_real).items() if not name.startswith("__")})
FakeFromFile(Path(os.environ["FAKE_GPUS"])).install(setattr, sys.modules[__name__])
