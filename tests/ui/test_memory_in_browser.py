"""The memory of a run in a real browser: estimated, compared with cards, made to fit, and what is wrong said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.ui import fake_nvml

pytestmark = pytest.mark.browser
MEASURED_MS = 240_000
"""A whole SDXL is measured, on a machine that may be busy."""


@pytest.fixture(scope="module")
def place(studios: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A studio on a machine with a small GPU, as far as its driver tells."""
    cards = [fake_nvml.Card(name="NVIDIA GeForce RTX 3060", uuid="GPU-1a2b3c4d-5e6f-7081-92a3-b4c5d6e7f809", total=12 * 2**30)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fake_nvml.environment(tmp_path_factory.mktemp("driver") / "cards.json", cards).items():
            patch.setenv(name, value)
        yield studios(warm=True)


def fill(page: Page, **texts: str) -> None:
    for name, text in texts.items():
        page.locator(f"#kl-{name}").fill(text)


@pytest.mark.long
def test_a_run_is_estimated_and_made_to_fit(place: Any, visit: Callable[..., Any]) -> None:
    seen = visit(place.url)
    page = seen.page
    # The images of toy:star are small; so many of them are as much as one of the usual size.
    fill(page, pretrained_model_name_or_path="nobody/sdxl", train_data_dir="toy:star", train_batch_size="64")
    box = page.locator(".kl-memory")
    # The card of this machine comes first.
    expect(box.locator("#kl-memory-card option").first).to_have_text("NVIDIA GeForce RTX 3060, 12 GB")
    page.locator("#kl-memory-card").select_option("8")
    page.locator("#kl-estimate").click()
    expect(box.locator(".kl-memory-bar")).to_have_count(2, timeout=MEASURED_MS)
    expect(box).to_contain_text("the published structure of SDXL")
    expect(box.get_by_role("img", name="Training")).to_be_visible()
    page.locator("#kl-memory-card").select_option("80")
    expect(box.locator(".kl-memory-verdict")).to_contain_text("Fits:")
    page.locator("#kl-memory-card").select_option("8")
    if box.locator("#kl-fit").count() == 0:
        pytest.fail(f"it fits on 8 GB as it is: {box.inner_text()}")
    page.locator("#kl-fit").click()
    expect(box.get_by_text("With these settings it fits")).to_be_visible(timeout=MEASURED_MS)
    planned = dict(row.split("\t")[::2] for row in box.locator("tbody tr").all_inner_texts())
    page.locator("#kl-use-plan").click()
    expect(box.locator(".kl-memory-verdict")).to_contain_text("Fits:")
    assert planned
    assert not seen.axe()


def test_a_plan_that_fits_goes_into_the_form(place: Any, visit: Callable[..., Any]) -> None:
    """The short form of the test above, with a small model and a large batch."""
    page = visit(place.url).page
    fill(page, pretrained_model_name_or_path="toy", train_data_dir="toy:star", resolution="64", train_batch_size="4096")
    page.locator("#kl-search").fill("min_bucket_reso")
    fill(page, min_bucket_reso="64")
    page.locator("#kl-search").fill("")
    box = page.locator(".kl-memory")
    page.locator("#kl-memory-card").select_option("8")
    page.locator("#kl-estimate").click()
    page.locator("#kl-fit").click(timeout=MEASURED_MS)
    expect(box.get_by_text("With these settings it fits")).to_be_visible(timeout=MEASURED_MS)
    expect(box.locator("tbody tr")).to_contain_text(["Gradient checkpointing"])
    page.locator("#kl-use-plan").click()
    expect(box.locator(".kl-memory-verdict")).to_contain_text("Fits:")
    page.locator("#kl-search").fill("gradient_checkpointing")
    expect(page.locator("#kl-gradient_checkpointing")).to_be_checked()


def test_a_small_model_takes_more_than_nothing(place: Any, visit: Callable[..., Any]) -> None:
    page = visit(place.url).page
    fill(page, pretrained_model_name_or_path="toy", train_data_dir="toy:star")
    page.locator("#kl-estimate").click()
    bars = page.locator(".kl-memory-total")
    expect(bars.first).to_be_visible(timeout=MEASURED_MS)
    shown = bars.all_inner_texts()
    assert shown and all(float(text.split()[0]) > 0 for text in shown), shown


def test_what_is_wrong_in_the_form_is_said_instead(place: Any, visit: Callable[..., Any]) -> None:
    page = visit(place.url).page
    fill(page, pretrained_model_name_or_path="", train_data_dir="toy:star")
    page.locator("#kl-estimate").click()
    expect(page.locator(".kl-memory-status")).to_contain_text("pretrained_model_name_or_path")
    expect(page.locator("#kl-estimate")).to_be_enabled()
