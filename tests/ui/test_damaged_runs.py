"""Run folders that something has happened to: the list of runs names them and goes on, and no number is shown that cannot be."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kohya_like.live import Live
from kohya_like.supervisor import JobSupervisor
from sd_scripts.runs.events import RunFinished, RunStarted, StepDone
from sd_scripts.runs.rundir import RunDirectory
from tests.ui.runs_on_disk import made, options

DEEP = "[" * 200_000


def a_folder_in_its_place(file: Path) -> None:
    file.unlink()
    file.mkdir()


def a_link_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


DAMAGES: dict[str, tuple[Callable[[RunDirectory], Any], str]] = {
    "log is a folder": (lambda run: a_folder_in_its_place(run.events_file), "events.jsonl cannot be read: Is a directory."),
    "log is a link to itself": (lambda run: a_link_to_itself(run.events_file), "events.jsonl cannot be read: Too many levels of symbolic"),
    "no settings": (lambda run: run.config.unlink(), "config.toml, which holds its settings, is missing."),
    "settings are not text": (lambda run: run.config.write_bytes(b"\xff\xfe\x00[["), "config.toml, which holds its settings, is not text."),
    "settings are a link to itself": (
        lambda run: a_link_to_itself(run.config),
        "config.toml, which holds its settings, cannot be read: Too",
    ),
    "settings are a folder": (lambda run: a_folder_in_its_place(run.config), "config.toml, which holds its settings, is missing."),
}


def shown(supervisor: JobSupervisor, name: str) -> dict[str, Any]:
    """What the page gets of a run."""
    job = supervisor.find(name)
    assert job is not None
    return Live(supervisor).run(job, "", 0, -1, "")


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_run_is_listed_as_such_and_the_others_as_ever(
    damage: Callable[[RunDirectory], Any], sentence: str, tmp_path: Path
) -> None:
    whole, broken = (made(tmp_path, options(tmp_path, output_name=name)) for name in ("whole", "broken"))
    damage(broken)
    supervisor = JobSupervisor(tmp_path)
    states = {job.name: job.state for job in supervisor.jobs()}
    assert states == {whole.name: "stopped", broken.name: "damaged"}
    answer = shown(supervisor, broken.name)
    assert answer["state"] == "damaged" and answer["cause"]["text"].startswith(sentence) and answer["cause"]["advice"]
    assert shown(supervisor, whole.name)["state"] == "stopped"


@pytest.mark.parametrize("name", ["run.json", "exit.json", "run_meta.json", "events.jsonl"])
def test_nesting_without_end_is_no_more_than_a_damaged_line(name: str, tmp_path: Path) -> None:
    run = made(tmp_path, options(tmp_path))
    run.log(StepDone(step=50, loss=0.5, lr=1e-4))
    with (run.path / name).open("a") as file:
        file.write(DEEP + "\n")
    run.log(RunFinished(step=50))
    supervisor = JobSupervisor(tmp_path)
    (job,) = supervisor.jobs()
    assert (job.state, job.summary.step, job.summary.loss) == ("finished", 50, 0.5)
    answer = shown(supervisor, run.name)
    assert (answer["state"], answer["step"]) == ("finished", 50) and run.events()[0][-1]["kind"] == "finished"


def test_a_run_whose_folder_may_not_be_looked_into_is_listed_as_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by us in place of the system, which lets root look everywhere."""
    run, other = made(tmp_path, options(tmp_path)), tmp_path / "photos"
    other.mkdir()
    closed = [str(run.path), str(other)]

    def refusing(look: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def asked(path: Any, *more: Any, **named: Any) -> os.stat_result:
            if os.path.dirname(path) in closed:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return look(path, *more, **named)

        return asked

    run.config.unlink()
    run.config.symlink_to(run.config)  # Nor may that be read.
    os.utime(run.path, (0, 0))
    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    supervisor = JobSupervisor(tmp_path)
    (job,) = supervisor.jobs()
    assert (job.name, job.state) == (run.name, "damaged") and shown(supervisor, run.name)["cause"]["advice"]


@pytest.mark.parametrize(
    ("started", "step", "loss", "seen"),
    [
        ({"steps": -1}, 700, 0.5, (700, 0, 0.5)),
        ({"steps": 700}, 701, 0.5, (701, 0, 0.5)),
        ({"steps": 700}, 700, -2.07e292, (700, 700, None)),
        ({"steps": 700}, -5, 0.5, (0, 700, 0.5)),
        ({"steps": 1e300}, 3, 1e300, (3, 0, None)),
    ],
)
def test_numbers_that_cannot_be_are_not_shown(
    started: dict[str, Any], step: int, loss: float, seen: tuple[int, int, float | None], tmp_path: Path
) -> None:
    run = made(tmp_path, options(tmp_path))
    run.events_file.write_text("")
    run.log(RunStarted(start_step=0, **started))
    run.log(StepDone(step=step, loss=loss, lr=1e-4))
    run.log(RunFinished(step=step))
    supervisor = JobSupervisor(tmp_path)
    (job,) = supervisor.jobs()
    answer = json.loads(json.dumps(shown(supervisor, run.name)))
    assert (job.summary.step, job.summary.steps, job.summary.loss) == seen
    assert (answer["step"], answer["steps"], answer["loss"]) == seen


def test_a_link_to_itself_among_the_runs_hides_none_of_them(tmp_path: Path) -> None:
    run = made(tmp_path, options(tmp_path))
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    assert [path.name for path in JobSupervisor(tmp_path).run_folders()] == [run.name]
