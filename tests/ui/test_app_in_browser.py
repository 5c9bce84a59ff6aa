"""The page as a whole: readable by everybody, light, quiet, usable on a telephone and with the keyboard alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.sync_api import Page, Request, Route, expect

from kohya_like import packing
from tests.ui.conftest import hearing
from tests.ui.runs_on_disk import made, options

pytestmark = pytest.mark.browser
ALL = [(width, theme) for width in (1400, 390) for theme in ("light", "dark")]
SECTION = ".kl-section:has([data-name=network_type])"
MAX_COMPONENTS = 100
MAX_TRANSFER_BYTES = 600_000
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


def open_tab(name: str, content: str) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        page.get_by_role("tab", name=name).click()
        page.wait_for_selector(content)

    return act


def write_prompts(page: Page) -> None:
    page.locator("#kl-prompt-0").fill("a star --w 512 --cn x.png")
    page.locator("#kl-prompt-0").press("Enter")
    page.locator(".kl-prompt-more summary").first.click()


def choose_dreambooth(page: Page) -> None:
    page.locator("#kl-mode-dreambooth").check()
    page.wait_for_selector("#kl-class_prompt")


def show_inference(page: Page) -> None:
    open_tab("Generate", "#kl-inf-prompt")(page)
    page.locator("#kl-inf-add-lora").click()
    for fold in page.locator(".kl-inf-form details > summary").all():
        fold.click()


def show_help(page: Page, words: str = "") -> None:
    page.get_by_role("tab", name="Help").click()
    page.get_by_role("searchbox", name="Search the options").fill(words)


def open_all(page: Page) -> None:
    page.get_by_role("tab", name="Train").click()
    page.locator("#kl-mode-lora").check()
    page.get_by_role("button", name="Open all").click()


STATES: dict[str, Callable[[Page], object]] = {
    "closed": lambda page: None,
    "errors": provoke_errors,
    "printed, preset, prompts": lambda page: (print_command(page), show_preset(page), write_prompts(page)),
    "dreambooth": choose_dreambooth,
    "runs": open_tab("Runs", "#kl-runs :visible"),
    "tools": open_tab("Tools", "#kl-tool-model"),
    "inference": show_inference,
    "help": lambda page: show_help(page, "noise offset"),
}


def test_axe_finds_no_violation_in_any_state_and_nothing_runs_over_the_edge(studio: Any, visit: Callable[..., Any]) -> None:
    """The short form of the next two: half of the states in a wide, light window, half in a narrow, dark one; colours of parts of lists."""
    found = []
    visited = visit(studio.url)
    page = visited.page
    halfway = len(STATES) // 2
    for number, (name, act) in enumerate(STATES.items()):
        if number == halfway:
            visited.switch_theme()
        for width in (1400, 390) if number < halfway else (390, 1400):
            page.set_viewport_size({"width": width, "height": 900})
            if width == (1400 if number < halfway else 390):
                act(page)
                found += [f"{name}: {line}" for line in visited.axe(contrast=True)]
            found += [f"{name}, {width}: {line}" for line in visited.overflow()]
    show_help(page)
    found += [f"all help: {line}" for line in visited.axe(contrast=False) + visited.axe(".kl-entry", contrast=True) + visited.overflow()]
    open_all(page)
    found += [f"open: {line}" for line in visited.axe(contrast=False) + visited.axe(SECTION, contrast=True) + visited.overflow()]
    assert not found, "\n".join(found)


def test_the_button_that_goes_on_looks_the_same_on_every_tab(
    studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path
) -> None:
    made(tmp_path, options(tmp_path, output_name="stopped"), (100, 200))
    visited = visit(studios(output_dir=tmp_path).url)
    page = visited.page
    places = {"Train": "#kl-start", "Generate": "#kl-inf-go", "Runs": "#kl-runs .kr-primary:not([hidden])", "Tools": "#kl-tool-run"}
    for tab, button in places.items():
        open_tab(tab, button)(page)
    for _theme in ("light", "dark"):
        seen = set()
        for tab, button in places.items():
            page.get_by_role("tab", name=tab).click()
            page.mouse.move(0, 0)
            colours = "node => { const { backgroundColor, color } = getComputedStyle(node); return backgroundColor + ' ' + color; }"
            seen.add(page.locator(button).first.evaluate(colours))
            assert visited.axe(button, contrast=True) == []
        assert len(seen) == 1, seen
        visited.switch_theme()
    page.get_by_role("tab", name="Runs").click()
    page.get_by_role("button", name="Disk and trash").click()
    expect(page.locator(".kl-dialog .kr-button").first).to_be_attached()
    weights = page.locator(".kl-dialog button").evaluate_all("all => all.map(button => getComputedStyle(button).fontWeight)")
    assert set(weights) == {"600"}, weights


INTO_THE_MARGIN = """options => options.filter(option => {
  const { paddingLeft, paddingRight } = getComputedStyle(option);
  const room = option.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
  return option.querySelector("span").getBoundingClientRect().width > room + 1;
}).map(option => option.textContent)"""


@pytest.mark.parametrize("width", [390, 1280, 1440, 1920])
def test_names_of_families_keep_apart(width: int, studio: Any, visit: Callable[..., Any]) -> None:
    options = visit(studio.url, width=width).page.locator(".kl-option:visible")
    expect(options.first).to_be_visible()
    assert options.count() > 12 and options.evaluate_all(INTO_THE_MARGIN) == []


@pytest.mark.long
@pytest.mark.parametrize(("width", "theme"), ALL)
def test_axe_finds_no_violation_and_nothing_runs_over_the_edge(studio: Any, visit: Callable[..., Any], theme: str, width: int) -> None:
    found = []
    visited = visit(studio.url, width=width, theme=theme)
    for name, act in STATES.items():
        act(visited.page)
        found += [f"{name}: {line}" for line in visited.axe() + visited.overflow()]
    open_all(visited.page)
    found += [f"open: {line}" for line in visited.axe() + visited.overflow()]
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize(("width", "theme"), ALL)
def test_axe_finds_no_violation_in_all_of_help(studio: Any, visit: Callable[..., Any], theme: str, width: int) -> None:
    visited = visit(studio.url, width=width, theme=theme)
    page = visited.page
    show_help(page)
    expect(page.locator(".kl-entry", has_text="--output_dir").first).to_be_visible()
    assert visited.axe() + visited.overflow() == []
    if (width, theme) == (1400, "dark"):
        open_all(page)
        assert visited.axe() + visited.overflow() == []


def test_help_shows_the_options_that_are_searched_for(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    show_help(page, "noise offset")
    expect(page.locator(".kl-entry", has_text="--noise_offset").first).to_be_visible()
    expect(page.locator(".kl-entry", has_text="--output_dir")).to_be_hidden()
    show_help(page)
    expect(page.locator(".kl-entry", has_text="--output_dir").first).to_be_visible()


def test_other_widths_need_no_sideways_scrolling_and_controls_are_large_enough_and_not_cut(studio: Any, visit: Callable[..., Any]) -> None:
    visited = visit(studio.url, width=390)
    page = visited.page
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
    print_command(page)
    for width in (768, 320):
        page.set_viewport_size({"width": width, "height": 900})
        assert visited.overflow() == [], width


def wakes(pid: int) -> int:
    """How often the threads of a process have gone to sleep so far; a busy machine lets them do so less often, never more."""
    told = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(line.split()[1]) for text in told for line in text.splitlines() if line.startswith("voluntary"))


def test_the_page_and_its_studio_are_small_and_ask_nobody_and_only_when_a_button_is_pressed(
    studios: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    studio = studios(own=True)
    visited = visit(studio.url, cold=True)
    page = visited.page
    page.wait_for_function("() => document.readyState === 'complete'")
    asked: list[str] = []

    def hear(request: Request) -> None:
        # What is asked once when the page is opened has no data, and may come late.
        if "/gradio_api/" in request.url and request.method == "POST" and '"data":[]' not in str(request.post_data):
            asked.append(request.url)

    with hearing(page, "request", hear):
        page.locator("#kl-learning_rate").fill("")
        page.locator("#kl-learning_rate").press_sequentially("0.00031")
        page.get_by_role("searchbox", name="Search all settings").fill("rank")
        expect(page.locator("#kl-learning_rate")).to_be_hidden()
        assert asked == []
        page.get_by_role("searchbox", name="Search all settings").fill("")
        print_command(page)
        assert len(asked) == 1
    transferred = page.evaluate(
        """() => [...performance.getEntriesByType('resource'), ...performance.getEntriesByType('navigation')]
            .reduce((sum, entry) => sum + entry.transferSize, 0)"""
    )
    assert 100_000 < transferred <= MAX_TRANSFER_BYTES
    assert page.evaluate("window.gradio_config.components.length") <= MAX_COMPONENTS
    shown = page.evaluate("window.gradio_config.dependencies.map((each) => each.show_progress)")
    assert shown and set(shown) == {"hidden"}, "Gradio tells screen readers of it: common.complete"
    assert {host.split(":")[0] for host in visited.complaints.hosts if host} == {"127.0.0.1"}
    assert psutil.Process(studio.process.pid).memory_info().rss <= MAX_RESIDENT_BYTES
    if Path("/proc").is_dir():
        before = wakes(studio.process.pid)
        time.sleep(1)
        assert wakes(studio.process.pid) - before < 400, "a studio that nobody asks anything takes from what trains beside it"


def test_the_first_part_of_the_page_is_drawn_first_however_late_the_module_of_all_comes(
    window: Page, studio: Any, visit: Callable[..., Any]
) -> None:
    def late(route: Route) -> None:
        window.wait_for_function("document.querySelectorAll('.kl-part').length > 9")
        window.evaluate(
            """() => new MutationObserver((changes) => (window.drawn ??= changes.find((each) => each.target.matches('.kl-part'))?.target))
                .observe(document.querySelector('.kl-part').closest('.gradio-container'), { subtree: true, childList: true })"""
        )
        route.continue_()

    window.route(f"**/{packing.FIRST}", late, times=1)
    # All others ask with the token that it holds.
    visit(studio.url)
    assert window.evaluate("window.drawn === document.querySelector('.kl-part')")


def test_the_whole_form_can_be_used_with_the_keyboard_alone(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    page.get_by_role("tab", name="Train").focus()
    seen: list[str] = []
    printed = False
    for _ in range(120):
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
