"""Masks drawn in a real browser: with the mouse, a finger and keys alone; and two pages that draw on one image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.ui.on_screen import Eyes
from tests.ui.test_data_in_browser import CELLS, OTHERS, images, opened

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
CANVAS, STATUS = ".kl-mask-canvas", ".kl-mask .kl-status"


def mask_of(folder: Path, stem: str) -> Any:
    return np.array(Image.open(folder / f"{stem}-masklabel.png"))


def edit(page: Page, number: int) -> None:
    page.locator(CELLS).nth(number).click()
    page.get_by_role("button", name="Edit the loss mask").click()
    expect(page.locator(STATUS)).to_contain_text("mask")


def draw(page: Page, *shares: tuple[float, float]) -> None:
    box = page.locator(CANVAS).bounding_box()
    assert box is not None
    points = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in shares]
    page.mouse.move(*points[0])
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*point, steps=8)
    page.mouse.up()


@pytest.mark.parametrize(("width", "height", "theme"), [(390, 844, "light"), *OTHERS])
def test_a_mask_is_drawn_saved_taken_back_and_shown_as_it_weighs(
    width: int, height: int, theme: str, studio: Any, visit: Callable[..., Any], tmp_path: Path
) -> None:
    folder = images(tmp_path / "mine", 12)
    visited = visit(studio.url, width=width, height=height, theme=theme)
    page = visited.page
    opened(page, folder)
    edit(page, 1)
    expect(page.locator(STATUS)).to_contain_text("all of the image counts until one is saved")
    save = page.get_by_role("button", name="Save mask")
    expect(save).to_be_disabled()
    assert visited.axe(".kl-dialog") + visited.overflow() == [] and Eyes(page).flaws() == []
    # A broad stroke over the upper half, and a bite out of its left end.
    page.locator("#kl-mask-size").fill("30")
    draw(page, (0.0, 0.2), (1.0, 0.2))
    page.get_by_text("Erase", exact=True).click()
    draw(page, (0.0, 0.2), (0.05, 0.2))
    save.click()
    expect(page.locator(STATUS)).to_contain_text("Saved in 0001-masklabel.png")
    expect(page.locator(STATUS)).to_contain_text("Masked loss is off on the Train tab")
    mask = mask_of(folder, "0001")
    assert mask.shape == (64, 96) and mask[12, 60:90].min() == 255 and mask[50:].max() == 0 and mask[12, 0] == 0
    # What is taken back is on the disk as soon as it is saved.
    page.get_by_role("button", name="Undo the last stroke").click()
    expect(save).to_be_enabled()
    save.click()
    expect(save).to_be_disabled()
    assert mask_of(folder, "0001")[12, 0] == 255
    page.get_by_role("button", name="Close the mask").click()
    expect(page.locator("#kl-data .kl-data-panel")).to_contain_text("masked loss is off")
    # With masked loss the overlay shows what training makes of it.
    page.get_by_role("tab", name="Train", exact=True).click()
    page.locator("#kl-search").fill("masked_loss")
    page.locator("#kl-masked_loss").check()
    page.locator("#kl-search").fill("")
    # Masks and what can be taken back are on the disk, not in the page.
    page.reload()
    page.wait_for_selector("#kl-train_data_dir", state="attached")
    page.get_by_role("tab", name="Data").click()
    expect(page.locator(".kl-data-panel")).to_contain_text("Choose an image")
    page.get_by_label("Which images").select_option(label="Without a mask")
    expect(page.locator("#kl-data .kl-note").first).to_contain_text("11 of 12 images")
    page.get_by_label("Which images").select_option(label="All images")
    page.locator(CELLS).nth(1).click()
    page.get_by_label("Show the weight in the loss").check()
    expect(page.locator(".kl-data-panel")).to_contain_text("Weight in the loss from 0 to 1")
    expect(page.locator(".kl-data-weight")).to_be_visible()
    assert visited.axe() + visited.overflow() == []
    page.get_by_role("button", name="Undo", exact=True).click()
    expect(page.locator("#kl-data .kl-status").first).to_contain_text("Taken back: mask drawn (1 mask)")
    assert mask_of(folder, "0001")[12, 0] == 0, "the mask before"


def test_keys_alone_draw_a_mask_and_nothing_is_lost_by_escape(studio: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    folder = images(tmp_path / "mine", 12)
    page = visit(studio.url, width=1280, height=720, theme="dark").page
    opened(page, folder)
    page.locator(CELLS).first.click()
    page.get_by_role("button", name="Edit the loss mask").press("Enter")
    expect(page.locator(STATUS)).to_contain_text("No mask yet")
    page.locator(CANVAS).focus()
    page.keyboard.press("Space")
    for _ in range(6):
        page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Escape")
    expect(page.locator(".kl-mask .kl-error")).to_contain_text("not saved")
    page.keyboard.press("]")
    page.keyboard.press("e")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Space")
    page.keyboard.press("Control+z")
    page.get_by_role("button", name="Save mask").press("Enter")
    expect(page.locator(STATUS)).to_contain_text("Saved")
    mask = mask_of(folder, "0000")
    middle = mask[mask.shape[0] // 2]
    assert middle[mask.shape[1] // 2] == 255 and (middle > 127).sum() > 3 * (mask[:, mask.shape[1] // 2] > 127).sum() - mask.shape[0]
    assert (middle > 127).sum() >= 20 and mask[0].max() == 0
    page.keyboard.press("Escape")
    expect(page.locator(".kl-mask")).to_have_count(0)


@pytest.mark.long
def test_a_finger_draws_and_the_page_does_not_scroll_under_it(studio: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    folder = images(tmp_path / "mine", 12)
    page = visit(studio.url, width=390, height=844, theme="dark").page
    opened(page, folder)
    edit(page, 2)
    box = page.locator(CANVAS).bounding_box()
    assert box is not None
    touch = page.context.new_cdp_session(page)
    scrolled = page.evaluate("document.querySelector('.kl-mask').scrollTop")

    def at(x: float, y: float) -> list[dict[str, float]]:
        return [{"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]}]

    touch.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": at(0.5, 0.1)})
    for step in range(2, 10):
        touch.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": at(0.5, step / 10)})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    page.get_by_role("button", name="Save mask").click()
    expect(page.locator(STATUS)).to_contain_text("Saved")
    mask = mask_of(folder, "0002")
    assert mask[10:54, 48].min() == 255 and mask[:, :20].max() == 0
    assert page.evaluate("document.querySelector('.kl-mask').scrollTop") == scrolled


@pytest.mark.long
def test_two_pages_draw_on_one_image_and_whoever_comes_later_chooses(studio: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    folder = images(tmp_path / "mine", 12)
    one, other = visit(studio.url).page, visit(studio.url).page
    for page in (one, other):
        opened(page, folder)
        edit(page, 3)
    one.get_by_role("button", name="Fill").click()
    one.get_by_role("button", name="Save mask").click()
    expect(one.locator(STATUS)).to_contain_text("Saved")
    draw(other, (0.5, 0.5), (0.6, 0.5))
    other.get_by_role("button", name="Save mask").click()
    expect(other.locator(".kl-mask .kl-error")).to_contain_text("Another page has changed this mask")
    assert mask_of(folder, "0003").min() == 255, "theirs stays until somebody chooses"
    other.get_by_role("button", name="Keep mine").click()
    expect(other.locator(STATUS)).to_contain_text("Saved")
    assert mask_of(folder, "0003").min() == 0


@pytest.mark.long
def test_points_and_a_box_go_to_a_model_and_what_it_finds_comes_back(studio: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    from tests import small_segmenters

    folder = images(tmp_path / "mine", 12)
    model = small_segmenters.build("sam2", tmp_path / "sam", seed=1)
    visited = visit(studio.url, width=1280, height=720)
    page = visited.page
    opened(page, folder)
    edit(page, 4)
    ask = page.get_by_role("button", name="Segment with a model")
    expect(ask).to_be_disabled()
    page.get_by_text("Box", exact=True).click()
    draw(page, (0.1, 0.2), (0.8, 0.9))
    page.get_by_text("Include point").click()
    draw(page, (0.5, 0.5))
    page.get_by_text("Exclude point").click()
    draw(page, (0.05, 0.05))
    expect(page.locator(".kl-mask-point")).to_have_count(2)
    ask.click()
    expect(page.locator("#kl-data-work-mask_points")).to_have_value("0.5:0.5\n-0.05:0.05")
    left, top, right, bottom = (float(number) for number in page.locator("#kl-data-work-mask_box").input_value().split(":"))
    assert [left, top, right, bottom] == pytest.approx([0.1, 0.2, 0.8, 0.9], abs=0.02)
    page.locator("#kl-data-work-mask_model").fill(str(model))
    assert visited.axe(".kl-dialog") + visited.overflow() == []
    page.get_by_role("button", name="Start: Make masks").press("Enter")
    expect(page.locator(".kl-data-work .kr-badge")).to_have_text("Finished", timeout=120_000)
    expect(page.locator(".kl-data-work")).to_contain_text("of 1 images")
    expect(page.locator(".kl-data-panel")).to_contain_text("with a mask")
    assert set(np.unique(mask_of(folder, "0004"))) <= {0, 255}
