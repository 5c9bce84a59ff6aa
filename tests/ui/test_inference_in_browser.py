"""The Generate tab in a real browser with the real worker: images are edited, compared, queued, cancelled; a worker is lost."""

from __future__ import annotations

import io
import random
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
from sd_scripts.runs.events import RunFinished
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
    # Previews, and so what is drawn, are as large as the images.
    needed |= {"sample_prompts": "put a border around it", "resolution": (64, 64)}
    run = RunDirectory.create(root, "border", build(RUNS["qwen_edit", "network"], needed))
    run.log(RunFinished(step=1, text="", advice=""))
    for name, strength in (("border-000100", 0.5), ("border-000200", 1.0), ("border", 2.0)):
        adapter(run.path / f"{name}.safetensors", strength)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        studio = studios(output_dir=root, warm=True)
    yield studio
    pids = [child.pid for child in workers(studio)]
    studio.end()
    assert not any(psutil.pid_exists(pid) for pid in pids), "the worker ends with its studio"


def workers(studio: Any) -> list[psutil.Process]:
    return [child for child in psutil.Process(studio.process.pid).children() if "--serve" in child.cmdline()]


def image() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(random.getrandbits(64)).integers(0, 255, (64, 64, 3), np.uint8)).save(stream, format="PNG")
    return stream.getvalue()


def open_tab(page: Page) -> None:
    page.get_by_role("tab", name="Generate").click()
    page.wait_for_selector("#kl-inf-prompt")


def give(page: Page, prompt: str, steps: int) -> None:
    """An image, an instruction and a number of steps in the form."""
    slots = page.locator(".kl-inf-slot img")
    while slots.count():
        page.get_by_role("button", name="Remove image 1").click()
    page.set_input_files("#kl-inf-file", {"name": "given.png", "mimeType": "image/png", "buffer": image()})
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


def test_an_image_is_edited_compared_by_keyboard_kept_over_a_reload_and_made_again(place: Any, visit: Callable[..., Any]) -> None:
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
    assert np.array_equal(pixels(made(page)), pixels(first)), "the same settings give the same image"
    page.locator("#kl-inf-steps").fill("0")
    page.locator("#kl-inf-go").click()
    expect(page.locator("#kl-inf-steps-error")).to_be_visible()
    expect(page.locator(".kl-inf-go .kl-note")).to_have_text("")  # not "Done.", beside what was refused


