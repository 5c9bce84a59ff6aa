"""What the browser tests share: a studio as its own process, a headless Chromium, and pages that report what goes wrong in them."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.base import AXE_FILE_PATH
from playwright.sync_api import Browser, Page, Playwright, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# A machine that trains beside the tests is slow to answer.
expect.set_options(timeout=30_000)
START_SECONDS = 90.0
"""Far above what a start takes; only a machine that is busy with other things comes near."""


@dataclass
class Studio:
    """A running gui.py."""

    url: str
    process: subprocess.Popen[str]
    output_dir: Path
    log: Path
    arguments: tuple[str, ...] = ()

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def end(self) -> None:
        """Ends the studio as Ctrl-C would; runs go on."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(15)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_studio(output_dir: Path, *arguments: str, port: int | None = None) -> Studio:
    """Starts gui.py and waits until it answers."""
    port = port or free_port()
    log = output_dir.parent / f"studio-{port}.log"
    command = [
        sys.executable,
        "-W",
        "error::ResourceWarning",
        str(ROOT / "gui.py"),
        "--server_port",
        str(port),
        "--output_dir",
        str(output_dir),
    ]
    with log.open("a") as stream:
        process = subprocess.Popen(
            [*command, *arguments], stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, text=True, cwd=output_dir.parent
        )
    studio = Studio(f"http://127.0.0.1:{port}/", process, output_dir, log, arguments)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the studio ended with {process.returncode}:\n{log.read_text()}")
        with contextlib.suppress(OSError), urllib.request.urlopen(studio.url, timeout=5):
            return studio
        time.sleep(0.1)
    studio.end()
    raise AssertionError(f"the studio did not answer in {START_SECONDS} s:\n{log.read_text()}")


@pytest.fixture(scope="module")
def studios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Studio]]:
    """Starts studios with arguments of one's choice, each with an output folder of its own; ends them after the module."""
    running: list[Studio] = []

    def start(*arguments: str, output_dir: Path | None = None, port: int | None = None) -> Studio:
        folder = output_dir or tmp_path_factory.mktemp("studio") / "output"
        running.append(start_studio(folder, *arguments, port=port))
        return running[-1]

    yield start
    for studio in running:
        studio.end()


@pytest.fixture(scope="module")
def studio(studios: Callable[..., Studio]) -> Studio:
    """A studio with default arguments, for all tests of a module."""
    return studios()


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as driver:
        yield driver


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    path = next((found for found in map(shutil.which, CHROMIUM_NAMES) if found), None)
    assert path, "the browser tests need Chromium or Chrome; install the package `chromium`"
    chromium = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_FLAGS))
    yield chromium
    chromium.close()


@dataclass
class Complaints:
    """What the browser reported while a page was open."""

    found: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def listen(self, page: Page) -> None:
        page.on("console", lambda message: self.found.append(f"console: {message.text}") if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.found.append(f"page: {error}"))
        page.on("requestfailed", lambda request: self._failed(request.url, request.failure))
        page.on("response", lambda answer: self.found.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None)
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def _failed(self, url: str, failure: str | None) -> None:
        # Closing or reloading a page ends the requests it waits for.
        if failure != "net::ERR_ABORTED":
            self.found.append(f"failed: {url} {failure}")


@dataclass(frozen=True)
class Visit:
    """A page of a studio, in a browser profile of its own."""

    page: Page
    complaints: Complaints

    def axe(self) -> list[str]:
        """Accessibility violations of WCAG 2.2 A and AA, one line for each place."""
        self.page.evaluate(Path(AXE_FILE_PATH).read_text(encoding="utf-8"))
        result = self.page.evaluate(
            "() => axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa'], resultTypes: ['violations']})"
        )
        assert result["passes"], "axe looked at nothing"
        return [
            f"{rule['id']}: {node['target']} {node.get('failureSummary', '')}" for rule in result["violations"] for node in rule["nodes"]
        ]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """Opens pages; every one must have made no complaint by the end of the test, unless it says `quiet=False`."""
    opened: list[tuple[Visit, bool]] = []

    def open_page(
        url: str, width: int = 1400, height: int = 900, theme: str = "light", quiet: bool = True, ready: str = "#kl-learning_rate"
    ) -> Visit:
        context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce")
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = context.new_page()
        page.set_default_timeout(30000)
        complaints = Complaints()
        complaints.listen(page)
        page.goto(f"{url}?__theme={theme}")
        if ready:
            page.wait_for_selector(ready, state="attached")
        opened.append((Visit(page, complaints), quiet))
        return opened[-1][0]

    yield open_page
    found = [complaint for visit, quiet in opened if quiet for complaint in visit.complaints.found]
    for visited, _ in opened:
        visited.page.context.close()
    assert not found, "\n".join(found)
