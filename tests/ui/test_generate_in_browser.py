"""More of the Generate tab by real clicks with the real worker: a list of prompts, Cancel in the middle of a step, a dropped LoRA file, the
forecast of memory."""

from __future__ import annotations

import base64
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from sd_scripts.families import RUNS
from sd_scripts.runs.events import RunFinished
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.flat import build
from tests.ui.test_inference_in_browser import PATIENCE, adapter, done, open_tab, workers

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def place(studios: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A studio over one finished run with a LoRA file."""
    root = tmp_path_factory.mktemp("generate") / "output"
    needed = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:edit_border", "output_dir": str(root), "output_name": "border"}
    needed |= {"sample_prompts": "put a border around it", "resolution": (64, 64)}
    run = RunDirectory.create(root, "border", build(RUNS["qwen_edit", "network"], needed))
    run.log(RunFinished(step=1, text="", advice=""))
    adapter(run.path / "border.safetensors", 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        studio = studios(output_dir=root, warm=True)
    yield studio
    studio.end()


def draw_with_the_toy(page: Page, prompt: str = "a red star") -> None:
    page.locator("#kl-inf-with").select_option(label="Toy of SDXL")
    expect(page.locator("#kl-inf-about")).to_contain_text("SDXL")
    page.locator("#kl-inf-prompt").fill(prompt)


def drop(page: Page, name: str, content: bytes) -> None:
    """A file that is dragged from elsewhere and let go over the prompt."""
    page.evaluate(
        """([name, text]) => {
          const moved = new DataTransfer();
          moved.items.add(new File([Uint8Array.from(atob(text), (each) => each.charCodeAt(0))], name));
          const to = document.querySelector('#kl-inf-prompt');
          const how = {bubbles: true, cancelable: true, dataTransfer: moved};
          for (const kind of ['dragover', 'drop']) to.dispatchEvent(new DragEvent(kind, how));
        }""",
        [name, base64.b64encode(content).decode()],
    )


def test_a_list_of_prompts_with_kohya_s_flags_draws_each_as_it_says(place: Any, visit: Callable[..., Any]) -> None:
    page = visit(place.url).page
    open_tab(page)
    draw_with_the_toy(page, "")
    page.locator(".kl-inf-form summary", has_text=re.compile("^More$")).click()
    box = page.locator("#kl-inf-prompt_list")
    box.fill("a red star --w 128 --h 64 --d 5 --s 3 --l 2 --n a line\n# a remark\na blue circle --d 6 --s 2 --w 64 --h 64 --much 3")
    page.locator("#kl-inf-go").click()
    expect(page.locator("#kl-inf-prompt_list-error")).to_contain_text("--much")
    box.fill(box.input_value().replace(" --much 3", ""))
    page.locator("#kl-inf-go").click()
    done(page)
    (folder,) = (path for path in (place.output_dir / "predictions").iterdir() if (path / "settings.json").is_file())
    told = {}
    for path in folder.glob("*.png"):
        with Image.open(path) as image:
            request = json.loads(image.info["request"])
            told[request["prompt"]] = (image.size, request["seed"], request["steps"], request["cfg_scale"], request["negative_prompt"])
    assert told["a red star"] == ((128, 64), 5, 3, 2.0, "a line")
    assert told["a blue circle"][:3] == ((64, 64), 6, 2) and len(told) == 2


def test_cancel_is_answered_in_the_middle_of_a_step_and_ends_after_it(place: Any, visit: Callable[..., Any]) -> None:
    page = visit(place.url).page
    open_tab(page)
    draw_with_the_toy(page)
    page.locator("#kl-inf-steps").fill("1000")
    page.locator("#kl-inf-size").fill("512,512")
    said: list[dict[str, Any]] = []
    page.on("response", lambda answer: said.append(answer.json()) if "/kl/predict/job/" in answer.url and answer.ok else None)
    page.locator("#kl-inf-go").click()
    expect(page.locator("#kl-inf-phase")).to_contain_text(" of 1000", timeout=PATIENCE)
    (worker,) = workers(place)
    # It cannot answer, and the page says at once that it has heard.
    worker.send_signal(signal.SIGSTOP)
    try:
        with page.expect_response("**/cancel*") as answered:
            page.locator("#kl-inf-cancel").click()
        at_click = answered.value.json()
        assert at_click["cancelling"] and at_click["state"] == "running"
        expect(page.locator("#kl-inf-phase")).to_contain_text("Cancelling")
        expect(page.locator("#kl-inf-cancel")).to_be_disabled()
    finally:
        worker.send_signal(signal.SIGCONT)
    expect(page.locator(".kl-inf-go .kl-note")).to_have_text("Cancelled.", timeout=PATIENCE)
    # One step was under way and one more may have ended before the line was read; a thousand were asked for.
    assert said[-1]["state"] == "cancelled" and said[-1]["step"] - at_click["step"] <= 2
    # The worker and its model are still there, for the next order.
    page.locator("#kl-inf-steps").fill("1")
    page.locator("#kl-inf-size").fill("64,64")
    page.locator("#kl-inf-go").click()
    done(page)
    assert workers(place) == [worker]


def test_a_dropped_lora_file_is_drawn_with_and_what_is_none_is_a_sentence(place: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    visited = visit(place.url)
    page = visited.page
    open_tab(page)
    adapter(tmp_path / "mine.safetensors", 1.0)
    whole, error = (tmp_path / "mine.safetensors").read_bytes(), page.locator("#kl-inf-with-error")
    for name, content, sentence in (
        ("old.ckpt", b"a pickle", "old.ckpt is not a .safetensors file; files of other kinds can run code"),
        ("cut.safetensors", whole[:-9], "cut.safetensors is damaged or was not downloaded whole"),
        ("page.safetensors", b"<!doctype html>", "page.safetensors is a web page, not a model"),
        ("mine.safetensors", whole, "nothing tells which family this is"),
    ):
        drop(page, name, content)
        expect(error).to_contain_text(sentence)
    assert visited.axe() == []
    # A header that does not tell: the family is asked for, and nothing else.
    expect(page.locator("#kl-inf-family")).to_be_focused()
    page.locator("#kl-inf-family").select_option(label="Qwen-Image-Edit")
    page.locator("#kl-inf-use").click()
    expect(page.locator("#kl-inf-about")).to_contain_text("Qwen-Image-Edit")
    assert error.is_hidden() and page.locator("#kl-inf-path").input_value().endswith("mine.safetensors")
    # The base stays that of the run that was chosen before, where it can be found; here that is the toy, which has to be named.
    page.locator(".kl-inf-form summary", has_text="Base model").click()
    page.locator("#kl-inf-pretrained_model_name_or_path").fill("toy")
    page.locator("#kl-inf-prompt").fill("make the circle red")
    page.locator("#kl-inf-steps").fill("1")
    page.locator("#kl-inf-size").fill("64,64")
    page.set_input_files("#kl-inf-file", Path(__file__).parents[2] / "docs" / "images" / "studio.webp")
    expect(page.locator(".kl-inf-slot img")).to_have_count(1)
    page.locator("#kl-inf-go").click()
    done(page)


@pytest.mark.parametrize(("width", "height", "theme"), [(1280, 720, "light"), (390, 844, "dark")])
def test_the_memory_of_drawing_is_told_and_a_plan_goes_into_the_form(
    place: Any, visit: Callable[..., Any], width: int, height: int, theme: str
) -> None:
    visited = visit(place.url, width=width, height=height, theme=theme)
    page = visited.page
    open_tab(page)
    draw_with_the_toy(page, "")
    page.locator(".kl-inf-form summary", has_text="Devices and memory").click()
    box = page.locator(".kl-inf-memory")
    box.locator("#kl-inf-estimate").click()
    expect(box.locator(".kl-memory-verdict")).to_contain_text(re.compile(r"Fits: .* GiB of host RAM\."), timeout=PATIENCE)
    page.locator(".kl-inf-form summary", has_text="Base model").click()
    page.locator("#kl-inf-pretrained_model_name_or_path").fill("stabilityai/stable-diffusion-xl-base-1.0")
    expect(box.get_by_role("status")).to_have_text("The form has changed since; estimate again.")
    page.locator("#kl-inf-size").fill("1024,1024")
    box.locator("#kl-inf-memory-card").select_option("8")
    box.locator("#kl-inf-estimate").click()
    expect(box.locator(".kl-memory-verdict")).to_contain_text("Does not fit", timeout=PATIENCE)
    box.locator("#kl-inf-fit").click()
    expect(box.locator(".kl-memory-plan")).to_contain_text("With these settings it fits", timeout=PATIENCE)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth") and visited.axe() == []
    box.locator("#kl-inf-use-plan").click()
    expect(page.locator("#kl-inf-offload")).to_be_checked()
