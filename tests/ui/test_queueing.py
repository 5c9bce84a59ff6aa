"""The queue as people order it: which run starts when a device is free, and what a run waits for besides one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kohya_like import queueing
from kohya_like.supervisor import Job, JobSupervisor, queue_of
from sd_scripts.schema.errors import OptionError
from tests.ui.standin_runs import SCRIPT, command, options, until


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobSupervisor]:
    """One device, which a run has that ends only when it is stopped; later runs are short."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    first = JobSupervisor(tmp_path, command("endless"))
    first.start(SCRIPT, options(tmp_path, output_name="first"))
    first.close()
    supervisor = JobSupervisor(tmp_path, command("quick"))
    yield supervisor
    for job in supervisor.seen():
        supervisor.stop(job, grace_seconds=0)
    supervisor.close()


def waiting(supervisor: JobSupervisor, *names: str) -> dict[str, Job]:
    return {name: supervisor.start(SCRIPT, options(supervisor.root, output_name=name)) for name in names}


def order(supervisor: JobSupervisor) -> list[str]:
    return [job.name.rpartition("-")[2] for job in queue_of(supervisor.seen())]


def begun(supervisor: JobSupervisor) -> list[str]:
    """Names of the later runs that have begun, in that order."""
    jobs = [job for job in supervisor.seen() if job.summary.started_at and not job.name.endswith("-first")]
    return [job.name.rpartition("-")[2] for job in sorted(jobs, key=lambda job: job.summary.started_at)]


def release(supervisor: JobSupervisor) -> None:
    """The first run ends and its device is free."""
    supervisor.stop(next(job for job in supervisor.seen() if job.name.endswith("-first")), grace_seconds=0)


def test_runs_start_in_the_order_that_they_were_put_into(supervisor: JobSupervisor) -> None:
    jobs = waiting(supervisor, "a", "b", "c")
    assert order(supervisor) == ["a", "b", "c"]
    supervisor.plan(jobs["c"], {"place": 0})
    supervisor.plan(jobs["a"], {"place": 99})
    assert order(supervisor) == ["c", "b", "a"]
    waiting(supervisor, "d")
    assert order(supervisor) == ["c", "b", "a", "d"], "who comes later waits behind them"
    release(supervisor)
    until(lambda: len(supervisor.jobs()) == 5 and all(job.state in ("finished", "stopped") for job in supervisor.jobs()))
    assert begun(supervisor) == ["c", "b", "a", "d"]
    assert not list(supervisor.root.glob(f"*/{queueing.FILE}"))
    with pytest.raises(OptionError, match="does not wait any more"):
        supervisor.plan(jobs["a"], {"held": True})


def test_what_is_held_or_planned_for_later_lets_others_pass(supervisor: JobSupervisor, tmp_path: Path) -> None:
    jobs = waiting(supervisor, "held", "late", "next", "free")
    supervisor.plan(jobs["held"], {"held": True})
    supervisor.plan(jobs["late"], {"not_before": time.time() + 3600})
    supervisor.plan(jobs["next"], {"after": jobs["free"].name})
    # Another studio on this folder sees the same.
    again = JobSupervisor(tmp_path, command("quick"))
    assert {job.name: job.waiting for job in queue_of(again.seen())} == {job.name: job.waiting for job in queue_of(supervisor.seen())}
    again.close()
    release(supervisor)
    until(lambda: [supervisor.find(jobs[name].name).state for name in ("free", "next") if supervisor.jobs()] == ["finished"] * 2)
    assert begun(supervisor) == ["free", "next"] and order(supervisor) == ["held", "late"]
    # The time has come.
    queueing.write(jobs["late"].path, replace(queueing.read(jobs["late"].path), not_before=time.time() - 1))
    until(lambda: supervisor.jobs() and supervisor.find(jobs["late"].name).state == "finished")
    supervisor.plan(jobs["held"], {"held": False})
    until(lambda: supervisor.jobs() and supervisor.find(jobs["held"].name).state == "finished")


def test_what_cannot_be_planned_is_refused_in_a_sentence(supervisor: JobSupervisor) -> None:
    jobs = waiting(supervisor, "a", "b", "c")
    supervisor.plan(jobs["a"], {"after": jobs["b"].name})
    supervisor.plan(jobs["b"], {"after": jobs["c"].name})
    for name, wish, words in (
        ("c", {"after": jobs["a"].name}, "neither would ever start"),
        ("c", {"after": jobs["c"].name}, "neither would ever start"),
        ("c", {"after": "../c"}, "is not there"),
        ("c", {"not_before": time.time() - 5}, "still to come"),
        ("c", {"not_before": float("nan")}, "still to come"),
        ("c", {"not_before": "soon"}, "still to come"),
    ):
        with pytest.raises(OptionError, match=words):
            supervisor.plan(jobs[name], wish)
    (jobs["c"].path / queueing.FILE).write_text('{"place": true, "not_before": "x", "held": 1, "after": null')
    assert queueing.read(jobs["c"].path) == queueing.Waiting(), "what cannot be read says nothing"
