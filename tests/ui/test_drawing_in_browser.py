"""A DDPM from nothing in a real browser: started from the form, its step taken apart in a plot, and images drawn with its files."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, expect
from safetensors import safe_open

from kohya_like import processes, tools
from sd_scripts.families import RUNS
from sd_scripts.runs.events import RunFinished, RunStarted, StepDone
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat
from tests.ui.conftest import painted
from tests.ui.standin_runs import until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
PATIENCE = 300_000
"""Milliseconds for a training and a drawing, which load torch first; a busy machine needs a minute for that."""
LEVEL = 3
"""Steps with the same times, so that layers are level around the one in the middle: slopes differ by pixels from column to column."""
PARTS = ("data", "work", "optimizer", "rest")
SMALL = {"vae": "toy", "resolution": "64", "train_batch_size": "2", "max_train_steps": "3", "output_name": "tiny"}
ARCHITECTURE = {"base_channels": "8", "channel_multipliers": "1 2", "attention_levels": "1", "attention_head_dim": "8", "text_width": "16"}


@pytest.fixture(scope="module")
def studio(studios: Callable[..., Any]) -> Any:
    """A studio on a computer without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return studios()


def timed_run(root: Path, name: str, steps: int, gpu: bool) -> list[dict[str, float]]:
    """A finished run whose log tells random times of its steps, the same of LEVEL steps one after the other; gives them."""
    settings = {"train_data_dir": "toy:shapes", "output_dir": str(root), "output_name": name}
    run = RunDirectory.create(root, name, flat.build(RUNS["ddpm", "scratch"], settings))
    run.log(RunStarted(steps=steps, start_step=0))
    told = []
    for step in range(1, steps + 1):
        if step % LEVEL == 1:
            parts = {key: random.uniform(0.01, 0.1) for key in ("data_fetch", "fwd_bwd", "opt_step")}
            times = {**parts, "step_total": sum(parts.values()) + random.uniform(0.01, 0.05)}
            if gpu:
                times |= {"fwd_bwd_gpu": random.uniform(0.1, 0.2), "opt_step_gpu": 0.01, "step_total_gpu": 0.25}
        run.log(StepDone(step=step, loss=1.0, lr=1e-4, **times))
        told.append(times)
    run.log(RunFinished(step=steps, text="", advice=""))
    return told


def heights(plot: Locator) -> list[int]:
    """Pixels of each layer where the point stands that is read, from the lowest layer up."""
    stage, cursor = plot.locator(".kr-stage").bounding_box(), plot.locator(".u-cursor-x").bounding_box()
    column = round(cursor["x"] - stage["x"])
    return [sum(pixel[0] == column for pixel in painted(plot.locator(".kr-stage"), kind)) for kind in PARTS]


def milliseconds(text: str) -> list[float]:
    return [float(value) * (1000 if unit == "s" else 1) for value, unit in re.findall(r"([\d.e-]+) (ms|s)\b", text)]


def runs_tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name="Runs").click()
    page.locator(".kr-row", has_text=name).click()
    expect(page.locator("#kl-runs .kr-title")).to_have_text(name)


def test_the_parts_of_a_step_are_stacked_to_the_whole_and_read_by_keyboard_and_pointer(studio: Any, visit: Callable[..., Any]) -> None:
    told = timed_run(studio.output_dir, "timed", 30, gpu=True)
    visited = visit(studio.url, width=1280)
    page = visited.page
    runs_tab(page, "timed")
    plot = page.locator("#kl-runs .kr-times")
    expect(plot.locator("summary")).to_contain_text("forward and backward")
    plot.locator("summary").click()
    assert all(painted(plot.locator(".kr-stage"), kind) for kind in PARTS)
    slider = page.get_by_role("slider", name="Read the times at a step")
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        slider.focus()
        page.keyboard.press("Home")
        for index in range(3 * LEVEL):
            times = told[index]
            parts = [times["data_fetch"], times["fwd_bwd"], times["opt_step"]]
            parts.append(times["step_total"] - sum(parts))
            total, *shown = milliseconds(plot.locator(".kr-readout").inner_text())
            assert total == pytest.approx(1000 * times["step_total"], rel=6e-3)
            assert shown == pytest.approx([1000 * part for part in parts], rel=6e-3)
            # Where two layers meet, a pixel has a colour of neither.
            if index % LEVEL == 1:
                drawn = heights(plot)
                assert drawn == pytest.approx([sum(drawn) * part / times["step_total"] for part in parts], abs=3)
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Tab")
        plot.scroll_into_view_if_needed()
        box = plot.locator(".kr-stage").bounding_box()
        page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 60)
        assert int(re.search(r"Step (\d+)", plot.locator(".kr-readout").inner_text()).group(1)) > 25
        page.mouse.move(0, 0)
        assert visited.axe() + visited.overflow() == []
        visited.switch_theme()
    plot.get_by_role("button", name="On the GPU's clock").click()
    expect(plot.locator(".kr-readout")).not_to_contain_text("data")
    slider.focus()
    page.keyboard.press("Home")
    total, work, optimizer, _rest = milliseconds(plot.locator(".kr-readout").inner_text())
    assert (total, work, optimizer) == pytest.approx((250, 1000 * told[0]["fwd_bwd_gpu"], 10), rel=6e-3)
    assert visited.axe() == []


