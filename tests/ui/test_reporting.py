"""The report of a run: what is in it, that it is one file, and that nothing private or harmful is."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from kohya_like import desk, reporting, supporting
from kohya_like.supervisor import JobSupervisor
from sd_scripts.runs.events import FileSaved, Previewed, RunFailed, RunFinished, RunStarted, StepDone, Validated, Warned
from sd_scripts.runs.rundir import RunDirectory
from tests.ui.runs_on_disk import made, options

HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
TOKEN = "hf_" + "a" * 24


def trained(root: Path) -> RunDirectory:
    """A run with everything in it, in a folder with a person's name and a space."""
    private = root / "Jane Doe"
    run = made(
        private / "out put",
        options(
            private / "out put",
            output_name="cat",
            learning_rate=3e-4,
            pretrained_model_name_or_path="stabilityai/some-base",
            train_data_dir=str(private / "photos" / "7_cats"),
            vae=r"C:\Users\Jane Doe\models\small.vae.safetensors",
            reg_data_dir="private/holiday/dogs",
        ),
    )
    run.log(RunStarted(steps=30, start_step=0))
    run.samples.mkdir()
    for step in range(1, 31):
        run.log(StepDone(step=step, epoch=0, loss=1 / step, lr=1e-4, step_in_session=step, trained_seconds=2.0 * step, peak_gib=7.25))
    for number, step in enumerate(range(1, 31, 3)):
        side = 48 if number else 600
        Image.new("RGB", (side, side), (8 * step, 90, 90)).save(run.samples / f"{step}.png")
        prompt = f"a cat {HOSTILE} like {private}/photos/7_cats/1.png"
        run.log(Previewed(step=step, index=0, file=f"samples/{step}.png", prompt=prompt, seed=1))
    run.log(Validated(step=30, loss=0.125))
    run.log(Warned(text=f"{private}/photos/7_cats/2.png is small; see /home/jane/x.log, C:\\Users\\jane\\y and {TOKEN}"))
    (run.path / "cat.safetensors").write_bytes(b"1234")
    run.log(FileSaved(step=30, what="export", file="cat.safetensors"))
    run.log(RunFinished(step=30, text="", advice=""))
    desk.say(
        run.path, {"label": {"before": "", "after": f"The cat {HOSTILE}"[:100]}, "notes": {"before": "", "after": f"from {private}\nok"}}
    )
    return run


