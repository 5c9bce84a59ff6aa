"""What does a tool's work."""

from __future__ import annotations

from importlib import import_module

import pytest

from sd_scripts.families import TOOLS


@pytest.mark.parametrize("name", TOOLS)
def test_the_work_of_every_tool_is_where_the_tool_says(name: str) -> None:
    module, _, function = TOOLS[name].work.partition(":")
    section = next(iter(TOOLS[name].model_fields.values())).annotation
    assert section is not None
    assert getattr(import_module(module), function).__annotations__["options"] == section.__name__
