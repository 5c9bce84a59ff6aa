"""The two rows of choices at the top of the Train tab: model families, and ways to train.

A way to train is a kind of run and a view of its fields.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """One way to train.

    DreamBooth and fine-tuning are the same kind of run. They differ in the options that come first and in those that are left out as
    long as they have their defaults; an option with a value is always shown, whichever way is chosen.
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
    """Options of the other way with the same method, or of no use here."""
    opens: bool = False
    """The accordion of the first options is open from the start."""


_CLASS_PICTURES = ("instance_prompt", "class_prompt", "num_class_images", "reg_data_dir", "prior_loss_weight")

WAYS = (
    Way("lora", "LoRA", "network", "A small file beside the base model. Trains fastest, needs the least memory."),
    Way(
        "dreambooth",
        "DreamBooth",
        "full",
        "The whole model learns one subject from a few pictures; pictures of its class keep the rest as it was.",
        title="Subject and class",
        first=_CLASS_PICTURES,
        hidden=("in_json",),
        opens=True,
    ),
    Way(
        "finetune",
        "Fine-tuning",
        "full",
        "The whole model learns from many pictures with captions, in text files or one metadata file.",
        title="Captions and metadata",
        first=("in_json", "dataset_config", "dataset_repeats"),
        hidden=_CLASS_PICTURES,
    ),
    Way(
        "scratch",
        "From nothing",
        "scratch",
        "A small model that the run makes, and that learns everything from your pictures.",
        hidden=_CLASS_PICTURES,
    ),
)
"""In the order of the page."""
