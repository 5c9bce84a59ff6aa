"""The model families: each folder here with a facts.py is one. Importing this loads no torch; `family` loads the one that is asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.facts import FamilyFacts
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.tools import FILE_TOOLS, ToolOptions

if TYPE_CHECKING:
    from sd_scripts.library.core.protocols import ModelFamily, NewFamily


def _found() -> dict[str, FamilyFacts]:
    folders = sorted(file.parent.name for file in Path(__file__).parent.glob("*/facts.py"))
    facts = {name: cast(FamilyFacts, import_module(f"{__name__}.{name}.facts").FACTS) for name in folders}
    return dict(sorted(facts.items(), key=lambda item: item[1].place))


FACTS: dict[str, FamilyFacts] = _found()
"""What each family states about itself, by its name, which is that of its folder."""
NAMES: tuple[str, ...] = tuple(FACTS)
_OPTIONS = {name: import_module(f"{__name__}.{name}.options") for name in NAMES}
RUNS: dict[tuple[str, str], type[RunOptions]] = {(run.family, run.method): run for name in NAMES for run in _OPTIONS[name].RUNS}
"""Kinds of runs by (family, method)."""
_TOOLS = [import_module(f"{__name__}.{name}.tools").TOOLS for name in NAMES if (Path(__file__).parent / name / "tools.py").is_file()]
TOOLS: dict[str, type[ToolOptions]] = {tool.name: tool for tools in (FILE_TOOLS, *_TOOLS) for tool in tools}
"""Tools by name: those for files of any family, and those of one."""


def family(name: str) -> ModelFamily:
    """The family of that name. Raises OptionError for an unknown one."""
    if name not in NAMES:
        raise OptionError(f"family: {name} is not known; there are {', '.join(NAMES)}")
    return cast("ModelFamily", import_module(f"{__name__}.{name}.model").FAMILY)


def maker_of(family: ModelFamily) -> NewFamily | None:
    """The family as one whose runs make their model; None where models are only loaded."""
    return cast("NewFamily", family) if hasattr(family, "is_new") else None
