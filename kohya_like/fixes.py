"""What one button does about a run that has failed: settings that are changed and another start, or the place where a person decides.

Of what trains the same with less, the first that is not on yet is changed, and the run goes on in its folder. What changes the training
makes a run of its own, which begins with the newest state of this one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.labels import label
from sd_scripts.schema.runs import RunOptions

from . import monitor, resuming
from .causes import Cause
from .supervisor import Job, JobSupervisor

FORM, DISK = "form", "disk"
"""Places to go to: the form with the settings of the run, and what the runs take of the disk."""
MODEL = "pretrained_model_name_or_path"
_BUTTONS = {FORM: "Correct it in the form", DISK: "Open Disk and trash"}


@dataclass(frozen=True)
class Fix:
    """What the button does. text: in a sentence; button: what it says; goes_to: FORM or DISK, and nothing is started then."""

    text: str
    button: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    goes_to: str = ""
    option: str = ""
    """The field of the form that is shown."""
    shown: tuple[tuple[str, str, str], ...] = ()
    """The changes in words: a label, a value, and the next one."""

    def as_page(self) -> dict[str, Any]:
        return {"text": self.text, "button": self.button, "goes_to": self.goes_to, "option": self.option, "shown": self.shown}


def fix_of(job: Job, cause: Cause) -> Fix | None:
    """The fix for the cause of a failure; None where nothing is known that a button could do."""
    if not cause.kind:
        return None
    try:
        options = job.run.options()
    except OptionError:
        return None
    if cause.kind == "disk":
        return Fix("What the runs take, and what may be deleted.", _BUTTONS[DISK], goes_to=DISK)
    if cause.kind in ("model", "file", "settings"):
        option = _option_in(cause.text, options) or (MODEL if cause.kind == "model" else "")
        where = f": {label(option, options.family)}" if option else ""
        return Fix(f"The settings of this run, in the form{where}.", _BUTTONS[FORM], goes_to=FORM, option=option)
    for changes in _changes(cause.kind, options):
        try:
            after = flat.build(type(options), {**flat.flatten(options), **changes})
        except OptionError:
            continue
        text = _goes_on(job) if _is_same(options, after) else f"A new run begins with these settings, {_from(_begins(job, changes))}."
        return Fix(text, "Change this and start again", changes, shown=_shown(options, after, changes))
    return Fix(_goes_on(job), "Start again") if cause.kind in ("passing", "ram", "readers") else None


def start(supervisor: JobSupervisor, job: Job, fix: Fix) -> Job:
    """Starts the run again with what is changed, or a new one that begins where it was. Raises OptionError."""
    before = job.run.options()
    after = flat.build(type(before), {**flat.flatten(before), **fix.changes})
    if _is_same(before, after):
        return supervisor.start(after.script, after, resume=job.path)
    state = _begins(job, fix.changes)
    begins = after.distributed.model_copy(update={"resume": "none" if state is None else str(state)})
    return supervisor.start(after.script, after.model_copy(update={"distributed": begins}))


def _changes(kind: str, options: RunOptions) -> Iterator[dict[str, Any]]:
    """What may help, what costs least first."""
    has, now = flat.fields(type(options)), flat.flatten(options)
    if kind == "memory":
        alone = not options.distributed.multi_gpu
        switches = ["gradient_checkpointing", *(["oom_fallback"] if alone else [])]
        yield from _if_new({name: True for name in switches if name in has}, now)
        yield from _if_new({name: True for name in switches[:1] if name in has}, now)
        batch, times = options.dataset.train_batch_size, options.training.gradient_accumulation_steps
        if batch > 1:
            yield {"train_batch_size": 1, "gradient_accumulation_steps": batch * times}
            yield {"train_batch_size": 1}
        if min(options.dataset.resolution) > 512:
            yield {"resolution": tuple(max(256, round(side * 0.75 / 64) * 64) for side in options.dataset.resolution)}
    elif kind == "nan":
        lower = {"learning_rate": float(f"{options.optimizer.learning_rate / 3:.2g}")}
        if options.training.mixed_precision == "fp16":
            yield {**lower, "mixed_precision": "bf16"}
        yield lower
    elif kind == "images":
        yield from _if_new({"on_bad_image": "skip"}, now)
    elif kind in ("ram", "readers"):
        yield from _if_new({"max_data_loader_n_workers": 0}, now)


def _if_new(changes: dict[str, Any], now: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What of the changes is not so already, together; nothing where all of it is."""
    new = {name: value for name, value in changes.items() if now[name] != value}
    if new:
        yield new


def _is_same(before: RunOptions, after: RunOptions) -> bool:
    """Whether each step trains the same."""
    return resuming.settings_of(before) == resuming.settings_of(after)


def _shown(before: RunOptions, after: RunOptions, changes: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    then, now = flat.flatten(before), flat.flatten(after)
    return tuple((label(name, before.family), _value(then[name]), _value(now[name])) for name in changes)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _begins(job: Job, changes: Mapping[str, Any]) -> Path | None:
    """The state that a new run begins with. Smaller steps begin before the last: with its weights the loss was no number."""
    farewell = monitor.summary(job.run.events_file).farewell if "learning_rate" in changes else None
    return resuming.newest_state(job.run.state, math.inf if farewell is None else farewell.step)[0]


def _goes_on(job: Job) -> str:
    return f"The run goes on in its folder, {_from(resuming.newest_state(job.run.state)[0])}."


def _from(state: Path | None) -> str:
    return "from the first step" if state is None else f"from the state of step {int(state.name)}"


def _option_in(text: str, options: RunOptions) -> str:
    """The option that a sentence is about: it begins a line of it, or its value is a path that stands there."""
    known = flat.fields(type(options))
    named: list[str] = [name for name in re.findall(r"^(?:- )?(\w+)\b", text, re.MULTILINE) if name in known]
    if named:
        return named[0]
    for name, value in flat.flatten(options).items():
        paths = [str(each) for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, str | Path)]
        if any(len(Path(path).parts) > 1 and path in text for path in paths):
            return name
    return ""
