"""The Inference tab in a real browser with the real worker: pictures are edited, compared, queued, cancelled; a worker is lost."""

from __future__ import annotations

import io
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from playwright.sync_api import Page, expect
from safetensors import safe_open
from safetensors.numpy import save_file

from sd_scripts.families import RUNS
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.flat import build
from tests.ui.standin_runs import ROOT, until
from tests.ui.test_guard import ask, token_of

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
PATIENCE = 300_000
"""Milliseconds for a worker, which loads torch first; a busy machine needs a minute for that."""
BASE = ROOT / "sd_scripts" / "toy" / "bases" / "qwen_edit"
LAYER = "transformer_blocks.0.attn.to_q"


def adapter(path: Path, strength: float) -> None:
    """A LoRA file for the built-in model, in diffusers' layout."""
    (weights,) = (BASE / "transformer").glob("*.safetensors")
    with safe_open(weights, "numpy") as base:
        rows, columns = base.get_slice(f"{LAYER}.weight").get_shape()
    draw = np.random.default_rng(0)
    down, up = draw.standard_normal((4, columns)), strength * draw.standard_normal((rows, 4))
    tensors = {f"transformer.{LAYER}.lora_A.weight": down, f"transformer.{LAYER}.lora_B.weight": up}
    save_file({name: tensor.astype(np.float32) for name, tensor in tensors.items()}, path)


