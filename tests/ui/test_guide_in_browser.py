"""A newcomer who reads what stands on the page: from images to a training in six clicks, and past ten mistakes."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from kohya_like.catalogues import SOURCES, compiled
from kohya_like.supervisor import JobSupervisor
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.toy.datasets import write_dataset
from tests.full_disk import small_disk
from tests.ui import full_studio
from tests.ui.on_screen import Eyes
from tests.ui.standin_runs import ROOT, until
from tests.ui.test_adding_in_browser import SIZES, drop
from tests.ui.test_journey import short_run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(2400)]
PATIENCE = 1_500_000
"""Milliseconds for a whole training on a busy machine."""


@contextmanager
def studio_of(studios: Callable[..., Any], root: Path) -> Iterator[Any]:
    """A studio on an empty folder; what it started is ended afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("PYTHONPATH", str(ROOT))
        studio = studios(output_dir=root, warm=True)
        yield studio
        studio.end()
        supervisor = JobSupervisor(root)
        for job in supervisor._look():
            supervisor.stop(job, grace_seconds=0)


class Newcomer:
    """Finds by its words what can be clicked, and counts the clicks."""

    def __init__(self, page: Page, language: str = "") -> None:
        self.page, self.clicks, self.texts = page, 0, {}
        if language:
            kinds = json.loads(compiled(SOURCES / f"{language}.po"))
            self.texts = kinds["said"] | kinds["page"]
            page.locator(".kl-language").select_option(language)
            expect(page.get_by_text(self.texts["Guide me"], exact=True).first).to_be_visible()

    def click(self, words: str) -> None:
        words = self.texts[words] if self.texts else words
        # What opened last lies on top.
        place = self.page.locator("dialog[open]").last if self.page.locator("dialog[open]").count() else self.page
        place.get_by_text(words, exact=True).first.click()
        self.clicks += 1

    def reads(self, words: str) -> None:
        expect(self.page.get_by_text(words).first).to_be_visible(timeout=PATIENCE)

    def adds(self, *paths: Path) -> None:
        drop(self.page, *paths)
        # In some languages the page has the same word elsewhere.
        expect(self.page.locator("dialog[open]")).to_have_count(1)
        self.click("Add")
        self.click("Done")

    def is_guided(self, what: str = "A style") -> None:
        self.click("Guide me")
        self.click(what)
        self.click("Fill in the form")


def stars(folder: Path, count: int = 24, captions: bool = True) -> Path:
    """Images of the shape that no built-in model knows, as somebody may have them."""
    given = write_dataset("star", folder.parent / "toy").train_data_dir
    folder.mkdir()
    for path in sorted(given.rglob("*.png"))[:count]:
        shutil.copy(path, folder)
        if captions:
            shutil.copy(path.with_suffix(".txt"), folder)
    return folder


@pytest.mark.parametrize(("width", "height", "theme"), [pytest.param(*SIZES[0], marks=pytest.mark.long), SIZES[1]])
def test_six_clicks_lead_from_dropped_images_to_a_run(
    width: int, height: int, theme: str, studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path
) -> None:
    root = tmp_path / "output"
    with studio_of(studios, root) as studio:
        # Another run is at work, so that this one waits and costs nothing.
        supervisor, busy = full_studio.under_way(root)
        visited = visit(studio.url, width=width, height=height, theme=theme)
        newcomer = Newcomer(visited.page)
        visited.page.get_by_role("tab", name="Runs").click()
        expect(visited.page.locator("#kl-runs .kr-title")).to_have_text("under-way")
        visited.page.get_by_role("tab", name="Train").click()
        newcomer.adds(stars(tmp_path / "my stars", 4))
        newcomer.click("Guide me")
        newcomer.reads("Which model?")
        assert visited.axe(".kl-dialog") == [] and Eyes(visited.page).flaws() == []
        newcomer.click("A style")
        newcomer.click("Fill in the form")
        newcomer.reads("from your captions, so that previews show what is learned")
        assert visited.axe(".kl-dialog") == [] and Eyes(visited.page).flaws() == []
        newcomer.click("Start training")
        expect(visited.page.locator("#kl-live")).to_contain_text("my-stars")
        assert newcomer.clicks == 6
        newcomer.click("Explain my settings")
        newcomer.reads("is 8 instead of 1.")
        assert visited.axe(".kl-dialog") == [] and Eyes(visited.page).flaws() == []
        # What was started is what the list of runs shows next.
        visited.page.keyboard.press("Escape")
        visited.page.get_by_role("tab", name="Runs").click()
        expect(visited.page.locator("#kl-runs .kr-title")).to_have_text("my-stars")
        supervisor.stop(busy, grace_seconds=0)
        supervisor.close()
        (run,) = (RunDirectory(path) for path in root.glob("*-my-stars"))
        options = run.options()
        assert (
            options.dataset.train_data_dir == str(root / "datasets" / "my stars") and options.model.pretrained_model_name_or_path == "toy"
        )


