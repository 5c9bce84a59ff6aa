"""Makes docs/images/studio.webp: the studio in a headless Chromium, with the demo at its end; `--output_dir` takes a demo that is there."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright
from studio import ROOT, chromium, start

IMAGE = ROOT / "docs" / "images" / "studio.webp"
PRESET = ROOT / "presets" / "sdxl_train_network" / "toy-star.toml"
WINDOW = {"width": 1280, "height": 1260}


def trained(folder: Path) -> None:
    """The demo, unless a finished one lies in the folder."""
    if not list(folder.glob("*-toy-star/toy-star.safetensors")):
        script = ROOT / "sd_scripts" / "sdxl_train_network.py"
        subprocess.run([sys.executable, str(script), "--config_file", str(PRESET), "--output_dir", str(folder)], check=True)


def take(browser: Browser, url: str) -> None:
    page = browser.new_page(viewport=WINDOW)  # type: ignore[arg-type]
    page.goto(f"{url}?__theme=light#runs")
    page.locator(".kr-row", has_text="toy-star").click()
    expect(page.locator("#kl-runs .kr-badge").last).to_have_text("Finished")
    # The star in the middle, half of it before and half after.
    page.locator("#kl-runs .kr-thumb").nth(1).click()
    page.wait_for_function("document.querySelector('#kl-runs .kr-after').naturalWidth > 0")
    page.wait_for_load_state("networkidle")
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(IMAGE, lossless=True, method=6)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--output_dir", type=Path)
    with tempfile.TemporaryDirectory() as made, sync_playwright() as driver:
        folder = arguments.parse_args().output_dir or Path(made)
        trained(folder)
        process, url, *_ = start(folder)
        browser = chromium(driver)
        take(browser, url)
        browser.close()
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
