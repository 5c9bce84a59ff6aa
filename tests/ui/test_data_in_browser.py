"""The Data tab in a real browser: many images, captions written in place by two pages, orders with a preview, proposals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, Route, expect

from sd_scripts.toy import worlds
from tests.ui.on_screen import Eyes

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
OTHERS = [pytest.param(*size, marks=pytest.mark.long) for size in ((1440, 900, "dark"), (1920, 1080, "light"), (1280, 720, "dark"))]
CELLS, TEXT = ".kl-data-cell", "#kl-data-text"


def images(folder: Path, count: int) -> Path:
    """So many small images with captions, the first two the same but for their size."""
    folder.mkdir()
    for number in range(12):
        pixels = np.random.default_rng(max(number, 1)).integers(0, 256, (6, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((96 if number else 120, 64 if number else 80), Image.Resampling.BICUBIC).save(
            folder / f"{number:04}.png"
        )
    for number in range(count):
        if number >= 12:
            shutil.copy(folder / f"{number % 11 + 1:04}.png", folder / f"{number:04}.png")
        (folder / f"{number:04}.txt").write_text(f"a cat, number {number}, {'red' if number % 3 else 'blue'}")
    return folder


def opened(page: Page, folder: Path) -> None:
    for name, text in (
        ("pretrained_model_name_or_path", "toy"),
        ("train_data_dir", str(folder)),
        ("resolution", "64"),
        ("min_bucket_reso", "32"),
    ):
        page.locator("#kl-search").fill(name)
        page.locator(f"#kl-{name}").fill(text)
    page.locator("#kl-search").fill("")
    page.get_by_role("tab", name="Data").click()
    expect(page.locator(CELLS)).not_to_have_count(0)


def rare(page: Page, name: str) -> None:
    """Presses a button that the menu beside the others holds."""
    page.locator("#kl-data .kl-menu > summary").click()
    page.locator("#kl-data .kl-menu").get_by_role("button", name=name, exact=True).click()
    expect(page.locator("#kl-data .kl-menu")).not_to_have_attribute("open", "")


@pytest.mark.parametrize(("width", "height", "theme"), [(390, 844, "light"), *OTHERS])
def test_captions_are_written_in_place_and_no_page_loses_those_of_another(
    width: int, height: int, theme: str, studio: Any, visit: Callable[..., Any], tmp_path: Path
) -> None:
    folder = images(tmp_path / "mine", 500)
    visited = visit(studio.url, width=width, height=height, theme=theme)
    page = visited.page
    opened(page, folder)
    expect(page.locator("#kl-data .kl-note").first).to_contain_text("500 images")
    assert page.locator(CELLS).count() < 120, "those in sight alone are drawn"
    page.locator(CELLS).first.click()
    page.keyboard.press("End")
    expect(page.locator("#kl-data-499")).to_be_in_viewport()
    expect(page.locator(TEXT)).to_have_value("a cat, number 499, red")
    page.keyboard.press("Home")
    expect(page.locator(TEXT)).to_have_value("a cat, number 0, blue")
    expect(page.locator(".kl-data-shown")).to_contain_text("a cat, number 0, blue")
    assert visited.axe() + visited.overflow() == [] and Eyes(page).flaws() == []
    # What is typed is saved when somebody goes on, also without a button.
    page.locator(TEXT).fill("a dog")
    page.get_by_role("button", name="Next").click()
    expect(page.locator(TEXT)).to_have_value("a cat, number 1, red")
    assert (folder / "0000.txt").read_text() == "a dog"
    expect(page.locator("#kl-data-0")).to_contain_text("a dog")
    # Another page has the same image open.
    other = visit(studio.url).page
    opened(other, folder)
    other.locator(CELLS).nth(1).click()
    expect(other.locator(TEXT)).to_have_value("a cat, number 1, red")
    page.locator(TEXT).fill("mine")
    page.locator(TEXT).press("Control+Enter")
    expect(page.locator("#kl-data-told")).to_contain_text("Saved")
    other.locator(TEXT).fill("theirs")
    other.locator(TEXT).press("Control+Enter")
    expect(other.locator(".kl-data-conflict")).to_contain_text("mine")
    assert (folder / "0001.txt").read_text() == "mine"
    other.get_by_role("button", name="Keep mine").click()
    expect(other.locator("#kl-data-told")).to_contain_text("Saved")
    assert (folder / "0001.txt").read_text() == "theirs"


def test_what_is_typed_stays_while_the_studio_is_slow_to_answer(studio: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    folder = images(tmp_path / "mine", 12)
    page = visit(studio.url, width=1280, height=720).page
    opened(page, folder)
    text, told = page.locator(TEXT), page.locator("#kl-data-told")
    waiting: list[Route] = []

    def go_on(order: str) -> None:
        while not waiting:
            page.wait_for_timeout(10)
        with page.expect_response(f"**/kl/data/{order}"):
            waiting.pop().continue_()
        page.unroute(f"**/kl/data/{order}")

    # Until the caption is here, there is nothing to type into; not the caption of another image, either.
    page.locator(CELLS).nth(2).click()
    expect(text).to_have_value("a cat, number 2, red")
    page.route("**/kl/data/image", lambda route: waiting.append(route))
    page.locator(CELLS).nth(1).click()
    expect(text).to_have_value("")
    expect(text).not_to_be_editable()
    go_on("image")
    expect(text).to_have_value("a cat, number 1, red")
    # Typed while it is saved.
    page.route("**/kl/data/caption", lambda route: waiting.append(route))
    text.fill("a dog")
    text.press("Control+Enter")
    text.press_sequentially(" runs")
    go_on("caption")
    expect(told).to_contain_text("Not saved yet")
    expect(text).to_have_value("a dog runs")
    assert (folder / "0001.txt").read_text() == "a dog"
    text.press("Control+Enter")
    expect(told).to_contain_text("Saved")
    assert (folder / "0001.txt").read_text() == "a dog runs"
    # Typed while an order writes the same caption.
    text.fill("a dog sleeps")
    page.get_by_role("button", name="Undo", exact=True).evaluate("button => button.click()")
    expect(page.locator("#kl-data-1")).to_contain_text("a dog")
    expect(page.locator("#kl-data-1")).not_to_contain_text("runs")
    expect(text).to_have_value("a dog sleeps")
    text.press("Control+Enter")
    expect(page.locator(".kl-data-conflict")).to_contain_text("It says now:a dog")
    assert (folder / "0001.txt").read_text() == "a dog"
    page.get_by_role("button", name="Keep mine").click()
    expect(told).to_contain_text("Saved")
    # An answer that says what is wrong.
    page.route("**/kl/data/image", lambda route: route.fulfill(json={"problem": "The disk is asleep."}))
    page.locator(CELLS).nth(3).click()
    expect(told).to_contain_text("could not be read")
    expect(text).not_to_be_editable()
    page.unroute("**/kl/data/image")
    page.locator(CELLS).nth(4).click()
    page.locator(CELLS).nth(3).click()
    expect(text).to_have_value("a cat, number 3, blue")
    assert page.locator(CELLS).evaluate_all("cells => cells.map(cell => Number(cell.ariaPosInSet))") == [*range(1, 13)], "another order"


def style(place: Locator, name: str, pseudo: str | None = None) -> str:
    return str(place.evaluate("(node, [name, pseudo]) => getComputedStyle(node, pseudo)[name]", [name, pseudo]))


def test_what_opens_over_the_page_looks_as_the_page_does(studio: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    folder = images(tmp_path / "mine", 12)
    (folder / "0001.txt").unlink()
    page = visit(studio.url, width=1280, height=720).page
    opened(page, folder)
    page.locator(CELLS).nth(1).click()
    facts = page.locator(".kl-data-panel .kl-note:visible")
    expect(facts).to_contain_text(["no caption"])
    page.locator(TEXT).fill("a dog")
    page.locator(TEXT).press("Control+Enter")
    expect(page.locator("#kl-data-told")).to_contain_text("Saved")
    expect(facts).not_to_contain_text(["no caption"])
    outside = page.get_by_role("button", name="Tags", exact=True)
    outside.click()
    inside = page.locator(".kl-dialog .kl-button")
    for name in ("fontSize", "fontWeight", "paddingLeft"):
        assert style(inside, name) == style(outside, name), name
    assert style(page.locator(".kl-dialog .kl-chip").first, "paddingLeft") == "10px"
    search = page.locator(".kl-dialog input")
    assert style(search, "color", "::placeholder") != style(search, "color"), "what is not typed looks typed"
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Edit the loss mask").click()
    expect(page.get_by_role("button", name="Save mask")).to_be_in_viewport(ratio=1)


def test_orders_are_seen_before_they_are_done_and_duplicates_are_proposed(studio: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    folder = images(tmp_path / "mine", 12)
    visited = visit(studio.url, width=1280, height=720, theme="dark")
    page = visited.page
    opened(page, folder)
    page.get_by_label("Find in captions and names").fill("blue")
    expect(page.locator(CELLS)).to_have_count(4)
    page.get_by_role("button", name="Search and replace").click()
    page.get_by_label("Find", exact=True).fill("cat")
    page.get_by_label("Replace by").fill("dog")
    page.get_by_role("button", name="Preview").click()
    expect(page.locator(".kl-data-rows ins")).to_have_count(4)
    assert visited.axe(".kl-dialog") == [] and "a cat, number 0, blue" in (folder / "0000.txt").read_text()
    page.get_by_role("button", name="Change them").click()
    expect(page.locator(CELLS).first).to_contain_text("a dog, number 0, blue")
    assert [("dog" in path.read_text()) for path in sorted(folder.glob("*.txt"))] == [number % 3 == 0 for number in range(12)]
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#kl-data .kl-status")).to_contain_text("Taken back: find 'cat', replace 'dog' (4 captions)")
    assert not any("dog" in path.read_text() for path in folder.glob("*.txt"))
    page.get_by_role("button", name="Tags", exact=True).click()
    expect(page.locator(".kl-data-tags button").first).to_have_text("a cat 12")
    assert visited.axe(".kl-dialog") == []
    page.get_by_role("button", name="Show red, 8").click()
    expect(page.locator(CELLS)).to_have_count(8)
    page.get_by_label("Find in captions and names").fill("")
    rare(page, "Find duplicates and blur")
    proposals = page.locator("dialog[open]")
    expect(proposals).to_contain_text("Nearly the same: 1")
    expect(proposals.locator(".kl-data-group").first.locator("input:checked")).to_have_count(1)
    assert visited.axe(".kl-dialog") == [] and len(list(folder.glob("*.png"))) == 12
    page.get_by_role("button", name="Leave out 1 image").click()
    expect(page.locator("#kl-data .kl-status")).to_contain_text("Left out: 1 image")
    expect(page.locator(CELLS)).to_have_count(11)
    assert not (folder / "0001.png").exists() and not (folder / "0001.txt").exists(), "the smaller one"
    page.get_by_role("button", name="Bring back what was left out").click()
    expect(page.locator(CELLS)).to_have_count(12)
    assert (folder / "0001.txt").read_text() == "a cat, number 1, red"


# German has the widest buttons, and with English the most rows of them.
@pytest.mark.parametrize("language", ["de", *(pytest.param(name, marks=pytest.mark.long) for name in ("en", "ru", "zh"))])
def test_on_a_telephone_the_images_are_in_sight_and_what_is_rare_stands_in_a_menu(
    language: str, studio: Any, visit: Callable[..., Any], tmp_path: Path
) -> None:
    visited = visit(studio.url, width=390, height=844)
    page = visited.page
    opened(page, images(tmp_path / "mine", 12))
    try:
        page.locator(".kl-language").select_option(language)
        page.locator("[role=tab]").nth(1).click()
        expect(page.locator(CELLS)).not_to_have_count(0)
        # Gradio hides those for which there is no room.
        assert page.locator("[role=tablist] [role=tab]:visible").count() == 6
        tops = page.locator("#kl-data .kl-data-top > .kl-row > *:visible").evaluate_all(
            "all => all.map(each => Math.round((each.offsetTop + each.offsetHeight / 2) / 20))"
        )
        assert len({*tops}) <= 5, "rows of buttons stand above the images"
        assert page.locator(CELLS).first.bounding_box()["y"] < 844 * 0.62
        # What is chosen with a finger is shown, far below the others.
        page.locator(CELLS).nth(1).click()
        expect(page.locator(TEXT)).to_have_value("a cat, number 1, red")
        assert Eyes(page).faults(".kl-data-panel .kl-data-large") == []
        menu = page.locator("#kl-data .kl-menu")
        menu.locator("summary").focus()
        page.keyboard.press("Enter")
        expect(menu.get_by_role("button")).to_have_count(5)
        assert [fault for row in (0, 4) for fault in Eyes(page).faults(f"#kl-data .kl-menu-list button:nth-child({row + 1})")] == []
        assert visited.axe("#kl-data") + visited.overflow() == []
        page.keyboard.press("Escape")
        expect(menu.get_by_role("button")).to_have_count(0)
        expect(menu.locator("summary")).to_be_focused()
        # A window that it opens leads back to it.
        page.keyboard.press("Enter")
        for key in ("Tab", "Tab", "Enter"):
            page.keyboard.press(key)
        expect(page.locator("#kl-data-work-face_model")).to_be_visible()
        page.keyboard.press("Escape")
        expect(menu.locator("summary")).to_be_focused()
        # So does a press elsewhere, and Ctrl+K finds what it holds.
        menu.locator("summary").click()
        page.locator("#kl-data-search").click()
        expect(menu.get_by_role("button")).to_have_count(0)
        if language == "en":
            page.keyboard.press("Control+k")
            page.locator(".kl-dialog input").fill("faces cut")
            page.keyboard.press("Enter")
            expect(page.locator("#kl-data-work-face_model")).to_be_visible()
    finally:
        page.evaluate("localStorage.clear(); sessionStorage.clear()")


def test_without_images_the_tab_says_what_it_is_for_and_opens_some(studio: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    visited = visit(studio.url, width=1280, height=720)
    page = visited.page
    page.get_by_role("tab", name="Data").click()
    expect(page.locator(".kl-data-empty")).to_contain_text("There are none yet")
    expect(page.locator(".kl-data-top")).to_have_css("border-top-width", "0px")  # an empty card is none
    assert visited.axe() + visited.overflow() == []
    page.locator(".kl-data-empty").get_by_role("button", name="Add images").click()
    expect(page.locator("#kl-add-name")).to_be_visible()
    page.keyboard.press("Escape")
    # A folder of the studio's computer, and another one after it; no base model is chosen.
    page.get_by_role("tab", name="Train").click()
    page.locator("#kl-train_data_dir").fill(str(tmp_path))
    page.get_by_role("tab", name="Data").click()
    expect(page.locator("#kl-data .kl-data-top .kl-error")).to_contain_text("no images")
    expect(page.locator(".kl-data-empty").get_by_role("button", name="Open again")).to_be_visible()
    for number, name in enumerate(("mine", "other")):
        images(tmp_path / name, 12 + number)
    for number, name in enumerate(("mine", "other")):
        if number:
            rare(page, "Open a folder")
            page.get_by_role("button", name="One folder up").click()
        else:
            page.locator(".kl-data-empty").get_by_role("button", name="Open a folder").click()
        page.locator("#kl-pick-list li", has_text=name).click()
        page.get_by_role("button", name="Use this folder").click()
        expect(page.locator(CELLS)).to_have_count(12 + number)
        expect(page.locator("#kl-data .kl-note").first).to_contain_text(str(tmp_path / name))
    page.get_by_role("tab", name="Train").click()
    expect(page.locator("#kl-train_data_dir")).to_have_value(str(tmp_path / "other"))


@pytest.mark.parametrize(("width", "height", "theme"), [(390, 844, "dark"), *OTHERS])
def test_captions_by_a_model_are_ordered_followed_and_taken_back(
    width: int, height: int, theme: str, studio: Any, visit: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "toys"
    folder.mkdir()
    scenes = worlds.scenes()[::40]
    for number, scene in enumerate(scenes):
        worlds.draw(scene, 64, 64, worlds.rng_for(2, number)).save(folder / f"{number}.png")
    visited = visit(studio.url, width=width, height=height, theme=theme)
    page = visited.page
    opened(page, folder)
    page.get_by_role("button", name="Write captions").click()
    start = page.get_by_role("button", name="Start: Write captions")
    expect(start).to_be_attached()
    page.locator("#kl-data-work-caption_model").fill("toy")
    page.locator("#kl-data-work-trigger_word").fill("zwx")
    assert visited.axe() + visited.overflow() == []
    # Where it would send images away, it first says so.
    expect(page.locator("#kl-data-key")).to_be_hidden()
    page.locator("#kl-data-work-endpoint").fill("http://127.0.0.1:9/v1")
    expect(page.locator("#kl-data-key")).to_be_visible()
    start.press("Enter")
    expect(page.locator(".kl-data-leaving")).to_contain_text(f"{len(scenes)} images")
    assert visited.axe() + visited.overflow() == [] and Eyes(page).flaws() == []
    page.get_by_role("button", name="Back to the form").press("Enter")
    page.locator("#kl-data-work-endpoint").fill("")
    start.press("Enter")
    expect(page.locator(".kl-data-work .kr-badge")).to_have_text("Finished", timeout=120_000)
    expect(page.locator(".kl-data-work")).to_contain_text(f"captions written: {len(scenes)}")
    for number, scene in enumerate(scenes):
        expect(page.locator(f"#kl-data-{number}")).to_contain_text(f"zwx, a {scene.color} {scene.shape} at the {scene.place}")
    assert visited.axe() + visited.overflow() == [] and Eyes(page).flaws() == []
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#kl-data-0")).to_contain_text("(no caption)")
    assert not list(folder.glob("*.txt"))
