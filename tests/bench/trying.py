"""A run that was just trained on a toy, by real clicks in a headless Chromium: seconds of "Try it" with a cold worker, of a grid of three
checkpoints and four prompts, of a blind vote, the pick and the saved files; screenshots of the grid and the pick, wide and on a phone.

usage: trying.py [--steps 12] [--folder where] preset ...
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image, ImageDraw
from playwright.sync_api import Page, expect, sync_playwright
from studio import ROOT, chromium, start

PROMPTS = "a star\na red star\na blue star\na circle"
EDITS = "add a border\nmake it red\nmake it blue\nremove it"


def trained(preset: Path, folder: Path, steps: int) -> None:
    """A short run with three checkpoints, whose held-out losses are measured."""
    script = ROOT / "sd_scripts" / f"{preset.parent.name}.py"
    every = str(steps // 3)
    lines = ["--max_train_steps", str(steps), "--save_every_n_steps", every, "--validate_every_n_steps", every, "--validation_split", "0.2"]
    lines += ["--output_dir", str(folder), "--preflight", "off"]
    subprocess.run([sys.executable, str(script), "--config_file", str(preset), *lines], check=True, stdout=subprocess.DEVNULL)


def control() -> bytes:
    """A red circle on grey, to be edited."""
    image, stream = Image.new("RGB", (64, 64), (230, 230, 230)), io.BytesIO()
    ImageDraw.Draw(image).ellipse((18, 18, 46, 46), fill=(200, 30, 30))
    image.save(stream, format="PNG")
    return stream.getvalue()


def edits(page: Page) -> bool:
    """Whether what is drawn with takes images."""
    return page.locator("#kl-inf-file").is_visible()


def prompts(page: Page) -> str:
    return EDITS if edits(page) else PROMPTS


def tried(page: Page) -> float:
    """Seconds from the first click to the image."""
    begun = time.perf_counter()
    page.get_by_role("button", name="Try it").click()
    expect(page.locator("#kl-inf-go")).to_be_enabled(timeout=60_000)
    if edits(page):
        page.locator("#kl-inf-file").set_input_files({"name": "before.png", "mimeType": "image/png", "buffer": control()})
        page.locator(".kl-inf-slot img").wait_for()
    page.locator("#kl-inf-prompt").fill(prompts(page).splitlines()[0])
    page.locator("#kl-inf-go").click()
    page.wait_for_function("document.querySelector('.kl-after')?.naturalWidth > 0", timeout=300_000)
    return time.perf_counter() - begun


def compared(page: Page) -> float:
    """Seconds of the grid, from the click on Compare."""
    page.get_by_text("What is compared").click()
    page.locator("#kl-inf-prompts").fill(prompts(page))
    begun = time.perf_counter()
    page.locator("#kl-inf-compare").click()
    expect(page.locator(".kl-compare [role=status]").first).to_contain_text("Complete", timeout=600_000)
    return time.perf_counter() - begun


def picked(page: Page) -> tuple[float, str]:
    """Seconds of one vote and of the pick with its numbers, and what was proposed."""
    begun = time.perf_counter()
    page.get_by_role("button", name="Blind vote").click()
    page.locator(".kl-vote-pair img").first.wait_for()
    page.keyboard.press("1")
    expect(page.locator(".kl-vote [role=status]")).to_contain_text("1 vote")
    page.get_by_role("button", name="Back to the grid").click()
    page.get_by_role("button", name="Numbers and pick").click()
    choose = page.get_by_role("button", name="Choose").first
    expect(page.locator(".kl-pick [role=status]")).to_contain_text("proposed", timeout=120_000)
    said = page.locator(".kl-pick [role=status]").inner_text()
    choose.click()
    expect(page.locator(".kl-pick [role=status]")).to_contain_text("Chosen in")
    return time.perf_counter() - begun, said


def saved(page: Page) -> list[str]:
    """The files that the grid was saved as."""
    found = []
    for kind in ("HTML", "PNG"):
        with page.expect_download() as given:
            page.get_by_role("link", name=f"Save as {kind}").click()
        found.append(f"{kind} {given.value.path().stat().st_size / 1024:.0f} KiB")
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("presets", nargs="+", type=Path)
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    given = arguments.parse_args()
    for preset in given.presets:
        with tempfile.TemporaryDirectory() as made, sync_playwright() as driver:
            trained(preset.resolve(), Path(made), given.steps)
            process, url, *_ = start(Path(made))
            browser = chromium(driver)
            page = browser.new_page(viewport={"width": 1280, "height": 720})
            page.goto(f"{url}?__theme=light#runs")
            page.locator(".kr-row").first.click()
            cold, grid = tried(page), compared(page)
            pick, said = picked(page)
            print(
                f"{preset.stem}: cold Try it {cold:.1f} s, grid {grid:.1f} s, vote and pick {pick:.1f} s, {', '.join(saved(page))}; {said}",
                flush=True,
            )
            for width, height, theme in ((1280, 720, "light"), (390, 844, "dark")):
                page.set_viewport_size({"width": width, "height": height})
                page.evaluate("dark => document.body.classList.toggle('dark', dark)", theme == "dark")
                page.wait_for_timeout(300)
                page.screenshot(path=given.folder / f"trying-{preset.stem}-{width}.png", full_page=width < 1000)
            browser.close()
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
