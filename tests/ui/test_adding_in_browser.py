"""From a pile of photos to a filled form in a real browser: images are dropped; files are found with mouse and keyboard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.ui.on_screen import Eyes
from tests.ui.test_datasets import jpeg, zipped

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
SIZES = [(390, 844, "dark"), pytest.param(1280, 720, "light", marks=pytest.mark.long)]
FIELD = "#kl-train_data_dir"


def drop(page: Page, *paths: Path) -> None:
    """Drops files and folders in the middle of the page, as the browser does for a file manager."""
    devtools = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    size = page.viewport_size or {"width": 0, "height": 0}
    for kind in ("dragEnter", "dragOver", "drop"):
        devtools.send("Input.dispatchDragEvent", {"type": kind, "x": size["width"] // 2, "y": size["height"] // 2, "data": data})
    devtools.detach()


@pytest.mark.parametrize(("width", "height", "theme"), SIZES)
def test_a_dropped_folder_becomes_a_data_set_and_is_in_the_form(
    width: int, height: int, theme: str, studio: Any, visit: Callable[..., Any], tmp_path: Path
) -> None:
    visited = visit(studio.url, width=width, height=height, theme=theme)
    page = visited.page
    photos = tmp_path / f"cats {width}"
    (photos / "deep").mkdir(parents=True)
    for number in range(3):
        (photos / f"{number}.jpg").write_bytes(jpeg(number))
        (photos / f"{number}.txt").write_text("a cat")
    (photos / "deep" / "0.jpg").write_bytes(jpeg(9))
    (photos / "read me.pdf").write_bytes(b"%PDF")
    drop(page, photos)
    expect(page.locator("#kl-add-name")).to_have_value(f"cats {width}")
    expect(page.locator(".kl-dialog .kl-status")).to_contain_text("8 files")
    expect(page.locator("#kl-add-go")).to_be_focused()
    assert visited.axe(".kl-dialog") == [] and Eyes(page).flaws() == []
    page.keyboard.press("Enter")
    expect(page.locator("#kl-add-close")).to_have_text("Done")
    expect(page.locator(".kl-dialog .kl-status")).to_contain_text("Added: 4 images, 3 captions. 1 got a number")
    expect(page.locator(".kl-add-report")).to_contain_text(f"cats {width}/read me.pdf: is no image, caption or zip")
    page.keyboard.press("Enter")
    folder = studio.output_dir / "datasets" / f"cats {width}"
    expect(page.locator(FIELD)).to_have_value(str(folder))
    expect(page.locator(".kl-dialog")).to_have_count(0)
    assert {path.name for path in folder.iterdir()} == {"0.jpg", "0.txt", "1.jpg", "1.txt", "2.jpg", "2.txt", "0-2.jpg"}
    # A zip into the same one, dropped into the window that the button opens.
    (tmp_path / "more.zip").write_bytes(zipped([("x/new.jpg", jpeg(10))]))
    page.get_by_role("button", name="Add images").click()
    expect(page.locator("#kl-add-name")).to_have_value(f"cats {width}")
    drop(page, tmp_path / "more.zip")
    page.locator("#kl-add-go").click()
    expect(page.locator(".kl-dialog .kl-status")).to_contain_text("Added: 1 image, 0 captions.")
    page.get_by_role("button", name="Done").click()
    assert (folder / "new.jpg").is_file()
    # A wrong name is said before anything is sent; Escape leaves nothing.
    page.get_by_role("button", name="Add images").click()
    page.locator("#kl-add-files").set_input_files(tmp_path / "more.zip")
    page.locator("#kl-add-name").fill("..")
    page.locator("#kl-add-go").click()
    expect(page.locator(".kl-add-report")).to_contain_text("choose another name")
    expect(page.locator("#kl-add-name")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".kl-dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Add images")).to_be_focused()


@pytest.mark.parametrize(("width", "height", "theme"), SIZES)
def test_folders_and_files_are_found_with_the_mouse_and_with_the_keyboard(
    width: int, height: int, theme: str, studio: Any, visit: Callable[..., Any], tmp_path: Path
) -> None:
    visited = visit(studio.url, width=width, height=height, theme=theme)
    page = visited.page
    (tmp_path / "images of cats").mkdir()
    for number in range(1000):
        (tmp_path / f"folder {number}").mkdir()
    (tmp_path / "base.safetensors").write_bytes(b"x")
    page.locator(FIELD).fill(str(tmp_path))
    up, use = page.get_by_role("button", name="One folder up"), page.get_by_role("button", name="Use this folder")
    promised: list[bool] = []

    def read(route: Route) -> None:
        promised.extend((up.is_enabled(), use.is_visible() and use.is_enabled()))
        route.continue_()

    page.route("**/kl/browse", read)
    page.get_by_role("button", name="Browse for Training image folder").click()
    search, path = page.locator("#kl-pick-search"), page.locator(".kl-pick-path")
    expect(search).to_be_focused()
    expect(page.locator("#kl-pick-list li").first).to_contain_text("folder 0")
    assert visited.axe(".kl-dialog") == [] and Eyes(page).flaws() == []
    # 300 rows are drawn at once, further ones as somebody comes to them.
    for _ in range(40):
        page.keyboard.press("PageDown")
    expect(page.locator("#kl-pick-400")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#kl-pick-400")).to_be_in_viewport()
    page.keyboard.type("CATS")
    expect(page.locator("#kl-pick-list li")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(path).to_have_text(str(tmp_path / "images of cats"))
    page.keyboard.press("Backspace")
    expect(path).to_have_text(str(tmp_path))
    page.locator("#kl-pick-list li", has_text="folder 7").first.click()
    expect(path).to_have_text(str(tmp_path / "folder 7"))
    use.click()
    page.unroute("**/kl/browse", read)
    assert len(promised) == 8 and not any(promised), "while a folder is read, it is not yet known which one it is"
    expect(page.locator(FIELD)).to_have_value(str(tmp_path / "folder 7"))
    expect(page.locator(FIELD)).to_be_focused()
    page.locator("#kl-pretrained_model_name_or_path").fill(str(tmp_path / "nothing.safetensors"))
    page.locator("#kl-pretrained_model_name_or_path").fill(str(tmp_path))
    page.get_by_role("button", name="Browse for Base model").click()
    expect(page.locator("#kl-pick-list li")).not_to_have_count(0)
    page.keyboard.type("base.s")
    expect(page.locator("#kl-pick-list li")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.locator("#kl-pretrained_model_name_or_path")).to_have_value(str(tmp_path / "base.safetensors"))