def test_base_lora_and_checkpoints_of_a_run_stand_side_by_side_after_one_click(place: Any, visit: Callable[..., Any]) -> None:
    visited = visit(place.url, width=390, theme="dark")
    page = visited.page
    open_tab(page)
    give(page, "put a border around it", 3)
    # The newest run is what is drawn with, and its file is on the base.
    expect(page.get_by_label("LoRA file 1", exact=True)).to_have_value(re.compile("border.safetensors"))
    page.locator("summary", has_text="What is compared").click()
    expect(page.locator("#kl-inf-prompts")).to_have_value("put a border around it")
    # Another prompt of the form is what is compared; the one of the previews brings theirs back, and what is written here stays.
    page.locator("#kl-inf-seeds").fill("x")
    for prompt, shown, compared in (("make it\nred ", "", "make it red"), ("put a border around it",) * 3):
        page.locator("#kl-inf-prompt").fill(prompt)
        expect(page.locator("#kl-inf-prompts")).to_have_value(shown)
        with page.expect_request(re.compile("/kl/compare/start")) as order:
            page.locator("#kl-inf-compare").click()
        # It is one prompt, also where it has several lines.
        assert order.value.post_data_json["prompts"] == compared
        # The answer brings the focus here, and would take along what is being written elsewhere.
        expect(page.locator("#kl-inf-seeds")).to_be_focused()
    expect(page.locator("#kl-inf-seeds-error")).to_contain_text("'x' is neither a whole number")
    # The field and what is wrong with it are above the row of buttons, which stays at the end of the window.
    for size in ((1920, 1080), (1280, 720), (390, 844)):
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.locator("#kl-inf-seeds").evaluate("field => scrollBy(0, field.getBoundingClientRect().bottom - innerHeight)")
        page.locator("#kl-inf-compare").click()
        expect(page.locator("#kl-inf-seeds")).to_be_focused()
        error, buttons = (page.locator(name).bounding_box() for name in ("#kl-inf-seeds-error", ".kl-inf-go"))
        assert error and buttons and error["y"] > 0 and error["y"] + error["height"] <= buttons["y"], (size, error, buttons)
    page.locator("#kl-inf-seeds").fill("1-2")
    # A decimal comma is shown as it is taken.
    page.locator("#kl-inf-strengths").fill("1,0 1")
    page.keyboard.press("Tab")
    expect(page.locator("#kl-inf-strengths")).to_have_value("1.0 1")
    page.locator("#kl-inf-compare").click()
    grid = page.locator(".kl-compare")
    expect(grid.get_by_role("status")).to_contain_text("Complete · 8 of 8 images", timeout=PATIENCE)
    labels = grid.locator("thead th").all_inner_texts()
    assert labels[0] == "base" and {"border-000100", "border-000200", "border"} == set(labels[1:])
    assert visited.axe() == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    # The keyboard goes over the grid, and over the large images.
    cells = grid.locator(".kl-compare-cell")
    expect(cells).to_have_count(8)
    cells.nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(cells.nth(5)).to_be_focused()
    page.keyboard.press("Enter")
    large = page.get_by_role("dialog", name="One image of the comparison")
    expect(large.get_by_role("img")).to_have_attribute("alt", f"{labels[1]}: put a border around it, seed 2")
    page.keyboard.press("b")
    expect(large.get_by_role("img")).to_have_attribute("alt", "base: put a border around it, seed 2")
    page.keyboard.press("ArrowUp")
    expect(large.get_by_role("img")).to_have_attribute("alt", f"{labels[1]}: put a border around it, seed 1")
    box, window = large.get_by_role("button", name="Close").bounding_box(), page.viewport_size
    assert box and window and box["y"] + box["height"] <= window["height"] and box["x"] + box["width"] <= 390
    assert visited.axe() == []
    page.keyboard.press("Escape")
    expect(large).to_be_hidden()
    with page.expect_download() as saved:
        grid.get_by_text("Save as HTML").click()
    assert saved.value.path().read_text().count("data:image/webp") == 8
    grid.get_by_role("button", name="Blind vote").click()
    expect(grid.locator(".kl-vote img")).to_have_count(2)
    expect(grid.locator(".kl-vote-prompt")).to_have_text("put a border around it")
    for key in "120":
        page.keyboard.press(key)
        expect(grid.get_by_role("status")).to_contain_text(f"{'120'.index(key) + 1} vote")
    # The keyboard is in the vote now; its frame stands apart from the words.
    assert float(grid.locator(".kl-vote").evaluate("node => parseFloat(getComputedStyle(node).outlineOffset)")) >= 6
    grid.locator("summary", has_text="Ranking").click()
    assert {row.split("\t")[0] for row in grid.locator("tbody tr").all_inner_texts()} == set(labels)
    expect(grid.get_by_role("status")).to_contain_text("Not enough votes yet")
    assert visited.axe() == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    grid.get_by_role("button", name="Back to the grid").click()
    grid.get_by_text("Delete", exact=True).click()
    grid.get_by_text("Delete these images").click()
    expect(grid).to_contain_text("Nothing is compared yet")


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
    assert first.locator(".kl-inf-thumb").count() == 0, "a page sees its own images only"


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


