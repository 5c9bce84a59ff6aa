"""The card of a failed run in a real browser: what happened, why, and one button that changes the settings and starts again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from kohya_like.supervisor import JobSupervisor
from sd_scripts.runs.events import RunFailed
from tests.ui import standin_runs
from tests.ui.on_screen import Eyes
from tests.ui.runs_on_disk import made, options
from tests.ui.standin_runs import SCRIPT, command
from tests.ui.test_desk_in_browser import looked, opened

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
LONG = [(1440, 900, "dark"), (390, 844, "light"), (390, 844, "dark")]
SIZES = [(1280, 720, "light"), *(pytest.param(*size, marks=pytest.mark.long) for size in LONG)]
CARD = "#kl-runs .kr-cause"
PATH = f"/data/{'stars/' * 40}a.png"


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of runs that failed in several ways, and one that keeps the only device."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    root = tmp_path / "output"
    supervisor = JobSupervisor(root, command("stubborn"))
    job = supervisor.start(SCRIPT, standin_runs.options(root, output_name="busy"))
    for name, text in (
        ("memory", "the device has no memory left"),
        ("nan", f"step 310: the loss is not a finite number. Images in the batch: {PATH}."),
        ("gone", "train_data_dir: /data/stars is not there; give a folder of images"),
        ("full", "OSError: [Errno 28] No space left on device"),
    ):
        made(root, options(root, output_name=name), (300,)).log(RunFailed(step=310, text=text, refused=name == "gone"))
    yield root
    supervisor.stop(job, grace_seconds=0)
    supervisor.close()


def pressed(page: Page, button: str) -> None:
    assert Eyes(page).faults(f"{CARD} .kr-fix button", button, at_once=False) == []
    page.locator(CARD).get_by_role("button", name=button).press("Enter")


@pytest.mark.parametrize(("width", "height", "theme"), SIZES)
def test_a_failed_run_has_a_card_with_a_button_that_mends_it(
    width: int, height: int, theme: str, busy: Path, studios: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    studio = studios(output_dir=busy)
    visited = visit(studio.url, width=width, height=height, theme=theme)
    page = visited.page
    opened(page, "memory")
    expect(page.locator(CARD)).to_contain_text("the device has no memory left")
    expect(page.locator(CARD)).to_contain_text("need more memory together than the GPU has")
    expect(page.locator(f"{CARD} .kr-fix")).to_contain_text("Gradient checkpointing: off → on")
    looked(visited, "fix-memory")
    pressed(page, "Change this and start again")
    title = page.locator("#kl-runs .kr-run > .kr-head .kr-title")
    expect(page.locator("#kl-runs .kr-run > .kr-head .kr-badge")).to_have_text("Waiting")
    (mended,) = busy.glob("*-memory/config.toml")
    assert "gradient_checkpointing = true" in mended.read_text()
    page.get_by_role("button", name="Stop", exact=True).and_(page.locator("#kl-runs button")).click()
    # Smaller steps are another training: a run of its own, which is shown.
    opened(page, "nan")
    assert page.locator(CARD).evaluate("card => card.scrollWidth <= card.clientWidth"), "a long path is broken over lines"
    expect(page.locator(f"{CARD} .kr-fix")).to_contain_text("Learning rate: 0.0001 → 3.3e-05. A new run begins with these settings")
    pressed(page, "Change this and start again")
    expect(page.locator("#kl-runs .kr-run > .kr-head .kr-badge")).to_have_text("Waiting")
    expect(title).to_have_text("nan")
    assert len(list(busy.glob("*-nan/config.toml"))) == 2
    page.get_by_role("button", name="Stop", exact=True).and_(page.locator("#kl-runs button")).click()
    expect(page.locator("#kl-runs .kr-run > .kr-head .kr-badge")).to_have_text("Stopped")
    # What a person has to decide.
    opened(page, "full")
    pressed(page, "Open Disk and trash")
    expect(page.locator(".kl-dialog")).to_contain_text(re.compile("[0-9]+ runs, "))
    page.keyboard.press("Escape")
    opened(page, "gone")
    pressed(page, "Correct it in the form")
    field = page.locator("#kl-train_data_dir")
    expect(field).to_be_focused()
    expect(field).to_have_value("toy:star")
    assert Eyes(page).faults("#kl-train_data_dir") == []
