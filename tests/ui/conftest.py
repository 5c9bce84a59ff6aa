"""What the browser tests share: a studio as its own process, a headless Chromium, and pages that report what goes wrong in them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from axe_playwright_python.base import AXE_FILE_PATH
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Playwright, expect, sync_playwright

from kohya_like import ports
from kohya_like.page import folder
from tests import warm
from tests.forked import forked

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
# Of one engine, the one without windows around its pages takes a fifth less.
CHROMIUM_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# A machine that trains beside the tests is slow to answer.
expect.set_options(timeout=30_000)
START_SECONDS = 90.0
"""Far above what a start takes; only a machine that is busy with other things comes near."""


class Forked:
    """A process of the studio server: what the tests use of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.pid = pid

    def poll(self) -> int | None:
        return None if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE else 0

    def wait(self, timeout: float | None = None) -> None:
        try:
            self._process.wait(timeout)
        except psutil.TimeoutExpired as err:
            raise subprocess.TimeoutExpired("a studio", timeout or 0.0) from err

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


@dataclass
class Studio:
    """A running gui.py."""

    url: str
    process: subprocess.Popen[str] | Forked
    output_dir: Path
    log: Path

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


_USED_PORTS: list[int] = []
"""Where studios of earlier modules listened. The browser knows the scripts of a page at the same address; elsewhere it reads them anew."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_of_a_studio() -> int:
    while _USED_PORTS:
        port = _USED_PORTS.pop()
        if ports.problem("127.0.0.1", port) is None:
            return port
    return free_port()


Start = Callable[[list[str], Path, Path], "subprocess.Popen[str] | Forked"]
"""Starts gui.py with arguments in a folder; what it says goes to the last."""


def anew(arguments: list[str], folder: Path, log: Path) -> subprocess.Popen[str]:
    """As a person starts it."""
    command = [sys.executable, "-W", "error::ResourceWarning", str(ROOT / "gui.py"), *arguments]
    with log.open("a") as stream:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, text=True, cwd=folder)


def start_studio(output_dir: Path, *arguments: str, port: int | None = None, start: Start = anew) -> Studio:
    """Starts gui.py and waits until it answers."""
    port = port or port_of_a_studio()
    log = output_dir.parent / f"studio-{port}.log"
    process = start(["--server_port", str(port), "--output_dir", str(output_dir), *arguments], output_dir.parent, log)
    studio = Studio(f"http://127.0.0.1:{port}/", process, output_dir, log)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the studio ended:\n{log.read_text()}")
        with contextlib.suppress(OSError), urllib.request.urlopen(studio.url, timeout=5):
            return studio
        time.sleep(0.1)
    studio.end()
    raise AssertionError(f"the studio did not answer in {START_SECONDS} s:\n{log.read_text()}")


@pytest.fixture(scope="session")
def studio_server() -> Iterator[Start]:
    """Forks studios from a process that has their libraries in it."""
    command = [sys.executable, "-m", "tests.ui.studio_server"]
    # Where the first to ask for it has other modules in mind, those are for its own studio.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment)
    assert server.stdin is not None and server.stdout is not None

    def start(arguments: list[str], folder: Path, log: Path, python: str = sys.executable) -> Forked:
        order = {"arguments": arguments, "folder": str(folder), "log": str(log), "environment": dict(os.environ), "python": python}
        server.stdin.write(json.dumps(order).encode() + b"\n")
        server.stdin.flush()
        return Forked(int(server.stdout.readline()))

    yield start
    server.stdin.close()
    server.stdout.close()
    server.wait(30)


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """What stands in Python's place for scripts of a studio that load torch, see tests/warm.py."""
    with tempfile.TemporaryDirectory() as folder:
        file, address = warm.program(Path(folder))
        server = forked(warm.serve, address)
        deadline = time.monotonic() + START_SECONDS
        while not Path(address).exists():
            assert server.is_alive() and time.monotonic() < deadline, "no warm Python"
            time.sleep(0.05)
        yield str(file)
        server.terminate()
        server.join()


