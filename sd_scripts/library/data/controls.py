"""Whether a data set's control pictures are as many as the model takes, and what to say when they are not."""

from __future__ import annotations

from collections.abc import Sequence

from sd_scripts.dataset.plan import Plan
from sd_scripts.library.core.protocols import ModelFamily, Parts
from sd_scripts.schema.errors import OptionError, Problem

_SHOWN = 5


def check_controls(plan: Plan, family: ModelFamily, parts: Parts) -> None:
    """Raises OptionError, naming the pictures, unless all that are used have as many control pictures as the model takes."""
    fewest, most = family.num_controls(parts)
    used = [*plan.trained_pictures(), *plan.held_out]
    few = [plan.pictures[index].path for index in used if len(plan.pictures[index].controls) < fewest]
    many = [plan.pictures[index].path for index in used if len(plan.pictures[index].controls) > most]
    version = parts.settings.get("model_version", parts.source)
    problems = []
    if few:
        problems.append(
            f"train_data_dir: {len(few)} of {len(used)} pictures have {_fewer(fewest)}, and {version} edits pictures: {_some(few)}. Put "
            "the picture before the edit, under the same name, into the folder control, or choose model_version image"
        )
    if many and most == 0:
        problems.append(
            f"train_data_dir: {len(many)} of {len(used)} pictures have control pictures, and {version} makes pictures from text alone: "
            f"{_some(many)}. Set model_version = image to leave them aside, or choose a model that edits"
        )
    elif many:
        problems.append(
            f"train_data_dir: {len(many)} of {len(used)} pictures have more than {most} control {'picture' if most == 1 else 'pictures'}, "
            f"which is what {version} takes: {_some(many)}. Take the others away, or choose a version that takes more"
        )
    if problems:
        raise OptionError([Problem("train_data_dir", problem) for problem in problems])


def _fewer(fewest: int) -> str:
    return "no control picture" if fewest == 1 else f"fewer than {fewest} control pictures"


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:_SHOWN]) + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")
