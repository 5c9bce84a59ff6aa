"""Errors of the engine that reach a person: each is a sentence, shown without a traceback."""

from __future__ import annotations

from pathlib import Path

from sd_scripts.schema.errors import OptionError

__all__ = ["NonFiniteLoss", "OptionError", "OutOfMemory", "TrainingError"]


class TrainingError(RuntimeError):
    """Training cannot go on, for a reason that a person can act on; the message says what and what to do."""


class NonFiniteLoss(TrainingError):
    """The loss or the gradient is not a number; raised before the optimizer step."""

    def __init__(self, step: int, names: list[str], what: str = "loss", report: Path | None = None) -> None:
        """report: folder with what is known of the step."""
        self.step, self.names = step, names
        kept = "" if report is None else f" Each sample's loss and image are in {report}."
        super().__init__(
            f"step {step}: the {what} is not a finite number. Images in the batch: {', '.join(names)}.{kept} The last good state is "
            "kept; a lower learning_rate, mixed_precision = bf16 or no, or max_grad_norm = 1 usually helps, and the images are worth a "
            "look"
        )


class OutOfMemory(TrainingError):
    """The device has no memory for something that was tried; the message names it."""
