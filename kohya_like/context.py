"""What every tab gets: the supervisor, the token of our own routes, the allowed folders, and the door into the Train tab.

How the tabs meet, all inside one gr.Blocks:
- `tabs.train.build(context)` returns the TrainDoor that `tabs.runs.build(context)` finds in context.train.
- `page.part("panel")` is one gr.HTML that shows one run live (curve, phase, speed, previews); its value is {"run": name of the run
  folder} or {"run": ""} for none, and an event that puts another name there makes it follow that run.
- `live.routes(supervisor, token)` are the JSON routes it polls. The page sends the token in the header `x-kl-token`; the
  part "top", which the app draws before all others, gives it to web/common/studio.js.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .predictions import PredictionQueue
    from .supervisor import JobSupervisor


@dataclass(frozen=True)
class TrainDoor:
    """How another tab puts settings into the form: `button.click(lambda: door.fill(config, ""), outputs=door.outputs)`."""

    outputs: tuple[Any, ...]
    """Components that fill() gives values for, in its order."""
    fill: Callable[[Path, str], tuple[Any, ...]]
    """Values that set the form from a config.toml, bring the Train tab to the front, and go to the field of an option, if one is named. A
    file that cannot be read becomes a sentence in the form's list of problems, not an exception."""


@dataclass(frozen=True)
class Context:
    """Made once by the app; nothing in it changes."""

    supervisor: JobSupervisor
    token: str
    output_dir: Path
    roots: tuple[Path, ...]
    """Folders the page may read and write, canonical; output_dir is one of them. files.confine checks against them."""
    predictions: PredictionQueue
    """Predictions: their queue, and what was made."""
    is_private: bool = False
    """Only somebody at this computer can open the page."""
    train: TrainDoor | None = None
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """What ends with the studio, before the predictions do."""
