"""One line for each epoch of a run: the means of its losses, its learning rate, the time it took. One table for the whole life of a run.

The rows and what is added up of the present epoch are part of a training state. So the table of a run that was killed and went on is that
of one that nobody disturbed, but for the seconds, and a run that goes back loses the rows of epochs that will come again.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sd_scripts.runs.events import EpochDone
from sd_scripts.schema.files import write_atomically

from .checkpoint import room_for
from .learner import Learner
from .meter import StepLog
from .observing import Observer

Row = dict[str, float]
"""The columns that an epoch has, by name."""


class EpochLog:
    """Adds up the steps of an epoch, and keeps the table of those that are over. Epochs count from 1, as people count them."""

    def __init__(self, path: Path, leading: Sequence[str] = ()) -> None:
        """path: the CSV file. leading: parts of the loss whose columns come before the learning rate, whether a run has them or not."""
        self._path = path
        self._columns = ["epoch", "loss_total", *(f"loss_{name}" for name in leading), "lr", "seconds"]
        self.rows: list[Row] = []
        """Of the epochs that are over."""
        self._written: list[str] = []
        """Columns of the file."""
        self._begin(whole=True)

    def _begin(self, whole: bool) -> None:
        """whole: whether the present epoch is seen from its first step on."""
        self._whole = whole
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._seconds = 0.0

    def add(self, log: StepLog) -> None:
        """One step of the present epoch was done."""
        for name, value in {"total": log.loss, **log.parts}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1
        self._seconds += log.seconds["step_total"]

    def end(self, epoch: int, lr: float) -> Row | None:
        """The present epoch is over, and its row is in the table; None where its first steps are not known. lr: of its last step."""
        row = self.so_far(epoch, lr)
        if row is not None:
            self.rows.append(row)
        self._begin(whole=True)
        return row

    def so_far(self, epoch: int, lr: float) -> Row | None:
        """The row of the present epoch as if it were over; None before its first step, and where its first steps are not known.

        A part of the loss that not every step has is the mean over those that do.
        """
        if not self._whole or not self._sums:
            return None
        means = {f"loss_{name}": total / self._counts[name] for name, total in self._sums.items()}
        return {"epoch": epoch, **means, "lr": lr, "seconds": round(self._seconds, 3)}

    def write(self, last: Row | None = None) -> None:
        """Writes the whole table, and a row for an epoch that the run ended in; without any row there is no file."""
        rows = [*self.rows, *([last] if last is not None else [])]
        self._written = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        if rows:
            write_atomically(self._path, self._lines([dict(zip(self._written, self._written, strict=True)), *rows]))
        else:
            self._path.unlink(missing_ok=True)

    def append(self) -> None:
        """Writes the newest row behind the others; the whole table where it is the first, or has a column that they lack."""
        row = self.rows[-1]
        if len(self.rows) == 1 or not self._path.is_file() or not set(row) <= set(self._written):
            self.write()
            return
        # One write: a reader must never meet half a line.
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(handle, self._lines([row]).encode())
        finally:
            os.close(handle)

    def _lines(self, rows: Sequence[Mapping[str, Any]]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._written, restval="", lineterminator="\n").writerows(rows)
        return text.getvalue()

    def state_dict(self) -> dict[str, Any]:
        """What a later process needs to go on with the table."""
        return {
            "rows": [dict(row) for row in self.rows],
            "whole": self._whole,
            "sums": dict(self._sums),
            "counts": dict(self._counts),
            "seconds": self._seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Goes back to a saved table; None for a state after `step` steps that has none, of an earlier version."""
        if state is None:
            self.rows = []
            self._begin(whole=step == 0)
            return
        self.rows = [dict(row) for row in state["rows"]]
        self._whole, self._seconds = bool(state["whole"]), float(state["seconds"])
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])


class EpochTable(Observer):
    """Adds each step of a run to its epoch, and writes down an epoch that is over; the run may end within one."""

    kept = "epochs"

    def __init__(self, learner: Learner, path: Path, leading: Sequence[str] = ()) -> None:
        """See EpochLog."""
        self._learner, self._table, self._process = learner, learner.timetable, learner.process
        self._path = path
        self.log = EpochLog(path, leading)

    def begin(self, step: int) -> None:
        """Brings the file to what is known."""
        if self._process.is_main:
            ended = step >= self._table.total_steps
            row = self.log.so_far(self._table.epochs_done(step - 1) + 1, self._learner.learning_rate()) if ended else None
            with room_for(self._path.name, self._path.parent):
                self.log.write(row)

    def after_step(self, step: int, log: StepLog) -> None:
        self.log.add(log)
        before = self._table.epochs_done(step - 1)
        ends = self._table.epochs_done(step) > before
        if not ends and step < self._table.total_steps:
            return
        rate = self._learner.learning_rate()
        row = self.log.end(before + 1, rate) if ends else self.log.so_far(before + 1, rate)
        if row is None or not self._process.is_main:
            return
        with room_for(self._path.name, self._path.parent):
            if ends:
                self.log.append()
            else:
                self.log.write(row)
        parts = {name.removeprefix("loss_"): value for name, value in row.items() if name.startswith("loss_") and name != "loss_total"}
        self._process.log(EpochDone(step=step, epoch=before + 1, loss=row["loss_total"], parts=parts, lr=row["lr"], seconds=row["seconds"]))

    def state_dict(self) -> dict[str, Any]:
        return self.log.state_dict()

    def load_state_dict(self, state: Any, step: int) -> None:
        self.log.load_state_dict(state, step)
