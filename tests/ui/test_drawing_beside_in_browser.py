"""The Generate tab says what drawing beside a training run will cost, before anything is drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.ui import full_studio

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(300)]


def test_a_run_under_way_on_the_same_device_is_named_before_drawing(
    studios: Callable[..., Any], visit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    root = tmp_path / "output"
    root.mkdir()
    supervisor, job = full_studio.under_way(root)
    page = visit(studios(output_dir=root).url, width=390, height=844).page
    page.get_by_role("tab", name="Generate").click()
    beside = page.locator("#kl-inf-beside")
    expect(beside).to_contain_text(
        "Training on cpu now: under-way. If you draw there, both will be slower, and the host RAM holds both models. "
    )
    supervisor.stop(job, grace_seconds=0)
    supervisor.close()
    expect(beside).to_be_hidden(timeout=40_000)
