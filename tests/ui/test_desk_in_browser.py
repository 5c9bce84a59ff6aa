"""The desk of the Runs tab in a real browser: stars, names, tags, notes, order, the trash and old states, by mouse and by keyboard."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from kohya_like import desk, monitor
from kohya_like.supervisor import JobSupervisor
from sd_scripts.runs.events import Previewed
from sd_scripts.runs.orders import Asked
from sd_scripts.runs.rundir import RunDirectory
from tests.ui.on_screen import Eyes
from tests.ui.runs_on_disk import made, options
from tests.ui.standin_runs import SCRIPT, command, until
from tests.ui.standin_runs import options as of_standin

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600), pytest.mark.long]
SIZES = [(390, 844, "light"), (1280, 720, "dark"), (1440, 900, "light"), (390, 844, "dark")]
RUNS = "#kl-runs"


def runs(root: Path) -> dict[str, RunDirectory]:
    """Three runs with states, made one after the other."""
    return {name: made(root, options(root, output_name=name), (100, 200, 300)) for name in ("apple", "berry", "cherry")}


@pytest.mark.parametrize(("width", "height", "theme"), SIZES[:2])
def test_a_run_at_work_is_asked_to_save_wait_and_end_at_a_step(
    width: int,
    height: int,
    theme: str,
    studios: Callable[..., Any],
    visit: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    root = tmp_path / "output"
    # The stand-in follows no wishes: what the trainer makes of them is tests/library/test_trainer.py.
    supervisor = JobSupervisor(root, command("slow"))
    job = supervisor.start(SCRIPT, of_standin(root, output_name="busy", sample_prompts="a star", max_train_steps=4000))
    orders = job.run.orders
    try:
        visited = visit(studios(output_dir=root).url, width=width, height=height, theme=theme)
        page = visited.page
        opened(page, "busy")
        for button, wish in (("Save now", Asked.SAVE), ("Sample now", Asked.SAMPLES), ("Pause", Asked.PAUSE)):
            page.get_by_role("button", name=button).press("Enter")
            until(lambda wish=wish: wish in orders.asked())
        expect(page.locator(f"{RUNS} .kr-desk")).to_contain_text("Asked for after the present step: a save, samples.")
        looked(visited, "orders")
        # The figures of a run are not far below its buttons.
        heights = [page.locator(f"{RUNS} {each}").first.bounding_box()["y"] for each in (".kr-head", ".kr-tile")]
        assert heights[1] - heights[0] < 560, "a telephone shows the loss with the head of the run"
        # Other prompts, once and from now on; a file of this computer is none.
        page.locator(f"{RUNS} summary", has_text="Prompts").press("Enter")
        prompts = page.locator("#kl-run-prompts")
        expect(prompts).to_have_value("a star")
        prompts.fill("a blue star\na house --d 4")
        page.get_by_role("button", name="Sample these once").press("Enter")
        until(lambda: orders.other_prompts() == "a blue star\na house --d 4")
        page.get_by_role("button", name="Use these from now on").press("Enter")
        until(lambda: job.run.options().samples.sample_prompts == "a blue star\na house --d 4")
        for wrong, sentence in (
            ("/etc/passwd.txt", "names a file"),
            ("a star --ci /etc/x.png", "control image"),
            ("a --w huge", "--w"),
            ("a --w 100", "multiple of 8"),
        ):
            prompts.fill(wrong)
            with page.expect_response(lambda answer: answer.status == 409):
                page.get_by_role("button", name="Use these from now on").press("Enter")
            expect(page.locator(f"{RUNS} .kr-desk [role=alert]")).to_contain_text(sentence)
            expect(prompts).to_have_value(wrong)
        prompts.fill("a blue star")
        job.run.samples.mkdir(exist_ok=True)

        def draw(step: int, index: int, prompt: str) -> None:
            file = job.run.samples / f"busy-{step:06d}-{index:02d}.png"
            Image.new("RGB", (64, 64)).save(file)
            job.run.log(Previewed(step=step, index=index, file=str(file), prompt=prompt))

        draw(1, 0, "a star")
        shown = page.locator(f"{RUNS} .kr-previews .kr-caption")
        expect(shown).to_have_text(re.compile("a star|a plain colour"))
        page.get_by_role("button", name="Sample these once").press("Enter")
        # What was asked for is what is looked at.
        draw(2, 9, "a blue star")
        expect(shown).to_have_text("a blue star")
        expect(page.locator(f"{RUNS} .kr-desk [role=alert]")).to_have_count(0)
        assert job.run.options().samples.sample_prompts == "a blue star\na house --d 4"
        looked_quietly(visited)
        # What was done is not announced any more.
        expect(page.locator(f"{RUNS} .kr-status")).to_contain_text("once")
        for each in (Asked.OTHER, Asked.SAVE, Asked.SAMPLES):
            orders.take_back(each)
        expect(page.locator(f"{RUNS} .kr-status")).to_have_text("")
        page.get_by_role("button", name="Go on").click()
        until(lambda: Asked.PAUSE not in orders.asked())
        step = page.get_by_label("Stop after step")
        step.fill("soon")
        drawn_again(page)
        expect(step).to_have_value("soon")
        step.press("Enter")
        expect(page.locator(f"{RUNS} .kr-desk [role=alert]")).to_contain_text("a whole number is needed")
        step.fill("100000000")
        with visited.page.expect_response(lambda answer: answer.status == 409):
            step.press("Enter")
        expect(page.locator(f"{RUNS} .kr-desk [role=alert]")).to_contain_text("choose one between")
        last = monitor.summary(job.run.events_file).steps - 1
        step.fill(str(last))
        step.press("Enter")
        until(lambda: orders.stop_step() == last)
        # A run can be read both on its page and in the list.
        for place in (".kr-count", ".kr-row-about"):
            expect(page.locator(f"{RUNS} {place}").first).to_contain_text(f"stops after step {last:,}")
        page.get_by_role("button", name="Train to the end").click()
        until(lambda: orders.stop_step() is None)
        expect(page.locator(f"{RUNS} .kr-count").first).not_to_contain_text("stops after")
        expect(step).to_have_value("")
        assert [line for line in visited.complaints.found if "409" not in line] == []
        visited.complaints.found.clear()
    finally:
        supervisor.stop(job, grace_seconds=0)
        supervisor.close()


def drawn_again(page: Page) -> None:
    """The page has heard of its run twice, so it has drawn what it heard first."""
    for _ in range(2):
        page.wait_for_event("response", lambda answer: re.search(r"/kl/run/[^/?]+([?]|$)", answer.url) is not None)


def looked_quietly(visited: Any) -> None:
    """As looked, where refusals are no complaint."""
    looked(visited, "prompts")
    assert [line for line in visited.complaints.found if "409" not in line] == []


def opened(page: Page, name: str) -> None:
    page.get_by_role("tab", name="Runs").click()
    page.locator(".kr-row", has_text=name).click()
    expect(page.locator(f"{RUNS} .kr-title")).to_have_text(name)


def looked(visited: Any, name: str) -> None:
    """Nothing is wrong with the page as it is; its screenshot goes where SCREENSHOTS says."""
    page = visited.page
    if os.environ.get("SCREENSHOTS"):
        size, theme = page.viewport_size, page.evaluate("document.body.classList.contains('dark') ? 'dark' : 'light'")
        page.screenshot(path=f"{os.environ['SCREENSHOTS']}/{name}-{size['width']}-{theme}.png")
    assert visited.axe() + visited.overflow() == [] and Eyes(page).flaws() == []


@pytest.mark.parametrize(("width", "height", "theme"), SIZES)
def test_runs_are_named_found_deleted_and_brought_back(
    width: int, height: int, theme: str, studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path
) -> None:
    root = tmp_path / "output"
    known = runs(root)
    visited = visit(studios(output_dir=root).url, width=width, height=height, theme=theme)
    page = visited.page
    opened(page, "berry")
    page.get_by_role("button", name=re.compile("^[☆★] Star$")).press("Enter")
    expect(page.get_by_role("button", name=re.compile("^[☆★] Star$"))).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Name, tags, notes").press("Enter")
    expect(page.get_by_label("Name", exact=True)).to_be_focused()
    page.keyboard.type("The good one")
    page.get_by_label("Tags").fill("keep, blue  sky")
    page.get_by_label("Notes").fill("eyes are\nsharp")
    looked(visited, "desk-form")
    # Somebody else is faster with the notes.
    desk.say(known["berry"].path, {"notes": {"before": "", "after": "theirs"}, "tags": {"add": ["cat"]}})
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(f"{RUNS} .kr-desk-form [role=alert]")).to_contain_text("theirs")
    expect(page.get_by_label("Notes")).to_have_value("eyes are\nsharp")
    looked(visited, "desk-conflict")
    page.get_by_role("button", name="Keep mine").click()
    expect(page.locator(f"{RUNS} .kr-notes")).to_have_text("eyes are\nsharp")
    expect(page.locator(f"{RUNS} .kr-title")).to_have_text("The good one")
    said = desk.read(known["berry"].path)
    assert said == desk.Said("The good one", "eyes are\nsharp", True, ("cat", "keep", "blue sky"))
    # In the list it is found and sorted by what was said of it.
    page.get_by_label("Order of the runs").select_option("Starred first")
    expect(page.locator(".kr-row").first).to_contain_text("The good one")
    page.get_by_label("Order of the runs").select_option("By name")
    expect(page.locator(".kr-row").first).to_contain_text("apple")
    looked(visited, "desk-said")
    # Deleted by mistake.
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("button", name="Keep it")).to_be_focused()
    looked(visited, "desk-delete")
    page.keyboard.press("Escape")
    assert known["berry"].path.exists()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Move to the trash").click()
    expect(page.locator(".kr-row")).to_have_count(2)
    expect(page.locator(f"{RUNS} .kr-status").first).to_contain_text("is in the trash")
    assert not known["berry"].path.exists()
    page.get_by_role("button", name="Disk and trash").click()
    dialog = page.locator(".kl-dialog")
    expect(dialog).to_contain_text("2 runs, ")
    # By its name, and with dates of one form only.
    row = dialog.get_by_role("list", name="In the trash").get_by_role("listitem").inner_text()
    assert row.startswith("The good one · ") and not re.search(r"\d{4}-?\d\d-?\d\d", row), row
    looked(visited, "tidy")
    dialog.get_by_role("button", name=re.compile("Put The good one .* back")).click()
    expect(dialog).to_contain_text("3 runs, ")
    expect(page.locator(f"{RUNS} .kr-status").first).to_have_text("")
    assert desk.read(known["berry"].path) == said
    # Two states of each may go; those of one stay.
    dialog.get_by_label("The good one").uncheck()
    dialog.get_by_role("button", name=re.compile("Clean up states")).click()
    dialog.get_by_role("button", name="Really delete 4 states").click()
    expect(dialog.locator(".kr-status")).to_contain_text("are free again")
    assert {name: len(list(run.state.iterdir())) for name, run in known.items()} == {"apple": 1, "berry": 3, "cherry": 1}
    dialog.get_by_role("button", name="Close").click()
    opened(page, "apple")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Move to the trash").click()
    expect(page.locator(".kr-row")).to_have_count(2)
    page.get_by_role("button", name="Disk and trash").click()
    dialog.get_by_role("button", name=re.compile("Empty the trash")).click()
    dialog.get_by_role("button", name="Really delete for ever").click()
    expect(dialog).to_contain_text("It is empty.")
    assert not known["apple"].path.exists() and not list((root / ".trash").iterdir())
