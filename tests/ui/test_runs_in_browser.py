"""The Runs tab and the live view in a real browser, with stand-in runs that the studio finds on disk."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, Response, Route, expect

from kohya_like import presets
from kohya_like.supervisor import Job, JobSupervisor
from sd_scripts.runs.events import KINDS, PhaseBegun, Previewed, RunFinished, RunStarted, StepDone, Validated, Warned
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat
from tests.ui.conftest import WIDTHS_AND_THEMES, hearing, painted
from tests.ui.on_screen import Eyes
from tests.ui.runs_on_disk import evaluated, made, style_run
from tests.ui.standin_runs import SCRIPT, command, options, until

pytestmark = pytest.mark.browser
HOSTILE = "</span><img src=x onerror=alert(1)> ${alert(2)} {{value}} `x`"


def old_run(root: Path, name: str, kind: str, text: str = "", console: str = "all is well\n") -> RunDirectory:
    """A run that ended: curve, validation, previews of three steps, files, console."""
    run = RunDirectory.create(root, name, options(root, output_name=name, network_dim=24))
    run.log(PhaseBegun(name="train"))
    run.log(RunStarted(steps=120, start_step=0, epochs=2))
    for step in range(1, 121):
        run.log(StepDone(step=step, epoch=0, loss=0.1 + 1 / step, lr=1e-4 * step / 120, step_total=0.2, peak_gib=3.2, data_fetch=0.001))
    run.log(Validated(step=60, loss=0.15))
    run.samples.mkdir()
    for step in (0, 60, 120):
        for index in range(2):
            file = f"{name}-{step:06d}-{index:02d}.png"
            Image.new("RGB", (64, 64), (2 * step, 60 + 90 * index, 120)).save(run.samples / file)
            run.log(Previewed(step=step, index=index, file=f"samples/{file}", prompt=f"a star {index} {HOSTILE}", seed=index))
    run.log(Warned(text=f"slow {HOSTILE}"))
    (run.path / f"{name}.safetensors").write_bytes(b"12345678")
    run.console.write_text(console + HOSTILE + "\n")
    if kind == "died":
        record = {"run_id": "f" * 32, "queued": 1.0, "pid": 2**22 - 1, "create_time": 1.0, "argv": ["python", "train.py", "a b"]}
        (run.path / "run.json").write_text(json.dumps(record))
        (run.path / "exit.json").write_text(json.dumps({"run_id": "f" * 32, "returncode": 1}))
    else:
        run.log(KINDS[kind](step=120, text=text))
    return run


@pytest.fixture(scope="module")
def place(studios: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, JobSupervisor, Job]]:
    """A studio over a folder with ended runs of each kind and one that is under way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
        root = tmp_path_factory.mktemp("runs") / "output"
        old_run(root, "whole", "finished")
        old_run(root, "broken", "failed", text=f"It broke {HOSTILE}")
        old_run(root, "out-of-memory", "died", console="torch.OutOfMemoryError: CUDA out of memory\n")
        evaluated(style_run(root, "styles"), 1)
        failing = JobSupervisor(root, command("fail"))
        failed = failing.start(SCRIPT, options(root, output_name="at-once"))
        until(lambda: failing.find(failed.name).state == "failed")
        failing.close()
        supervisor = JobSupervisor(root, command("slow"))
        job = supervisor.start(SCRIPT, options(root, output_name="under-way"))
        yield studios(output_dir=root), supervisor, job
        supervisor.stop(job, grace_seconds=0)
        supervisor.close()


def runs_tab(page: Page, name: str = "") -> None:
    page.get_by_role("tab", name="Runs").click()
    page.wait_for_selector(".kr-row")
    if name:
        page.locator(".kr-row", has_text=name).click()
        expect(page.locator("#kl-runs .kr-title")).to_have_text(name)


def count_of(page: Page, selector: str = "#kl-runs .kr-count") -> int:
    found = re.match(r"([\d,.]+) of", page.locator(selector).inner_text())
    return int(re.sub(r"\D", "", found.group(1))) if found else -1


