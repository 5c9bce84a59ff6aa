"""How long the sessions of a run have trained, from its event log. A session is one process, from its first step to its last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .events import Event, RunStarted, Spent


@dataclass(frozen=True)
class Session:
    """One session, or several together. What a killed process had not logged yet is not known and does not count."""

    steps: int = 0
    """Steps done, those included that a later session did again."""
    trained_seconds: float = 0.0
    """Of all steps."""
    paused_seconds: float = 0.0
    """Of saving, previews and validation between steps."""

    def __add__(self, other: Session) -> Session:
        return Session(self.steps + other.steps, self.trained_seconds + other.trained_seconds, self.paused_seconds + other.paused_seconds)


@dataclass
class Sessions:
    """The sessions of a run; take() reads its events in order."""

    past: Session = Session()
    num_past: int = 0
    present: Session = Session()
    """The newest one, which may be over; without steps until its first one is logged."""

    def take(self, events: Iterable[Event]) -> None:
        """Reads the next events. Lines of older versions, which tell no `step_in_session`, are passed over."""
        for event in events:
            if isinstance(event, RunStarted):
                self._close()
            elif isinstance(event, Spent):
                self._read(event.step_in_session, event.trained_seconds, event.paused_seconds or 0.0)

    def _read(self, steps: int | None, trained: float | None, paused: float) -> None:
        if steps is None or trained is None or min(steps, trained, paused) < 0:
            return
        if steps < self.present.steps:
            self._close()
        self.present = Session(steps, trained, paused)

    def _close(self) -> None:
        if self.present.steps:
            self.past, self.num_past = self.past + self.present, self.num_past + 1
        self.present = Session()

    @property
    def total(self) -> Session:
        """All sessions together."""
        return self.past + self.present

    @property
    def count(self) -> int:
        """Sessions that did at least one step."""
        return self.num_past + bool(self.present.steps)
