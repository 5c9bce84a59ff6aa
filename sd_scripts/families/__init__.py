"""The model families: each folder here with a facts.py is one. Importing this loads no torch; `family` loads the one that is asked for."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.facts import FamilyFacts, Sign
from sd_scripts.schema.imported import Importer
from sd_scripts.schema.masking import DATA_TOOLS
from sd_scripts.schema.predict import PredictOptions
from sd_scripts.schema.rating import RateImages
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.tools import FILE_TOOLS, ToolOptions

if TYPE_CHECKING:
    from sd_scripts.library.core.protocols import EditingFamily, EvaluatingFamily, ModelFamily, NewFamily


def _found() -> dict[str, FamilyFacts]:
    folders = sorted(file.parent.name for file in Path(__file__).parent.glob("*/facts.py"))
    facts = {name: cast(FamilyFacts, import_module(f"{__name__}.{name}.facts").FACTS) for name in folders}
    return dict(sorted(facts.items(), key=lambda item: item[1].place))


FACTS: dict[str, FamilyFacts] = _found()
"""What each family states about itself, by its name, which is that of its folder."""
NAMES: tuple[str, ...] = tuple(FACTS)
SHARED_SIGNS: tuple[Sign, ...] = tuple(dict.fromkeys(sign for facts in FACTS.values() for sign in facts.signs if sign.companion))
"""Signs of files that several families use, such as a text encoder: they tell no family, and a network beside it counts first."""
OWN_SIGNS: dict[str, tuple[Sign, ...]] = {name: tuple(sign for sign in facts.signs if not sign.companion) for name, facts in FACTS.items()}
"""Signs of the network that a family trains; where two train the same one, the first of them is told by it."""
_OPTIONS = {name: import_module(f"{__name__}.{name}.options") for name in NAMES}
RUNS: dict[tuple[str, str], type[RunOptions]] = {(run.family, run.method): run for name in NAMES for run in _OPTIONS[name].RUNS}
"""Kinds of runs by (family, method)."""
_TOOLS = [import_module(f"{__name__}.{name}.tools").TOOLS for name in NAMES if (Path(__file__).parent / name / "tools.py").is_file()]
TOOLS: dict[str, type[ToolOptions]] = {tool.name: tool for tools in (FILE_TOOLS, DATA_TOOLS, (RateImages,), *_TOOLS) for tool in tools}
"""Tools by name: those for files of any family, those for images, and those of one family."""
PREDICTS: dict[str, type[PredictOptions]] = {
    name: import_module(f"{__name__}.{name}.predict_options").PREDICT
    for name in NAMES
    if (Path(__file__).parent / name / "predict_options.py").is_file()
}
"""Prediction with a loaded model, by family; the others have no script for it."""


@cache
def importers() -> tuple[Importer, ...]:
    """What reads the configurations of programs that families come from."""
    names = [name for name in NAMES if (Path(__file__).parent / name / "importer.py").is_file()]
    return tuple(import_module(f"{__name__}.{name}.importer").IMPORTER for name in names)


def family(name: str) -> ModelFamily:
    """The family of that name. Raises OptionError for an unknown one."""
    if name not in NAMES:
        raise OptionError(f"family: {name} is not known; there are {', '.join(NAMES)}")
    return cast("ModelFamily", import_module(f"{__name__}.{name}.model").FAMILY)


def editor_of(family: ModelFamily) -> EditingFamily | None:
    """The family as one whose models may take control images; None for others."""
    return cast("EditingFamily", family) if FACTS[family.name].edits else None


def maker_of(family: ModelFamily) -> NewFamily | None:
    """The family as one whose runs make their model; None where models are only loaded."""
    return cast("NewFamily", family) if hasattr(family, "is_new") else None


def evaluator_of(family: ModelFamily) -> EvaluatingFamily | None:
    """The family as one whose runs are shown by evaluations of its own; None where they are shown by prompts."""
    return cast("EvaluatingFamily", family) if FACTS[family.name].evaluates else None