def test_edit_pairs_in_two_folders_stay_pairs_and_the_guide_offers_models_that_edit(
    studio: Any, visit: Callable[..., Any], tmp_path: Path
) -> None:
    page = visit(studio.url).page
    newcomer = Newcomer(page)
    for place, colour in (("before", "red"), ("after", "blue")):
        (tmp_path / "my edits" / place).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (64, 48 + number), colour).save(tmp_path / "my edits" / place / f"{number}.png")
    for number in range(3):
        (tmp_path / "my edits" / "after" / f"{number}.txt").write_text("make it blue")
    page.get_by_role("button", name="Add images").first.click()
    expect(page.locator("#kl-add-name")).to_have_value("my-images")
    page.locator("#kl-add-folder").set_input_files(tmp_path / "my edits")
    expect(page.locator("#kl-add-name")).to_have_value("my edits")
    newcomer.click("Add")
    newcomer.reads("Edit pairs: 3.")
    newcomer.click("Done")
    newcomer.click("Guide me")
    models = page.get_by_label("Which model?")
    expect(models.locator("option:checked")).to_have_text("Built-in small model (SDXL)")
    newcomer.click("An edit")
    expect(models.locator("option:checked")).to_contain_text("Built-in small model (FLUX.1 Kontext)")
    offered = [option.inner_text() for option in models.locator("option:enabled").all()]
    assert not [name for name in offered if "(SDXL)" in name or name.startswith("Qwen/Qwen-Image (")] and len(offered) > 6, offered
    newcomer.click("A style")
    assert models.locator("option:enabled").count() > len(offered)
    newcomer.click("An edit")
    newcomer.click("Fill in the form")
    newcomer.reads("from your captions, so that previews show what is learned")
    newcomer.click("Look at the form first")
    assert page.locator("#kl-train_data_dir").input_value().endswith("my edits")


@pytest.mark.long
@pytest.mark.parametrize("language", ["de", "ru", "zh"])
def test_six_clicks_lead_to_a_run_in_every_language(
    language: str, studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path
) -> None:
    root = tmp_path / "output"
    with studio_of(studios, root) as studio:
        supervisor, busy = full_studio.under_way(root)
        visited = visit(studio.url, width=390, height=844)
        newcomer = Newcomer(visited.page, language)
        newcomer.adds(stars(tmp_path / "my stars", 4))
        newcomer.is_guided()
        assert visited.overflow() == [] and Eyes(visited.page).flaws() == []
        newcomer.click("Start training")
        expect(visited.page.locator("#kl-live")).to_contain_text("my-stars")
        assert newcomer.clicks == 6
        supervisor.stop(busy, grace_seconds=0)
        supervisor.close()


@pytest.mark.long
def test_a_newcomer_gets_a_lora_that_draws_what_the_base_cannot(
    studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path
) -> None:
    import torch

    from sd_scripts.families import family
    from sd_scripts.library.adapters.merge import merge_into
    from sd_scripts.toy import demo, measure

    root = tmp_path / "output"
    with studio_of(studios, root) as studio:
        newcomer = Newcomer(visit(studio.url, quiet=False).page)
        newcomer.adds(stars(tmp_path / "my stars"))
        newcomer.is_guided("An object")
        newcomer.click("Start training")
        assert newcomer.clicks == 6
        expect(newcomer.page.locator("#kl-live .kr-badge")).to_have_text("Finished", timeout=PATIENCE)
        (run,) = (RunDirectory(path) for path in root.glob("*-my-stars"))
        options = run.options()
        model = family(options.family)
        parts = model.load(options.model, torch.device("cpu"), torch.float32)
        render = demo.renderer(model, parts, options.samples.sample_steps, options.samples.sample_cfg_scale)
        tasks = measure.prompts("star", 24, seed=5)
        before = measure.obedience(render, tasks).shape
        merge_into(parts, run.path / "my-stars.safetensors", 1.0)
        after = measure.obedience(render, tasks).shape
    assert after >= before + 0.25, (before, after)


