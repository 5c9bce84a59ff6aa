"""The whole way of a person, with the real trainer: open, start, watch, reload, stop, resume, and a studio that is killed on the way."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import toml
from PIL import Image
from playwright.sync_api import Page, expect

from kohya_like.supervisor import JobSupervisor
from sd_scripts.runs.rundir import RunDirectory
from tests.ui.standin_runs import ROOT, until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1500)]
PRESET = ROOT / "presets" / "sdxl_train_network" / "toy-star.toml"
PATIENCE = 180_000
"""Milliseconds for what a training does; a busy machine needs a minute until the first step."""


@pytest.fixture
def place(studios: Callable[..., Any], tmp_path: Path) -> Iterator[Any]:
    """A studio over an empty folder. Whatever it started is ended afterwards, and nothing is left of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        studio = studios(output_dir=tmp_path / "output")
        yield studio
        studio.end()
        supervisor = JobSupervisor(tmp_path / "output")
        for job in supervisor._look():
            supervisor.stop(job, grace_seconds=0)
            assert supervisor.members(job) == []


def steps(page: Page, panel: str) -> int:
    """The step that the page shows; -1 for none yet."""
    found = re.match(r"([\d,.\s]+) of", page.locator(f"{panel} .kr-count").inner_text())
    return int(re.sub(r"\D", "", found.group(1))) if found else -1


def moves(page: Page, panel: str, by: int = 2) -> int:
    """Waits for the curve, and for the steps to go on; gives the step then shown."""
    page.wait_for_selector(f"{panel} .kr-stage canvas", state="attached", timeout=PATIENCE)
    before = steps(page, panel)
    until(lambda: steps(page, panel) >= before + by, seconds=PATIENCE / 1000)
    return steps(page, panel)


def state(page: Page, word: str) -> None:
    expect(page.locator("#kl-runs .kr-run .kr-badge")).to_have_text(word, timeout=PATIENCE)