@pytest.mark.long
def test_a_model_from_nothing_is_started_and_draws_over_a_reload_with_a_seed_that_is_used_again(
    studio: Any, visit: Callable[..., Any], tmp_path: Path
) -> None:
    for index, colour in enumerate(("red", "blue", "teal")):
        Image.new("RGB", (64, 64), colour).save(tmp_path / f"{index}.png")
        (tmp_path / f"{index}.txt").write_text(f"a {colour} circle")
    visited = visit(studio.url, width=390)
    page = visited.page
    page.locator("#kl-family-ddpm").check()
    expect(page.locator("#kl-mode-scratch")).to_be_checked()
    page.get_by_role("button", name="Open all").click()
    for name, text in {**SMALL, **ARCHITECTURE, "train_data_dir": str(tmp_path)}.items():
        page.locator(f"#kl-{name}").fill(text)
    page.locator("#kl-prompt-0").fill("a red circle --s 1")
    page.locator("#kl-start").click()
    expect(page.locator("#kl-live .kr-title")).to_have_text("tiny")
    expect(page.locator("#kl-live .kr-run .kr-badge").first).to_have_text("Finished", timeout=PATIENCE)

    runs_tab(page, "tiny")
    expect(page.locator("#kl-runs .kr-count")).to_have_text("3 of 3 steps")
    expect(page.locator("#kl-runs .kr-before")).to_have_attribute("alt", re.compile("step 0: a red circle"))
    expect(page.locator("#kl-runs .kr-after")).to_have_attribute("alt", re.compile("step 3: a red circle"))
    until(lambda: page.evaluate("document.querySelector('#kl-runs .kr-after').naturalWidth") >= 64)
    with page.expect_download() as coming:
        page.get_by_role("link", name="tiny.safetensors", exact=True).click()
    with safe_open(coming.value.path(), "numpy") as file:
        assert list(file.keys()) and file.metadata()
    page.locator("#kl-runs .kr-actions").get_by_role("button", name="Draw").click()
    panel = page.locator("#kl-runs .kr-draw")
    badge = panel.locator(".kr-draw-result .kr-badge")
    expect(page.locator("#kl-draw-prompt")).to_have_value("a red circle")
    expect(page.locator("#kl-draw-ckpt")).to_have_value("tiny.safetensors")
    page.locator("#kl-draw-steps").fill("0")
    page.locator("#kl-draw-n").fill("2")
    go = panel.get_by_role("button", name="Draw", exact=True)
    go.click()
    expect(page.locator("#kl-draw-steps-error")).to_contain_text("1 to 10000")
    expect(page.locator("#kl-draw-steps")).to_be_focused()
    assert visited.axe("#kl-runs") == [] and not (studio.output_dir / tools.FOLDER).exists()
    page.locator("#kl-draw-steps").fill("1")
    go.click()
    panel.get_by_role("button", name="Cancel").click()
    expect(badge).to_have_text("Cancelled")
    assert drawing(studio) == []
    page.locator("#kl-draw-steps").press("Enter")
    expect(panel.get_by_role("progressbar")).to_be_visible()
    page.reload()
    page.wait_for_selector("#kl-learning_rate", state="attached")
    page.get_by_role("tab", name="Runs").click()
    expect(badge).to_have_text("Finished", timeout=PATIENCE)
    expect(page.locator("#kl-draw-steps")).to_have_value("1")
    expect(panel.locator(".kr-draw-before li")).to_have_count(1)
    expect(go).to_be_enabled()

    thumbs = panel.locator(".kr-draw-strip button")
    expect(thumbs).to_have_count(3)
    expect(panel.locator(".kr-draw-chosen img")).to_have_attribute("alt", "All images as one grid")
    thumbs.nth(1).click()
    expect(thumbs.nth(1)).to_have_attribute("aria-pressed", "true")
    seed = int(re.search(r"seed (\d+)", thumbs.nth(1).get_attribute("aria-label")).group(1))
    assert seed == 1 + int(re.search(r"seed (\d+)", thumbs.first.get_attribute("aria-label")).group(1))
    panel.get_by_role("button", name=f"Use seed {seed} again").click()
    expect(page.locator("#kl-draw-seed")).to_have_value(str(seed))
    with page.expect_download() as coming:
        panel.get_by_role("link", name="Download").click()
    with Image.open(coming.value.path()) as image:
        assert image.size == (64, 64) and any("a red circle" in str(value) for value in image.info.values())
    assert visited.axe("#kl-runs") == [] and visited.overflow() == []

    (folder,) = studio.output_dir.glob("*-tiny")
    (folder / "tiny.safetensors").write_bytes(b"no model")
    go.click()
    expect(panel.locator(".kr-draw-wrong")).to_contain_text("tiny.safetensors", timeout=PATIENCE)
    assert "Traceback" not in panel.inner_text()
    expect(go).to_be_enabled()


def drawing(studio: Any) -> list[Any]:
    """The processes that draw for a studio."""
    found = [process for each in processes.of_runs().values() for process in each]
    return [process for process in found if str(studio.output_dir) in " ".join(process.cmdline())]
