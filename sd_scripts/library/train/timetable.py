"""When what happens in a run: saves, previews, validation, learning rates. Follows from the options and the images alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sd_scripts.dataset.plan import Plan
from sd_scripts.schema.runs import RunOptions

from .checkpoint import ends_period
from .optim import learning_rate_at


@dataclass(frozen=True)
class Timetable:
    """When what happens. epochs_done: whole epochs before a step; what is due is asked with the number of steps done."""

    total_steps: int
    epochs_done: Callable[[int], int]
    learning_rate_at: Callable[[int], float]
    """Factor on the peak rates, from the number of the step about to be done."""
    sample_due: Callable[[int], bool]
    samples_with_saves: bool
    validation_due: Callable[[int], bool]
    validates_with_saves: bool
    global_batch: int
    """Samples in an optimizer step, over all processes and micro-batches."""
    max_grad_norm: float
    state_on_train_end: bool
    names_of: Callable[[int], list[str]]
    """Files of all images of a step, over all processes, for messages."""


def timetable_of(options: RunOptions, plan: Plan, total_steps: int) -> Timetable:
    """The timetable of a run of this length on these images."""
    samples, data, optimizer = options.samples, options.dataset, options.optimizer
    epochs_done = plan.epoch_of

    def sample_due(step: int) -> bool:
        if step == 0:
            return samples.sample_at_first
        steps, epochs = samples.sample_every_n_steps, samples.sample_every_n_epochs
        return (steps is not None and step % steps == 0) or (epochs is not None and ends_period(epochs_done, step, epochs))

    def validation_due(step: int) -> bool:
        return data.validate_every_n_steps is not None and step % data.validate_every_n_steps == 0

    held_out = bool(plan.held_out)
    return Timetable(
        total_steps=total_steps,
        epochs_done=epochs_done,
        learning_rate_at=learning_rate_at(optimizer, total_steps),
        sample_due=sample_due,
        samples_with_saves=samples.sample_every_n_steps is None,
        validation_due=validation_due if held_out else lambda step: False,
        validates_with_saves=held_out and data.validate_every_n_steps is None,
        global_batch=plan.global_batch_size,
        max_grad_norm=optimizer.max_grad_norm,
        state_on_train_end=options.output.save_state_on_train_end,
        names_of=lambda step: [plan.images[ref.image].path for ref in plan.global_batch(step)],
    )