def test_every_run_on_disk_is_listed_with_its_state_and_a_reload_shows_the_same_run_again(place: Any, visit: Callable[..., Any]) -> None:
    page = visit(place[0].url).page
    runs_tab(page)
    for name, state in (("whole", "Finished"), ("broken", "Failed"), ("out-of-memory", "Died"), ("under-way", "Running")):
        expect(page.locator(".kr-row", has_text=name).locator(".kr-badge")).to_have_text(state)
    runs_tab(page, "broken")
    page.reload()
    page.wait_for_selector("#kl-learning_rate", state="attached")
    page.get_by_role("tab", name="Runs").click()
    expect(page.locator("#kl-runs .kr-title")).to_have_text("broken")


SEEN = """async () => {
  const nodes = () => [...document.querySelectorAll('#kl-runs .kr-run, #kl-runs .kr-run *')].filter((node) => node.checkVisibility());
  await Promise.all(nodes().filter((node) => node.tagName === 'IMG').map((image) => {
    image.loading = 'eager';
    return image.complete || new Promise((there) => { image.onload = image.onerror = there; }); }));
  const told = ['class', 'alt', 'aria-label', 'aria-valuetext', 'href', 'src', 'd', 'style', 'title'];
  return nodes().map((node) => [node.tagName, [...node.childNodes].filter((each) => each.nodeType === 3).map((each) => each.data).join(''),
    node.value, ...told.map((name) => node.getAttribute(name))].join('|')); }"""
"""Everything that somebody sees of a run, or is told of it, once its images are there, which have their sizes then."""


def test_each_run_has_an_address_and_shows_nothing_of_the_one_before_and_each_tab_of_the_browser_has_its_own_draft(
    place: Any, visit: Callable[..., Any]
) -> None:
    url = place[0].url
    # Reloads end what gradio asks for at that moment, and a run that is gone is answered with 404.
    page = visit(url, quiet=False).page
    title = page.locator("#kl-runs .kr-title")
    folders = {name: next(place[0].output_dir.glob(f"*-{name}")).name for name in ("whole", "styles", "at-once")}
    alone: dict[str, list[str]] = {}
    wrong = []

    def at(address: str, tab: str = "Runs") -> None:
        expect(page).to_have_url(re.compile(f"#{address}$"))
        expect(page.get_by_role("tab", name=tab)).to_have_attribute("aria-selected", "true")

    def settled(name: str) -> list[str]:
        """What is seen once it stays as it is: images and evaluations come later, and a run on its way is in the page, hidden."""
        if name == "styles":
            expect(page.locator(".kr-matrix-baselines")).to_be_visible()
        seen: list[list[str]] = [[], []]

        def stays() -> bool:
            seen.append(page.evaluate(SEEN))
            page.wait_for_timeout(100)
            return bool(seen[-1]) and seen[-1] == seen[-2] and "visibility: hidden" not in seen[-1][0]

        until(stays)
        return seen[-1]

    def compare(name: str) -> None:
        at(f"run={folders[name]}")
        expect(title).to_have_text(name)
        now, wanted = settled(name), alone[name]
        wrong.extend(
            [f"{name}: {line}" for line in now if line not in wanted] + [f"{name} lacks {line}" for line in wanted if line not in now]
        )
        wrong.extend([] if now == wanted else [f"{name}: another order"])

    for name in ("styles", "at-once"):
        page.evaluate("name => location.hash = '#run=' + name", folders[name])
        page.reload()
        at(f"run={folders[name]}")
        expect(title).to_have_text(name)
        alone[name] = settled(name)
    assert len(alone["styles"]) > len(alone["at-once"])
    runs_tab(page, "whole")
    runs_tab(page, "at-once")
    compare("at-once")
    runs_tab(page, "styles")
    compare("styles")
    page.get_by_role("tab", name="Help").click()
    at("help", "Help")
    page.go_back()
    compare("styles")
    page.go_back()
    compare("at-once")
    page.go_back()
    at(f"run={folders['whole']}")
    expect(title).to_have_text("whole")
    page.go_forward()
    compare("at-once")
    assert not wrong, "\n".join(dict.fromkeys(wrong))
    page.get_by_role("tab", name="Train").click()
    at("train", "Train")

    # A link, in another tab: a run, and the settings that were typed last; from then on each has its own.
    page.locator("#kl-network_dim").fill("31")
    other = page.context.new_page()
    other.goto(f"{url}#run={folders['whole']}")
    expect(other.locator("#kl-runs .kr-title")).to_have_text("whole")
    other.get_by_role("tab", name="Train").click()
    expect(other.locator("#kl-network_dim")).to_have_value("31")
    other.locator("#kl-network_dim").fill("47")
    page.locator("#kl-learning_rate").fill("0.00077")
    page.get_by_role("tab", name="Runs").click()
    other.reload()
    expect(other.locator("#kl-network_dim")).to_have_value("47")
    expect(other.locator("#kl-learning_rate")).to_have_value("0.0001")
    expect(other.get_by_role("tab", name="Train")).to_have_attribute("aria-selected", "true")
    other.close()
    page.evaluate("location.hash = '#run=20200101-000000-gone'")
    expect(page.locator("#kl-runs .kr-status")).to_contain_text("20200101-000000-gone is not in the folders of this studio")


