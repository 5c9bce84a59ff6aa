"""Several runs beside one another: which settings differ, in the words of the form, and what each has reached and taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sd_scripts.schema.flat import flatten
from sd_scripts.schema.labels import label

from . import monitor
from .supervisor import Job

OF_EVERY_RUN = frozenset({"output_name", "output_dir"})
"""Settings that tell where a run lies, not what it is."""
MOST_RUNS = 16
MOST_POINTS = 500
"""Of a run's curve, on a plot of several."""


@dataclass(frozen=True)
class DifferingSetting:
    """A setting that is not the same in all runs. values: as each run has it, None where its kind of run has no such setting."""

    name: str
    label: str
    values: tuple[Any, ...]


def differences(jobs: Sequence[Job]) -> list[DifferingSetting]:
    """The settings in which runs differ, in the order of the form. Raises OptionError for a run whose settings cannot be read."""
    read = [job.run.options() for job in jobs]
    known = [flatten(options) for options in read]
    families = {options.family for options in read}
    family = families.pop() if len(families) == 1 else ""
    names = [name for name in dict.fromkeys(name for values in known for name in values) if name not in OF_EVERY_RUN]
    rows: list[tuple[str, str, tuple[Any, ...]]] = [("model family and training mode", "", tuple(type(options).label for options in read))]
    rows += [(name, label(name, family), tuple(values.get(name) for values in known)) for name in names]
    return [DifferingSetting(name, words or name, values) for name, words, values in rows if any(value != values[0] for value in values)]


def reached(job: Job, progress: monitor.Progress | None = None) -> dict[str, Any]:
    """What a run has come to: steps, last loss, lowest held-out loss, seconds of training and in pauses, most memory. None: not known.

    progress: what its log says, where somebody has read it already.
    """
    if progress is None:
        progress = monitor.Progress()
        progress.fold(job.run.events()[0])
    total, last = progress.sessions.total, progress.last_step
    return {
        "state": job.state,
        "steps": progress.step,
        "of steps": progress.steps,
        "loss": progress.loss,
        "lowest held-out loss": min((loss for _, loss in progress.validation), default=None),
        "trained seconds": round(total.trained_seconds, 1),
        "paused seconds": round(total.paused_seconds, 1),
        "seconds per step": progress.seconds_per_step,
        "peak GiB": getattr(last, "peak_gib", None),
    }


def beside(job: Job, progress: monitor.Progress) -> dict[str, Any]:
    """A run as the page draws it beside others: what it has reached, its curve as [step, mean loss, smoothed loss], and held-out losses."""
    points = progress.curve.points
    shown = points[:: max(1, len(points) // MOST_POINTS)]
    shown += points[-1:] if shown and shown[-1] is not points[-1] else []
    return {
        "name": job.name,
        "reached": reached(job, progress),
        "curve": [[point.step, float(f"{point.loss:.6g}"), float(f"{point.smooth:.6g}")] for point in shown],
        "validation": progress.validation,
    }