def test_what_is_no_image_is_told_at_the_images_and_one_that_is_dropped_or_pasted_is_taken(place: Any, visit: Callable[..., Any]) -> None:
    page = visit(place.url).page
    open_tab(page)
    page.set_input_files("#kl-inf-file", {"name": "notes.png", "mimeType": "image/png", "buffer": b"no image"})
    expect(page.locator("#kl-inf-images-error")).to_contain_text("notes.png is not an image")
    page.locator(".kl-language").select_option("de")
    expect(page.locator("html")).to_have_attribute("lang", "de")
    torn = image()[:-40]
    page.set_input_files("#kl-inf-file", {"name": "torn.png", "mimeType": "image/png", "buffer": torn})
    expect(page.locator("#kl-inf-images-error")).to_have_text("torn.png ist abgeschnitten oder beschädigt")
    page.locator(".kl-language").select_option("en")
    expect(page.locator("html")).to_have_attribute("lang", "en")
    page.wait_for_selector("#kl-inf-prompt")
    for kind, carrier in (("drop", "dataTransfer"), ("paste", "clipboardData")):
        page.evaluate(
            """async ([kind, carrier, bytes]) => {
              const moved = new DataTransfer();
              moved.items.add(new File([new Uint8Array(bytes)], 'moved.png', {type: 'image/png'}));
              const make = kind === 'drop' ? DragEvent : ClipboardEvent;
              document.querySelector('#kl-inf-prompt').dispatchEvent(new make(kind, {bubbles: true, cancelable: true, [carrier]: moved}));
            }""",
            [kind, carrier, list(image())],
        )
        expect(page.locator(".kl-inf-slot img")).to_have_count(1 if kind == "drop" else 2)
    assert page.locator("#kl-inf-images-error").is_hidden()
    page.get_by_role("button", name="Remove image 2").click()
    expect(page.locator(".kl-inf-slot img")).to_have_count(1)


def test_a_finished_run_is_tried_by_one_click_and_the_toy_by_another(place: Any, visit: Callable[..., Any]) -> None:
    visited = visit(place.url)
    page = visited.page
    page.get_by_role("tab", name="Runs").click()
    page.get_by_role("button", name="Try it").click()
    expect(page.locator("#kl-inf-about")).to_have_text(re.compile(r"^border · [A-Z].+ \d+:\d\d [AP]M · Qwen-Image-Edit · base toy$"))
    expect(page.locator("#kl-inf-with")).to_have_value(re.compile("border.safetensors"))
    expect(page.locator("#kl-inf-prompt")).to_have_value("put a border around it")
    assert page.evaluate("location.hash") == "#generate"
    # A model that draws from text alone has no place for images; its own settings are filled in.
    page.locator("#kl-inf-with").select_option(label="Toy of SDXL")
    expect(page.locator("#kl-inf-sampler")).to_be_visible()
    expect(page.locator("#kl-inf-size")).to_have_value("64")
    expect(page.locator("#kl-inf-file")).to_be_hidden()
    expect(page.locator(".kl-inf-lora")).to_have_count(0)
    page.locator("#kl-inf-prompt").fill("a red circle in the center")
    page.locator("#kl-inf-go").click()
    done(page)
    with Image.open(io.BytesIO(made(page))) as drawn:
        assert drawn.size == (64, 64) and "a red circle in the center" in str(drawn.info["parameters"])
    # Its prompt and seed become a row of the next grid.
    page.get_by_role("button", name="Send to Compare").click()
    expect(page.locator("#kl-inf-prompts")).to_have_value(re.compile(r"^a red circle in the center --d \d+$"))
    assert visited.axe() == []
    page.locator("#kl-inf-with").select_option(label="Another file, model or hub id …")
    page.locator("#kl-inf-path").fill("/nowhere/at/all.safetensors")
    page.locator("#kl-inf-use").click()
    expect(page.locator("#kl-inf-with-error")).to_contain_text("/nowhere/at/all.safetensors")


