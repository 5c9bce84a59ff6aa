"""Notices in a real browser: the dialog by keyboard, what a browser says when a run ends, and an address that is kept by the studio."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from kohya_like import notices
from kohya_like.supervisor import JobSupervisor
from tests.ui.runs_on_disk import made
from tests.ui.runs_on_disk import options as of_run
from tests.ui.standin_runs import SCRIPT, command, options, until
from tests.ui.test_desk_in_browser import looked
from tests.ui.test_notices import Mailbox, mailbox  # noqa: F401

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
LONG = [(1440, 900, "dark"), (390, 844, "light"), (390, 844, "dark")]
SIZES = [(1280, 720, "light"), *(pytest.param(*size, marks=pytest.mark.long) for size in LONG)]
# What the browser shows stands outside of the page; the page's calls of it are kept.
HEARD = """() => { window.heard = []; window.Notification = class {
  static permission = 'granted'; static requestPermission = async () => 'granted';
  constructor(text) { window.heard.push(text); } }; }"""


@pytest.mark.parametrize(("width", "height", "theme"), SIZES)
def test_notices_are_set_up_and_told(
    width: int,
    height: int,
    theme: str,
    studios: Callable[..., Any],
    visit: Callable[..., Any],
    tmp_path: Path,
    mailbox: Mailbox,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    root = tmp_path / "output"
    made(root, of_run(root, output_name="old"))
    visited = visit(studios(output_dir=root).url, width=width, height=height, theme=theme)
    page = visited.page
    page.evaluate(HEARD)
    page.get_by_role("tab", name="Runs").click()
    page.get_by_role("button", name="Notices").press("Enter")
    dialog = page.locator(".kl-dialog")
    dialog.get_by_label("Notification of this browser").press("Space")
    expect(dialog.get_by_role("status")).to_have_text("This browser tells you when a run ends.")
    address = dialog.get_by_label("Address")
    address.fill("ntfy.sh")
    with page.expect_response(lambda answer: answer.status == 409):
        dialog.get_by_role("button", name="Keep this address").press("Enter")
    expect(dialog.get_by_role("status")).to_contain_text("give a whole one")
    assert [line for line in visited.complaints.found if "409" not in line] == []
    visited.complaints.found.clear()
    address.fill(mailbox.url)
    dialog.get_by_role("button", name="Send a test").press("Enter")
    expect(dialog.get_by_role("status")).to_have_text("Sent.")
    assert b"This is a test" in mailbox.got[0][2] and (root / notices.FILE).is_file()
    looked(visited, "notices")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    page.get_by_role("button", name="Notices").press("Enter")
    expect(dialog.get_by_label("Address")).to_have_value(mailbox.url)
    expect(dialog.get_by_label("Notification of this browser")).to_be_checked()
    dialog.get_by_role("button", name="Close").press("Enter")
    # On another tab, where nobody else asks for all runs, a run begins and ends.
    page.get_by_role("tab", name="Train").click()
    supervisor = JobSupervisor(root, command("endless"))
    job = supervisor.start(SCRIPT, options(root, output_name="under-way"))
    expect(page.locator("#kl-live .kr-title")).to_have_text("under-way")
    with page.expect_response(lambda answer: answer.url.endswith("/kl/runs") and "under-way" in answer.text()):
        assert page.evaluate("window.heard") == []
    supervisor.stop(job, grace_seconds=0)
    supervisor.close()
    page.wait_for_function("window.heard.length === 1")
    assert page.evaluate("window.heard")[0] in ("under-way: died", "under-way: stopped")
    until(lambda: len(mailbox.got) == 2)
    assert b"under-way" not in mailbox.got[1][2] and b"A run" in mailbox.got[1][2]
