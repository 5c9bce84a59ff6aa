"""Whether a data set's control images are as many as the model takes, and what to say when they are not."""

from __future__ import annotations

from collections.abc import Sequence

from sd_scripts.dataset.plan import Plan
from sd_scripts.library.core.protocols import ModelFamily, Parts
from sd_scripts.schema.errors import OptionError, Problem

_SHOWN = 5


def check_controls(plan: Plan, family: ModelFamily, parts: Parts) -> None:
    """Raises OptionError, naming the images, unless all that are used have as many control images as the model takes."""
    fewest, most = family.num_controls(parts)
    used = [*plan.trained_images(), *plan.held_out]
    few = [plan.images[index].path for index in used if len(plan.images[index].controls) < fewest]
    many = [plan.images[index].path for index in used if len(plan.images[index].controls) > most]
    version = parts.settings.get("model_version", parts.source)
    problems = []
    if few:
        problems.append(
            f"train_data_dir: {len(few)} of {len(used)} images have {_fewer(fewest)}, and {version} edits images: {_some(few)}. Put "
            "the image before the edit, under the same name, into the folder control, or choose model_version image"
        )
    if many and most == 0:
        problems.append(
            f"train_data_dir: {len(many)} of {len(used)} images have control images, and {version} makes images from text alone: "
            f"{_some(many)}. Set model_version = image to leave them aside, or choose a model that edits"
        )
    elif many:
        problems.append(
            f"train_data_dir: {len(many)} of {len(used)} images have more than {most} control {'image' if most == 1 else 'images'}, "
            f"which is what {version} takes: {_some(many)}. Take the others away, or choose a version that takes more"
        )
    if problems:
        raise OptionError([Problem("train_data_dir", problem) for problem in problems])


def _fewer(fewest: int) -> str:
    return "no control image" if fewest == 1 else f"fewer than {fewest} control images"


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:_SHOWN]) + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")
