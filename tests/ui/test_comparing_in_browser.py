"""Runs compared on the page, in a real browser: curves, settings, figures and previews, by mouse and keyboard."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from kohya_like import desk
from sd_scripts.runs.events import Previewed, RunFinished, RunStarted, StepDone, Validated
from sd_scripts.runs.rundir import RunDirectory
from tests.ui.conftest import painted
from tests.ui.runs_on_disk import made, options
from tests.ui.test_desk_in_browser import looked

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
LONG = [(1440, 900, "dark"), (390, 844, "light"), (390, 844, "dark")]
SIZES = [(1280, 720, "light"), *(pytest.param(*size, marks=pytest.mark.long) for size in LONG)]
RUNS = "#kl-runs"
HOSTILE = "<img src=x onerror=alert(1)>"


def trained(root: Path, name: str, loss: float, previews: tuple[int, ...], **values: object) -> RunDirectory:
    """A run of 40 steps that ended at this loss, with two previews at each of some steps."""
    run = made(root, options(root, output_name=name, **values), minutes_ago=60)
    run.log(RunStarted(steps=40, start_step=0))
    run.samples.mkdir()
    for step in range(1, 41):
        told = {"step_total": 0.25, "seconds_per_step": 0.25, "trained_seconds": step / 4, "paused_seconds": 0.0, "step_in_session": step}
        run.log(StepDone(step=step, epoch=0, loss=loss + 1 / step, lr=1e-4, peak_gib=10 * loss, **told))
        for index in range(2 * (step in previews)):
            Image.new("RGB", (48, 48), (6 * step, 200 * index, 90)).save(run.samples / f"{step}-{index}.png")
            run.log(Previewed(step=step, index=index, file=f"samples/{step}-{index}.png", prompt=f"a star {index} {HOSTILE}", seed=index))
    run.log(Validated(step=40, loss=loss / 2))
    run.log(RunFinished(step=40, text="", advice=""))
    return run


def folder(root: Path) -> dict[str, RunDirectory]:
    made(root, options(root, output_name="other"))
    low = trained(root, "low", 0.1, (10, 20, 30), learning_rate=3e-4, network_dim=8)
    high = trained(root, "high", 0.6, (20, 30, 40), learning_rate=1e-4, gradient_checkpointing=True)
    desk.say(high.path, {"label": {"before": "", "after": f"The high {HOSTILE}"}})
    return {"low": low, "high": high}


def cells(page: Page, words: str) -> list[str]:
    """The cells of a row of the table, one for each run."""
    row = page.locator(f"{RUNS} tbody tr", has=page.locator("th", has_text=re.compile(f"^{words}")))
    return row.locator("td").all_inner_texts()


def boxes(found: Locator) -> list[dict[str, float]]:
    return [box for each in found.all() if (box := each.bounding_box())]


@pytest.mark.parametrize(("width", "height", "theme"), SIZES)
def test_runs_that_are_chosen_stand_beside_one_another(
    width: int, height: int, theme: str, studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path
) -> None:
    root = tmp_path / "output"
    runs = folder(root)
    studio = studios(output_dir=root)
    visited = visit(studio.url, width=width, height=height, theme=theme)
    page = visited.page
    page.get_by_role("tab", name="Runs").click()
    page.locator(".kr-row", has_text="low").click()
    page.get_by_role("button", name="Compare runs").press("Enter")
    heading = page.locator(f"{RUNS} .kr-detail .kr-title:visible")
    expect(heading).to_have_text("1 run compared")
    expect(page.get_by_role("button", name="Back to one run")).to_be_focused()
    second = page.locator(".kr-nav").get_by_role("checkbox", name=re.compile("The high"))
    second.focus()
    page.keyboard.press("Space")
    expect(heading).to_have_text("2 runs compared")
    assert page.evaluate("location.hash") == f"#compare={runs['low'].name},{runs['high'].name}"
    expect(page.locator(".kr-nav").get_by_role("checkbox", name=re.compile("low"))).to_be_checked()
    # Both curves are on one plot, the lower one below.
    plot = page.locator(f"{RUNS} section[aria-label=Loss] .kr-stage:visible")
    lower, upper = (sorted(row for _, row in painted(plot, f"line-{place}")) for place in (0, 1))
    assert len(lower) > 100 and len(upper) > 100 and lower[len(lower) // 2] > upper[len(upper) // 2]
    assert plot.evaluate("stage => stage.querySelector('.u-wrap').offsetHeight <= stage.clientHeight"), "its steps are written below it"
    page.get_by_label("Read the curves at a step").focus()
    page.keyboard.press("Home")
    expect(page.locator(f"{RUNS} .kr-readout:visible")).to_have_text(f"Step 1: low 1.1, The high {HOSTILE} 1.6")
    # Only what differs, in the words of the form.
    page.locator(f"{RUNS} .kr-compare-scroll").scroll_into_view_if_needed()
    assert cells(page, "Learning rate") == ["0.0003", "0.0001"]
    assert cells(page, "Gradient checkpointing") == ["off", "on"]
    settings = page.locator(f"{RUNS} .kr-compare tbody").first.locator("code").all_inner_texts()
    assert set(settings) == {"learning_rate", "network_dim", "gradient_checkpointing"}
    assert cells(page, "Training time") == ["10 s", "10 s"] and cells(page, "Peak memory") == ["1 GiB", "6 GiB"]
    assert cells(page, "Lowest held-out loss") == ["0.05", "0.3"]
    assert page.locator(f"{RUNS} .kr-compare tbody tr:visible").count() == 2 + 3 + 8
    # Previews: side by side, of the step that both have; elsewhere a sentence.
    images = page.locator(f"{RUNS} .kr-compare-images img")
    expect(images).to_have_count(2)
    expect(images.first).to_have_attribute("alt", re.compile("low at step 30: a star 0"))
    page.wait_for_function(
        "[...document.querySelectorAll('.kr-compare-images img')].every((image) => image.complete && image.naturalWidth)"
    )
    one, two = boxes(images)
    assert one["y"] == two["y"] and one["x"] + one["width"] < two["x"] and abs(one["width"] - two["width"]) < 1
    looked(visited, "compare")
    steps = page.locator(f"{RUNS} .kr-compare").get_by_role("slider")
    steps.focus()
    page.keyboard.press("Home")
    expect(page.locator(f"{RUNS} .kr-compare-images")).to_contain_text("No preview at step 10; its nearest is of step 20.")
    page.get_by_label("Prompt", exact=True).select_option(index=1)
    expect(images.first).to_have_attribute("alt", re.compile("low at step 10: a star 1"))
    # The address leads there again, in another browser too.
    page.evaluate("scrollTo(0, 0)")
    page.reload()
    expect(heading).to_have_text("2 runs compared")
    expect(second).to_be_checked()
    page.get_by_role("button", name="Open run low").press("Enter")
    expect(heading).to_have_text("low")
    assert page.evaluate("location.hash") == f"#run={runs['low'].name}"
    page.go_back()
    expect(heading).to_have_text("2 runs compared")
    page.get_by_role("button", name="Back to one run").press("Enter")
    expect(heading).to_have_text("low")
    page.goto(f"{studio.url}?again=1#compare={runs['low'].name},20200101-000000-gone")
    expect(page.locator(f"{RUNS} .kr-status:visible")).to_have_text("Not in the folders of this studio: 20200101-000000-gone.")
    expect(heading).to_have_text("1 run compared")
