"""The page as a whole: readable by everybody, light, quiet, usable on a telephone and with the keyboard alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser
MAX_COMPONENTS = 150
MAX_TRANSFER_BYTES = 700_000
MAX_RESIDENT_BYTES = 200 * 2**20


def provoke_errors(page: Page) -> None:
    page.locator("#kl-network_dim").fill("-1")
    page.locator("#kl-print").click()
    page.wait_for_selector(".kl-problems:not([hidden])")


def print_command(page: Page) -> None:
    for name, text in (("pretrained_model_name_or_path", "toy"), ("train_data_dir", "toy:star"), ("network_dim", "16")):
        page.locator(f"#kl-{name}").fill(text)
    page.locator("#kl-print").click()
    page.wait_for_selector(".kl-output:not([hidden])")


def show_preset(page: Page) -> None:
    page.get_by_label("Preset", exact=True).select_option(label="Style, 24 GB")
    page.wait_for_selector(".kl-preset table")


def open_tab(name: str) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        page.get_by_role("tab", name=name).click()
        page.wait_for_timeout(400)

    return act


def write_prompts(page: Page) -> None:
    open_tab("Train")(page)
    page.locator("#kl-prompt-0").fill("a star --w 512 --cn x.png")
    page.locator("#kl-prompt-0").press("Enter")
    page.locator(".kl-prompt-more summary").first.click()


def choose_dreambooth(page: Page) -> None:
    page.locator("#kl-way-dreambooth").check()
    page.wait_for_selector("#kl-class_prompt")


def show_inference(page: Page) -> None:
    open_tab("Inference")(page)
    page.locator("#kl-inf-add-lora").click()
    for fold in page.locator(".kl-inf-form details > summary").all():
        fold.click()


STATES: dict[str, Callable[[Page], object]] = {
    "closed": lambda page: None,
    "open": lambda page: page.get_by_role("button", name="Open all").click(),
    "errors": provoke_errors,
    "printed": print_command,
    "preset": show_preset,
    "prompts": write_prompts,
    "dreambooth": choose_dreambooth,
    "runs": open_tab("Runs"),
    "tools": open_tab("Tools"),
    "inference": show_inference,
    "help": open_tab("Help"),
}


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_violation_and_nothing_runs_over_the_edge(studio: Any, visit: Callable[..., Any], theme: str, width: int) -> None:
    found = []
    visited = visit(studio.url, width=width, theme=theme)
    for name, act in STATES.items():
        act(visited.page)
        found += [f"{name}: {line}" for line in visited.axe()]
        overflow = visited.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        if overflow > 0:
            found.append(f"{name}: the page is {overflow} px wider than the window")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("width", [320, 768])
def test_other_widths_need_no_sideways_scrolling(studio: Any, visit: Callable[..., Any], width: int) -> None:
    page = visit(studio.url, width=width).page
    page.get_by_role("button", name="Open all").click()
    print_command(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_controls_are_large_enough_to_touch_and_labels_are_not_cut(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url, width=390).page
    page.get_by_role("button", name="Open all").click()
    small = page.evaluate(
        """() => [...document.querySelectorAll('button, summary, .kl-part select, .kl-part input[type=text]')]
            .filter(node => node.checkVisibility() && node.tabIndex >= 0 && node.getBoundingClientRect().height < 24)
            .map(node => node.outerHTML.slice(0, 90))"""
    )
    cut = page.evaluate(
        """() => [...document.querySelectorAll('button, label, summary')]
            .filter(node => node.checkVisibility() && node.scrollWidth > node.clientWidth + 1)
            .filter(node => getComputedStyle(node).display !== 'inline')
            .map(node => node.textContent.slice(0, 60))"""
    )
    assert (small, cut) == ([], [])


def test_the_page_is_small_and_asks_nobody_but_the_studio(studio: Any, visit: Callable[..., Any]) -> None:
    visited = visit(studio.url)
    page = visited.page
    page.wait_for_timeout(1500)
    transferred = page.evaluate(
        """() => [...performance.getEntriesByType('resource'), ...performance.getEntriesByType('navigation')]
            .reduce((sum, entry) => sum + entry.transferSize, 0)"""
    )
    components = page.evaluate("window.gradio_config.components.length")
    assert transferred <= MAX_TRANSFER_BYTES
    assert components <= MAX_COMPONENTS
    assert {host.split(":")[0] for host in visited.complaints.hosts if host} == {"127.0.0.1"}


def test_the_studio_needs_little_memory(studio: Any, visit: Callable[..., Any]) -> None:
    print_command(visit(studio.url).page)
    process = psutil.Process(studio.process.pid)
    assert process.memory_info().rss <= MAX_RESIDENT_BYTES


def test_typing_asks_the_server_nothing_and_printing_asks_once(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    page.wait_for_timeout(1000)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/gradio_api/" in request.url and request.method == "POST" else None)
    page.locator("#kl-learning_rate").fill("")
    page.locator("#kl-learning_rate").press_sequentially("0.00031")
    page.get_by_role("searchbox", name="Search all settings").fill("rank")
    page.wait_for_timeout(300)
    assert asked == []
    page.get_by_role("searchbox", name="Search all settings").fill("")
    print_command(page)
    assert len(asked) == 1


def test_the_whole_form_can_be_used_with_the_keyboard_alone(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    page.get_by_role("tab", name="Train").focus()
    seen: list[str] = []
    printed = False
    for _ in range(80):
        page.keyboard.press("Tab")
        here = page.evaluate(
            """() => { const node = document.activeElement, style = getComputedStyle(node);
              const near = node.id === 'kl-load' ? getComputedStyle(node.nextElementSibling) : style;
              const ring = near.outlineStyle !== 'none' && parseFloat(near.outlineWidth) >= 1;
              return {id: node.id, text: node.textContent.slice(0, 30), ring}; }"""
        )
        seen.append(here["id"] or here["text"])
        assert here["ring"], f"no visible focus on {seen[-1]}"
        if here["id"] == "kl-pretrained_model_name_or_path":
            page.keyboard.type("toy")
        elif here["id"] == "kl-train_data_dir":
            page.keyboard.type("toy:star")
        elif here["text"] == "Network" or here["text"].startswith("Network"):
            page.keyboard.press("Enter")
        elif here["id"] == "kl-network_alpha":
            page.keyboard.type("8")
        elif here["id"] == "kl-print":
            page.keyboard.press("Enter")
            printed = True
            break
    assert printed, seen
    page.wait_for_selector(".kl-output:not([hidden])")
    toml = page.locator(".kl-output pre").nth(1).inner_text()
    assert 'train_data_dir = "toy:star"' in toml
    assert "network_alpha = 8.0" in toml


def test_help_lists_every_option_and_finds_them(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    page.get_by_role("tab", name="Help").click()
    search = page.get_by_role("searchbox", name="Search the options")
    search.fill("noise offset")
    expect(page.locator(".kl-entry", has_text="--noise_offset").first).to_be_visible()
    expect(page.locator(".kl-entry", has_text="--output_dir")).to_be_hidden()


def test_the_first_visit_offers_the_demo_and_one_click_starts_it(studios: Callable[..., Any], visit: Callable[..., Any]) -> None:
    studio = studios()
    page = visit(studio.url).page
    page.get_by_role("button", name="Train the demo").click()
    expect(page.locator("#kl-pretrained_model_name_or_path")).to_have_value("toy")
    expect(page.locator("#kl-train_data_dir")).to_have_value("toy:star")
    expect(page.get_by_role("button", name="Train the demo")).to_have_count(0)
    deadline = time.monotonic() + 30
    while not (runs := [path for path in studio.output_dir.glob("*-toy-star") if (path / "run.json").is_file()]):
        assert time.monotonic() < deadline, "no run folder appeared"
        time.sleep(0.2)
    assert 'train_data_dir = "toy:star"' in (runs[0] / "config.toml").read_text()
    expect(page.locator("#kl-live")).to_contain_text("toy-star")
    page.locator("#kl-stop").click()
    expect(page.locator(".kl-answer")).to_contain_text("asked to stop")
    page.reload()
    page.wait_for_selector("#kl-learning_rate")
    expect(page.get_by_role("button", name="Train the demo")).to_have_count(0)


def test_eight_tabs_of_one_browser_all_open(studio: Any, browser: Any) -> None:
    context = browser.new_context()
    pages = [context.new_page() for _ in range(8)]
    for page in pages:
        page.goto(studio.url)
    for page in pages:
        page.wait_for_selector("#kl-learning_rate", timeout=60000)
        page.locator("#kl-network_dim").fill("-1")
        page.locator("#kl-print").click()
        page.wait_for_selector(".kl-problems:not([hidden])", timeout=60000)
    context.close()
