"""The two rows of choices at the top of the Train tab: model families, and training modes.

A training mode is a kind of run and a view of its fields.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingMode:
    """One training mode.

    DreamBooth and fine-tuning are the same kind of run. They differ in the options that come first and in those that are left out as
    long as they have their defaults; an option with a value is always shown, whichever mode is chosen.
    """

    name: str
    label: str
    method: str
    """Second half of the key in RUNS."""
    about: str
    title: str = ""
    """Heading over the options that come first."""
    first: tuple[str, ...] = ()
    """Options at the top of their accordion."""
    hidden: tuple[str, ...] = ()
    """Options of the other mode with the same method, or of no use here."""
    opens: bool = False
    """The accordion of the first options is open from the start."""


_CLASS_IMAGES = ("instance_prompt", "class_prompt", "num_class_images", "reg_data_dir", "prior_loss_weight")

TRAINING_MODES = (
    TrainingMode("lora", "LoRA", "network", "A small file beside the base model. Trains fastest, needs the least memory."),
    TrainingMode(
        "dreambooth",
        "DreamBooth",
        "full",
        "The whole model learns one subject from a few images; images of its class keep the rest as it was.",
        title="Subject and class",
        first=_CLASS_IMAGES,
        hidden=("in_json",),
        opens=True,
    ),
    TrainingMode(
        "finetune",
        "Fine-tuning",
        "full",
        "The whole model learns from many images with captions, in text files or one metadata file.",
        title="Captions and metadata",
        first=("in_json", "dataset_config", "dataset_repeats"),
        hidden=_CLASS_IMAGES,
    ),
    TrainingMode(
        "scratch",
        "From nothing",
        "scratch",
        "A small model that the run makes, and that learns everything from your images.",
        hidden=_CLASS_IMAGES,
    ),
)
"""In the order of the page."""