def test_what_was_chosen_last_stays_when_the_answer_to_an_earlier_choice_comes_later(place: Any, visit: Callable[..., Any]) -> None:
    page = visit(place.url).page
    open_tab(page)
    held: list[Any] = []
    earlier = re.compile(r"/kl/predict\?.*with=.*border")
    page.route(earlier, lambda route: held.append(route))
    choice = page.locator("#kl-inf-with")
    choice.select_option(index=1)
    until(lambda: page.evaluate("1") and held)
    # What were written or ordered now would be of what was chosen before.
    expect(page.locator("#kl-inf-go")).to_be_disabled()
    expect(page.locator("#kl-inf-compare")).to_be_disabled()
    assert page.locator("#kl-inf-prompt").evaluate("node => node.closest('[inert]') !== null")
    choice.select_option(label="Toy of SDXL")
    expect(page.locator("#kl-inf-sampler")).to_be_visible()
    expect(page.locator("#kl-inf-go")).to_be_enabled()
    assert page.locator(".kl-inf-form > [inert]").count() == 0
    with page.expect_response(earlier):
        held[0].continue_()
    page.evaluate("() => new Promise(requestAnimationFrame)")
    expect(page.locator("#kl-inf-about")).to_contain_text("SDXL")
    assert page.locator("#kl-inf-sampler").is_visible()
    page.unroute(earlier)
    # What is typed as the base has its licence beside what is drawn with.
    expect(page.locator("#kl-inf-licence")).to_be_hidden()
    page.locator("summary").get_by_text("Base model", exact=True).click()
    page.locator("#kl-inf-pretrained_model_name_or_path").fill("stabilityai/sdxl-turbo")
    expect(page.locator("#kl-inf-licence")).to_contain_text("Licence: Stability's for SDXL Turbo")


def test_a_refusal_is_gone_when_something_else_is_chosen(place: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(b"no header")
    page = visit(place.url).page
    open_tab(page)
    give(page, "make the circle red", 1)
    row, error = page.get_by_label("LoRA file 1", exact=True), page.locator("#kl-inf-lora-error")
    good = row.input_value()

    def be_refused() -> None:
        row.select_option(label="Another file …")
        page.get_by_label("Path of LoRA file 1").fill(str(tmp_path / "cut.safetensors"))
        page.locator("#kl-inf-go").click()
        # The words of the refusal before this one stand hidden on the page.
        expect(error).to_be_visible(timeout=PATIENCE)
        expect(error).to_contain_text("cut.safetensors is not a safetensors file")

    be_refused()
    row.select_option(good)
    expect(error).to_be_hidden()
    be_refused()
    page.get_by_role("button", name="Remove LoRA file 1").click()
    expect(error).to_be_hidden()
    page.get_by_role("button", name="Add a LoRA").click()
    be_refused()
    page.locator("#kl-inf-with").select_option(label="Toy of SDXL")
    expect(page.locator("#kl-inf-about")).to_contain_text("SDXL")
    expect(error).to_be_hidden()
    expect(page.locator("#kl-inf-wrong")).to_be_hidden()


def test_a_refusal_that_comes_after_another_choice_is_told_beside_the_result(place: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(b"no header")
    page = visit(place.url).page
    open_tab(page)
    give(page, "make the circle red", 1)
    held: list[Any] = []
    page.route("**/kl/predict/start?*", lambda route: held.append(route))
    page.get_by_label("LoRA file 1", exact=True).select_option(label="Another file …")
    page.get_by_label("Path of LoRA file 1").fill(str(tmp_path / "cut.safetensors"))
    page.locator("#kl-inf-go").click()
    until(lambda: page.evaluate("1") and held)
    page.locator("#kl-inf-with").select_option(label="Toy of SDXL")
    expect(page.locator("#kl-inf-about")).to_contain_text("SDXL")
    held[0].continue_()
    expect(page.locator("#kl-inf-wrong")).to_contain_text("cut.safetensors is not a safetensors file", timeout=PATIENCE)
    expect(page.locator("#kl-inf-lora-error")).to_be_hidden()
    # The next order is not that one.
    page.locator("#kl-inf-prompt").fill("a red circle in the center")
    page.unroute("**/kl/predict/start?*")
    page.locator("#kl-inf-go").click()
    done(page)
    expect(page.locator("#kl-inf-wrong")).to_be_hidden()


def test_an_address_of_the_former_tab_leads_to_this_one(place: Any, visit: Callable[..., Any]) -> None:
    page = visit(place.url).page
    page.goto(f"{place.url}?kept#inference")
    page.wait_for_selector("#kl-inf-prompt")


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
