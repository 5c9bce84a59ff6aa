"""Speed, remaining time and totals of sessions, in exact numbers."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from sd_scripts.library.train.meter import DECAY, Meter, Phases, Sections, StepLog, largest, marks_of, peak_gib
from sd_scripts.runs.events import Event, read
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.sessions import Session, Sessions
from tests.forked import forked

CPU = torch.device("cpu")


def step_of(seconds: float, **parts: float) -> StepLog:
    return StepLog(loss=1.0, grad_norm=0.5, parts=parts, seconds={"data_fetch": 0.0, "step_total": seconds})


def metered(times: list[float], total: int = 100) -> Meter:
    """After a first step of 60 s and steps of these times."""
    meter = Meter(4, CPU)
    meter.begin(total, {}, {})
    meter.add(step_of(60.0), warming_up=True)
    for seconds in times:
        meter.add(step_of(seconds), warming_up=False)
    return meter


def test_after_a_resume_the_speed_is_that_of_the_new_steps_only() -> None:
    # From step 900 of 1000; ten steps of 2 s are done. Dividing the session's 80 s by step 911 would say 0.09 s a step and 8 s left.
    meter = metered([2.0] * 10, total=1000)
    point = meter.point(911, peak=1.5)
    assert point["seconds_per_step"] == 2.0 and point["eta_seconds"] == 2.0 * 89
    assert point["step_in_session"] == 11 and point["trained_seconds"] == 80.0 and point["paused_seconds"] == 0.0
    assert point["images_per_second"] == 2.0 and point["peak_gib"] == 1.5


def test_the_recent_mean_weighs_each_step_by_how_long_ago_it_was() -> None:
    meter = metered([1.0, 3.0])
    assert meter.seconds_per_step == pytest.approx((DECAY * 1.0 + 3.0) / (DECAY + 1.0), rel=1e-12)
    # 34 steps later a step weighs half; where one size in four takes twice as long, the mean is 1.25 and the median would be 1.
    assert abs(DECAY**34 - 0.5) < 0.005
    assert metered([1.0, 1.0, 1.0, 2.0] * 200).seconds_per_step == pytest.approx(1.25, abs=0.02)


def test_only_the_first_step_is_known_at_first() -> None:
    meter = Meter(2, CPU)
    meter.begin(10, {}, {})
    assert meter.seconds_per_step == 0.0
    meter.add(step_of(8.0), warming_up=True)
    assert meter.seconds_per_step == 8.0 and meter.eta_seconds(1) == 72.0
    meter.add(step_of(1.0), warming_up=False)
    assert meter.seconds_per_step == 1.0 and meter.eta_seconds(2) == 8.0


def test_pauses_left_cost_what_those_so_far_have_cost() -> None:
    planned = {"save": [10, 20, 30, 40], "sample": [20, 40], "validate": [40]}
    meter = Meter(4, CPU)
    # What phases took before the loop is not of the loop.
    meter.begin(40, planned, {"save": 100.0, "cache": 500.0})
    for seconds in [9.0] + [1.0] * 20:
        meter.add(step_of(seconds), warming_up=seconds == 9.0)
    meter.paused({"save": 100.0, "cache": 500.0})
    meter.paused({"save": 106.0, "cache": 500.0})
    meter.paused({"save": 106.0, "cache": 500.0, "train": 50.0})
    meter.paused({"save": 108.0, "sample": 30.0, "cache": 500.0, "train": 99.0})
    assert meter.paused_seconds == 38.0
    # 19 steps left, two saves of (6 + 2) / 2 s, one preview of 30 s; nobody knows yet what validation costs.
    assert meter.eta_seconds(21) == 19.0 + 2 * 4.0 + 30.0
    assert meter.eta_seconds(39) == 1.0 + 4.0 + 30.0
    assert meter.eta_seconds(40) == 0.0


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=60), st.integers(0, 900))
def test_the_remaining_time_does_not_depend_on_where_the_session_began(times: list[float], first: int) -> None:
    done = len(times) + 1
    here = metered(times, total=100).eta_seconds(done)
    there = metered(times, total=100 + first).eta_seconds(first + done)
    assert there == pytest.approx(here, rel=1e-9) and min(times) * (100 - done) * 0.999 <= here <= max(times) * (100 - done) * 1.001


def test_a_point_is_the_mean_since_the_last_one() -> None:
    meter = metered([])
    meter.point(1, 0.0)
    for loss, seconds in ((1.0, 2.0), (3.0, 4.0)):
        meter.add(StepLog(loss, loss, {"edge": loss}, {"data_fetch": 0.5, "step_total": seconds}), warming_up=False)
    point = meter.point(3, 0.0)
    assert (point["loss"], point["step_total"], point["data_fetch"], point["grad_norm"]) == (2.0, 3.0, 0.5, 3.0)
    assert point["parts"] == {"edge": 2.0}


# Sections


class Mark:
    """A stand-in for torch.cuda.Event: a GPU that is one step behind, and takes 3 ms between two marks."""

    reached, made = 0, 0

    def record(self) -> None:
        Mark.made += 1
        self.number = Mark.made

    def query(self) -> bool:
        return self.number <= Mark.reached

    def elapsed_time(self, end: Mark) -> float:
        assert end.query(), "reading it would wait for the GPU"
        return 3.0 * (end.number - self.number)


def stepped() -> StepLog:
    """A step of two micro-batches: 8 marks of sections, 2 of the whole."""
    sections = Sections(Mark)
    for _ in range(2):
        with sections.of("data_fetch"):
            pass
        with sections.of("fwd_bwd"):
            pass
    with sections.of("fwd_bwd"):
        pass
    with sections.of("opt_step"):
        pass
    return StepLog(1.0, 1.0, seconds=sections.all(), marks=sections.marks)


def test_times_of_the_gpu_are_those_of_the_line_before_and_nobody_waits_for_them() -> None:
    Mark.reached = Mark.made = 0
    meter = Meter(1, CPU)
    points = []
    for _ in range(3):
        for _ in range(2):
            meter.add(stepped(), warming_up=False)
        points.append(meter.point(1, 0.0))
        Mark.reached = Mark.made
    assert not any(name.endswith("_gpu") for name in points[0])
    for point in points[1:]:
        assert {name: value for name, value in point.items() if name.endswith("_gpu")} == pytest.approx(
            {"fwd_bwd_gpu": 0.009, "opt_step_gpu": 0.003, "step_total_gpu": 0.027}
        )
        assert point["fwd_bwd_gpu"] + point["opt_step_gpu"] <= point["step_total_gpu"]


def test_a_gpu_that_is_far_behind_is_not_waited_for() -> None:
    Mark.reached = Mark.made = 0
    meter = Meter(1, CPU)
    for _ in range(3):
        meter.add(stepped(), warming_up=False)
        assert not any(name.endswith("_gpu") for name in meter.point(1, 0.0))


def test_a_device_without_marks_has_no_times_of_its_own() -> None:
    assert marks_of(CPU) is None
    sections = Sections()
    with sections.of("fwd_bwd"):
        time.sleep(0.02)
    seconds = sections.all()
    assert sections.marks == {} and seconds["step_total"] >= seconds["fwd_bwd"] >= 0.02 > seconds["opt_step"] == 0


def test_overflowed_steps_are_counted_by_line() -> None:
    meter = metered([])
    meter.point(1, 0.0)
    for overflowed in (True, False, True):
        meter.add(StepLog(1.0, 1.0, {}, {"step_total": 1.0}, overflowed=overflowed), warming_up=False)
    assert meter.overflowed == 2
    meter.point(4, 0.0)
    assert meter.overflowed == 0


# Phases


def test_phases_tell_what_each_has_taken_the_present_one_included(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    phases = Phases(run)
    assert phases.seconds() == {}
    for name, seconds in (("train", 0.05), ("save", 0.1), ("train", 0.05)):
        phases.enter(name)
        time.sleep(seconds)
    spent = phases.seconds()
    assert spent["train"] >= 0.1 and spent["save"] >= 0.1
    assert phases.seconds()["save"] == spent["save"]
    time.sleep(0.01)
    assert phases.seconds()["train"] > spent["train"]
    logged = [(event["name"], event["seconds"]) for event in run.events()[0]]
    assert [name for name, _ in logged] == ["train", "save", "train"] and logged[2][1] == pytest.approx(spent["save"], abs=1e-3)


# Sessions


def told(*rows: tuple[Any, ...]) -> list[Event]:
    """Events from ("started",) and (kind, steps, trained, paused)."""
    names = ("kind", "step_in_session", "trained_seconds", "paused_seconds")
    return read(dict(zip(names, row)) for row in rows)


def test_sessions_add_up_and_a_killed_one_counts_what_it_had_logged() -> None:
    sessions = Sessions()
    sessions.take(told(("started",), ("step", 10, 5.0, 0.0), ("step", 20, 10.0, 3.0), ("session", 25, 12.0, 4.0)))
    assert sessions.total == Session(25, 12.0, 4.0) and sessions.count == 1
    # Killed after its second line.
    sessions.take(told(("started",), ("step", 10, 6.0, 0.0), ("step", 20, 12.0, 1.0), ("started",)))
    assert sessions.present == Session() and sessions.count == 2
    # It continues from a state at step 25 and does some steps again.
    sessions.take(told(("step", 10, 7.0, 0.5)))
    assert sessions.present == Session(10, 7.0, 0.5) and sessions.total == Session(55, 31.0, 5.5) and sessions.count == 3


def test_a_session_is_told_apart_without_the_line_that_begins_it() -> None:
    sessions = Sessions()
    sessions.take(told(("step", 10, 5.0, 0.0), ("step", 20, 9.0, 0.0), ("step", 10, 4.0, 1.0), ("session", 10, 4.0, 2.0)))
    assert sessions.total == Session(30, 13.0, 2.0) and sessions.count == 2


STRANGE = st.sampled_from([None, "a", True, -1, 0, 7, 2.5, 1e400])


@given(st.lists(st.tuples(st.sampled_from(["step", "session", "started", "x", 3]), STRANGE, STRANGE, STRANGE)))
def test_no_line_however_strange_breaks_the_sums(rows: list[tuple[Any, ...]]) -> None:
    sessions = Sessions()
    sessions.take(told(*rows))
    total = sessions.total
    assert total.steps >= 0 and 0 <= total.trained_seconds < 1e300 and sessions.count <= len(rows)


def test_the_summary_has_this_session_and_all_of_the_run() -> None:
    meter = metered([2.0] * 4)
    meter.paused({"save": 3.0, "sample": 5.0})
    earlier = told(("started",), ("step", 50, 100.0, 10.0), ("started",), ("step", 3, 64.0, 0.0))
    summary = meter.summary(56, earlier)
    assert (summary.step_in_session, summary.trained_seconds, summary.paused_seconds) == (5, 68.0, 8.0)
    assert (summary.save_seconds, summary.sample_seconds, summary.validate_seconds) == (3.0, 5.0, 0.0)
    assert (summary.sessions, summary.total_steps_done) == (2, 55)
    assert (summary.total_trained_seconds, summary.total_paused_seconds) == (168.0, 18.0)


# Memory


def _tells_its_peak(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    accelerator = Accelerator(cpu=True)
    Path(folder, str(rank)).write_text(f"{accelerator.num_processes} {largest((3.5, 7.25)[rank], accelerator)}")
    accelerator.end_training()


def test_the_peak_is_that_of_the_process_that_took_most(tmp_path: Path) -> None:
    assert largest(2.5, Accelerator(cpu=True)) == 2.5 and 0.05 < peak_gib(CPU) < 100
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = [forked(_tells_its_peak, rank, port, str(tmp_path)) for rank in range(2)]
    for one in both:
        one.join(120)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2 7.25", "2 7.25"]
