"""What every tab gets: the supervisor, the token of our own routes, and the allowed folders.

How the tabs meet, all inside one gr.Blocks:
- What fills the form of the Train tab, from wherever on the page, goes through `openSettings` of web/train/opening.js.
- `page.part("panel")` is one gr.HTML that shows one run live (curve, phase, speed, previews); its value is {"run": name of the run
  folder} or {"run": ""} for none, and an event that puts another name there makes it follow that run.
- `live.routes(supervisor, token)` are the JSON routes it polls. The page sends the token in the header `x-kl-token`; the
  part "top", which the app draws before all others, gives it to web/common/studio.js.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .predictions import PredictionQueue
    from .supervisor import JobSupervisor


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
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """What ends with the studio, before the predictions do."""
