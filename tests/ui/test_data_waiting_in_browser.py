"""Work on images that waits for a device, in a real browser: each of it can be found again and stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from kohya_like.supervisor import JobSupervisor
from tests.ui import standin_runs
from tests.ui.on_screen import Eyes
from tests.ui.standin_runs import SCRIPT, command
from tests.ui.test_data_in_browser import images, opened, rare

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of runs, of which one keeps the only device."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    supervisor = JobSupervisor(tmp_path / "output", command("stubborn"))
    job = supervisor.start(SCRIPT, standin_runs.options(tmp_path / "output", output_name="busy"))
    yield tmp_path / "output"
    supervisor.stop(job, grace_seconds=0)
    supervisor.close()


def test_what_waits_is_found_behind_what_was_ordered_later(
    busy: Path, studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path
) -> None:
    page = visit(studios(output_dir=busy).url).page
    opened(page, images(tmp_path / "mine", 12))
    card = page.locator(".kl-data-work")
    for tool, option in (("Find faces cut off", "face_model"), ("Find near duplicates with a model", "image_model")):
        rare(page, tool)
        dialog, field = page.locator(".kl-dialog"), page.locator(f"#kl-data-work-{option}")
        dialog.get_by_role("button", name=f"Start: {tool}").click()
        expect(dialog.locator(".kl-error:visible")).to_have_text("This is required.")
        # A typing mistake is told now, and not when a device is free.
        field.fill("/nowhere/model")
        dialog.get_by_role("button", name=f"Start: {tool}").click()
        expect(dialog.locator(".kl-error:visible")).to_contain_text("there is no file or folder /nowhere/model")
        field.fill(str(tmp_path))
        dialog.get_by_role("button", name=f"Start: {tool}").click()
        expect(card.get_by_role("heading")).to_have_text(tool)
        expect(card.locator(".kr-badge")).to_have_text("Waiting")
    card.get_by_role("button", name="Show: Find faces cut off").click()
    expect(card.get_by_role("heading")).to_have_text("Find faces cut off")
    expect(card.get_by_role("button", name="Show: Find near duplicates with a model")).to_be_visible()
    assert Eyes(page).flaws() == []
    card.get_by_role("button", name="Stop").click()
    expect(card.locator(".kr-badge")).to_have_text("Stopped")
    card.get_by_role("button", name="Show: Find near duplicates with a model").click()
    card.get_by_role("button", name="Stop").click()
    expect(card.locator(".kr-badge")).to_have_text("Stopped")
    expect(card.get_by_role("button", name="Show: ")).to_have_count(0)
