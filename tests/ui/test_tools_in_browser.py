"""The Tools tab in a real browser: a form for each tool, a file verified, problems at their fields, one click from a run's file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Page, expect

from kohya_like import tools
from sd_scripts.families import TOOLS
from sd_scripts.families.sdxl.model import Sdxl
from sd_scripts.families.sdxl.options import SdxlModelOptions
from sd_scripts.runs.events import RunFinished
from sd_scripts.runs.rundir import RunDirectory
from tests.made_here import lora_of
from tests.ui.on_screen import Eyes
from tests.ui.standin_runs import options

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
PATIENCE = 600_000
"""Milliseconds for a tool, which loads torch first; a busy machine needs a minute for that."""


def open_tools(page: Page) -> None:
    page.get_by_role("tab", name="Tools").click()
    page.wait_for_selector("#kl-tool-run:not(:empty)")


def test_each_tool_has_its_form_and_keeps_what_was_typed_and_what_is_wrong_stands_at_its_field_and_starts_nothing(
    studio: Any, visit: Callable[..., Any]
) -> None:
    page = visit(studio.url).page
    # Other tests share the studio.
    before = sorted((studio.output_dir / ".tools").glob("*"))
    open_tools(page)
    page.locator("#kl-tool-model").fill("mine.safetensors")
    for name, tool in TOOLS.items():
        if tool.family or tool.tab != "tools":
            # It draws with the files of a run, and stands beside it, or works on images on the Data tab.
            expect(page.locator(f"#kl-tool-{name}")).to_have_count(0)
            continue
        page.locator(f"#kl-tool-{name}").check()
        expect(page.locator("#kl-tool-run")).to_have_text(tool.label)
    page.reload()
    page.wait_for_selector("#kl-learning_rate", state="attached")
    open_tools(page)
    page.locator("#kl-tool-verify_lora").check()
    expect(page.locator("#kl-tool-model")).to_have_value("mine.safetensors")
    # The next tool has the same file.
    page.locator("#kl-tool-convert_lora").check()
    expect(page.locator("#kl-tool-model")).to_have_value("mine.safetensors")

    page.locator("#kl-tool-model").fill("")
    page.locator("#kl-tool-resize_lora").check()
    page.locator("#kl-tool-new_rank").fill("0")
    page.locator("#kl-tool-run").click()
    expect(page.locator("#kl-tool-new_rank-error")).to_contain_text("1 to 4096")
    expect(page.locator("#kl-tool-model")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#kl-tool-model")).to_be_focused()
    assert sorted((studio.output_dir / ".tools").glob("*")) == before


def test_a_file_of_a_run_is_verified_with_one_click(studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path) -> None:
    root = tmp_path / "output"
    run = RunDirectory.create(root, "stars", options(root, output_name="stars"))
    run.log(RunFinished(step=1, text="", advice=""))
    model = Sdxl().load(SdxlModelOptions(pretrained_model_name_or_path="toy"), torch.device("cpu"), torch.float32)
    path = lora_of("sdxl", run.path / "stars.safetensors", parts=model)
    visited = visit(studios(output_dir=root, warm=True).url, width=390)
    page = visited.page
    page.get_by_role("tab", name="Runs").click()
    page.get_by_role("button", name="Verify stars.safetensors").click()
    expect(page.locator("#kl-tool-model")).to_have_value(str(path))
    assert page.locator("#kl-tool-files option").first.get_attribute("value") == str(path), "saved files are suggested"
    expect(page.locator(".kl-tool-side .kr-badge")).to_have_text("Finished", timeout=PATIENCE)
    expect(page.locator(".kl-tool-lines")).to_contain_text("stars.safetensors")
    (report,) = (root / tools.FOLDER).glob("*-verify_lora/report.json")
    assert isinstance(json.loads(report.read_text()), dict)
    page.locator(".kl-tool-report summary").first.click()
    assert visited.axe() == []
    for width in (390, 1000, 1400, 1920):
        page.set_viewport_size({"width": width, "height": 1080})
        assert Eyes(page).flaws() == [], width
        # The programs that read the file stand in its window, all of them.
        box, readers = (page.locator(place).bounding_box() for place in (".kl-tool-lines", ".kl-tool-lines :text('read whole by')"))
        assert box and readers and readers["x"] + readers["width"] <= box["x"] + box["width"], (width, box, readers)
