"""How heavy the studio is and how fast it answers, in a headless Chromium; the best of several tries.

usage: studio.py          an empty folder, beside `import gradio` alone in turns
       studio.py many     the server's memory with NUM_IMAGES images and NUM_RUNS runs open
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image
from playwright.sync_api import Browser, Page, Playwright, sync_playwright
from report import report

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from sd_scripts.runs.events import RunStarted, RunStopped, StepDone  # noqa: E402
from sd_scripts.runs.rundir import RunDirectory  # noqa: E402
from tests.ui.runs_on_disk import options  # noqa: E402

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's second start finds compiled files
ROUNDS = 5
NUM_IMAGES, NUM_RUNS, NUM_POINTS = 10_000, 500, 100


def start(folder: Path) -> tuple[subprocess.Popen[bytes], str, float, float]:
    """A studio, its address, and seconds of wall and CPU time until it answered."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun = time.perf_counter()
    command = [sys.executable, str(ROOT / "gui.py"), "--server_port", str(port), "--output_dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/"
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                break
        time.sleep(0.02)
    wall = time.perf_counter() - begun
    times = psutil.Process(process.pid).cpu_times()
    return process, url, wall, times.user + times.system


def imported() -> tuple[float, float]:
    """Seconds of wall and CPU time that `import gradio` alone takes."""
    code = "import gradio, os; times = os.times(); print(times.user + times.system)"
    begun = time.perf_counter()
    cpu = float(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)
    return time.perf_counter() - begun, cpu


def chromium(driver: Playwright) -> Browser:
    path = next(found for found in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if found)
    return driver.chromium.launch(executable_path=path, args=["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"])


def timed(page: Page, click: str, done: str) -> float:
    """Milliseconds from a click to the first moment a condition holds, measured in the page."""
    return float(
        page.evaluate(
            """([click, done]) => new Promise(resolve => {
              const test = new Function('return ' + done), begun = performance.now();
              const look = () => test() ? resolve(performance.now() - begun) : setTimeout(look, 1);
              document.querySelector(click).click(); look(); })""",
            [click, done],
        )
    )


SEEN = """(() => { const look = () => {
  const field = document.querySelector('#kl-learning_rate');
  if (field && field.getBoundingClientRect().height) performance.mark('seen'); else requestAnimationFrame(look); }; look(); })()"""


def visit(browser: Browser, url: str) -> tuple[Page, float]:
    """A page in an empty profile, and the seconds until it shows the form.

    The page itself looks in every frame: playwright's wait_for_selector looks again after up to half a second.
    """
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.add_init_script(SEEN)
    begun = time.time()
    page.goto(url, wait_until="commit")
    page.wait_for_function("performance.getEntriesByName('seen').length")
    origin, seen = page.evaluate("[performance.timeOrigin, performance.getEntriesByName('seen')[0].startTime]")
    return page, (origin + seen) / 1000 - begun


def latencies(page: Page) -> tuple[float, float]:
    """Best Print and best load of a TOML file."""
    page.locator("#kl-pretrained_model_name_or_path").fill("toy")
    page.locator("#kl-train_data_dir").fill("toy:star")
    prints, loads = [], []
    for turn in range(ROUNDS):
        page.locator("#kl-network_dim").fill(str(20 + turn))
        shown = f"(document.querySelector('.kl-output:not([hidden])') || {{innerText: ''}}).innerText.includes('network_dim = {20 + turn}')"
        prints.append(timed(page, "#kl-print", shown))
    for turn in range(ROUNDS):
        toml = page.locator(".kl-output pre").nth(1).inner_text().replace(f"network_dim = {19 + ROUNDS}", f"network_dim = {90 + turn}")
        loads.append(
            float(
                page.evaluate(
                    """([text, wanted]) => new Promise(resolve => {
                      const box = document.querySelector('#kl-load'), bag = new DataTransfer(), begun = performance.now();
                      bag.items.add(new File([text], 'x.toml')); box.files = bag.files;
                      box.dispatchEvent(new Event('change'));
                      const look = () => document.querySelector('#kl-network_dim').value === wanted
                        ? resolve(performance.now() - begun) : setTimeout(look, 1);
                      look(); })""",
                    [toml, str(90 + turn)],
                )
            )
        )
    return min(prints), min(loads)


def measure(browser: Browser, folder: Path) -> None:
    starts, imports = [], []
    for turn in range(3):
        imports.append(imported())
        process, url, wall, cpu = start(folder / str(turn))
        starts.append((wall, cpu))
        if turn < 2:
            process.terminate()
            process.wait()
    visible = []
    for _ in range(ROUNDS):
        page, seconds = visit(browser, url)
        visible.append(seconds)
        page.wait_for_timeout(1000)
        sizes: Any = page.evaluate(
            "[...performance.getEntriesByType('resource'), ...performance.getEntriesByType('navigation')].map(entry => entry.transferSize)"
        )
        components = page.evaluate("window.gradio_config.components.length")
        handlers = page.evaluate("window.gradio_config.dependencies.length")
    prints, loads = latencies(page)
    report(
        "studio",
        "start 4 s, visible 1.5 s, 700 kB, 150 components, Print and load 150 ms, 200 MiB",
        start_seconds=min(wall for wall, _ in starts),
        start_cpu_seconds=min(cpu for _, cpu in starts),
        start_cpu_of_import=min(cpu for _, cpu in starts) / min(cpu for _, cpu in imports),
        visible_seconds=min(visible),
        visible_of_import=min(visible) / min(wall for wall, _ in imports),
        transfer_kb=sum(sizes) / 1000,
        components=components,
        event_handlers=handlers,
        print_ms=prints,
        load_toml_ms=loads,
        server_mib=psutil.Process(process.pid).memory_info().rss / 2**20,
    )
    process.terminate()
    process.wait()


def fill(folder: Path) -> Path:
    """The folder of images; beside it one with the runs."""
    images, rng = folder / "images", np.random.default_rng(1)
    images.mkdir()
    for number in range(NUM_IMAGES):
        pixels = rng.integers(0, 256, (6, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((96, 64)).save(images / f"{number:05}.png", compress_level=1)
        (images / f"{number:05}.txt").write_text(f"a scene, number {number}, {'red' if number % 3 else 'blue'}")
    settings = options(folder / "output")
    for number in range(NUM_RUNS):
        run = RunDirectory.create(folder / "output", f"run{number:03}", settings)
        run.log(RunStarted(steps=NUM_POINTS, images=NUM_IMAGES, batch=1))
        for step in range(NUM_POINTS):
            run.log(StepDone(step=step + 1, loss=float(rng.uniform(0.1, 0.2)), lr=1e-4, step_total=0.5))
        run.log(RunStopped(step=NUM_POINTS))
    return images


def many(browser: Browser, folder: Path) -> None:
    images = fill(folder)
    process, url, _, _ = start(folder / "output")
    found: dict[str, float] = {}

    def note(when: str) -> None:
        told = psutil.Process(process.pid).memory_full_info()
        found[f"{when}_pss_mib"], found[f"{when}_rss_mib"] = told.pss / 2**20, told.rss / 2**20

    try:
        page, _ = visit(browser, url)
        page.wait_for_timeout(2000)
        note("visited")
        page.get_by_role("tab", name="Runs").click()
        page.wait_for_timeout(5000)
        page.get_by_role("tab", name="Train").click()
        texts = {"pretrained_model_name_or_path": "toy", "train_data_dir": str(images), "resolution": "64", "min_bucket_reso": "32"}
        for name, text in texts.items():
            page.locator("#kl-search").fill(name)
            page.locator(f"#kl-{name}").fill(text)
        page.locator("#kl-search").fill("")
        page.get_by_role("tab", name="Data").click()
        page.wait_for_selector(".kl-data-cell", timeout=300_000)
        page.wait_for_timeout(5000)
        note("open")
        page.get_by_role("button", name="Find duplicates and blur", exact=True).click()
        page.get_by_role("dialog").wait_for(timeout=1_200_000)
        note("compared")
        report("studio with many", "200 MB", images=NUM_IMAGES, runs=NUM_RUNS, **found)
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = chromium(driver)
        (many if "many" in sys.argv else measure)(browser, Path(folder))
        browser.close()


if __name__ == "__main__":
    main()
