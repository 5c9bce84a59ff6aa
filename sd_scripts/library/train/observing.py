"""What watches a session of training without being part of it."""

from __future__ import annotations

from typing import Any, ClassVar

from .meter import StepLog


class Observer:
    """Is told of the steps of a session, in every process, and changes nothing of them. Each does what it needs of this."""

    kept: ClassVar[str] = ""
    """Entry of a state's loop that holds state_dict(); empty for those that begin anew with each session."""

    def begin(self, step: int) -> None:
        """A session begins after so many steps of the run."""

    def before_step(self, step: int) -> None:
        """Another step begins, after so many."""

    def after_step(self, step: int, log: StepLog) -> None:
        """So many steps are done; log is that of the last one."""

    def end(self, step: int) -> None:
        """No more steps are done, for whatever reason."""

    def state_dict(self) -> Any:
        """What the next session needs."""

    def load_state_dict(self, state: Any, step: int) -> None:
        """Goes back to a state after so many steps; None where a state of an earlier version has none."""