def red(place: Locator) -> bool:
    return place.evaluate("""node => {
        const probe = document.body.appendChild(document.createElement('p'));
        probe.style.color = 'var(--kl-bad)';
        const bad = getComputedStyle(probe).color;
        probe.remove();
        return getComputedStyle(node).color === bad;
    }""")


def test_the_demo_a_second_time_can_be_opened_or_trained_again_and_a_start_is_followed_by_no_alarm(
    place: Any, visit: Callable[..., Any]
) -> None:
    studio, supervisor, _job = place
    demo = presets.find(presets.DEMO, studio.output_dir, own=False)
    of = flat.with_absolute_paths(flat.build(demo.run, {**demo.values, "output_dir": str(studio.output_dir)}))
    done = made(studio.output_dir, of, (of.training.max_train_steps,))
    (done.path / f"{of.output.output_name}.safetensors").write_bytes(b"x")
    done.log(RunFinished(step=of.training.max_train_steps))
    page = visit(studio.url).page
    try:
        page.get_by_label("Preset", exact=True).select_option(f"built:{presets.DEMO}")
        page.get_by_role("button", name="Use this preset").click()
        page.locator("#kl-print").click()
        expect(page.locator(".kl-output")).to_be_visible()
        page.locator("#kl-network_dim").fill("5")
        expect(page.locator(".kl-output")).to_be_hidden()
        expect(page.locator(".kl-answer")).to_have_text("The settings have changed since the command was printed.")
        page.locator("#kl-network_dim").fill(str(of.network.network_dim))
        page.locator("#kl-print").click()
        expect(page.locator(".kl-output")).to_be_visible()
        page.locator("#kl-start").click()
        wrong = page.locator(".kl-problems")
        expect(wrong).to_contain_text("finished already")
        wrong.get_by_role("button", name="Open it", exact=True).click()
        expect(page.locator("#kl-runs .kr-title")).to_have_text(of.output.output_name)
        expect(page).to_have_url(re.compile(f"#run={done.name}$"))
        page.go_back()
        # The one device has a run already, so what is started waits.
        wrong.get_by_role("button", name="Train again", exact=True).click()
        expect(page.locator(".kl-answer")).to_contain_text("waits for a free device")
        expect(page.locator("#kl-live .kr-badge")).to_have_text("Waiting")
        expect(wrong.or_(page.locator(".kl-output")).locator("visible=true")).to_have_count(0)
        assert len(list(studio.output_dir.glob(f"*-{of.output.output_name}"))) == 2

        page.locator("#kl-output_name").fill("another")
        page.locator("#kl-resume-choice").select_option("auto")
        page.locator("#kl-start").click()
        expect(page.locator("#kl-live .kr-title")).to_have_text("another")
        beside = page.locator(".kl-foresight .kl-foreseen")
        expect(beside).to_contain_text("waits in the queue")
        assert not red(beside)
        expect(wrong).to_be_hidden()

        # What a file has become, and what is in the data set, is read by now: the run that was started is in sight.
        kohya = f'pretrained_model_name_or_path = "toy"\ntrain_data_dir = "toy:star"\noutput_dir = "{studio.output_dir}"\n'
        kohya += 'output_name = "third"\nnetwork_module = "networks.lora"\nresolution = "64,64"\nmin_bucket_reso = 32\nno_half_vae = true\n'
        page.locator("#kl-load").set_input_files({"name": "old.toml", "mimeType": "text/plain", "buffer": kohya.encode()})
        expect(page.locator(".kl-import")).to_be_visible()
        page.locator("#kl-check").click()
        expect(page.locator(".kl-report")).to_be_visible()
        page.locator("#kl-start").click()
        expect(page.locator("#kl-live .kr-title")).to_have_text("third")
        assert Eyes(page).faults("#kl-live .kr-title", "third") == []
        expect(page.locator("#kl-answers .kl-card:visible")).to_have_count(0)
    finally:
        for job in supervisor.jobs():
            if job.state == "queued":
                supervisor.request_stop(job)


