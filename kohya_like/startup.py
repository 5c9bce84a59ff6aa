"""What must happen before gradio is imported: no calls home, no stub files, and a start that does not wait for either."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

QUIET = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "GRADIO_RUN_HISTORY": "False",
}
"""Environment of the studio and of everything it starts; a value that the person has set stays."""

_STUBS = "gradio.component_meta"


class _WithoutStubs(importlib.abc.MetaPathFinder):
    """Lets gradio.component_meta be imported as usual, then makes its stub writer do nothing.

    Gradio writes a .pyi file for each component class at each import: 1.2 of its 2.8 CPU seconds, and copies of our own source if we
    subclassed a component. Only editors read those files.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != _STUBS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, real: importlib.abc.Loader) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        if hasattr(module, "create_or_modify_pyi"):
            vars(module)["create_or_modify_pyi"] = _write_nothing


def _write_nothing(component_class: type, class_name: str, events: object) -> None:
    """Takes the arguments of gradio's stub writer."""


def prepare() -> None:
    """Sets the environment and the import hook. Does nothing to a gradio that is imported already."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    without_stubs()


def without_stubs() -> None:
    """Sets the import hook."""
    if _STUBS not in sys.modules and not any(isinstance(finder, _WithoutStubs) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WithoutStubs())
