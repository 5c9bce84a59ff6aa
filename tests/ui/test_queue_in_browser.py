"""The queue on the page, in a real browser: a run that waits is moved, held, planned for a time and put after another, by keyboard."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from kohya_like import queueing
from kohya_like.supervisor import JobSupervisor
from tests.ui.standin_runs import SCRIPT, command, options, until
from tests.ui.test_desk_in_browser import looked, opened

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
LONG = [(1440, 900, "dark"), (390, 844, "light"), (390, 844, "dark")]
SIZES = [(1280, 720, "light"), *(pytest.param(*size, marks=pytest.mark.long) for size in LONG)]
QUEUE = "#kl-runs .kr-queue"


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobSupervisor]:
    """The only device is taken, and two runs wait for it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    root = tmp_path / "output"
    supervisor = JobSupervisor(root, command("stubborn"))
    for name in ("busy", "one", "two"):
        supervisor.start(SCRIPT, options(root, output_name=name))
    yield supervisor
    for job in supervisor.seen():
        supervisor.stop(job, grace_seconds=0)
    supervisor.close()


@pytest.mark.parametrize(("width", "height", "theme"), SIZES)
def test_a_run_that_waits_is_moved_held_and_planned(
    width: int, height: int, theme: str, supervisor: JobSupervisor, studios: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    visited = visit(studios(output_dir=supervisor.root).url, width=width, height=height, theme=theme)
    page = visited.page
    two = next(job.path for job in supervisor.seen() if job.name.endswith("-two"))
    (one,) = (job.name for job in supervisor.seen() if job.name.endswith("-one"))
    opened(page, "two")
    queue, phase = page.locator(QUEUE), page.locator("#kl-runs .kr-phase")
    # The list says it without a click.
    rows = {name: page.locator("#kl-runs .kr-row", has_text=name).locator(".kr-row-about") for name in ("busy", "one", "two")}
    expect(rows["one"]).to_contain_text("Number 1 in the queue\nWaits for a free device")
    expect(rows["two"]).to_contain_text("Number 2 in the queue\nWaits for a free device")
    expect(rows["busy"]).not_to_contain_text("queue")
    expect(queue).to_contain_text("2 of 2 that wait")
    expect(page.get_by_role("button", name="Later")).to_be_disabled()
    page.get_by_role("button", name="Earlier").press("Enter")
    expect(queue).to_contain_text("1 of 2 that wait")
    assert queueing.read(two).place == 0
    page.get_by_role("button", name="Hold", exact=True).press("Enter")
    expect(phase).to_have_text("Held until it is released")
    expect(rows["two"]).to_contain_text("Number 1 in the queue\nHeld until it is released")
    expect(rows["one"]).to_contain_text("Number 2 in the queue")
    page.get_by_role("button", name="Release", exact=True).press("Enter")
    expect(phase).to_have_text("Waits for a free device")
    page.get_by_label("Start after").select_option(one)
    expect(phase).to_have_text(re.compile(r"^Starts after one · [A-Z][a-z]{2} \d+, \d\d:\d\d [AP]M$"))
    tomorrow = datetime.fromtimestamp(time.time() + 86400).replace(second=0, microsecond=0)
    page.get_by_label("Start at").fill(tomorrow.strftime("%Y-%m-%dT%H:%M"))
    page.get_by_label("Start at").press("Enter")
    until(lambda: queueing.read(two).not_before == tomorrow.timestamp())
    expect(page.locator("#kl-runs .kr-status").first).to_contain_text("It starts then")
    expect(phase).to_contain_text(re.compile(r"Starts after one · .*, at"))
    expect(rows["two"]).to_contain_text(re.compile(r"Starts after one · .*, at"))
    looked(visited, "queue")
    page.get_by_label("Start at").fill("2020-01-01T00:00")
    with page.expect_response(lambda answer: answer.status == 409):
        page.get_by_label("Start at").press("Enter")
    expect(page.locator("#kl-runs .kr-desk [role=alert]")).to_contain_text("still to come")
    assert [line for line in visited.complaints.found if "409" not in line] == []
    visited.complaints.found.clear()
    page.get_by_label("Start after").select_option("no other run")
    expect(phase).not_to_contain_text("after")
    assert queueing.read(two).not_before == tomorrow.timestamp(), "what was refused changed nothing"
