"""The table of epochs: exact means, one table for the whole life of a run, and columns in the order that is promised."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest

from sd_scripts.library.train.epochs import EpochLog
from sd_scripts.library.train.meter import StepLog


def step(loss: float, **parts: float) -> StepLog:
    return StepLog(loss, 0.0, parts, {"step_total": 0.25})


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_has_the_means_over_all_steps_of_its_epoch(tmp_path: Path) -> None:
    log = EpochLog(tmp_path / "epochs.csv", ("swd", "ssm"))
    for loss in (1.0, 2.0, 6.0):
        log.add(step(loss, swd=loss / 2, ssm=0.5, flow=3 * loss))
    assert log.end(1, 1e-4) == {
        "epoch": 1,
        "loss_total": 3.0,
        "loss_swd": 1.5,
        "loss_ssm": 0.5,
        "loss_flow": 9.0,
        "lr": 1e-4,
        "seconds": 0.75,
    }
    log.append()
    assert (
        tmp_path / "epochs.csv"
    ).read_text() == "epoch,loss_total,loss_swd,loss_ssm,lr,seconds,loss_flow\n1,3.0,1.5,0.5,0.0001,0.75,9.0\n"


def test_a_part_that_comes_later_is_a_column_of_its_own_and_empty_before(tmp_path: Path) -> None:
    log = EpochLog(tmp_path / "epochs.csv")
    log.add(step(1.0))
    log.end(1, 0.1)
    log.append()
    log.add(step(2.0, prior=4.0))
    log.add(step(4.0))
    log.end(2, 0.1)
    log.append()
    found = rows(tmp_path / "epochs.csv")
    assert list(found[0]) == ["epoch", "loss_total", "lr", "seconds", "loss_prior"]
    assert [row["loss_prior"] for row in found] == ["", "4.0"], "the mean over the steps that have it"
    assert found[1]["loss_total"] == "3.0"


def filled(path: Path, losses: list[float], begin: int, state: dict[str, Any] | None) -> EpochLog:
    """A session from a step on; epochs have 4 steps."""
    log = EpochLog(path)
    if state is not None:
        log.load_state_dict(state, begin)
        log.write()
    for number in range(begin, len(losses)):
        log.add(step(losses[number], part=losses[number] / 3))
        if (number + 1) % 4 == 0:
            log.end((number + 1) // 4, 0.1)
            log.append()
    return log


def test_a_run_that_goes_on_at_any_step_has_the_table_of_one_that_was_left_alone(tmp_path: Path) -> None:
    losses = [random.random() for _ in range(14)]
    filled(tmp_path / "whole.csv", losses, 0, None)
    for stop in range(1, 14):
        path = tmp_path / f"{stop}.csv"
        state = json.loads(json.dumps(filled(path, losses[:stop], 0, None).state_dict()))
        # The process lived on for a while and wrote rows that will come again.
        filled(path, losses, stop, state)
        filled(path, losses, stop, state)
        assert path.read_text() == (tmp_path / "whole.csv").read_text()
    assert len(rows(tmp_path / "whole.csv")) == 3


def test_a_state_of_an_earlier_version_begins_with_its_first_whole_epoch(tmp_path: Path) -> None:
    log = EpochLog(tmp_path / "epochs.csv")
    log.load_state_dict(None, 6)
    log.add(step(1.0))
    assert log.so_far(2, 0.1) is None and log.end(2, 0.1) is None, "the first steps of this epoch are not known"
    log.add(step(3.0))
    assert log.end(3, 0.1) == {"epoch": 3, "loss_total": 3.0, "lr": 0.1, "seconds": 0.25}
    log.write()
    assert [row["epoch"] for row in rows(tmp_path / "epochs.csv")] == ["3"]


def test_without_a_row_there_is_no_file_and_one_of_a_future_that_will_not_come_goes(tmp_path: Path) -> None:
    path = tmp_path / "epochs.csv"
    path.write_text("epoch\n7\n")
    EpochLog(path).write()
    assert not path.exists()


def test_a_run_that_ends_within_an_epoch_has_a_row_for_it_until_it_goes_on(tmp_path: Path) -> None:
    log = EpochLog(tmp_path / "epochs.csv")
    log.add(step(2.0))
    log.write(log.so_far(1, 0.1))
    assert [row["loss_total"] for row in rows(tmp_path / "epochs.csv")] == ["2.0"]
    longer = EpochLog(tmp_path / "epochs.csv")
    longer.load_state_dict(log.state_dict(), 1)
    longer.write()
    longer.add(step(4.0))
    longer.end(1, 0.1)
    longer.append()
    assert [row["loss_total"] for row in rows(tmp_path / "epochs.csv")] == ["3.0"]


@pytest.mark.parametrize("name", ["rows", "sums"])
def test_a_saved_table_is_a_copy(name: str, tmp_path: Path) -> None:
    log = EpochLog(tmp_path / "epochs.csv")
    log.add(step(1.0))
    kept = log.state_dict()
    before = json.dumps(kept[name])
    log.end(1, 0.1)
    log.add(step(5.0))
    assert json.dumps(kept[name]) == before
