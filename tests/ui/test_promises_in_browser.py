"""After each button of the page somebody sees what it promises: on the screen, in its column, with nothing over it; at every size."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page, TimeoutError, expect

from sd_scripts.families import FACTS
from tests.ui import full_studio
from tests.ui.on_screen import Eyes

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
SIZES = [(1280, 720), (1440, 900), (1920, 1080), (2560, 1440), (390, 844)]
RUNS, TOOLS, INFERENCE = "#kl-runs", "#kl-tools", "#kl-inference"


@dataclass(frozen=True)
class Promise:
    """A button, and what it promises."""

    button: str
    """A regular expression for all of its name."""
    shows: str
    """CSS of what is on the screen afterwards."""
    says: str = ""
    """A regular expression for what that says."""
    place: str = ""
    """CSS of where the button stands, where there are several."""
    gives: str = ""
    """What the browser does besides: a download, or a filechooser, which takes the settings of a run."""
    at_once: bool = True
    """It is in sight without scrolling."""
    before: Callable[[Page, Path], object] | None = None
    rare: bool = False
    """Pressed by the long form alone: another like it is always pressed."""


def fill(**texts: str) -> Callable[[Page, Path], None]:
    def act(page: Page, _root: Path) -> None:
        for name, text in texts.items():
            page.locator(f"#kl-{name}").fill(text)

    return act


THEME = "Switch between the light and the dark theme"
SESSION = "a" * 32
"""Of this browser, to the Generate tab."""
DEMO = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star"}
LIVE, MADE = "#kl-live", ".kl-exported"


def group(title: str, field: str) -> Promise:
    """An accordion of the form, which shows its fields."""
    return Promise(
        f"{title}.* (settings|changed|problems?)",
        f"[data-name={field}]",
        place=".kl-main",
        rare=title not in ("Model", "Resume & Distributed"),
    )


def row(name: str) -> Promise:
    """A run in the list of all."""
    return Promise(f"{name}.*(Running|Finished|Stopped|Stopping|Failed|Died|Waiting)", f"{RUNS} .kr-title", f"^{name}$", f"{RUNS} .kr-list")


def fold(name: str, place: str, inside: str, rare: bool = False) -> Promise:
    """Something that opens; what opens is the last that is open, so those of one place are pressed from the first to the last."""
    return Promise(name, f"{place} details[open]:not(:has(~ details[open])) {inside}", place=place, rare=rare)


def again(page: Page, _root: Path) -> None:
    """The page as it is at a first visit."""
    page.evaluate("localStorage.clear(); sessionStorage.clear()")
    page.route("**/kl/runs", lambda route: route.fulfill(json={"runs": [], "sweeps": False}))
    page.reload()
    page.wait_for_selector(".kl-welcome")
    page.unroute("**/kl/runs")


def name_kohya(page: Page, root: Path) -> None:
    """Settings as another program keeps them, and their path in its field."""
    path = root.parent / "theirs.json"
    path.write_text(json.dumps({"LoRA_type": "Standard", "network_dim": 8, "unet_lr": 0.0001, "sdxl": True, "logging_dir": "a"}))
    page.locator("#kl-load-path").fill(str(path))


def name_images(page: Page, root: Path) -> None:
    """A folder with an image, for the guide."""
    folder = root.parent / "photos"
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (80, 64), "teal").save(folder / "a.png")
    page.locator("#kl-guide-folder").fill(str(folder))


def choose_images(page: Page, root: Path) -> None:
    """Images in the form, two of them nearly the same, whose captions nobody has written yet."""
    folder = root.parent / "mine"
    folder.mkdir(exist_ok=True)
    for number, side in enumerate((64, 96, 64)):
        grey = Image.radial_gradient("L") if number < 2 else Image.linear_gradient("L")
        grey.resize((side, side)).convert("RGB").save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a shape, grey")
    page.locator("#kl-family-sdxl").check()
    page.locator("#kl-mode-lora").check()
    fill(pretrained_model_name_or_path="toy", train_data_dir=str(folder))(page, root)


def choose_cell(page: Page, _root: Path) -> None:
    page.locator(".kl-data-cell").last.click()
    expect(page.locator(".kl-data-shown p")).not_to_have_count(0)


def write_caption(page: Page, root: Path) -> None:
    page.locator("#kl-data-search").fill("")
    choose_cell(page, root)
    page.locator("#kl-data-text").fill("a shape, seen here")


def send_away(page: Page, _root: Path) -> None:
    """Captions by a server that does not answer, so that there is time to stop."""
    page.locator("#kl-data-work-caption_model").fill("theirs")
    page.locator("#kl-data-work-endpoint").fill("http://127.0.0.1:9/v1")
    # All have captions: without this there would be nothing to do.
    page.locator("#kl-data-work-overwrite").check()


def stop_work(page: Page, _root: Path) -> None:
    work = page.locator(".kl-data-work")
    # It may have given up on the server by itself.
    expect(work.get_by_role("button", name=re.compile("^(Stop|Resume)$"))).to_be_visible()
    if work.get_by_role("button", name="Stop").count():
        work.get_by_role("button", name="Stop").click()
    expect(work.get_by_role("button", name="Resume")).to_be_visible()


def take_alpha(page: Page, _root: Path) -> None:
    page.locator("#kl-data-work-mask_model").fill("alpha")


def wait_for_work(page: Page, _root: Path) -> None:
    expect(page.locator(".kl-data-work .kr-badge")).to_have_text("Finished", timeout=120_000)


def conflict(page: Page, root: Path) -> None:
    """Two pages write the same caption."""
    (root.parent / "mine" / "2.txt").write_text(f"theirs {time.monotonic_ns()}")
    page.locator("#kl-data-text").fill(f"mine {time.monotonic_ns()}")
    page.locator("#kl-data-text").press("Control+Enter")


def plan_sweep(page: Page, _root: Path) -> None:
    page.get_by_role("tab", name="Train").click()
    card = page.locator(".kl-sweeping")
    if not card.evaluate("card => card.open"):
        card.locator("summary").click()
    page.locator("#kl-pretrained_model_name_or_path").fill("toy")
    page.locator("#kl-train_data_dir").fill("toy:star")
    # The first setting may be the one that was added, and names none yet.
    card.get_by_label("Setting 1", exact=True).select_option("learning_rate")
    card.get_by_label("Values of setting 1").fill("1e-4 1e-3")
    expect(card.get_by_role("button", name="Start sweep")).to_be_enabled()


def choose_preset(page: Page, _root: Path) -> None:
    page.get_by_label("Preset", exact=True).select_option(label="Style, 24 GB")


def be_known(page: Page, _root: Path) -> None:
    """The browser that has made the predictions."""
    page.evaluate(f"localStorage.setItem('kl.session', JSON.stringify('{SESSION}'))")


PROMISES: list[Promise] = [
    Promise(THEME, "body.dark .kl-theme", "Light"),
    Promise(THEME, "body:not(.dark) .kl-theme", "Dark"),
    Promise("Go to", ".kl-dialog #kl-palette li"),
    # The first visit. Another run takes the only device: what is started here waits.
    Promise("I have my own images", "#kl-add-name", before=again),
    Promise("Cancel", ".kl-kinds", place=".kl-dialog", at_once=False),
    Promise("Guide me", ".kl-guide"),
    Promise("A (person|style)|An (object|edit)", ".kl-guide .kl-note", place=".kl-guide"),
    Promise("Fill in the form", ".kl-dialog .kl-error", "Say where the images are"),
    Promise("Fill in the form", ".kl-explained", "Base model", ".kl-dialog", before=name_images),
    Promise("Look at the form first", "#kl-start"),
    Promise("Explain my settings", ".kl-explained", "Output name is photos"),
    Promise("Go to Output name", "#kl-output_name"),
    Promise("Explain my settings", ".kl-explained", rare=True),
    Promise("Go to .*", "#kl-pretrained_model_name_or_path", rare=True),
    Promise("Explain my settings", ".kl-explained"),
    Promise("Close the explanation", "#kl-start"),
    Promise("Guide me", ".kl-guide"),
    Promise("Close the guide", "#kl-start"),
    Promise("Train the demo", f"{LIVE} .kr-run", r"toy-star[\s\S]*Waiting", before=again),
    Promise("Start training", ".kl-problems", "waits in the queue"),
    Promise("Open it", f"{RUNS} .kr-title", "toy-star"),
    Promise("Stop", f"{RUNS} .kr-run .kr-badge", "Stopped", RUNS),
    Promise("Train", "#kl-start"),
    Promise("resume: .*", "#kl-resume-choice"),
    # The run before it has the same name, and may be told to wait for a moment longer.
    Promise("Train again", ".kl-answer", "Starts a new run.*waits"),
    Promise("Stop", ".kl-answer", "[Ss]top", ".kl-buttons"),
    Promise("Start training", f"{LIVE} .kr-run", r"second[\s\S]*Waiting", before=fill(output_name="second")),
    Promise("Stop", ".kl-answer", "[Ss]top", ".kl-buttons"),
    # The form.
    Promise("Print command", ".kl-output pre"),
    Promise("Copy the command", "[aria-label='Copy the command']", "Copied"),
    Promise("Copy the TOML", "[aria-label='Copy the TOML']", "Copied", rare=True),
    Promise("Save TOML", "#kl-keep", gives="download"),
    Promise("Save for sd-scripts", "#kl-keep", gives="download"),
    Promise("Save for ai-toolkit", "#kl-keep", gives="download"),
    Promise("Save for musubi-tuner", ".kl-problems", "musubi-tuner does not train"),
    Promise("Save for OneTrainer", "#kl-keep", gives="download"),
    Promise("Check data set", ".kl-report .kl-factlist"),
    Promise("Export for cluster.*", ".kl-export .kl-grid"),
    Promise("Sweep.*", ".kl-sweep-row"),
    Promise("Another setting", ".kl-sweep-row:nth-child(2)"),
    Promise("Remove setting .*", ".kl-sweep", at_once=False),
    Promise("More", ".kl-export .kl-fold[open] .kl-field", place=".kl-export"),
    Promise("Write the files", MADE),
    Promise("Download .*[.]zip", MADE, gives="download"),
    fold(".*[.](sbatch|sh|toml|md|yaml)", MADE, "pre"),
    Promise("Estimate memory", ".kl-memory-status", "pretrained_model_name_or_path", before=fill(pretrained_model_name_or_path="")),
    Promise("Check data set", ".kl-problems", "is missing", before=fill(train_data_dir="")),
    Promise("(pretrained_model_name_or_path|train_data_dir)( is|:) .*", "#kl-train_data_dir"),
    Promise("Use this preset", ".kl-preset .kl-note", "The form now has", before=choose_preset),
    Promise("Not now", "#kl-preset", before=choose_preset, place=".kl-preset", rare=True),
    Promise("Save these settings as a preset", "#kl-preset-name"),
    Promise("Save my settings", ".kl-preset .kl-note", "Saved as Mine", before=fill(**DEMO, **{"preset-name": "Mine"})),
    Promise("Reset .*", "#kl-network_dim", place="[data-name=network_dim]", before=fill(network_dim="7")),
    Promise("Open a file", ".kl-answer", "Settings loaded: config.toml", gives="filechooser"),
    Promise("Open the file at this path", ".kl-import", "What became of", before=name_kohya),
    Promise("(taken|renamed|not needed|not supported|unknown) .*", ".kl-import .kl-table"),
    Promise("Copy the report", "[aria-label='Copy the report']", "Copied", rare=True),
    Promise("Close the import report", "#kl-keep"),
    Promise("Close all", ".kl-section:not([open]) > summary"),
    Promise("Undo", ".kl-undo:not(:disabled)", before=fill(output_name="another")),
    Promise("Redo", ".kl-undo:not(:disabled)"),
    group("Model", "revision"),
    group("Dataset", "reg_data_dir"),
    group("Network", "network_type"),
    group("Optimizer", "optimizer_type"),
    group("Advanced Training", "max_train_epochs"),
    group("Torch Compile", "compile"),
    group("Memory", "gradient_checkpointing"),
    group("Resume & Distributed", "resume"),
    group("Samples", "sample_every_n_steps"),
    group("Saving", "save_every_n_steps"),
    Promise("Open all", ".kl-section[open] [data-name=revision]"),
    Promise("Show .* more settings?, for when .*", "[data-name=launcher]", place=".kl-block:has([data-name=launcher])"),
    Promise("Close all", ".kl-section:not([open]) > summary"),
    Promise("As text", "#kl-sample_prompts", rare=True),
    Promise("As text", ".kl-prompts", rare=True),
    Promise("Add a prompt", ".kl-prompt textarea:focus"),
    Promise("Negative, size, seed .*", ".kl-prompt-more[open] .kl-prompt-cells"),
    Promise("Remove prompt .*", ".kl-prompts"),
    # Over the form: files on the studio's computer, and images that are added.
    Promise("Browse for .*", ".kl-pick-list", place="[data-name=train_data_dir]"),
    Promise("One folder up", ".kl-pick-path"),
    Promise("Use this folder", "#kl-train_data_dir"),
    Promise("Browse for .*", ".kl-pick-list", place="[data-name=pretrained_model_name_or_path]", rare=True),
    Promise("Close without choosing", "#kl-pretrained_model_name_or_path", rare=True),
    Promise("Add images", "#kl-add-name"),
    Promise("Choose (images or zips|a folder)", "#kl-add-go", "Add", gives="filechooser"),
    Promise("Add", ".kl-dialog .kl-status", "Left out", place=".kl-dialog"),
    Promise("Cancel|Done", "#kl-train_data_dir", place=".kl-dialog", at_once=False),
    Promise(
        "|".join(re.escape(facts.label) for facts in FACTS.values()),
        "#kl-mode-about",
    ),
    Promise("DreamBooth|Fine-tuning|LoRA|From nothing", "#kl-mode-about"),
    # The run beside the form.
    Promise("Learning rate", f"{LIVE} .kr-stage", place=LIVE),
    Promise("Log scale", f"{LIVE} .kr-stage", place=LIVE, rare=True),
    Promise("Raw", f"{LIVE} .kr-stage", place=LIVE, rare=True),
    fold("Console", LIVE, ".kr-console", rare=True),
    # Runs.
    Promise("Runs", f"{RUNS} .kr-run"),
    row("whole"),
    Promise("Prompt .*", f"{RUNS} .kr-pair", place=f"{RUNS} .kr-thumb:last-child"),
    Promise(".*[.](safetensors|toml|json|csv)", f"{RUNS} .kr-files", gives="download", place=f"{RUNS} .kr-files"),
    fold("Console", RUNS, ".kr-console"),
    row("styles"),
    Promise("style distance|content difference|flow matching", f"{RUNS} .kr-lines-plot .kr-stage", place=RUNS),
    Promise(
        "SWD to the target style|share of the source's SWD|structure",
        f"{RUNS} .kr-lines-plot + .kr-lines-plot .kr-stage",
        place=RUNS,
        rare=True,
    ),
    Promise("Smoothed", f"{RUNS} .kr-lines-plot .kr-stage", place=RUNS, rare=True),
    Promise("Parts of the loss.*", f"{RUNS} .kr-lines-plot:not([open]) > summary", place=RUNS, rare=True),
    Promise("Evaluations.*", f"{RUNS} .kr-lines-plot + .kr-lines-plot:not([open]) > summary", place=RUNS, rare=True),
    Promise("Parts of the loss.*", f"{RUNS} .kr-lines-plot[open] .kr-stage", place=RUNS, rare=True),
    Promise("(flat|line|night)(,| to) .*", f"{RUNS} .kr-matrix-view .kr-pair", place=RUNS),
    Promise("Transfer a style", f"{RUNS} .kr-draw-form", place=f"{RUNS} .kr-actions"),
    Promise("Target style: .*", f"{RUNS} .kr-choices", place=RUNS, rare=True),
    Promise("Image 1, seed 7", f"{RUNS} .kr-draw-chosen img", place=RUNS),
    Promise("All images in one file", f"{RUNS} .kr-draw-chosen img", place=RUNS, rare=True),
    Promise("Download", f"{RUNS} .kr-draw-images .kr-actions", gives="download", place=RUNS),
    Promise("Use seed 7 again", "#kl-draw-seed", place=RUNS),
    Promise("Use these settings", "#kl-draw-ckpt", place=f"{RUNS} .kr-draw"),
    Promise("Transfer", "#kl-draw-image-error", "cannot be read", f"{RUNS} .kr-draw-form"),
    row("resumable"),
    Promise("Resume", f"{RUNS} .kr-run", "Waits", RUNS),
    row("no-memory"),
    Promise("Change this and start again", f"{RUNS} .kr-status", "Started again", f"{RUNS} .kr-fix"),
    Promise("Hold", f"{RUNS} .kr-phase", "Held", f"{RUNS} .kr-queue"),
    Promise("Release", f"{RUNS} .kr-phase", "Waits", f"{RUNS} .kr-queue"),
    Promise("Earlier", f"{RUNS} .kr-queue", "1 of 2 that wait", f"{RUNS} .kr-queue"),
    Promise("Later", f"{RUNS} .kr-queue", "2 of 2 that wait", f"{RUNS} .kr-queue", rare=True),
    Promise("Stop", f"{RUNS} .kr-run .kr-badge", "Stopped", RUNS),
    row("resumable"),
    Promise("Stop", f"{RUNS} .kr-run .kr-badge", "Stopped", RUNS),
    row("shapes"),
    Promise("Draw", f"{RUNS} .kr-draw-form", place=f"{RUNS} .kr-actions"),
    fold("More", f"{RUNS} .kr-draw", ".kl-field"),
    Promise("Draw images with this model", f"{RUNS} .kr-draw:not([open]) > summary", place=RUNS),
    row("under-way"),
    Promise("Copy command", f"{RUNS} .kr-status", "clipboard", RUNS),
    Promise("Save now", f"{RUNS} .kr-status", "saves its file", RUNS),
    Promise("Sample now", f"{RUNS} .kr-status", "draws its sample prompts", RUNS),
    Promise("Pause", f"{RUNS} .kr-status", "waits", RUNS),
    Promise("Go on", f"{RUNS} .kr-status", "goes on", RUNS),
    Promise("Set", f"{RUNS} .kr-desk", "whole number", RUNS, rare=True),
    Promise("Set", f"{RUNS} .kr-status", "end after step 99999", RUNS, before=fill(**{"stop-at": "99999"})),
    Promise("Train to the end", f"{RUNS} .kr-status", "to its last step", RUNS),
    fold("Prompts", f"{RUNS} .kr-desk", "#kl-run-prompts"),
    Promise("Sample these once", f"{RUNS} .kr-status", "once", RUNS),
    Promise("Use these from now on", f"{RUNS} .kr-status", "from now on", RUNS),
    Promise("Stop", f"{RUNS} .kr-status", "Asked to stop", RUNS),
    Promise("End now", f"{RUNS} .kr-status", "Ended", RUNS),
    row("broken"),
    Promise("[☆★] Star", f"{RUNS} .kr-desk [aria-pressed=true]", place=f"{RUNS} .kr-desk"),
    Promise("Report", f"{RUNS} .kr-desk", gives="download", place=f"{RUNS} .kr-desk"),
    Promise("Support file", f"{RUNS} .kr-desk", gives="download", place=f"{RUNS} .kr-desk"),
    Promise("Name, tags, notes", "#kl-desk-label:focus"),
    Promise("Leave as it was", f"{RUNS} .kr-desk-edit:focus"),
    Promise("Name, tags, notes", "#kl-desk-label:focus", rare=True),
    Promise("Save", f"{RUNS} .kr-desk-edit:focus", place=f"{RUNS} .kr-desk", rare=True),
    Promise("Delete", ".kl-dialog", "trash", place=f"{RUNS} .kr-desk"),
    Promise("Keep it", f"{RUNS} .kr-title", "^broken$", place=".kl-dialog", at_once=False, rare=True),
    Promise("Delete", ".kl-dialog", "trash", place=f"{RUNS} .kr-desk", rare=True),
    Promise("Move to the trash", f"{RUNS} .kr-status", "is in the trash", place=".kl-dialog"),
    Promise("Compare runs", f"{RUNS} .kr-nav input:checked", place=f"{RUNS} .kr-nav", at_once=False),
    Promise("Held-out loss", f"{RUNS} .kr-beside-one-another .kr-stage", place=RUNS, at_once=False),
    Promise("Open run .*", f"{RUNS} .kr-desk", place=RUNS),
    Promise("Compare runs", f"{RUNS} .kr-nav input:checked", place=f"{RUNS} .kr-nav", at_once=False, rare=True),
    Promise("Back to one run", f"{RUNS} .kr-nav .kr-row", place=f"{RUNS} .kr-nav", rare=True),
    Promise("Notices", "#kl-notice-url"),
    Promise("Send a test", ".kl-dialog .kl-status", "Give an address first", ".kl-dialog"),
    Promise("Keep this address", ".kl-dialog .kl-status", "Nothing is sent", ".kl-dialog"),
    Promise("Close", f"{RUNS} .kr-nav .kr-actions", place=".kl-dialog"),
    Promise("Disk and trash", ".kr-tidy", "Trash"),
    Promise("Put broken .* back", ".kr-tidy .kr-status", "is back", rare=True),
    Promise("Close", f"{RUNS} .kr-nav .kr-actions", place=".kl-dialog", rare=True),
    Promise("broken.*Failed", f"{RUNS} .kr-title", "^broken$", f"{RUNS} .kr-list", rare=True),
    Promise("Delete", ".kl-dialog", "trash", place=f"{RUNS} .kr-desk", rare=True),
    Promise("Move to the trash", f"{RUNS} .kr-status", "is in the trash", place=".kl-dialog", rare=True),
    Promise("Disk and trash", ".kr-tidy", "Trash", rare=True),
    Promise("Clean up states.*", ".kr-tidy .kr-danger", "Really delete"),
    Promise("Really delete [0-9]+ states?", ".kr-tidy .kr-status", "are free again"),
    Promise("Empty the trash.*", ".kr-tidy .kr-danger", "Really delete"),
    Promise("Really delete for ever", ".kr-tidy", "It is empty"),
    Promise("Close", f"{RUNS} .kr-nav .kr-actions", place=".kl-dialog"),
    row("toy-star"),
    row("second"),
    Promise("Use these settings", ".kl-answer", "Settings loaded", f"{RUNS} .kr-actions"),
    Promise("Runs", f"{RUNS} .kr-run"),
    row("whole"),
    Promise("Try it", "#kl-inf-prompt", place=f"{RUNS} .kr-actions", before=be_known),
    Promise("Runs", f"{RUNS} .kr-run"),
    # Tools.
    Promise("Verify whole.safetensors", f"{TOOLS} .kl-tool-side", "Verify LoRA"),
    Promise("Cancel", f"{TOOLS} .kr-badge", "Cancelled"),
    Promise("Tools", "#kl-tool-model"),
    Promise("Merge LoRA|Extract LoRA|Resize LoRA|Convert LoRA|Metadata|Fetch model", "#kl-tool-models", place=".kl-option"),
    Promise("Verify LoRA, .*", f"{TOOLS} .kl-tool-report"),
    fold("All figures", TOOLS, ".kl-part-of"),
    Promise("Layers1", f"{TOOLS} .kl-part-of .kl-part-of:not([open]) > summary", rare=True),
    fold("Console", TOOLS, ".kr-console", rare=True),
    Promise("Verify LoRA", "#kl-tool-model", place=".kl-option"),
    Promise("Verify LoRA", "#kl-tool-model-error", place=".kl-tool-form > .kl-row", before=fill(**{"tool-model": ""})),
    fold("More", TOOLS, ".kl-field", rare=True),
    # Generate.
    Promise("Generate", "#kl-inf-prompt", place="[role=tablist]", before=be_known),
    Promise("base|whole", ".kl-pair", place=".kl-inf-grid"),
    Promise("Download .*", ".kl-inf-view .kl-row", gives="download", place=INFERENCE),
    Promise("make the sky red, .*", ".kl-pair", rare=True),
    Promise("Use these settings", ".kl-inf-go .kl-note", "settings of this image", place=INFERENCE),
    Promise("Remove image 1", ".kl-inf-add"),
    Promise("Edit this further", "#kl-inf-prompt:focus"),
    Promise("Add a LoRA", ".kl-inf-lora"),
    Promise("Remove LoRA file 1", "#kl-inf-add-lora"),
    fold("Base model", INFERENCE, ".kl-field", rare=True),
    fold("More", INFERENCE, ".kl-field", rare=True),
    fold("More of the model", INFERENCE, ".kl-field", rare=True),
    fold("Devices and memory", INFERENCE, ".kl-field", rare=True),
    fold("What is compared", INFERENCE, ".kl-inf-checks"),
    Promise("Send to Compare", "#kl-inf-prompts", place=INFERENCE),
    fold("Why does it look different\\?", ".kl-tool-side", ".kl-upload"),
    Promise("Image of another program", ".kl-inf-told .kl-error", "no PNG that can be read", gives="filechooser"),
    Promise("Compare", "#kl-inf-wrong", "[Nn]othing to compare", place=".kl-inf-form"),
    Promise("Grids", ".kl-compare", place=".kl-inf-views"),
    Promise("Draw", "#kl-inf-prompt", place=".kl-inf-views"),
    Promise("Generate", "#kl-inf-steps-error", place=INFERENCE, before=fill(**{"inf-steps": "0"})),
    # Help.
    Promise("Help", ".kl-guide"),
    # Data. The form has images of one's own now.
    Promise("Train", "#kl-start", at_once=False),
    Promise("Data", ".kl-data-cell", place="[role=tablist]", before=choose_images),
    Promise("[0-9]+ findings?", "#kl-data .kl-fold[open] li"),
    Promise("More", "#kl-data .kl-menu[open] button", place="#kl-data"),
    Promise("Open a folder", ".kl-pick-list"),
    Promise("Close without choosing", ".kl-data-cell"),
    Promise("More", "#kl-data .kl-menu[open] button", place="#kl-data"),
    Promise("Open again", ".kl-data-cell"),
    Promise("Write captions", "#kl-data-work-caption_model"),
    fold("More", ".kl-dialog", ".kl-field", rare=True),
    Promise("Browse for Caption model", ".kl-pick-list", rare=True),
    Promise("Close without choosing", "#kl-data-work-caption_model", rare=True),
    Promise("Start: Write captions", ".kl-data-leaving", "Not sent", before=send_away),
    Promise("Back to the form", "#kl-data-work-caption_model", at_once=False),
    Promise("Close the form", ".kl-data-cell"),
    Promise("Write captions", "#kl-data-work-caption_model"),
    Promise("Start: Write captions", ".kl-data-leaving", "Not sent", before=send_away),
    Promise("Send them", ".kl-data-work .kr-badge", "Running|Failed|Starting"),
    Promise("Stop", ".kl-data-work .kr-badge", "Stopped", place=".kl-data-work"),
    Promise("Resume", ".kl-data-work .kr-badge", "Running", place=".kl-data-work"),
    fold("Console", ".kl-data-work", ".kr-console", rare=True),
    Promise("Close what was done", ".kl-data-cell", before=stop_work),
    Promise("Make masks", "#kl-data-work-mask_model"),
    Promise("Browse for Mask model", ".kl-pick-list", rare=True),
    Promise("Close without choosing", "#kl-data-work-mask_model", rare=True),
    Promise("Start: Make masks", ".kl-data-work .kr-badge", "Starting|Running|Finished", before=take_alpha),
    Promise("Close what was done", ".kl-data-cell", before=wait_for_work),
    Promise("Search and replace", "#kl-data-find"),
    Promise("Preview", ".kl-data-rows ins", "zwx", before=lambda page, _root: page.locator("#kl-data-prefix").fill("zwx, ")),
    Promise("Change them", ".kl-data-caption", "zwx"),
    Promise("Undo", "#kl-data .kl-status", "Taken back"),
    Promise("Tags", ".kl-data-tags"),
    Promise("Show .*, [0-9]+", ".kl-data-cell"),
    Promise("Tags", ".kl-data-tags", rare=True),
    Promise("Close the tags", ".kl-data-cell", rare=True),
    Promise("Search and replace", "#kl-data-find"),
    Promise("Close without changing", ".kl-data-cell"),
    Promise("Save caption", "#kl-data-told", "Saved", before=write_caption),
    Promise("Edit the loss mask", ".kl-mask-canvas"),
    Promise("Erase|Exclude point|Box|Paint", ".kl-mask-canvas"),
    Promise("Fill", ".kl-mask .kl-status", "Not saved yet"),
    Promise("Clear", ".kl-mask .kl-status", "Not saved yet"),
    Promise("Undo the last stroke", ".kl-mask-canvas"),
    Promise("Redo the stroke", ".kl-mask-canvas"),
    Promise("Invert the mask", ".kl-mask .kl-status", "Not saved yet"),
    Promise("Save mask", ".kl-mask .kl-status", "Saved in"),
    Promise("Remove mask", ".kl-mask .kl-status", "removed"),
    # In a narrow window the images lie above.
    Promise("Close the mask", "#kl-data-text"),
    Promise("Edit the loss mask", ".kl-mask-canvas"),
    Promise("Include point", ".kl-mask-canvas"),
    Promise("Segment with a model …", "#kl-data-work-mask_points", before=lambda page, _root: page.locator(".kl-mask-canvas").click()),
    Promise("Close the form", "#kl-data-text"),
    Promise("Keep mine", "#kl-data-told", "Saved", before=conflict),
    Promise("Take theirs", "#kl-data-told", "About", before=conflict),
    Promise("Next", "#kl-data-text"),
    Promise("Previous", "#kl-data-text"),
    Promise("More", "#kl-data .kl-menu[open] button", place="#kl-data"),
    Promise("Find faces cut off", "#kl-data-work-face_model"),
    Promise("Browse for Face model", ".kl-pick-list", rare=True),
    Promise("Close without choosing", "#kl-data-work-face_model", rare=True),
    Promise("Start: Find faces cut off", "#kl-data-work-face_model"),
    Promise("Close the form", ".kl-data-cell"),
    Promise("More", "#kl-data .kl-menu[open] button", place="#kl-data"),
    Promise("Find near duplicates with a model", "#kl-data-work-image_model"),
    Promise("Browse for Image model", ".kl-pick-list", rare=True),
    Promise("Close without choosing", "#kl-data-work-image_model", rare=True),
    Promise("Start: Find near duplicates with a model", "#kl-data-work-image_model"),
    Promise("Close the form", ".kl-data-cell"),
    Promise("More", "#kl-data .kl-menu[open] button", place="#kl-data"),
    Promise("Find duplicates and blur", ".kl-data-group"),
    Promise("Close the proposals", ".kl-data-cell"),
    Promise("More", "#kl-data .kl-menu[open] button", place="#kl-data"),
    Promise("Find duplicates and blur", ".kl-data-group"),
    Promise("Leave out [0-9]+ images?", "#kl-data .kl-status", "Left out: 1 image"),
    Promise("Bring back what was left out", "#kl-data .kl-status", "Brought back: 1 image"),
    Promise("Leave out", "#kl-data .kl-status", "Left out: 1 image", place=".kl-data-panel", before=choose_cell),
    # The last, because the runs that it queues are in every list afterwards.
    Promise("Start sweep", ".kl-sweeping [role=status]", "has begun", before=plan_sweep, rare=True),
]


@pytest.fixture
def place(studios: Callable[..., Any], tmp_path: Path) -> Iterator[Any]:
    """A studio that was opened on an empty folder, which has runs of every kind now and one that is under way."""
    root = tmp_path / "output"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
        studio = studios(output_dir=root)
        supervisor, _ = full_studio.under_way(root)
        yield studio
        studio.end()
        for job in supervisor._look():
            supervisor.stop(job, grace_seconds=0)
        supervisor.close()


def kept(page: Page, root: Path, promise: Promise, others: list[tuple[int, int]]) -> list[str]:
    """Presses a button, and tells what is wrong with what it shows, here and at other sizes."""
    eyes = Eyes(page)
    try:
        if promise.before:
            promise.before(page, root)
        with {"download": page.expect_download, "filechooser": page.expect_file_chooser}.get(promise.gives, nullcontext)() as given:
            faults = eyes.press(promise.button, promise.place)
        if promise.gives == "filechooser":
            given.value.set_files(next(root.glob("*-whole/config.toml")))
    except (TimeoutError, AssertionError) as err:
        # The walk goes on, so that one of them tells all that is wrong.
        faults = [str(err).splitlines()[0]]
    if faults:
        return faults
    faults = eyes.faults(promise.shows, promise.says, promise.at_once) + eyes.flaws()
    here = page.viewport_size
    for width, height in others:
        page.set_viewport_size({"width": width, "height": height})
        faults += [f"{line}, at {width}x{height}" for line in eyes.faults(promise.shows, promise.says, at_once=False) + eyes.flaws()]
    if others and here:
        page.set_viewport_size(here)
    return faults


def walk(page: Page, root: Path, promises: list[Promise], others: list[tuple[int, int]]) -> list[str]:
    """Presses the buttons in order, and tells each that keeps no promise, or that no promise is written for.

    others: sizes at which what they show is looked at too, but for the rare ones, which are left out then.
    """
    found, unknown = [], {}
    for promise in promises:
        if others and promise.rare:
            continue
        found += [f"{promise.button}: {promise.shows} {fault}" for fault in kept(page, root, promise, others)]
        names = [name for name in Eyes(page).buttons() if not any(re.fullmatch(known.button, name) for known in promises)]
        unknown |= {name: promise.button for name in names if name not in unknown}
    return found + [f"{name}: no promise is written for this button, which is there after {after}" for name, after in unknown.items()]


@pytest.mark.parametrize(
    "sizes",
    [SIZES[::4], *(pytest.param([size], marks=pytest.mark.long) for size in SIZES)],
    ids=lambda sizes: "-".join(f"{width}x{height}" for width, height in sizes),
)
def test_what_each_button_promises_can_be_seen(sizes: list[tuple[int, int]], place: Any, visit: Callable[..., Any]) -> None:
    page = visit(place.url, width=sizes[0][0], height=sizes[0][1]).page
    # Before the others come: one of them may look as if it trained, while its folder is being written.
    expect(page.locator("#kl-live .kr-title")).to_have_text("under-way")
    full_studio.fill(place.output_dir, SESSION)
    found = walk(page, place.output_dir, PROMISES, sizes[1:])
    assert not found, "\n".join(found)


def test_the_skip_links_lead_to_start_from_every_tab(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    for tab in ("Train", "Help", "Runs"):
        page.get_by_role("tab", name=tab).click()
        for skip in page.locator(".kl-skip").all():
            # That of the presets is on the Train tab.
            if not skip.evaluate("node => node.checkVisibility()"):
                continue
            skip.focus()
            box = skip.bounding_box()
            assert box and box["width"] > 100 and box["x"] >= 0 and box["y"] >= 0, "it shows while it has the focus"
            page.keyboard.press("Enter")
            expect(page.locator("#kl-start")).to_be_focused()
            assert Eyes(page).faults("#kl-start") == []