def test_the_curve_of_a_run_under_way_moves_by_small_polls_and_the_hidden_page_asks_nothing(place: Any, visit: Callable[..., Any]) -> None:
    page = visit(place[0].url).page
    expect(page.locator("#kl-live .kr-title")).to_have_text("under-way")
    before = count_of(page, "#kl-live .kr-count")
    until(lambda: count_of(page, "#kl-live .kr-count") > before)
    runs_tab(page, "under-way")
    curve = page.locator("#kl-runs .kr-curve")
    polls: list[Response] = []
    with hearing(
        page, "response", lambda answer: polls.append(answer) if "/kl/run/" in answer.url and "sample" not in answer.url else None
    ):
        before, line = count_of(page), painted(curve, "smooth")
        until(lambda: count_of(page) > before + 2)
        # Those of the time before tell the whole run.
        polls.clear()
        until(lambda: count_of(page) >= 0 and len(polls) >= 3)
    sizes = sorted(len(answer.body()) for answer in polls)
    assert sizes[len(sizes) // 2] < 2500
    assert painted(curve, "smooth") != line
    expect(page.locator("#kl-runs .kr-phase")).to_have_text("Training")
    expect(page.locator("#kl-runs .kr-count")).to_contain_text("left")
    page.get_by_role("tab", name="Help").click()
    expect(page.locator("#kl-runs")).to_be_hidden()
    asked: list[str] = []
    with hearing(page, "request", lambda request: asked.append(request.url) if "/kl/run" in request.url else None):
        # A page that is seen asks at least once in this time.
        page.evaluate("() => new Promise((done) => setTimeout(done, 2600))")
    assert asked == []


def test_a_run_that_died_shows_the_cause_what_to_change_and_the_last_lines_and_no_text_is_taken_for_markup(
    place: Any, visit: Callable[..., Any]
) -> None:
    page = visit(place[0].url).page
    ran: list[str] = []
    with hearing(page, "dialog", lambda dialog: (ran.append(dialog.message), dialog.dismiss())):
        runs_tab(page, "broken")
        expect(page.locator("#kl-runs .kr-cause")).to_contain_text(HOSTILE)
        expect(page.locator("#kl-runs .kr-warnings")).to_contain_text(HOSTILE)
        expect(page.locator("#kl-runs .kr-caption")).to_contain_text(HOSTILE)
        page.locator("#kl-runs summary", has_text="Console").click()
        expect(page.locator("#kl-runs .kr-console")).to_contain_text(HOSTILE)
        assert page.locator("img[src=x]").count() == 0

        runs_tab(page, "out-of-memory")
        cause = page.locator("#kl-runs .kr-cause")
        expect(cause).to_contain_text("The GPU ran out of memory.")
        expect(cause).to_contain_text("Turn on gradient_checkpointing")
        expect(cause.locator("pre")).to_contain_text("torch.OutOfMemoryError")
        expect(page.get_by_role("button", name="Resume")).to_be_visible()
        page.get_by_role("button", name="Copy command").click()
        expect(page.locator("#kl-runs .kr-status")).to_contain_text("clipboard")
        assert page.evaluate("navigator.clipboard.readText()") == "python train.py 'a b'"
    assert ran == []


def test_previews_are_compared_with_the_keyboard_files_come_down_and_settings_go_back_into_the_form(
    place: Any, visit: Callable[..., Any]
) -> None:
    page = visit(place[0].url).page
    runs_tab(page, "whole")
    after, before = page.locator("#kl-runs .kr-after"), page.locator("#kl-runs .kr-before")
    expect(after).to_have_attribute("alt", re.compile("step 120: a star 0"))
    expect(before).to_have_attribute("alt", re.compile("step 0: a star 0"))
    until(lambda: page.evaluate("document.querySelector('#kl-runs .kr-after').naturalWidth") == 64)
    step = page.get_by_role("slider", name=re.compile("^Step"))
    step.focus()
    page.keyboard.press("ArrowLeft")
    expect(after).to_have_attribute("alt", re.compile("step 60"))
    assert step.get_attribute("aria-valuetext") == "step 60"
    cut = page.get_by_role("slider", name="Before and after")
    cut.focus()
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    assert page.locator("#kl-runs .kr-pair").evaluate("node => node.style.getPropertyValue('--kl-cut')") == "60%"
    second = page.get_by_role("button", name="Prompt 2")
    second.focus()
    page.keyboard.press("Enter")
    expect(after).to_have_attribute("alt", re.compile("a star 1"))
    with page.expect_download() as coming:
        page.get_by_role("link", name="whole.safetensors").click()
    assert Path(coming.value.path()).read_bytes() == b"12345678"
    page.get_by_role("button", name="Use these settings").click()
    expect(page.locator("#kl-network_dim")).to_be_visible()
    expect(page.locator("#kl-network_dim")).to_have_value("24")


def test_the_curve_is_read_with_pointer_and_keyboard_and_its_layers_are_switched(place: Any, visit: Callable[..., Any]) -> None:
    page = visit(place[0].url).page
    runs_tab(page, "whole")
    readout = page.locator("#kl-runs .kr-readout")
    # One loss, wherever it stands.
    expect(readout).to_contain_text("Step 120: loss 0.1083")
    expect(page.locator("#kl-runs .kr-tile", has_text="Loss").first).to_contain_text("0.1083")
    expect(page.locator(".kr-row", has_text="whole")).to_contain_text("loss\u00a00.108")
    slider = page.get_by_role("slider", name="Read the curve at a step")
    slider.focus()
    page.keyboard.press("Home")
    expect(readout).to_contain_text("Step 1: loss 1.1")
    page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("Step 2: loss 0.6")
    slider.evaluate("node => node.blur()")
    box = page.locator("#kl-runs .kr-stage").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    assert 40 < int(re.search(r"Step (\d+)", readout.inner_text()).group(1)) < 80
    curve = page.locator("#kl-runs .kr-curve")
    assert painted(curve, "validation") and painted(curve, "smooth") and not painted(curve, "lr")
    expect(curve.locator(".kr-legend")).to_have_text("rawsmoothedvalidation")
    curve.get_by_role("button", name="Learning rate").click()
    assert painted(curve, "lr")
    curve.get_by_role("button", name="Raw").click()
    expect(curve.locator(".kr-legend")).to_have_text("smoothedvalidationlearning rate")
    line = painted(curve, "smooth")
    curve.get_by_role("button", name="Log scale").click()
    assert painted(curve, "smooth") != line


def test_a_part_of_the_curve_is_seen_large_by_dragging_and_by_keyboard_and_stays_while_the_run_goes_on(
    place: Any, visit: Callable[..., Any]
) -> None:
    page = visit(place[0].url).page
    runs_tab(page, "whole")
    curve = page.locator("#kl-runs .kr-curve")
    whole = curve.get_by_role("button", name="Whole run")
    dots = len(painted(curve, "validation"))
    box = curve.locator(".kr-stage").bounding_box()
    expect(whole).to_be_hidden()
    page.mouse.move(box["x"] + 100, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 80, steps=4)
    page.mouse.up()
    expect(whole).to_be_visible()
    assert len(painted(curve, "validation")) < dots
    curve.get_by_role("button", name="Learning rate").click()
    whole.click()
    expect(whole).to_be_hidden()
    slider = page.get_by_role("slider", name="Read the curve at a step")
    expect(slider).to_be_focused()
    page.keyboard.press("+")
    expect(whole).to_be_visible()
    page.keyboard.press("-")
    page.keyboard.press("-")
    expect(whole).to_be_hidden()


def test_the_console_follows_its_end_but_not_while_somebody_reads_back(place: Any, visit: Callable[..., Any]) -> None:
    job = place[2]
    with job.run.console.open("a") as console:
        console.write("".join(f"\nline {index} of many" for index in range(300)) + "\n")
    page = visit(place[0].url).page
    runs_tab(page, "under-way")
    page.locator("#kl-runs summary", has_text="Console").click()
    log = page.locator("#kl-runs .kr-console")
    expect(log).to_contain_text("line 299 of many")
    at_end = "node => node.scrollHeight - node.scrollTop - node.clientHeight < 30"
    until(lambda: log.evaluate(at_end))
    with job.run.console.open("a") as console:
        console.write("".join(f"\nline {index} of more" for index in range(20)) + "\n")
    expect(log).to_contain_text("line 19 of more")
    assert log.evaluate(at_end)
    log.evaluate("node => node.scrollTop = 50")
    with job.run.console.open("a") as console:
        console.write("\nthe newest line\n")
    expect(log).to_contain_text("the newest line")
    assert log.evaluate("node => node.scrollTop") == 50


@pytest.mark.parametrize(("width", "theme"), WIDTHS_AND_THEMES)
def test_axe_finds_nothing_and_nothing_runs_over_the_edge(place: Any, visit: Callable[..., Any], theme: str, width: int) -> None:
    seen = visit(place[0].url, width=width, theme=theme)
    runs_tab(seen.page)
    found = []
    for name in ("whole", "out-of-memory", "under-way"):
        runs_tab(seen.page, name)
        console = seen.page.locator("#kl-runs summary", has_text="Console")
        console.click()
        expect(seen.page.locator("#kl-runs .kr-console")).to_contain_text(re.compile(r"\S"))
        found += [f"{name}: {line}" for line in seen.axe(contrast=name == "under-way" or None) + seen.overflow()]
        console.click()
    assert not found, "\n".join(found)


@pytest.mark.long
def test_seven_tabs_of_one_browser_all_follow_the_run_and_the_last_one_is_answered(place: Any, visit: Callable[..., Any]) -> None:
    # One more than the connections that a browser opens to one place, so that none may keep one.
    first = visit(place[0].url).page
    pages = [first, *(first.context.new_page() for _ in range(6))]
    for page in pages[1:]:
        page.goto(place[0].url, wait_until="commit")
    for page in pages:
        page.wait_for_selector("#kl-live .kr-curve canvas", timeout=60000)
    before = [count_of(page, "#kl-live .kr-count") for page in pages]
    until(lambda: all(count_of(page, "#kl-live .kr-count") > step for page, step in zip(pages, before)))
    pages[-1].locator("#kl-network_dim").fill("-1")
    pages[-1].locator("#kl-print").click()
    pages[-1].wait_for_selector(".kl-problems:not([hidden])", timeout=60000)
    runs_tab(pages[-1], "under-way")
    pages[-1].wait_for_selector("#kl-runs .kr-curve canvas")
    for page in pages[1:]:
        page.close()


def test_a_studio_killed_and_started_again_loses_nothing(place: Any, studios: Callable[..., Any], visit: Callable[..., Any]) -> None:
    """The last test of the module: it takes the studio away."""
    studio, supervisor, job = place
    page = visit(studio.url, quiet=False).page
    runs_tab(page, "under-way")
    page.wait_for_selector("#kl-runs .kr-curve canvas")
    studio.process.kill()
    studio.process.wait()
    expect(page.locator("#kl-runs .kr-status")).to_contain_text("does not answer", timeout=15000)
    # Also about a run of which nothing was told yet.
    for name in ("broken", "under-way"):
        runs_tab(page, name)
        expect(page.locator("#kl-runs .kr-status")).to_contain_text("does not answer")
        assert page.locator("#kl-runs .kr-badge").last.inner_text() == ""
    step = supervisor.find(job.name).summary.step
    until(lambda: supervisor.find(job.name).summary.step > step)
    studios(output_dir=studio.output_dir, port=studio.port)
    page.wait_for_function("() => !document.body.innerText.includes('does not answer')", timeout=60000)
    page.get_by_role("tab", name="Runs").click()
    expect(page.locator("#kl-runs .kr-title")).to_have_text("under-way", timeout=30000)
    expect(page).to_have_url(re.compile(r"#run=\d+-\d+-under-way$"))
    before = count_of(page)
    until(lambda: count_of(page) > before)
    page.get_by_role("button", name="Stop", exact=True).locator("visible=true").click()
    expect(page.locator("#kl-runs .kr-badge").last).to_have_text("Stopped", timeout=30000)
    assert supervisor.find(job.name).state == "stopped" and supervisor.find(job.name).returncode == 0

    # A run that is started elsewhere comes up beside the form of a page that is open and shows none.
    page.get_by_role("tab", name="Train").click()
    page.reload()
    expect(page.locator("#kl-network_dim")).to_be_visible()
    expect(page.locator("#kl-live .kr-run")).to_be_hidden()
    elsewhere = supervisor.start(SCRIPT, options(studio.output_dir, output_name="elsewhere"))
    try:
        expect(page.locator("#kl-live .kr-title")).to_have_text("elsewhere")
        expect(page.locator("#kl-live .kr-badge")).to_have_text("Running")
        page.locator("#kl-stop").click()
        expect(page.locator(".kl-answer")).to_contain_text("elsewhere was asked to stop")
    finally:
        supervisor.stop(elsewhere, grace_seconds=0)


def test_lists_of_choices_look_like_ones_and_sizes_of_files_stand_in_one_column(place: Any, visit: Callable[..., Any]) -> None:
    page = visit(place[0].url).page
    (next(path for path in place[0].output_dir.glob("*") if path.name.endswith("whole")) / "whole.safetensors").write_bytes(b"no model")
    # Without a button beside it, at the edge.
    runs_tab(page, "at-once")
    expect(page.locator("#kl-runs .kr-files li")).to_have_text([re.compile("config.toml")])
    expect(page.locator("#kl-runs .kr-files .kr-size").first).to_be_visible()
    edge = "node => node.querySelector('ul').getBoundingClientRect().right - node.querySelector('.kr-size').getBoundingClientRect().right"
    assert abs(page.locator("#kl-runs .kr-files").evaluate(edge)) < 1
    runs_tab(page, "whole")
    expect(page.locator("#kl-runs .kr-files .kr-button")).to_be_visible()
    plain = (
        "nodes => nodes.filter(node => node.checkVisibility() && getComputedStyle(node).appearance === 'none').map(node => node.outerHTML)"
    )
    assert page.locator("select").evaluate_all(plain) == []
    files = page.locator("#kl-runs .kr-files li")
    edges = "nodes => nodes.map(node => Math.round(node.querySelector('.kr-size').getBoundingClientRect().right))"
    assert files.count() > 1 and files.locator(".kr-button").count() < files.count()
    assert len(set(files.evaluate_all(edges))) == 1
    page.set_viewport_size({"width": 390, "height": 844})
    apart = """nodes => nodes.map(node => [...node.children].map(each => each.getBoundingClientRect())).every(([name, size, button]) =>
      size.top >= name.bottom - 1 && (!button || button.left >= name.right))"""
    assert files.evaluate_all(apart) and page.evaluate("document.documentElement.scrollWidth") <= 390


def test_what_stands_below_a_long_list_of_runs_is_in_the_window_before_anybody_scrolls(
    studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path
) -> None:
    root = tmp_path / "output"
    for number in range(20):
        made(root, options(root, output_name=f"run-{number}"))
    page = visit(studios(output_dir=root).url, width=1280, height=720).page
    # Its buttons have several rows.
    page.locator(".kl-language").select_option("ru")
    page.locator("[role=tab][data-tab-id=runs]").click()
    expect(page.locator("#kl-runs .kr-row")).to_have_count(20)
    buttons = page.locator("#kl-runs .kr-nav .kr-button:visible")
    boxes = [buttons.nth(place).bounding_box() for place in range(buttons.count())]
    assert len({round(box["y"]) for box in boxes if box}) > 1 and all(box and box["y"] + box["height"] <= 720 for box in boxes), boxes
    assert Eyes(page).faults("#kl-runs .kr-nav .kr-button:last-child") == []


def test_what_somebody_says_of_a_run_is_in_the_list_without_waiting_for_its_next_poll(
    studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path
) -> None:
    root = tmp_path / "output"
    made(root, options(root, output_name="before"))
    page = visit(studios(output_dir=root).url).page
    # From now on nothing is asked for by the clock.
    page.evaluate(
        "{ const later = setTimeout; window.setTimeout = (work, time, ...given) => (time > 900 ? 0 : later(work, time, ...given)); }"
    )
    runs_tab(page, "before")
    page.get_by_role("button", name="Name, tags, notes").click()
    page.locator("#kl-desk-label").fill("After")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator("#kl-runs .kr-row-name")).to_have_text("After")
    page.get_by_role("button", name="Star").click()
    expect(page.locator("#kl-runs .kr-row-name")).to_have_text("After ★")