@pytest.fixture(scope="module")
def studios(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Callable[..., Studio]]:
    """Starts studios with arguments of one's choice, each with an output folder of its own; ends them after the module.

    own: in a Python of its own, which is as large as what it imports.
    warm: what it starts and loads torch has it already, but is no process below the studio's.
    """
    running: list[Studio] = []

    def start(*arguments: str, output_dir: Path | None = None, port: int | None = None, own: bool = False, warm: bool = False) -> Studio:
        folder = output_dir or tmp_path_factory.mktemp("studio") / "output"
        how = anew if own else request.getfixturevalue("studio_server")
        if warm:
            how = functools.partial(how, python=request.getfixturevalue("warm_python"))
        running.append(start_studio(folder, *arguments, port=port, start=how))
        return running[-1]

    yield start
    for studio in running:
        studio.end()
    _USED_PORTS.extend({studio.port for studio in running})


@pytest.fixture(scope="session")
def studio(tmp_path_factory: pytest.TempPathFactory, studio_server: Start) -> Iterator[Studio]:
    """A studio with default arguments, for all tests that start nothing in it."""
    studio = start_studio(tmp_path_factory.mktemp("studio") / "output", start=studio_server)
    yield studio
    studio.end()


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
    _is_open: bool = False

    @contextlib.contextmanager
    def listening(self, page: Page) -> Iterator[None]:
        """Hears what a page says that is opened next; what the one before says while it is left belongs to a test that has ended."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(hearing(page, "framenavigated", lambda _frame: self._begin()))
            for event, told in (
                ("console", lambda message: self._said(message.type, message.text)),
                ("pageerror", lambda error: self.found.append(f"page: {error}")),
                ("requestfailed", lambda request: self._failed(request.url, request.failure)),
                ("response", lambda answer: self.found.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None),
                ("request", lambda request: self.hosts.add(urlsplit(request.url).netloc)),
            ):
                stack.enter_context(hearing(page, event, told))
            yield

    def _begin(self) -> None:
        if not self._is_open:
            self.found.clear()
            self.hosts.clear()
            self._is_open = True

    def _said(self, kind: str, text: str) -> None:
        # Gradio's words for a stream that a reload or it itself has ended. A studio that is gone is told by _failed.
        aborted = "AbortError: signal is aborted" in text or "Connection errored out" in text
        if kind in ("error", "warning") and not aborted:
            self.found.append(f"console: {text}")

    def _failed(self, url: str, failure: str | None) -> None:
        # Closing or reloading a page ends the requests it waits for.
        if failure != "net::ERR_ABORTED":
            self.found.append(f"failed: {url} {failure}")


OTHER_PAGES = [pytest.param(*other, marks=pytest.mark.long) for other in ((1400, "light"), (1400, "dark"), (390, "light"))]
WIDTHS_AND_THEMES = [(390, "dark"), *OTHER_PAGES]
"""Of pages that axe reads: wide and narrow ones, light and dark ones. Other tests read wide, light ones."""


def in_module(page: Page, name: str, expression: str, given: Any = None) -> Any:
    """What a JavaScript expression gives that calls one of the page's modules `it`, and `given` what is given."""
    return page.evaluate(f"async given => {{ const it = await import('{folder()}{name}'); return {expression}; }}", given)


PAINTED = """(plot, kind) => {
  const canvas = plot.querySelector('canvas');
  const probe = new OffscreenCanvas(1, 1).getContext('2d');
  probe.fillStyle = getComputedStyle(plot).getPropertyValue(`--kl-plot-${kind}`).trim();
  probe.fillRect(0, 0, 1, 1);
  const wanted = probe.getImageData(0, 0, 1, 1).data;
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  const isMeant = (at) => [0, 1, 2, 3].every((place) => Math.abs(data[at + place] - wanted[place]) < 4);
  const places = [];
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] && isMeant(at)) places.push(at / 4);
  return JSON.stringify([canvas.width, places]); }"""


