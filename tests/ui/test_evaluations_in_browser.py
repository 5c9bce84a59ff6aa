"""A run of style transfer in a real browser: its form, its curves, its evaluations from each style to each, and its transfers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from kohya_like import tools
from kohya_like.supervisor import JobSupervisor
from sd_scripts.families import RUNS
from sd_scripts.runs.events import RunFailed, RunStopped
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat
from tests.ui.conftest import painted
from tests.ui.runs_on_disk import STYLES, colour_of, evaluated, style_run
from tests.ui.standin_runs import ROOT, command, until

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def place(studios: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, RunDirectory]]:
    """A studio over a run with four evaluations, and with one that has many images of each style and none yet that can be read."""
    root = tmp_path_factory.mktemp("runs") / "output"
    run = style_run(root, "styles")
    for epoch in range(3):
        evaluated(run, epoch)
    evaluated(run, 2, 25)
    transferred(run)
    run.log(RunStopped(step=30))
    several = style_run(root, "several")
    evaluated(several, 1, sources=(("flat", "a"), ("flat", "b ${x}"), ("night", "c")))
    several.log(RunFailed(step=12, text="It broke.", advice=""))
    yield studios(output_dir=root), run


def transferred(run: RunDirectory) -> None:
    """A transfer of a flat image to lines, as the studio and the tool leave it."""
    name = "20260101-120000-abcd-lgt_infer"
    folder, start = run.path / tools.DRAWN / name, run.path.parent / tools.FOLDER / name
    folder.mkdir(parents=True)
    start.mkdir(parents=True)
    for file, style in ((tools.SOURCE, "flat"), ("source_to_line.png", "line")):
        Image.new("RGB", (32, 32), colour_of(style, 0)).save(folder / file)
    Image.new("RGB", (66, 32)).save(folder / "sheet-7.png")
    texts = {
        "ckpt": "styles.safetensors",
        "image": "/images/a.png",
        "target": "line",
        "source": "auto",
        "strength": "0.7",
        "steps": "9",
        "seed": "7",
    }
    order = {
        "tool": "lgt_infer",
        "run_id": "f" * 32,
        "started": 1.7e9,
        "argv": ["python"],
        "texts": texts,
        "output": "",
        "of_run": run.name,
    }
    report = {"outputs": [str(folder / "source_to_line.png")], "grid": str(folder / "sheet-7.png"), "seed": 7, "sources": ["flat"]}
    for file, content in (("tool.json", order), ("exit.json", {"run_id": "f" * 32, "returncode": 0}), ("report.json", report)):
        (start / file).write_text(json.dumps(content))


def runs_tab(page: Page, name: str) -> Any:
    """Opens a run in the Runs tab; its panel of evaluations."""
    page.get_by_role("tab", name="Runs").click()
    page.locator(".kr-row", has_text=name).click()
    expect(page.locator("#kl-runs .kr-title")).to_have_text(name)
    return page.locator("#kl-runs .kr-matrix")


def colour(page: Page, image: Any) -> tuple[int, int, int]:
    """The colour in the middle of an image of one colour, once it is there."""
    expect(image).to_have_js_property("complete", True)
    red, green, blue, _ = image.evaluate(
        """async (image) => {
            await image.decode();
            const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
            canvas.getContext("2d").drawImage(image, 0, 0, 1, 1);
            return [...canvas.getContext("2d").getImageData(0, 0, 1, 1).data];
        }"""
    )
    return red, green, blue


def test_the_matrix_shows_every_pair_at_every_evaluation_and_is_read_by_keyboard(
    place: tuple[Any, RunDirectory], visit: Callable[..., Any]
) -> None:
    visited = visit(place[0].url, width=1280)
    page = visited.page
    panel = runs_tab(page, "styles")
    expect(panel.locator("thead th").first).to_have_text("From")
    table = panel.locator(".kr-matrix-table")
    expect(table.locator("thead th")).to_have_text(["From", "Source", "VAE", *(f"To {style}" for style in STYLES)])
    expect(table.locator("tbody th")).to_have_text(list(STYLES))
    expect(table.get_by_role("button")).to_have_count(15)
    expect(panel.get_by_role("button", name="Evaluate now")).to_be_hidden()

    slider = panel.get_by_role("slider", name=re.compile("Evaluation"))
    expect(slider).to_have_attribute("aria-valuetext", "epoch 2, step 25")
    cell = table.get_by_role("button", name="flat to night")
    cell.focus()
    page.keyboard.press("Enter")
    expect(cell).to_have_attribute("aria-pressed", "true")
    large = panel.locator(".kr-after")
    slider.focus()
    page.keyboard.press("Home")
    expect(slider).to_have_attribute("aria-valuetext", "before the first step")
    for epoch, words in ((0, "before the first step"), (1, "epoch 1"), (2, "epoch 2")):
        expect(panel.locator(".kr-value")).to_have_text(words)
        expect(large).to_have_attribute("alt", f"flat to night, {words}")
        assert colour(page, large) == pytest.approx(colour_of("night", epoch), abs=4)
        expect(panel.locator(".kr-matrix-numbers div", has_text="structure").locator("dd").first).to_have_text(f"{1 / (5 + epoch):.3g}")
        page.keyboard.press("ArrowRight")
    assert colour(page, panel.locator(".kr-before")) == pytest.approx(colour_of("flat", 0), abs=4)

    panel.get_by_label("Compare with").select_option(label="epoch 1")
    expect(panel.locator(".kr-corner-left")).to_have_text("epoch 1")
    expect(panel.locator(".kr-corner-right")).to_have_text("epoch 2, step 25")
    expect(panel.locator(".kr-before")).to_have_attribute("alt", "flat to night, epoch 1")
    assert colour(page, panel.locator(".kr-before")) == pytest.approx(colour_of("night", 1), abs=4)
    panel.get_by_role("slider", name="Before and after").press("Home")
    expect(panel.get_by_role("slider", name="Before and after")).to_have_attribute("aria-valuetext", "0 % before, 100 % after")
    table.get_by_role("button", name="line, the source").click()
    expect(panel.locator(".kr-before")).to_be_hidden()
    assert colour(page, large) == pytest.approx(colour_of("line", 0), abs=4)
    expect(panel.locator(".kr-matrix-baselines tbody th")).to_have_text(
        ["Transfers, epoch 2, step 25", "source", "vae round trip", "random source", "real target"]
    )
    with page.expect_download() as coming:
        panel.get_by_role("link", name="The numbers as CSV").click()
    assert Path(coming.value.path()).read_text() == "from,to\n"
    assert visited.axe() + visited.overflow() == []
    visited.switch_theme()
    page.set_viewport_size({"width": 390, "height": 900})
    assert visited.axe() + visited.overflow() == []


def test_several_images_of_a_style_have_a_row_each_and_a_new_evaluation_appears_by_itself(
    place: tuple[Any, RunDirectory], visit: Callable[..., Any]
) -> None:
    page = visit(place[0].url).page
    panel = runs_tab(page, "several")
    rows = panel.locator(".kr-matrix-table tbody th")
    expect(rows).to_have_text(["flat, a", "flat, b ${x}", "night, c"])
    expect(panel.locator(".kr-value")).to_have_text("epoch 1")
    expect(panel.get_by_role("slider", name=re.compile("Evaluation"))).to_be_disabled()
    (several,) = place[0].output_dir.glob("*-several")
    evaluated(RunDirectory(several), 2)
    expect(panel.locator(".kr-value")).to_have_text("epoch 2")
    expect(rows).to_have_text(list(STYLES))


def test_the_parts_of_the_loss_and_the_evaluations_are_plotted_and_each_can_be_left_out(
    place: tuple[Any, RunDirectory], visit: Callable[..., Any]
) -> None:
    page = visit(place[0].url).page
    runs_tab(page, "styles")
    parts, measures = page.locator("#kl-runs .kr-lines-plot").all()
    assert all(painted(parts, f"line-{place}") for place in range(3)) and not painted(parts, "line-3")
    parts.get_by_role("button", name="Smoothed").click()
    page.get_by_role("slider", name="Read the parts of the loss at a step").focus()
    page.keyboard.press("Home")
    expect(parts.locator(".kr-readout")).to_have_text("Step 1: style distance 4, content difference 0.05, flow matching 1.1")
    parts.get_by_role("button", name="content difference").click()
    assert painted(parts, "line-0") and not painted(parts, "line-1") and painted(parts, "line-2")
    expect(parts.locator(".kr-readout")).not_to_contain_text("content")
    expect(measures.get_by_role("group", name="Lines of the plot").get_by_role("button")).to_have_count(4)
    assert painted(measures, "line-0")
    page.get_by_role("slider", name="Read the evaluations at a step").focus()
    page.keyboard.press("Home")
    expect(measures.locator(".kr-readout")).to_contain_text("Step 0: SWD to the target style 1")


def test_a_transfer_shows_its_result_beside_the_image_and_another_is_ordered_with_an_upload(
    place: tuple[Any, RunDirectory], visit: Callable[..., Any], tmp_path: Path
) -> None:
    studio, run = place
    visited = visit(studio.url, width=1280)
    page = visited.page
    runs_tab(page, "styles")
    page.locator("#kl-runs .kr-actions").get_by_role("button", name="Transfer a style").click()
    panel = page.locator("#kl-runs .kr-draw")
    expect(panel.locator("summary").first).to_have_text("Transfer a style")
    result = panel.get_by_role("region", name="Transfer", exact=True)
    given, made = result.locator("figure img"), result.locator(".kr-draw-chosen img")
    expect(result.locator("h3")).to_have_text("To line")
    expect(result.locator("figcaption")).to_have_text("As given, taken as flat")
    assert colour(page, given) == colour_of("flat", 0) and colour(page, made) == colour_of("line", 0)
    box, other = given.bounding_box(), made.bounding_box()
    assert box["y"] == pytest.approx(other["y"], abs=2) and box["x"] + box["width"] <= other["x"]
    result.get_by_role("button", name="All images in one file").click()
    expect(given).to_be_hidden()

    for name, text in (("target", "flat"), ("source", "auto"), ("strength", "1.0"), ("steps", "15"), ("seed", "")):
        expect(page.locator(f"#kl-draw-{name}")).to_have_value(text)
    expect(page.locator("#kl-draw-source option")).to_have_text(["auto", *STYLES, "average"])
    expect(page.locator("#kl-draw-sampler")).to_be_hidden()
    go = panel.get_by_role("button", name="Transfer", exact=True)
    go.click()
    expect(page.locator("#kl-draw-image-error")).to_be_visible()
    expect(page.locator("#kl-draw-image")).to_be_focused()
    panel.get_by_role("button", name="Target style: night").click()
    expect(page.locator("#kl-draw-target")).to_have_value("night")
    (tmp_path / "no.png").write_text("no image")
    page.locator("#kl-draw-image-file").set_input_files(tmp_path / "no.png")
    expect(page.locator("#kl-draw-image-error")).to_contain_text("no.png")
    Image.new("RGB", (40, 30), (200, 10, 10)).save(tmp_path / "yes.png")
    page.locator("#kl-draw-image-file").set_input_files(tmp_path / "yes.png")
    expect(panel.get_by_role("img", name="The image as given").first).to_be_visible()
    expect(page.locator("#kl-draw-image-error")).to_be_hidden()
    assert visited.axe() + visited.overflow() == []
    visited.switch_theme()
    page.set_viewport_size({"width": 390, "height": 900})
    assert visited.axe() + visited.overflow() == []
    page.set_viewport_size({"width": 1280, "height": 900})
    before = set((run.path / tools.DRAWN).iterdir())
    go.click()
    expect(result.locator("h3")).to_have_text("To night")
    cancel = result.get_by_role("button", name="Cancel")
    cancel.click()
    expect(result.locator(".kr-badge")).to_have_text("Cancelled")
    (folder,) = set((run.path / tools.DRAWN).iterdir()) - before
    with Image.open(folder / tools.SOURCE) as image:
        assert image.size == (40, 30) and image.getpixel((0, 0)) == (200, 10, 10)
    order = json.loads((studio.output_dir / tools.FOLDER / folder.name / "tool.json").read_text())
    assert f"--image={folder / tools.SOURCE}" in order["argv"] and "--target=night" in order["argv"]


def test_the_form_of_style_transfer_has_its_folds_and_speaks_of_styles_where_others_speak_of_prompts(
    place: tuple[Any, RunDirectory], visit: Callable[..., Any], tmp_path: Path
) -> None:
    page = visit(place[0].url).page
    page.locator("#kl-family-lgt").check()
    expect(page.locator("#kl-mode-scratch")).to_be_checked()
    page.get_by_role("button", name="Open all").click()
    expect(page.locator("#kl-test_image_dir")).to_be_attached()
    for title in ("Style term", "Content terms", "Velocity terms", "Integration"):
        expect(page.locator("summary", has_text=title)).to_be_visible()
    shown = page.locator(".kl-main").inner_text()
    assert re.findall(r"(?im)^.*\b(?:prompts?|captions?|text encoders?)\b.*$", shown) == []
    for style, count in (("monet", 3), ("photo", 2)):
        for index in range(count):
            (tmp_path / style).mkdir(exist_ok=True)
            Image.new("RGB", (64, 64), (index, 9, 9)).save(tmp_path / style / f"{index}.png")
    page.locator("#kl-train_data_dir").fill(str(tmp_path))
    page.locator("#kl-resolution").fill("64")
    page.locator("#kl-train_batch_size").fill("1")
    page.locator("#kl-check").click()
    report = page.locator(".kl-report")
    expect(report).to_contain_text("Styles", timeout=60_000)
    expect(report.locator("tr", has_text="monet").first).to_contain_text("3")
    expect(report).not_to_contain_text("Caption")
    expect(report).not_to_contain_text("regularisation")


def test_a_run_of_style_transfer_that_is_at_work_is_asked_to_evaluate(place: tuple[Any, RunDirectory], visit: Callable[..., Any]) -> None:
    run = RUNS["lgt", "scratch"]
    given = {"train_data_dir": "toy:styles", "vae": "toy", "output_dir": str(place[0].output_dir), "output_name": "at-work"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("PYTHONPATH", str(ROOT))
        supervisor = JobSupervisor(place[0].output_dir, command("endless"))
        job = supervisor.start(run.script, flat.build(run, given))
    try:
        panel = runs_tab(visit(place[0].url).page, "at-work")
        panel.get_by_role("button", name="Evaluate now").click()
        expect(panel).to_contain_text("after the step it is at")
        # The page says so at once, and then tells the studio.
        until(job.run.evaluation_requested)
    finally:
        supervisor.stop(job, grace_seconds=0)
        supervisor.close()
