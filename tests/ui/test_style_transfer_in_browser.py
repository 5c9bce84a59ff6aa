"""Style transfer from nothing in a real browser: started from the form, evaluated when asked, and an image transferred with its file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import expect

from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.toy import worlds
from sd_scripts.toy.styles import draw
from tests.ui.standin_runs import until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
PATIENCE = 300_000
"""Milliseconds for what loads torch first; a busy machine needs a minute for that."""
STYLES = ("flat", "line", "night")
SMALL = {
    "vae": "toy",
    "resolution": "64",
    "train_batch_size": "2",
    # It goes on until it is stopped, however late the order to evaluate comes.
    "max_train_steps": "1000000",
    "save_every_n_steps": "10",
    "output_name": "tiny",
    "base_channels": "8",
    "channel_multipliers": "1 2",
    "layers_per_block": "1",
    "attention_head_dim": "8",
    "swd_scales": "1",
    "ode_integration_steps": "1",
    "num_references": "1",
    "log_every_n_steps": "1",
    "sample_every_n_steps": "1000000",
    "sample_steps": "1",
}


@pytest.mark.long
def test_styles_are_learned_from_the_form_evaluated_on_demand_and_transferred(
    studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its short forms: a model from nothing is started and draws in test_drawing_in_browser; evaluations are shown and asked for, and a
    transfer is ordered, in test_evaluations_in_browser; a training evaluates when it is asked in tests/library/test_trainer.py."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    images = tmp_path / "images"
    for style in STYLES:
        (images / style).mkdir(parents=True)
        for number in range(6):
            scene = worlds.TRAINED[7 * number]
            draw(scene, style, worlds.rng_for(1, number), 64).save(images / style / f"{number}.png")
    given = tmp_path / "given.png"
    draw(worlds.TRAINED[3], "flat", worlds.rng_for(2), 64).save(given)

    studio = studios(output_dir=tmp_path / "output")
    visited = visit(studio.url)
    page = visited.page
    page.locator("#kl-family-lgt").check()
    expect(page.locator("#kl-mode-scratch")).to_be_checked()
    page.get_by_role("button", name="Open all").click()
    page.locator("#kl-train_data_dir").fill(str(images))
    for name, text in SMALL.items():
        page.locator(f"#kl-{name}").fill(text)
    page.locator("#kl-start").click()
    live = page.locator("#kl-live")
    expect(live.locator(".kr-title")).to_have_text("tiny")
    matrix = live.locator(".kr-matrix")
    expect(matrix.get_by_role("slider", name=re.compile("Evaluation"))).to_be_visible(timeout=PATIENCE)
    (log,) = studio.output_dir.glob("*-tiny/events.jsonl")
    run = RunDirectory(log.parent)
    matrix.get_by_role("button", name="Evaluate now").click()
    until(lambda: len(evaluations(run)) == 2 and list(run.path.glob("*.safetensors")), seconds=PATIENCE / 1000)
    page.locator("#kl-stop").click()
    expect(live.locator(".kr-run .kr-badge").first).to_have_text("Stopped", timeout=PATIENCE)
    first, asked = evaluations(run)
    assert first == 0 < asked
    table = matrix.locator(".kr-matrix-table")
    expect(table.locator("thead th")).to_have_text(["From", "Source", "VAE", *(f"To {style}" for style in STYLES)])
    table.get_by_role("button", name="flat to night").click()
    expect(matrix.locator(".kr-after")).to_have_attribute("alt", re.compile("flat to night"))
    assert visited.axe("#kl-live") == []

    page.get_by_role("tab", name="Runs").click()
    page.locator(".kr-row", has_text="tiny").click()
    page.locator("#kl-runs .kr-actions").get_by_role("button", name="Transfer a style").click()
    panel = page.locator("#kl-runs .kr-draw")
    page.locator("#kl-draw-image-file").set_input_files(given)
    expect(panel.locator(".kr-given-image")).to_be_visible()
    panel.get_by_role("button", name="Target style: night").click()
    page.locator("#kl-draw-steps").fill("1")
    panel.get_by_role("button", name="Transfer", exact=True).click()
    expect(panel.locator(".kr-draw-result .kr-badge")).to_have_text("Finished", timeout=PATIENCE)
    with page.expect_download() as coming:
        panel.get_by_role("link", name="Download").click()
    with Image.open(coming.value.path()) as image:
        image.load()
        assert image.width in (64, 130) and any("night" in str(value) for value in image.info.values())
    assert visited.axe("#kl-runs") == []


def evaluations(run: RunDirectory) -> list[int]:
    """The steps at which it has evaluated."""
    return [event["step"] for event in run.events()[0] if event["kind"] == "evaluation"]