def painted(plot: Locator, kind: str) -> list[tuple[int, int]]:
    """Columns and rows of the pixels of a plot that have the colour of its lines of this kind."""
    expect(plot.locator("canvas")).to_be_visible()
    # As a text: playwright takes many numbers one by one.
    width, places = json.loads(plot.evaluate(PAINTED, kind))
    return [(place % width, place // width) for place in places]


@contextlib.contextmanager
def hearing(page: Page, event: str, told: Callable[[Any], object]) -> Iterator[None]:
    """Tells of a page's events. The page outlives the test, what listens to it must not."""
    page.on(event, told)  # type: ignore[call-overload]
    yield
    page.remove_listener(event, told)


@dataclass(frozen=True)
class Visit:
    """A page of a studio, in a browser that has seen none before."""

    page: Page
    complaints: Complaints
    is_thorough: bool
    """The long tests run as well."""

    def axe(self, part: str = "html", contrast: bool | None = None) -> list[str]:
        """Accessibility violations of WCAG 2.2 A and AA in a part of the page, one line for each place.

        contrast: with the contrast of colours, which takes four times as long as all other rules together; if not said, where the long
        tests run too.
        """
        if not self.page.evaluate("!!window.axe"):
            self.page.evaluate("source => { eval(source); }", Path(AXE_FILE_PATH).read_text(encoding="utf-8"))
        result = self.page.evaluate(
            """([part, contrast]) => axe.run(part, {
              runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa'], resultTypes: ['violations'],
              rules: {'color-contrast': {enabled: contrast}}})""",
            [part, self.is_thorough if contrast is None else contrast],
        )
        assert result["passes"], "axe looked at nothing"
        return [
            f"{rule['id']}: {node['target']} {node.get('failureSummary', '')}" for rule in result["violations"] for node in rule["nodes"]
        ]

    def switch_theme(self) -> None:
        """By the page's own button. Colours that change slowly have changed afterwards."""
        self.page.locator(".kl-theme").evaluate("button => button.click()")
        self.page.evaluate(
            """() => Promise.all(document.getAnimations()
              .filter(each => each.playState === 'running' && each.effect.getComputedTiming().endTime !== Infinity)
              .map(each => each.finished.catch(() => null)))"""
        )

    def overflow(self) -> list[str]:
        """A sentence when the page is wider than its window."""
        pixels = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return [f"the page is {pixels} px wider than the window"] if pixels > 0 else []


def open_context(browser: Browser) -> BrowserContext:
    """A browser profile. A page that is opened for the first time, not by a reload, meets it empty."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, reduced_motion="reduce")
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    context.add_init_script(
        """(() => {
          const visit = new URLSearchParams(location.search).get('visit');
          if (!visit || sessionStorage.getItem('visit') === visit) return;
          localStorage.clear(); sessionStorage.clear(); sessionStorage.setItem('visit', visit); })()"""
    )
    # Gradio's word "Loading" counts seconds in every frame, also when it has left the page: 6 % of a core all the time.
    context.add_init_script(
        """(() => {
          const frame = window.requestAnimationFrame.bind(window);
          window.requestAnimationFrame = work => new Error().stack.includes('/statustracker-') ? 0 : frame(work); })()"""
    )
    return context


@pytest.fixture(scope="session")
def only_window(browser: Browser) -> Iterator[Page]:
    context = open_context(browser)
    yield context.new_page()
    context.close()


@pytest.fixture(scope="module")
def window(only_window: Page) -> Iterator[Page]:
    """The page that tests use one after the other: its browser has the scripts already, which take most of the time to open one."""
    yield only_window
    only_window.goto("about:blank")


@pytest.fixture
def visit(browser: Browser, window: Page, pytestconfig: pytest.Config) -> Iterator[Callable[..., Visit]]:
    """Opens pages; every one must have made no complaint by the end of the test, unless it says `quiet=False`.

    The first is the page that all tests share, in an empty profile; further ones, and with `cold` the first, are of browsers of their own.
    """
    opened: list[tuple[Visit, bool]] = []
    with contextlib.ExitStack() as stack:

        def open_page(
            url: str,
            width: int = 1400,
            height: int = 900,
            theme: str = "light",
            quiet: bool = True,
            ready: str = "#kl-learning_rate",
            cold: bool = False,
        ) -> Visit:
            page = window
            if opened or cold:
                page = stack.enter_context(open_context(browser)).new_page()
            page.set_viewport_size({"width": width, "height": height})
            page.mouse.move(0, 0)
            page.set_default_timeout(30000)
            complaints = Complaints()
            stack.enter_context(complaints.listening(page))
            page.goto(f"{url}?__theme={theme}&visit={uuid.uuid4()}")
            if ready:
                page.wait_for_selector(ready, state="attached")
            opened.append((Visit(page, complaints, pytestconfig.option.markexpr != "not long"), quiet))
            return opened[-1][0]

        yield open_page
        found = [complaint for visit, quiet in opened if quiet for complaint in visit.complaints.found]
    assert not found, "\n".join(found)
