"""What is known of the base model that a run names: its licence, and whether it draws in few steps. Looks at the name alone."""

from __future__ import annotations

from pathlib import Path

from sd_scripts.schema.facts import PublishedBase
from sd_scripts.schema.runs import RunOptions

from . import FACTS


def published(family: str, name: str) -> PublishedBase | None:
    """The published model that a base of this name is, or is most likely made from; None for the built-in model and for new ones."""
    if name.strip() in ("", "toy"):
        return None
    words = Path(name.replace("\\", "/")).name.lower()
    return next((base for base in FACTS[family].bases if all(piece in words for piece in base.pieces)), None)


def about(family: str, name: str) -> str:
    """A sentence or two for the field of the base model; empty where there is nothing to say."""
    base = published(family, name)
    return "" if base is None else " ".join([licence(family, name), *([_of_few_steps(base)] if base.undistilled else [])])


def licence(family: str, name: str) -> str:
    """The sentence of its licence alone, for who only draws; empty where there is nothing to say."""
    base = published(family, name)
    return "" if base is None else f"Licence: {base.licence}."


def notes(options: RunOptions) -> list[str]:
    """The same for a run, before it starts; nothing of few steps where the run keeps them."""
    base = published(options.family, options.model.pretrained_model_name_or_path or "")
    if base is None:
        return []
    said = [f"licence of the base model: {base.licence}"]
    keeps = options.model.undoes_distillation or options.objective.prior_weight > 0
    return said if keeps or not base.undistilled else [*said, _of_few_steps(base)]


def _of_few_steps(base: PublishedBase) -> str:
    return (
        f"This model was distilled to few steps, which plain training wears down. Train {base.undistilled} and draw with this one, or give "
        "training_adapter a LoRA that undoes the distillation, or set base_prior_weight to 1 with num_class_images."
    )