class Tags(HTMLParser):
    """Names of all tags, and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs


def report(run: RunDirectory, language: str = "en") -> str:
    job = JobSupervisor(run.path.parent).find(run.name)
    assert job is not None
    return reporting.page(job, language).decode()


def test_a_report_has_what_was_trained_and_nothing_private(tmp_path: Path) -> None:
    text = report(trained(tmp_path))
    assert "…\nok" in text
    for words in ("Learning rate (learning_rate)", "0.0003", "stabilityai/some-base", "…/7_cats", "…/small.vae.safetensors", "0.125",
                  "7.25", "…/dogs", "cat.safetensors, step 30", "Fingerprint of the settings", "…/2.png is small"):  # fmt: skip
        assert words in text, words
    for private in ("Jane", "jane", str(tmp_path), "out put", "holiday", TOKEN, "<script>alert", "<img src=x"):
        assert private not in text, private
    tags = Tags(text)
    assert not {"script", "iframe", "link", "object", "form", "a"} & set(tags.names)
    assert all(str(value).startswith("data:image/webp;base64,") for name, value in tags.attributes if name == "src")
    assert not [name for name, _ in tags.attributes if name.startswith("on")]
    assert tags.names.count("img") == reporting.MOST_STEPS and "step 1<" in text and "step 28<" in text
    assert "url(" not in text and not re.search(r"(src|href)=.?https?:", text)


def test_a_report_is_in_the_language_of_the_reader(tmp_path: Path) -> None:
    run = trained(tmp_path)
    german, english = report(run, "de"), report(run)
    assert '<html lang="de">' in german and '<html lang="zh-Hans">' in report(run, "zh")
    for words in (
        "Einstellungen, die nicht Vorgabe sind",
        "Lernrate (learning_rate)",
        "30 von 30",
        "Trainingszeit",
        "Schritt 28<",
        "4 Byte<",
    ):
        assert words in german and words not in english, words
    assert len(Tags(german).names) == len(Tags(english).names)
    assert report(run, "../../etc/passwd") == report(run, "") == english


def test_a_support_file_has_the_log_and_the_findings_and_nothing_private(tmp_path: Path) -> None:
    run = trained(tmp_path)
    prompt = "my secret niece on a beach --d 3"
    settings = re.sub("(?m)^sample_prompts = .*$", f'sample_prompts = "{prompt}"', run.config.read_text())
    run.config.write_text(settings)
    run.console.write_text(f"draws {prompt}\nreads {tmp_path}/Jane Doe/photos/7_cats/2.png with {TOKEN}\nCUDA out of memory\n")
    run.log(RunFailed(step=30, text=f"{tmp_path}/Jane Doe/photos/7_cats/2.png cannot be read", advice="Replace it."))
    job = JobSupervisor(run.path.parent).find(run.name)
    assert job is not None and job.state == "failed"
    with zipfile.ZipFile(io.BytesIO(supporting.archive(job))) as packed:
        assert packed.testzip() is None
        texts = {Path(name).name: packed.read(name).decode() for name in packed.namelist()}
    assert set(texts) == {"ABOUT.txt", "settings.txt", "console.txt", "events.jsonl", "findings.txt", "versions.json"}
    assert "* learning_rate = 0.0003" in texts["settings.txt"] and f"sample_prompts = ({len(prompt)} characters)" in texts["settings.txt"]
    assert "Replace it." in texts["findings.txt"] and "Python" in texts["findings.txt"], "the doctor's lines follow"
    assert "out of memory" in texts["console.txt"] and "…/2.png" in texts["console.txt"]
    kinds = [json.loads(line)["kind"] for line in texts["events.jsonl"].splitlines()]
    assert kinds.count("step") == 30 and "sample" not in kinds
    assert json.loads(texts["versions.json"])["versions"]["torch"]
    for name, text in texts.items():
        for private in ("Jane", "jane", str(tmp_path), "out put", "holiday", TOKEN, "niece", "a cat "):
            assert private not in text, (name, private)


def test_a_run_of_which_little_is_left_has_a_report_too(tmp_path: Path) -> None:
    run = made(tmp_path, options(tmp_path, output_name="bare"))
    assert "Settings that are not the defaults" in report(run) and "<svg" not in report(run)
    run.config.write_text("broken = [")
    run.meta.unlink()
    run.log(StepDone(step=1, epoch=0, loss=0.5, lr=1e-4))
    run.log(Previewed(step=1, index=0, file="samples/gone.png", prompt="gone"))
    assert "They cannot be read any more." in report(run) and "<svg" in report(run)


@pytest.mark.browser
def test_a_prompt_that_was_changed_has_a_row_of_its_own(tmp_path: Path) -> None:
    run = made(tmp_path, options(tmp_path, output_name="cat"))
    run.samples.mkdir()
    for step, prompt in ((0, "a star"), (10, "a star"), (20, "a sun")):
        Image.new("RGB", (48, 48)).save(run.samples / f"{step}.png")
        run.log(Previewed(step=step, index=0, file=f"samples/{step}.png", prompt=prompt))
    of_sun, of_star = (re.search(rf">{prompt}</th></tr><tr>(.*?)</tr>", report(run)) for prompt in ("a sun", "a star"))
    assert of_sun is not None and of_star is not None and (of_sun[1].count("<img"), of_star[1].count("<img")) == (1, 2)


@pytest.mark.parametrize("width", [1280, pytest.param(390, marks=pytest.mark.long)])
def test_a_report_is_read_in_a_browser_from_its_file(width: int, window: Page, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(report(trained(tmp_path)))
    asked: list[str] = []
    heard: Callable[[Any], None] = lambda request: asked.append(request.url)  # noqa: E731
    window.on("request", heard)
    window.set_viewport_size({"width": width, "height": 844})
    window.goto(file.as_uri())
    window.remove_listener("request", heard)
    expect(window.locator("h1")).to_contain_text("The cat </title><script>")
    assert window.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    curve, first = window.locator("svg").bounding_box(), window.locator("img").first.bounding_box()
    assert curve and curve["width"] > 300 and curve["height"] > 90
    assert first and first["width"] == 150 and window.evaluate("[...document.images].every((image) => image.naturalWidth)")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