@pytest.mark.long
def test_mistakes_end_with_a_sentence_that_names_the_cure_or_with_a_lora(
    studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path
) -> None:
    """Eight of them; the full disk and the model of another family have journeys of their own."""
    root = tmp_path / "output"
    with studio_of(studios, root) as studio:
        page = visit(studio.url, quiet=False).page
        newcomer = Newcomer(page)
        # 1 to 5: HEIC without its decoder, the same image twice, tiny images, no captions, a file that cannot be read.
        folder = stars(tmp_path / "my stars", 12, captions=False)
        (folder / "phone.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0")
        first = min(folder.glob("*.png"))
        shutil.copy(first, folder / f"{first.stem}-again.png")
        Image.new("RGB", (3, 2), "red").save(folder / "tiny.png")
        (folder / "torn.png").write_bytes(first.read_bytes()[:60])
        drop(page, folder)
        newcomer.click("Add")
        newcomer.reads("run pip install pillow-heif, or convert it to JPEG")
        newcomer.click("Done")
        # 6: a folder with a typing error.
        newcomer.click("Guide me")
        newcomer.click("A style")
        path = page.get_by_label("Where are the images?")
        good = path.input_value()
        path.fill(good.replace("stars", "starz"))
        newcomer.click("Fill in the form")
        newcomer.reads(f"Is {good} meant?")
        path.fill(good)
        # 7: a model that is none.
        page.get_by_label("Which model?").select_option("*")
        model = tmp_path / "some.safetensors"
        model.write_bytes(b"no model")
        page.get_by_label("File, folder or hub id of the model").fill(str(model))
        newcomer.click("Fill in the form")
        newcomer.reads("some.safetensors")
        page.get_by_label("Which model?").select_option("0")
        newcomer.click("Fill in the form")
        newcomer.reads("have no caption and are told as this")
        # 8: a learning rate of 10.
        newcomer.click("Look at the form first")
        page.get_by_label("Learning rate", exact=True).fill("10")
        newcomer.click("Start training")
        badge = page.locator("#kl-live .kr-badge")
        expect(badge).to_have_text("Failed", timeout=PATIENCE)
        expect(page.locator("#kl-live")).to_contain_text("learning")
        page.get_by_label("Learning rate", exact=True).fill("0.003")
        page.get_by_label("Max train steps", exact=True).fill("4")
        newcomer.click("Start training")
        expect(badge).to_have_text("Finished", timeout=PATIENCE)
        until(lambda: bool(list(root.glob("*-my-stars/my-stars.safetensors"))))
        # 9: the port is in use.
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            command = [sys.executable, str(ROOT / "gui.py"), "--server_port", port, "--output_dir", str(root)]
            told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert told.returncode != 0 and port in told.stderr and "Traceback" not in told.stderr


def test_a_model_of_another_family_is_told_with_the_cure_and_then_a_run_begins(
    studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path
) -> None:
    root, folder, model = tmp_path / "output", stars(tmp_path / "my stars", 4), tmp_path / "model"
    model.mkdir()
    (model / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with studio_of(studios, root) as studio:
        supervisor, busy = full_studio.under_way(root)
        page = visit(studio.url).page
        newcomer = Newcomer(page)
        page.get_by_label("Base model", exact=True).fill(str(model))
        page.get_by_label("Training image folder", exact=True).fill(str(folder))
        newcomer.click("Start training")
        newcomer.reads("model is a Flux model (FluxPipeline); you chose SDXL. Choose its own family, or a base model of SDXL")
        page.get_by_label("Base model", exact=True).fill("toy")
        newcomer.click("Start training")
        expect(page.locator("#kl-live")).to_contain_text("Waiting")
        supervisor.stop(busy, grace_seconds=0)
        supervisor.close()


def test_a_full_disk_is_told_with_the_cure_and_with_room_the_training_ends_with_a_lora(
    studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path
) -> None:
    folder, disk = stars(tmp_path / "my stars", 4), tmp_path / "disk"
    with small_disk(disk, 64) as is_mounted:
        if not is_mounted:
            pytest.skip("this machine lets no disk be mounted")
        with studio_of(studios, disk / "output") as studio:
            page = visit(studio.url, quiet=False).page
            newcomer = Newcomer(page)
            drop(page, folder)
            newcomer.click("Add")
            newcomer.reads("Make room, or start the studio with another --output_dir.")
            newcomer.click("Cancel")
            page.get_by_placeholder("or a path on the studio").fill(str(short_run(tmp_path, 2, "short")))
            page.get_by_role("button", name="Open the file at this path").click()
            newcomer.reads("Settings loaded: short.toml")
            page.get_by_label("Training image folder", exact=True).fill(str(folder))
            with (disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
                while True:
                    filler.write(bytes(4096))
            newcomer.click("Start training")
            newcomer.reads("free some space")
            (disk / "filler").unlink()
            newcomer.click("Start training")
            expect(page.locator("#kl-live .kr-badge")).to_have_text("Finished", timeout=PATIENCE)
            assert list(disk.glob("output/*-short/short.safetensors"))