@pytest.fixture(scope="module")
def place(studios: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A studio over one finished run with three LoRA files. No worker is left after it."""
    root = tmp_path_factory.mktemp("inference") / "output"
    needed = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:edit_border", "output_dir": str(root), "output_name": "border"}
    run = RunDirectory.create(root, "border", build(RUNS["qwen_edit", "network"], needed))
    run.log("finished", step=1, text="", remedy="")
    for name, strength in (("border-000100", 0.5), ("border-000200", 1.0), ("border", 2.0)):
        adapter(run.path / f"{name}.safetensors", strength)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        studio = studios(output_dir=root)
    yield studio
    pids = [child.pid for child in workers(studio)]
    studio.end()
    assert not any(psutil.pid_exists(pid) for pid in pids), "the worker ends with its studio"


def workers(studio: Any) -> list[psutil.Process]:
    return [child for child in psutil.Process(studio.process.pid).children() if "--serve" in child.cmdline()]


def picture() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng().integers(0, 255, (64, 64, 3), np.uint8)).save(stream, format="PNG")
    return stream.getvalue()


def open_tab(page: Page) -> None:
    page.get_by_role("tab", name="Inference").click()
    page.wait_for_selector("#kl-inf-prompt")


def give(page: Page, prompt: str, steps: int) -> None:
    """A picture, an instruction and a number of steps in the form."""
    slots = page.locator(".kl-inf-slot img")
    while slots.count():
        page.get_by_role("button", name="Remove picture 1").click()
    page.set_input_files("#kl-inf-file", {"name": "given.png", "mimeType": "image/png", "buffer": picture()})
    expect(slots).to_have_count(1)
    page.locator("#kl-inf-prompt").fill(prompt)
    page.locator("#kl-inf-steps").fill(str(steps))


def done(page: Page) -> None:
    expect(page.locator(".kl-inf-go .kl-note")).to_have_text("Done.", timeout=PATIENCE)


def made(page: Page) -> bytes:
    """The file that Download gives."""
    with urllib.request.urlopen(page.evaluate("document.querySelector('#kl-inf-download').href")) as answer:
        return bytes(answer.read())


def pixels(data: bytes) -> Any:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def test_a_picture_is_edited_compared_by_keyboard_kept_over_a_reload_and_made_again(place: Any, visit: Callable[..., Any]) -> None:
    visited = visit(place.url)
    page = visited.page
    open_tab(page)
    give(page, "make the circle red", 5)
    page.locator("#kl-inf-go").click()
    done(page)
    cut = page.get_by_role("slider", name="Before and after")
    cut.focus()
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    expect(cut).to_have_attribute("aria-valuetext", "60 % before, 40 % after")
    assert page.locator(".kl-pair").evaluate("node => getComputedStyle(node).getPropertyValue('--kl-cut')") == "60%"
    page.keyboard.press("Home")
    expect(cut).to_have_attribute("aria-valuetext", "0 % before, 100 % after")
    first = made(page)
    with Image.open(io.BytesIO(first)) as image:
        assert any("make the circle red" in str(value) for value in image.info.values()), "the file says how it was made"
    seed = page.locator("#kl-inf-seed").input_value()
    assert visited.axe() == []

    page.reload()
    page.wait_for_selector("#kl-learning_rate", state="attached")
    open_tab(page)
    expect(page.locator(".kl-inf-thumb")).to_have_count(1)
    page.locator("#kl-inf-prompt").fill("something else")
    page.locator("#kl-inf-steps").fill("3")
    page.locator("#kl-inf-reuse").click()
    expect(page.locator("#kl-inf-prompt")).to_have_value("make the circle red")
    expect(page.locator("#kl-inf-seed")).to_have_value(seed)
    expect(page.locator("#kl-inf-lock")).to_be_checked()
    page.locator("#kl-inf-go").click()
    done(page)
    expect(page.locator(".kl-inf-thumb")).to_have_count(2)
    assert np.array_equal(pixels(made(page)), pixels(first)), "the same settings give the same picture"


def test_base_lora_and_checkpoints_of_a_run_stand_side_by_side_after_one_click(place: Any, visit: Callable[..., Any]) -> None:
    visited = visit(place.url, width=390, theme="dark")
    page = visited.page
    open_tab(page)
    give(page, "put a border around it", 3)
    page.locator("#kl-inf-add-lora").click()
    expect(page.get_by_label("LoRA file 1", exact=True)).to_have_value(re.compile("border"))
    page.locator("#kl-inf-compare").click()
    done(page)
    cells = page.locator(".kl-inf-cell")
    expect(cells).to_have_count(4)
    labels = cells.all_inner_texts()
    assert labels[0] == "base" and {"border-000100", "border-000200", "border"} == set(labels[1:])
    cells.nth(1).click()
    expect(cells.nth(1)).to_have_attribute("aria-pressed", "true")
    assert made(page) != b""
    assert visited.axe() == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    cut = "[...document.querySelectorAll('.kl-inf-columns section')].filter(node => node.scrollWidth > node.clientWidth + 1).length"
    assert page.evaluate(cut) == 0, "nothing stands out of its card"


def test_an_order_shows_its_progress_and_the_second_page_waits_in_line_until_it_is_cancelled(place: Any, visit: Callable[..., Any]) -> None:
    first, second = visit(place.url).page, visit(place.url).page
    for page, steps in ((first, 1000), (second, 2)):
        open_tab(page)
        give(page, "make it blue", steps)
        page.locator("#kl-inf-go").click()
        if page is first:
            expect(page.locator("#kl-inf-phase")).to_contain_text(" of 1000", timeout=PATIENCE)
            expect(page.get_by_role("progressbar", name="Progress")).to_have_attribute("aria-valuenow", re.compile(r"\d+"))
            expect(page.locator(".kl-inf-preview")).to_have_attribute("src", re.compile("^data:image/"))
    expect(second.locator("#kl-inf-phase")).to_have_text("Waiting: number 1 in the queue")
    first.locator("#kl-inf-cancel").click()
    expect(first.locator(".kl-inf-go .kl-note")).to_have_text("Cancelled.")
    done(second)
    assert first.locator(".kl-inf-thumb").count() == 0, "a page sees its own pictures only"


def test_a_killed_worker_is_told_in_a_sentence_and_the_next_order_starts_another(place: Any, visit: Callable[..., Any]) -> None:
    visited = visit(place.url)
    page = visited.page
    open_tab(page)
    give(page, "make it green", 1000)
    page.locator("#kl-inf-go").click()
    expect(page.locator("#kl-inf-phase")).to_contain_text(" of 1000", timeout=PATIENCE)
    (worker,) = workers(place)
    worker.kill()
    expect(page.locator("#kl-inf-wrong")).to_contain_text("The prediction worker was ended by signal 9")
    assert visited.axe() == []
    page.locator("#kl-inf-steps").fill("0")
    page.locator("#kl-inf-go").click()
    expect(page.locator("#kl-inf-steps-error")).to_contain_text("1 to 1000")
    expect(page.locator("#kl-inf-steps")).to_be_focused()
    page.locator("#kl-inf-steps").fill("2")
    page.locator("#kl-inf-go").click()
    done(page)
    assert page.locator("#kl-inf-wrong").is_hidden()
    page.locator("#kl-inf-free").click()
    expect(page.locator(".kl-inf-go .kl-note")).to_have_text("The model is out of memory.")
    until(lambda: workers(place) == [])


def test_what_is_no_picture_is_told_at_the_pictures_and_one_that_is_dropped_or_pasted_is_taken(
    place: Any, visit: Callable[..., Any]
) -> None:
    page = visit(place.url).page
    open_tab(page)
    page.set_input_files("#kl-inf-file", {"name": "notes.png", "mimeType": "image/png", "buffer": b"no picture"})
    expect(page.locator("#kl-inf-images-error")).to_contain_text("notes.png is not a picture")
    for kind, carrier in (("drop", "dataTransfer"), ("paste", "clipboardData")):
        page.evaluate(
            """async ([kind, carrier, bytes]) => {
              const moved = new DataTransfer();
              moved.items.add(new File([new Uint8Array(bytes)], 'moved.png', {type: 'image/png'}));
              const make = kind === 'drop' ? DragEvent : ClipboardEvent;
              document.querySelector('#kl-inf-prompt').dispatchEvent(new make(kind, {bubbles: true, cancelable: true, [carrier]: moved}));
            }""",
            [kind, carrier, list(picture())],
        )
        expect(page.locator(".kl-inf-slot img")).to_have_count(1 if kind == "drop" else 2)
    assert page.locator("#kl-inf-images-error").is_hidden()
    page.get_by_role("button", name="Remove picture 2").click()
    expect(page.locator(".kl-inf-slot img")).to_have_count(1)


def test_a_studio_for_inference_alone_shows_the_tab_and_has_no_route_of_the_others(
    studios: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    studio = studios("--inference_only")
    visited = visit(studio.url, ready="#kl-inf-prompt")
    page = visited.page
    assert page.get_by_role("tab").count() == 0 and page.locator("#kl-start").count() == 0
    assert visited.axe() == []
    token = token_of(studio)
    assert ask(studio, "/kl/predict")[0] == 401 and ask(studio, "/kl/predict", X_KL_Token=token)[0] == 200
    for path in ("/kl/runs", "/kl/tools"):
        assert ask(studio, path, X_KL_Token=token)[0] == 404
