"""Files that fill the form, in a real browser: opened or dropped, with a report of what became of each key."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import toml
from playwright.sync_api import Page, Route, expect

from sd_scripts.runs.events import RunFinished
from tests.ui.conftest import hearing
from tests.ui.on_screen import Eyes
from tests.ui.runs_on_disk import made, options
from tests.ui.test_tools import lora

pytestmark = pytest.mark.browser
OPENING = "**/kl/train/open"
KOHYA = {
    "LoRA_type": "Standard",
    "sdxl": True,
    "pretrained_model_name_or_path": "base.safetensors",
    "train_data_dir": "/images/dog",
    "learning_rate": 0.0003,
    "network_dim": 24,
    "network_alpha": 8,
    "max_resolution": "768,768",
    "xformers": "xformers",
    "optimizer": "AdamW8bit",
    "save_model_as": "safetensors",
}


def drop(page: Page, name: str, data: bytes) -> None:
    """Drops a file on the page, as a file manager does."""
    page.evaluate(
        """([name, text]) => {
          const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0)), bag = new DataTransfer();
          bag.items.add(new File([bytes], name));
          const send = kind => document.body.dispatchEvent(new DragEvent(kind, {dataTransfer: bag, bubbles: true, cancelable: true}));
          send('dragover');
          if (document.querySelector('.kl-drop').hidden) throw new Error('the page does not say that it takes the file');
          send('drop'); }""",
        [name, base64.b64encode(data).decode()],
    )


def test_a_kohya_configuration_that_is_dropped_fills_the_form_and_is_reported(studio: Any, visit: Callable[..., Any]) -> None:
    visited = visit(studio.url)
    page = visited.page
    expect(page.locator(".kl-welcome")).to_be_visible()
    drop(page, "dog.json", json.dumps(KOHYA).encode())
    report = page.locator(".kl-import")
    # Who has settings of his own is not asked whether he is new.
    expect(page.locator(".kl-welcome")).to_have_count(0)
    expect(report.get_by_role("heading", name="What became of dog.json")).to_be_visible()
    expect(report).to_be_focused()
    expect(page.locator("#kl-learning_rate")).to_have_value("0.0003")
    expect(page.locator("#kl-network_dim")).to_have_value("24")
    expect(page.locator("#kl-train_data_dir")).to_have_value("/images/dog")
    rows = report.locator("tbody tr")
    assert rows.count() == len(KOHYA), "every key is reported once"
    report.get_by_role("button", name="taken").click()
    some = rows.count()
    assert 0 < some < len(KOHYA)
    report.get_by_role("searchbox").fill("network_dim")
    expect(rows).to_have_count(1)
    report.get_by_role("button", name="Copy the report").click()
    assert "network_dim\t24" in page.evaluate("navigator.clipboard.readText()")

    # What gave way stands above the form, until another file is opened.
    flux = {"sdxl": False, "flux1_checkbox": True, "compile": True, "compile_mode": "reduce-overhead", "blocks_to_swap": 10}
    drop(page, "flux.json", json.dumps({**KOHYA, **flux}).encode())
    banner = page.get_by_role("alert").filter(has_text="compile_mode = reduce-overhead gave way to blocks_to_swap = 10")
    expect(banner).to_be_in_viewport(ratio=1)
    boxes = [where.bounding_box() for where in (banner, page.locator(".kl-start"), page.locator(".kl-main"))]
    assert all(boxes) and boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"] and boxes[0]["width"] == boxes[2]["width"]
    drop(page, "dog.json", json.dumps(KOHYA).encode())
    expect(banner).to_have_count(0)
    assert visited.axe() == []


def test_the_report_of_a_file_is_in_the_window_at_every_width(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url, width=1280, height=720).page
    drop(page, "dog.json", json.dumps({**KOHYA, "pretrained_model_name_or_path": "/models/sdxl/sd_xl_base_1.0.safetensors"}).encode())
    expect(page.locator(".kl-import")).to_be_focused()
    for width in (390, 680, 780, 1000):
        page.set_viewport_size({"width": width, "height": 720})
        assert Eyes(page).flaws() == [], width
    # A long value without a space leaves room for what became of it.
    page.set_viewport_size({"width": 1440, "height": 900})
    drop(page, "dog.json", json.dumps({**KOHYA, "output_name": "x" * 150}).encode())
    told = page.locator(".kl-import tr", has_text="xxxx").locator("td")
    expect(told).to_be_visible()
    assert told.bounding_box()["width"] > 150


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844)])
def test_whose_file_it_is_is_asked_with_buttons_and_its_data_are_put_into_the_form(
    width: int, height: int, studio: Any, visit: Callable[..., Any]
) -> None:
    visited = visit(studio.url, width=width, height=height)
    page = visited.page
    both = {"training_method": "LORA", "model_type": "FLUX_DEV_1", "model_family": "sdxl", "lora_rank": 24, "data_backend_config": "m.json"}
    drop(page, "both.json", json.dumps(both).encode())
    question = page.locator(".kl-owner")
    expect(question.get_by_role("heading", name="Which program is both.json from?")).to_be_visible()
    expect(question).to_be_focused()
    for name in ("OneTrainer", "SimpleTuner", "None of them"):
        expect(question.get_by_role("button", name=name)).to_be_in_viewport(ratio=1)
    box = question.bounding_box()
    assert box and box["x"] >= 0 and box["x"] + box["width"] <= width and visited.axe() == []
    question.get_by_role("button", name="OneTrainer").click()
    expect(page.locator(".kl-import")).to_contain_text("configuration of OneTrainer: FLUX")
    expect(question).to_be_hidden()
    expect(page.locator("#kl-network_dim")).to_have_value("24")

    # What describes data alone changes nothing else.
    page.locator("#kl-train_data_dir").fill("gone")
    data = {"resolutions": [512], "directory": [{"path": "/images/cat", "num_repeats": 3}], "tomorrow": 1}
    drop(page, "data.toml", toml.dumps(data).encode())
    expect(page.locator(".kl-import")).to_contain_text("a data set of diffusion-pipe")
    expect(page.locator("#kl-train_data_dir")).to_have_value("/images/cat")
    expect(page.locator("#kl-network_dim")).to_have_value("24")
    expect(page.locator("[data-verdict=unknown]").first).to_contain_text("unknown 1")
    drop(page, "both.json", json.dumps(both).encode())
    question.get_by_role("button", name="None of them").click()
    expect(question).to_be_hidden()
    expect(page.locator("#kl-train_data_dir")).to_have_value("/images/cat")


def test_of_a_lora_file_only_the_header_leaves_the_browser(studio: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit(studio.url, width=390).page
    path = lora(tmp_path / "dog.safetensors")
    data = path.read_bytes() + bytes(3_000_000)
    sizes: list[int] = []
    with hearing(page, "request", lambda request: sizes.append(len(request.post_data or "")) if request.method == "POST" else None):
        drop(page, path.name, data)
        expect(page.locator(".kl-import")).to_contain_text("pretrained_model_name_or_path")
    expect(page.locator("#kl-network_dim")).to_have_value("4")
    assert sizes and max(sizes) < 300_000
    page.locator(".kl-missing").get_by_role("button", name="train_data_dir").click()
    expect(page.locator("#kl-train_data_dir")).to_be_focused()
    # Where it lies the browser does not tell.
    page.get_by_role("button", name="Continue training this LoRA").click()
    expect(page.locator("#kl-network_weights")).to_be_focused()
    expect(page.locator("#kl-network_weights")).to_have_value("")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_lora_is_also_opened_by_its_path_and_a_damaged_one_refused(studio: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit(studio.url).page
    where = page.get_by_placeholder("or a path on the studio")
    where.fill(str(lora(tmp_path / "dog.safetensors")))
    where.press("Enter")
    expect(page.locator("#kl-network_dim")).to_have_value("4")
    page.get_by_role("button", name="Continue training this LoRA").click()
    expect(page.locator("#kl-network_weights")).to_have_value(str(tmp_path / "dog.safetensors"))
    assert Eyes(page).faults("#kl-network_weights") == []
    for name, data in (("long.safetensors", b"\xff" * 64), ("short.safetensors", b"\x10"), ("odd.json", b"{]"), ("x.ckpt", b"PK\x03\x04")):
        drop(page, name, data)
        expect(page.locator(".kl-problems")).to_contain_text(name)
    expect(page.locator("#kl-network_dim")).to_have_value("4")


@contextlib.contextmanager
def held(page: Page) -> Iterator[list[Route]]:
    """What asks for settings waits for the test."""
    waiting: list[Route] = []
    page.route(OPENING, lambda route: waiting.append(route))
    yield waiting
    page.unroute(OPENING)


def test_while_settings_are_opened_nothing_else_is_written_into_the_form_and_afterwards_everything(
    studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    run = made(output, options(output, learning_rate=3e-4), (4,))
    run.log(RunFinished(step=4))
    page = visit(studios(output_dir=output).url).page
    text = json.dumps(KOHYA).encode()
    path = tmp_path / "dog.json"
    path.write_bytes(text)
    rate, status = page.locator("#kl-learning_rate"), page.locator(".kl-answer")

    def by_path() -> None:
        page.locator("#kl-load-path").fill(str(path))
        page.locator("#kl-load-path").press("Enter")

    def of_the_run() -> None:
        page.get_by_role("tab", name="Runs").click()
        page.get_by_role("button", name="Use these settings").click()
        expect(page.get_by_role("tab", name="Train")).to_have_attribute("aria-selected", "true")

    ways = {
        "by its path": by_path,
        "chosen": lambda: page.locator("#kl-load").set_input_files(path),
        "dropped": lambda: drop(page, "dog.json", text),
        "of a run": of_the_run,
    }
    for way, ask in ways.items():
        rate.fill("0.5")
        with held(page) as waiting:
            ask()
            expect(status, way).to_contain_text("Opening ")
            expect(page.locator(".kl-main"), way).to_have_attribute("inert", "")
            expect(page.locator(".kl-buttons"), way).to_have_attribute("inert", "")
            rate.focus()
            page.keyboard.type("7")
            expect(rate, way).to_have_value("0.5")
            while not waiting:
                page.wait_for_timeout(10)
            waiting[0].continue_()
            expect(rate, way).to_have_value("0.0003")
        expect(status, way).not_to_contain_text("Opening ")
        rate.fill("0.7")
        expect(rate, way).to_have_value("0.7")


def test_of_two_files_the_one_that_was_asked_for_last_stays_and_a_studio_that_is_away_leaves_the_form_as_it_was(
    studio: Any, visit: Callable[..., Any]
) -> None:
    page = visit(studio.url, quiet=False).page
    rate = page.locator("#kl-learning_rate")
    with held(page) as waiting:
        drop(page, "one.json", json.dumps({**KOHYA, "learning_rate": 0.01}).encode())
        while len(waiting) < 1:
            page.wait_for_timeout(10)
        drop(page, "two.json", json.dumps({**KOHYA, "learning_rate": 0.02}).encode())
        page.wait_for_function("() => document.querySelector('.kl-answer').textContent.includes('two.json')")
        while len(waiting) < 2:
            page.wait_for_timeout(10)
        waiting[1].continue_()
        expect(rate).to_have_value("0.02")
        waiting[0].continue_()
        drop(page, "three.json", b"{}")
        while len(waiting) < 3:
            page.wait_for_timeout(10)
        expect(rate).to_have_value("0.02")
        waiting[2].abort()
        expect(page.locator(".kl-problems")).to_be_visible()
    rate.fill("0.7")
    expect(rate).to_have_value("0.7")
