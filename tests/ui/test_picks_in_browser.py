"""The pick of a checkpoint by clicks: numbers, a choice that is taken back, the mark in Runs, and the others deleted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from playwright.sync_api import Locator, Page, expect
from safetensors.torch import save_file

from sd_scripts.families import RUNS
from sd_scripts.runs.events import FileSaved, RunFinished, RunStarted, Validated
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(600)]
STEPS = (10, 20, 30)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with three files, whose held-out loss was lowest in the middle."""
    root = tmp_path / "output"
    root.mkdir()
    data = tmp_path / "data"
    data.mkdir()
    for number in range(3):
        Image.effect_noise((64, 64), 60 + number).convert("RGB").save(data / f"{number}.png")
    given = {"pretrained_model_name_or_path": "toy", "train_data_dir": str(data), "resolution": [64, 64], "min_bucket_reso": 64}
    made = RunDirectory.create(root, "star", flat.build(RUNS["sdxl", "network"], {**given, "output_name": "star", "output_dir": str(root)}))
    made.log(RunStarted(steps=30))
    for step, offset in zip(STEPS, (0.4, 0.0, 0.3), strict=True):
        made.log(Validated(step=step, loss=1.0 + offset, samples=[[place / 16, 1 + 0.1 * place + offset] for place in range(16)]))
        made.log(FileSaved(step=step, what="export", file=f"star-{step}.safetensors"))
        save_file({"weight": torch.full((3000,), float(step))}, made.path / f"star-{step}.safetensors")
    made.log(RunFinished(step=30))
    return made


def drawn(run: RunDirectory) -> None:
    """A grid that was drawn before; the studio shows what is on the disk."""
    from tests.ui.test_comparisons import ADA, Place, asked

    place = Place(run.path.parent)
    files = [str(run.path / f"star-{step}.safetensors") for step in STEPS]
    place.finished(place.compared.start({**asked(files, seeds="3"), "strengths": "1"}, ADA))
    place.close()


def picking(page: Page) -> Locator:
    page.get_by_role("tab", name="Generate").click()
    page.locator(".kl-inf-views").get_by_text("Grids").click()
    page.get_by_role("button", name="Numbers and pick").click()
    return page.get_by_role("region", name="Numbers and pick")


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844)])
def test_a_checkpoint_is_picked_by_clicks(
    run: RunDirectory, studios: Callable[..., Any], visit: Callable[..., Any], width: int, height: int, tmp_path: Path
) -> None:
    drawn(run)
    page = visit(studios(output_dir=run.path.parent).url, width=width, height=height).page
    pick = picking(page)
    expect(pick.get_by_role("status")).to_contain_text(re.compile(r"star-20 is proposed: it has the lowest held-out loss \(1.75\) of 3"))
    expect(pick.locator("tr", has_text="star-20")).to_contain_text("proposed")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    table = pick.get_by_role("region", name="Numbers by checkpoint")
    assert table.evaluate("node => node.scrollWidth <= node.clientWidth"), "nothing is read by scrolling sideways"
    assert len({row.bounding_box()["x"] for row in pick.locator("tbody tr").all()}) == 1, "checkpoints stand below one another"
    loss = pick.locator("tr", has_text="star-20").get_by_role("cell").filter(has_text=re.compile(r"^\d")).nth(1).bounding_box()
    assert loss and loss["x"] + loss["width"] <= width, "the first losses are in sight beside Choose"
    page.screenshot(path=tmp_path / f"pick-{width}.png")
    pick.get_by_text("Rate the images by models").click()
    pick.get_by_role("button", name="Rate", exact=True).click()
    expect(pick.get_by_role("alert")).to_contain_text("Name a model first")
    expect(pick.get_by_role("button", name="Rate", exact=True)).to_be_visible()
    pick.get_by_role("button", name="Choose star-20").click()
    expect(pick.get_by_role("status")).to_contain_text("Chosen in")
    pick.get_by_role("button", name="Choose star-30").click()
    expect(pick.locator("tr", has_text="star-30")).to_contain_text("chosen")
    pick.get_by_role("button", name="Delete the others").click()
    expect(pick.get_by_role("alert")).to_contain_text("put back for 30 days")
    pick.get_by_role("button", name="Keep the others").click()
    pick.get_by_role("button", name="Delete the others").click()
    pick.get_by_role("button", name="Move 2 files to the trash").click()
    expect(pick.get_by_role("status")).to_contain_text(re.compile(r"Moved to the trash: 2 files.*frees 23\.\d KiB"))
    assert [path.name for path in run.path.glob("*.safetensors")] == ["star-30.safetensors"]
    page.get_by_role("tab", name="Runs").click()
    expect(page.locator("#kl-runs .kr-files li", has_text="star-30.safetensors")).to_contain_text("chosen · step 30")


def test_a_run_without_held_out_losses_has_no_empty_columns_for_them(
    run: RunDirectory, studios: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    """On a phone five columns of dashes hid the numbers that there are."""
    lines = run.events_file.read_text(encoding="utf-8").splitlines(keepends=True)
    run.events_file.write_text("".join(line for line in lines if '"validation"' not in line), encoding="utf-8")
    drawn(run)
    pick = picking(visit(studios(output_dir=run.path.parent).url, width=390, height=844, theme="dark").page)
    expect(pick.get_by_role("status")).to_contain_text("measured no held-out loss")
    expect(pick.locator("thead tr").last.locator("th")).to_have_text(["distance", "near copies"])
    expect(pick).not_to_contain_text("Losses with their 95 % interval")
