"""Ctrl+K finds and opens what has the words; Undo and Redo of the form, by buttons and by keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.ui.runs_on_disk import made, options

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
SIZES = [(1280, 720, "light"), pytest.param(390, 844, "dark", marks=pytest.mark.long)]


@pytest.mark.parametrize(("width", "height", "theme"), SIZES)
def test_settings_runs_and_buttons_are_found_by_their_words_and_changes_are_undone(
    width: int, height: int, theme: str, tmp_path: Path, studios: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    run = made(tmp_path / "output", options(tmp_path / "output", output_name="cat"))
    visited = visit(studios(output_dir=tmp_path / "output").url, width=width, height=height, theme=theme)
    page = visited.page
    found = page.locator("#kl-palette li")
    rate, undo, redo = page.locator("#kl-learning_rate"), page.get_by_role("button", name="Undo"), page.get_by_role("button", name="Redo")
    expect(undo).to_be_disabled()

    search = page.get_by_role("combobox", name="Find a setting, a run, a tab or a button")
    page.keyboard.press("Control+k")
    expect(search).to_be_focused()
    page.keyboard.type("gradient norm clip")
    expect(found.first).to_contain_text("max_grad_norm")
    page.keyboard.press("Enter")
    expect(page.locator("#kl-max_grad_norm")).to_be_focused()

    rate.fill("5e-5")
    expect(undo).to_be_enabled()
    page.locator("label", has_text="SD 1.5").first.click()
    expect(page.locator("input[name=kl-family]:checked")).to_have_value("sd")
    undo.click()
    expect(page.locator("input[name=kl-family]:checked")).to_have_value("sdxl")
    expect(rate).to_have_value("5e-5")
    undo.click()
    expect(rate).to_have_value("0.0001")
    expect(undo).to_be_disabled()
    page.locator(".kl-theme").focus()
    page.keyboard.press("Control+Shift+Z")
    expect(rate).to_have_value("5e-5")
    page.keyboard.press("Control+Z")
    expect(rate).to_have_value("0.0001")
    page.keyboard.press("Control+Y")
    expect(rate).to_have_value("5e-5")
    expect(redo).to_be_enabled()

    page.get_by_role("button", name="Go to", exact=True).click()
    expect(search).to_be_focused()
    # Everything once: Gradio draws its tabs twice.
    # Of all, also those below, which have no text that is laid out, as none has before the first frame.
    offered = found.evaluate_all("items => items.map(item => [...item.childNodes].map(each => each.textContent).join(' '))")
    assert [text for text in offered if text.startswith("Train ")] == ["Train tab"] and "Go to button" not in offered, offered
    page.keyboard.type("no such thing at all")
    expect(page.locator("dialog [role=status]")).to_have_text("Nothing has these words.")
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)
    page.keyboard.press("Control+k")
    expect(search).to_be_focused()
    page.keyboard.type("cat stopped")
    expect(found).to_have_count(1)
    found.first.click()
    page.wait_for_url(f"**#run={run.name}")
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert visited.complaints.found == []
