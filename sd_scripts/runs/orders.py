"""What somebody may ask of a run while it trains: files in its folder, looked for after each step. Nothing that is asked changes a step.

`evaluate.request`, `save.request` and `sample_other.request`, which holds prompts, are taken away when they are followed, `pause.request`
by whoever wants it to go on, and `stop_at.request`, which holds the number of a step, when the run has ended there.
"""

from __future__ import annotations

import os
from enum import IntFlag
from pathlib import Path

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import write_atomically


class Asked(IntFlag):
    """What is asked at a moment; together in one number, so that one process tells the others in a sum."""

    NOTHING = 0
    SAMPLES = 1
    SAVE = 2
    PAUSE = 4
    STOP = 8
    OTHER = 16
    """Samples of other prompts than the run's."""


class Orders:
    """The wishes in a run's folder."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            Asked.SAMPLES: folder / "evaluate.request",
            Asked.SAVE: folder / "save.request",
            Asked.PAUSE: folder / "pause.request",
            Asked.OTHER: folder / "sample_other.request",
        }
        self._stop_at = folder / "stop_at.request"

    def ask(self, what: Asked) -> None:
        """Asks for samples, a save or a pause after the present step."""
        write_atomically(self._files[what], f"{str(what.name).lower()}\n")

    def ask_other(self, prompts: str) -> None:
        """Asks for samples of these prompts, once."""
        write_atomically(self._files[Asked.OTHER], prompts)

    def other_prompts(self) -> str:
        """Those that samples are asked of; empty where there are none that can be read."""
        try:
            return self._files[Asked.OTHER].read_text(encoding="utf-8")
        except (OSError, ValueError):
            return ""

    def take_back(self, what: Asked) -> None:
        """What is no longer asked, or is being followed."""
        for kind, file in {**self._files, Asked.STOP: self._stop_at}.items():
            if kind & what:
                file.unlink(missing_ok=True)

    def stop_step(self) -> int | None:
        """The step after which the run shall end; None when nobody has asked, or nothing can be read there."""
        try:
            text = self._stop_at.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
        return int(text) if text.isdecimal() else None

    def stop_after(self, step: int | None) -> None:
        """Asks to save and end after that many steps; None takes it back. Raises OptionError for a number that is none."""
        if step is None:
            self._stop_at.unlink(missing_ok=True)
        elif step < 1:
            raise OptionError(f"stop after step {step}: a step is at least 1")
        else:
            write_atomically(self._stop_at, f"{step}\n")

    def asked(self, done: int | None = None) -> Asked:
        """What is asked now; done: steps that the run will have done when it is followed, for a step to stop after."""
        found = Asked.NOTHING
        for what, file in self._files.items():
            if os.path.exists(file):
                found |= what
        if done is not None and (stop := self.stop_step()) is not None and done >= stop:
            found |= Asked.STOP
        return found