def trains_gently(studio: Any) -> None:
    """On a machine with much to do the browser must not come so late that there is nothing left to stop."""
    for child in psutil.Process(studio.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.nice(15)


def short_run(folder: Path, steps: int, name: str) -> Path:
    """A file of settings for the demo, made short."""
    settings = tomllib.loads(PRESET.read_text(encoding="utf-8"))
    settings["training"] |= {"max_train_steps": steps}
    settings["samples"] |= {"sample_steps": 2, "sample_every_n_steps": steps}
    settings["output"] = {"output_name": name}
    path = folder / f"{name}.toml"
    path.write_text(toml.dumps(settings), encoding="utf-8")
    return path


def walk_to(page: Page, what: str, limit: int = 260) -> None:
    """Presses Tab until the focus is on what is wanted, and sees that it shows."""
    for _ in range(limit):
        page.keyboard.press("Tab")
        if page.evaluate("selector => { const e = document.activeElement; return !!e && e.matches(selector) && !e.hidden; }", what):
            outline = page.evaluate("() => { const s = getComputedStyle(document.activeElement); return s.outlineStyle + s.boxShadow; }")
            assert outline != "nonenone", f"no ring around {what}"
            return
    raise AssertionError(f"Tab never came to {what}")


def start_the_demo(place: Any, visit: Callable[..., Any]) -> Page:
    """By keyboard; the page shows the training also after a reload."""
    seen = visit(place.url, quiet=False)
    page = seen.page
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Train the demo").wait_for()
    page.evaluate("() => [...document.querySelectorAll('button')].find(b => b.textContent.trim() === 'Train the demo').id = 'the-demo'")
    walk_to(page, "#the-demo")
    page.keyboard.press("Enter")
    expect(page.locator("#kl-pretrained_model_name_or_path")).to_have_value("toy")
    expect(page.locator("#kl-train_data_dir")).to_have_value("toy:star")
    expect(page.get_by_role("button", name="Train the demo")).to_have_count(0)
    expect(page.locator("#kl-live")).to_contain_text("toy-star")
    assert seen.axe() == []
    moves(page, "#kl-live")
    trains_gently(place)
    page.reload()
    page.wait_for_selector("#kl-learning_rate", state="attached")
    expect(page.get_by_role("button", name="Train the demo")).to_have_count(0)
    moves(page, "#kl-live")
    assert seen.complaints.found == [] and seen.complaints.hosts == {f"127.0.0.1:{place.port}"}
    return page


def stop_and_resume(page: Page, studio: Any, visit: Callable[..., Any]) -> tuple[Page, RunDirectory, int]:
    """By keyboard: stopped where it was started, resumed in the tab of runs of another page. Gives that page, the run and its last step."""
    supervisor = JobSupervisor(studio.output_dir)
    (run,) = studio.output_dir.glob("*-toy-star")
    walk_to(page, "#kl-stop")
    page.keyboard.press("Enter")
    expect(page.locator(".kl-answer")).to_contain_text("asked to stop")
    expect(page.locator("#kl-live .kr-badge")).to_have_text("Stopped", timeout=PATIENCE)
    stopped_at = supervisor.find(run.name).summary.step
    assert supervisor.find(run.name).returncode == 0

    fresh = visit(studio.url, theme="dark")
    page = fresh.page
    page.keyboard.press("Tab")
    page.get_by_role("tab", name="Runs").evaluate("tab => tab.classList.add('the-runs')")
    walk_to(page, "button.the-runs[role=tab]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#kl-runs .kr-row")
    state(page, "Stopped")
    expect(page.get_by_role("heading", name="New here?", include_hidden=True), "nobody is new where somebody has trained").to_have_count(0)
    assert fresh.axe() == []
    walk_to(page, "#kl-runs .kr-primary")
    page.keyboard.press("Enter")
    state(page, "Running")
    # The button that was pressed is gone; the focus stayed with its neighbours.
    assert page.evaluate("!!document.activeElement.closest('#kl-runs .kr-actions')")
    return page, supervisor.find(run.name).run, stopped_at


def test_the_demo_is_started_watched_reloaded_stopped_and_resumed_without_a_mouse(place: Any, visit: Callable[..., Any]) -> None:
    """The short form of the next. A studio is killed in test_runs_in_browser too; a resumed run counts on in tests/runs."""
    page, run, _stopped_at = stop_and_resume(start_the_demo(place, visit), place, visit)
    assert run.options().distributed.resume == "auto" and not run.stop_requested()
    page.keyboard.press("Shift+Tab")
    walk_to(page, "#kl-runs .kr-actions button")
    assert page.evaluate("document.activeElement.textContent") == "Stop"


@pytest.mark.long
def test_the_demo_is_started_watched_reloaded_survives_a_killed_studio_and_is_stopped_and_resumed_without_a_mouse(
    place: Any, studios: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    page = start_the_demo(place, visit)
    place.process.kill()
    place.process.wait()
    expect(page.locator("#kl-live .kr-status")).to_contain_text("Training is not affected", timeout=PATIENCE)
    (run,) = place.output_dir.glob("*-toy-star")
    assert 'train_data_dir = "toy:star"' in (run / "config.toml").read_text()
    supervisor = JobSupervisor(place.output_dir)
    before = supervisor.find(run.name).summary.step
    until(lambda: supervisor.find(run.name).summary.step > before, seconds=PATIENCE / 1000)
    again = studios(output_dir=place.output_dir, port=place.port)
    # The page that was open finds the new studio by itself.
    page.wait_for_function("() => !document.body.innerText.includes('does not answer')", timeout=PATIENCE)
    page.wait_for_selector("#kl-learning_rate", state="attached")
    moves(page, "#kl-live", by=1)
    page, folder, stopped_at = stop_and_resume(page, again, visit)
    trains_gently(again)
    assert moves(page, "#kl-runs", by=1) > stopped_at
    starts = [json.loads(line) for line in folder.events_file.read_text().splitlines() if '"started"' in line]
    assert starts[-1]["start_step"] == stopped_at
    page.keyboard.press("Shift+Tab")
    walk_to(page, "#kl-runs .kr-actions button")
    assert page.evaluate("document.activeElement.textContent") == "Stop"
    page.keyboard.press("Space")
    state(page, "Stopped")


@pytest.mark.long
def test_a_short_run_finishes_with_previews_to_compare_and_a_file_that_opens(place: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit(place.url, width=390).page
    page.get_by_placeholder("or a path on the studio").fill(str(short_run(tmp_path, 4, "short")))
    load = page.get_by_role("button", name="Open the file at this path")
    # On a narrow screen the buttons of the side panel keep to the lower edge; a person scrolls a little further.
    load.evaluate("node => node.scrollIntoView({block: 'center'})")
    load.click()
    expect(page.locator("#kl-max_train_steps")).to_have_value("4")
    page.locator("#kl-start").click()
    expect(page.locator("#kl-live .kr-badge")).to_have_text("Finished", timeout=PATIENCE)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    page.get_by_role("tab", name="Runs").click()
    state(page, "Finished")
    expect(page.locator("#kl-runs .kr-count")).to_have_text("4 of 4 steps")
    expect(page.locator("#kl-runs .kr-before")).to_have_attribute("alt", re.compile("step 0: a teal star"))
    expect(page.locator("#kl-runs .kr-after")).to_have_attribute("alt", re.compile("step 4: a teal star"))
    until(lambda: page.evaluate("document.querySelector('#kl-runs .kr-after').naturalWidth") >= 64)
    with page.expect_download() as coming:
        page.get_by_role("link", name="short.safetensors", exact=True).click()
    data = Path(coming.value.path()).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert any(name.startswith("lora_unet_") for name in header) and header["__metadata__"]
    (run,) = place.output_dir.glob("*-short")
    with Image.open(min((run / "samples").iterdir())) as preview:
        assert preview.size[0] >= 64
    page.get_by_role("button", name="Try it").click()
    expect(page.locator("#kl-inf-prompt")).to_have_value("a teal star at the top left")
    expect(page.get_by_label("LoRA file 1", exact=True)).to_have_value(re.compile("short.safetensors"))
    page.locator("#kl-inf-go").click()
    expect(page.locator(".kl-inf-go .kl-note")).to_have_text("Done.", timeout=PATIENCE)
    until(lambda: page.evaluate("document.querySelector('.kl-pair .kl-after').naturalWidth") >= 64)
    (drawn,) = (place.output_dir / "predictions").glob("*/2*.png")
    with Image.open(drawn) as found:
        assert "Steps: 2" in str(found.info["parameters"]) and "short:" in str(found.info["parameters"]), "its settings and its file"


@pytest.mark.long
def test_a_run_that_is_refused_before_its_first_step_says_why_and_offers_no_resume(
    place: Any, visit: Callable[..., Any], tmp_path: Path
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    # The demo holds one of them out.
    for name in ("held", "whole"):
        Image.new("RGB", (64, 64), "teal" if name == "held" else "red").save(images / f"{name}.png")
    (images / "broken.png").write_bytes((images / "whole.png").read_bytes()[:40])
    page = visit(place.url).page
    page.get_by_placeholder("or a path on the studio").fill(str(short_run(tmp_path, 4, "short")))
    page.get_by_role("button", name="Open the file at this path").click()
    page.locator("#kl-train_data_dir").fill(str(images))
    page.locator("#kl-start").click()
    expect(page.locator("#kl-live .kr-badge")).to_have_text("Failed", timeout=PATIENCE)
    page.get_by_role("tab", name="Runs").click()
    state(page, "Failed")
    cause = page.locator("#kl-runs .kr-cause")
    expect(cause).to_contain_text("broken.png")
    assert "Traceback" not in cause.inner_text() and "CalledProcessError" in next(place.output_dir.glob("*-short/console.log")).read_text()
    expect(page.get_by_role("button", name="Resume", exact=True)).to_be_hidden()


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "mode", "preset", "file"),
    [
        ("flux", "lora", "flux_train_network/toy-teal-flux", "toy-teal.safetensors"),
        ("sd", "dreambooth", "sd_train/toy-dreambooth", "toy-dreambooth.safetensors"),
    ],
)
def test_other_families_and_whole_models_are_trained_from_the_page(
    family: str, mode: str, preset: str, file: str, place: Any, visit: Callable[..., Any]
) -> None:
    """By clicks alone: family, training mode, preset, fewer steps, Start; then the finished run with its file and its previews."""
    seen = visit(place.url)
    page = seen.page
    page.locator(f"#kl-family-{family}").check()
    page.locator(f"#kl-mode-{mode}").check()
    page.locator("#kl-preset").select_option(f"built:{preset.rpartition('/')[2]}")
    page.get_by_role("button", name="Use this preset").click()
    expect(page.locator("#kl-train_data_dir")).to_have_value(re.compile("^toy:"))
    steps_field = page.locator("#kl-max_train_steps")
    steps_field.fill("3")
    page.locator("#kl-start").click()
    expect(page.locator("#kl-live .kr-badge")).to_have_text("Finished", timeout=PATIENCE)
    assert seen.complaints.found == []
    (run,) = place.output_dir.glob(f"*-{file.partition('.')[0]}")
    assert (run / file).stat().st_size > 100_000
    assert sorted(path.name[-13:-4] for path in (run / "samples").glob("*-00.png")) == ["000000-00", "000003-00"]
    settings = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    assert settings["kohya_like"]["script"] == f"{preset.partition('/')[0]}.py" and settings["training"]["max_train_steps"] == 3
