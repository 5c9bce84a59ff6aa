"""The GPUs of a run in a real browser, over studios whose driver is made of cards that the tests describe."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from kohya_like.supervisor import JobSupervisor
from tests.ui.conftest import WIDTHS_AND_THEMES
from tests.ui.fake_nvml import DRIVER_NOT_LOADED, GIB, GPU_IS_LOST, NOT_SUPPORTED, Card, environment, write
from tests.ui.standin_runs import ROOT, SCRIPT, command, options, until

pytestmark = pytest.mark.browser
SILENT = ("UtilizationRates", "MemoryInfo", "MemoryInfo_v2", "Temperature", "PowerUsage", "FanSpeed")


@dataclass
class Place:
    """A studio, the file that describes its cards, and the processes of the run that is under way."""

    url: str
    file: Path
    cards: list[Card]
    pids: list[int]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[int]]]:
    """A folder with a run under way that was given the GPUs 2 and 3."""
    root = tmp_path_factory.mktemp("gpus") / "output"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        supervisor = JobSupervisor(root, command("endless"))
        job = supervisor.start(SCRIPT, options(root, output_name="star"))
    until(lambda: (job.path / "events.jsonl").exists())
    record = json.loads((job.path / "run.json").read_text())
    (job.path / "run.json").write_text(json.dumps({**record, "device": "2,3"}))
    yield root, [process.pid for process in supervisor.members(job)]
    supervisor.stop(job, grace_seconds=0)
    supervisor.close()
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def place(studios: Callable[..., Any], run_folder: tuple[Path, list[int]]) -> Place:
    root, pids = run_folder
    file = root.parent / "gpus.json"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(file, []).items():
            patch.setenv(name, value)
        studio = studios(output_dir=root)
    return Place(studio.url, file, [], pids)


def eight(pids: list[int]) -> list[Card]:
    cards = [
        Card("NVIDIA A100-SXM4-80GB", f"GPU-{index}", 80 * GIB, (6 + 9 * index) * GIB, 95 - 13 * index, 55 + 5 * index)
        for index in range(8)
    ]
    cards[2].processes = [(pids[-1], 11 * GIB // 2), (1, GIB)]
    cards[7].refuses = {f"nvmlDeviceGet{name}": NOT_SUPPORTED for name in SILENT}
    return cards


def runs_tab(page: Page) -> None:
    page.get_by_role("tab", name="Runs").click()
    page.locator(".kr-row", has_text="star").click()
    expect(page.locator("#kl-runs .kr-title")).to_have_text("star")


def numbers(page: Page) -> int:
    """Readings that the line of the first plot goes through."""
    return len(re.findall(r"[ML]", page.locator("#kl-runs .kr-spark-line").first.get_attribute("d") or ""))


def test_each_of_several_gpus_has_a_card_and_those_of_the_run_are_marked(place: Place, visit: Callable[..., Any]) -> None:
    write(place.file, eight(place.pids))
    page = visit(place.url).page
    runs_tab(page)
    cards = page.locator("#kl-runs .kr-gpu")
    expect(cards).to_have_count(8)
    expect(page.locator("#kl-runs .kr-gpu-fold summary")).to_have_text("8 GPUs, 231 of 560\u00a0GiB in use; this run uses 2, 3")
    assert [cards.nth(index).locator(".kr-badge").is_visible() for index in range(8)] == [index in (2, 3) for index in range(8)]
    expect(cards.nth(2).locator(".kr-badge")).to_have_text("This run, 5.5\u00a0GiB")
    expect(cards.nth(3)).to_contain_text("33 of 80\u00a0GiB")
    for index, words in ((0, "55\u00a0°C, cool"), (1, "60\u00a0°C, warm"), (5, "80\u00a0°C, hot")):
        expect(cards.nth(index).locator(".kr-heat")).to_have_text(words)
    expect(cards.nth(7)).to_contain_text(re.compile("Memorynot told.*Usenot told.*temperature not told.*power not told"))
    strip = page.locator("#kl-runs .kr-gpu-strip")
    # The last one keeps silent about all but what it may draw, which belongs to no sum then.
    for words in ("mean of 7 of 8 GPUs", "231\u00a0GiBof 560\u00a0GiB, 7 of 8 GPUs", "85\u00a0°C, hotof the hottest, 7 of 8 GPUs"):
        expect(strip).to_contain_text(words)
    expect(strip).to_contain_text("1,981\u00a0Wof 3,150\u00a0W, 7 of 8 GPUs")
    # Beside the form they are folded away.
    page.get_by_role("tab", name="Train").click()
    expect(page.locator("#kl-live .kr-gpu-fold summary")).to_contain_text("8 GPUs")
    expect(page.locator("#kl-live .kr-gpu").first).to_be_hidden()


@pytest.mark.parametrize(("width", "theme"), WIDTHS_AND_THEMES)
def test_axe_finds_nothing_and_nothing_runs_over_the_edge(place: Place, visit: Callable[..., Any], theme: str, width: int) -> None:
    write(place.file, eight(place.pids))
    seen = visit(place.url, width=width, theme=theme)
    runs_tab(seen.page)
    fold = seen.page.locator("#kl-runs .kr-gpu-fold")
    expect(fold).to_be_visible()
    assert (fold.get_attribute("open") is None) == (width == 390)
    fold.evaluate("node => { node.open = true; }")
    expect(seen.page.locator("#kl-runs .kr-gpu").last).to_be_visible()
    assert seen.axe() + seen.overflow() == []
    cut = "nodes => nodes.filter(node => node.scrollWidth > node.clientWidth + 1).map(node => node.textContent)"
    assert seen.page.locator("#kl-runs .kr-gpu, #kl-runs .kr-gpu-cell").evaluate_all(cut) == []


def test_one_gpu_has_no_cards_its_history_outlives_a_reload_and_the_time_of_this_session_stands_beside_it(
    place: Place, visit: Callable[..., Any]
) -> None:
    write(place.file, [Card(processes=[(place.pids[-1], GIB)])])
    page = visit(place.url).page
    runs_tab(page)
    strip = page.locator("#kl-runs .kr-gpu-strip")
    for words in ("NVIDIA GeForce RTX 4090", "of 24\u00a0GiB", "64\u00a0°C, warm", "of 450\u00a0W"):
        expect(strip).to_contain_text(words)
    expect(page.locator("#kl-runs .kr-gpu-fold")).to_be_hidden()
    session = page.locator("#kl-runs .kr-tile", has_text="This session")
    expect(session).to_contain_text(re.compile(r"This session\d+ (s|min)[\d,]+ steps"))
    expect(page.locator("#kl-runs .kr-tile", has_text="In total")).to_have_count(0)
    until(lambda: numbers(page) >= 3)
    assert "in the last 5 minutes: between" in (page.locator("#kl-runs .kr-spark").first.get_attribute("aria-label") or "")
    before = numbers(page)
    page.reload()
    page.wait_for_selector("#kl-learning_rate", state="attached")
    runs_tab(page)
    expect(strip).to_contain_text("NVIDIA GeForce RTX 4090")
    assert numbers(page) >= before


def test_a_driver_that_goes_a_gpu_that_is_lost_and_their_return(place: Place, visit: Callable[..., Any]) -> None:
    cards = [Card(name="A"), Card(name="B")]
    write(place.file, cards)
    page = visit(place.url).page
    runs_tab(page)
    expect(page.locator("#kl-runs .kr-gpu")).to_have_count(2)
    cards[1].refuses["*"] = GPU_IS_LOST
    write(place.file, cards)
    problem = page.locator("#kl-runs .kr-gpu-problem")
    expect(problem).to_contain_text("GPU 1 is lost")
    expect(page.locator("#kl-runs .kr-gpu").nth(1)).to_contain_text("B")
    write(place.file, cards, raises=DRIVER_NOT_LOADED)
    expect(problem).to_contain_text("No NVIDIA driver on this machine")
    expect(page.locator("#kl-runs .kr-gpu-strip")).to_be_hidden()
    # What the processes use is shown instead.
    expect(page.locator("#kl-runs .kr-tile", has_text="Memory now")).to_contain_text("GiB")
    write(place.file, [Card(name="A"), Card(name="C"), Card(name="C")])
    expect(page.locator("#kl-runs .kr-gpu")).to_have_count(3)
    expect(problem).to_be_hidden()
    expect(page.locator("#kl-runs .kr-tile", has_text="Memory now")).to_be_hidden()