def test_what_ending_a_run_now_has_said_stays_when_it_has_ended_and_the_list_has_heard_of_it_too(
    studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    root = tmp_path / "output"
    supervisor = JobSupervisor(root, command("stubborn"))
    job = supervisor.start(SCRIPT, options(root, output_name="ending"))
    try:
        page = visit(studios(output_dir=root).url).page
        runs_tab(page, "ending")
        page.get_by_role("button", name="Stop", exact=True).click()
        expect(page.locator("#kl-runs .kr-status")).to_contain_text("Asked to stop")
        expect(page.get_by_role("button", name="End now")).to_be_visible()
        # The list asks for nothing by the clock from now on; the page hears of the run once it has been told that it is ended.
        page.evaluate(
            "{ const later = setTimeout; window.setTimeout = (work, time, ...given) => (time > 2000 ? 0 : later(work, time, ...given)); }"
        )
        held: list[Route] | None = []
        page.route(re.compile(r"/kl/run/[^/?]+([?]|$)"), lambda route: route.continue_() if held is None else held.append(route))
        page.get_by_role("button", name="End now").click()
        expect(page.locator("#kl-runs .kr-status")).to_contain_text("Ended without waiting")
        waiting, held = held, None
        for each in waiting:
            each.continue_()
        expect(page.locator("#kl-runs .kr-run .kr-badge")).to_have_text("Stopped")
        expect(page.locator("#kl-runs .kr-status")).to_contain_text("Resume continues from the last saved state")
        expect(page.locator("#kl-runs .kr-list .kr-badge")).to_have_text("Stopped")
    finally:
        supervisor.stop(job, grace_seconds=0)
        supervisor.close()
