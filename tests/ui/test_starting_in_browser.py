"""Resume & Distributed in a real browser: what will be resumed, GPUs, machines, the export for a cluster; by mouse and by keyboard."""

from __future__ import annotations

import shlex
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from kohya_like import desk
from sd_scripts.runs.events import RunFinished
from tests.ui import fake_nvml
from tests.ui.conftest import WIDTHS_AND_THEMES
from tests.ui.runs_on_disk import made, options

pytestmark = pytest.mark.browser
UUIDS = ("GPU-1a2b3c4d-5e6f-7081-92a3-b4c5d6e7f809", "GPU-2b3c4d5e-6f70-8192-a3b4-c5d6e7f8091a")
CARDS = [fake_nvml.Card(name="NVIDIA H200", uuid=uuid, total=139 * 2**30) for uuid in UUIDS]


@pytest.fixture(scope="module")
def place(studios: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A studio on a machine with two GPUs, as far as its driver tells."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fake_nvml.environment(tmp_path_factory.mktemp("driver") / "cards.json", CARDS).items():
            patch.setenv(name, value)
        yield studios()


def fill(page: Page, **texts: str) -> None:
    for name, text in {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", **texts}.items():
        page.locator(f"#kl-{name}").fill(text)


def section(page: Page, title: str = "Resume & Distributed") -> Locator:
    return page.locator(".kl-section", has=page.get_by_role("heading", name=title, exact=True))


def open_section(page: Page, title: str = "Resume & Distributed") -> Locator:
    found = section(page, title)
    found.locator("> summary").click()
    return found


def command(page: Page) -> list[str]:
    page.evaluate("document.querySelector('.kl-output').hidden = true")
    page.locator("#kl-print").click()
    page.wait_for_selector(".kl-output:not([hidden])")
    return shlex.split(page.locator(".kl-output pre").first.inner_text())


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_search_leads_to_resume_and_shows_what_waits_for_something_else(place: Any, visit: Callable[..., Any]) -> None:
    page = visit(place.url).page
    search = page.get_by_role("searchbox", name="Search all settings")
    search.fill("resume")
    expect(section(page)).to_be_visible()
    expect(page.get_by_label("Resume", exact=True)).to_be_visible()
    search.fill("machine rank")
    rank = page.locator("#kl-machine_rank")
    expect(rank).to_be_visible()
    expect(section(page)).to_contain_text("Has no effect until Multi-GPU is on.")
    search.fill("")
    open_section(page)
    expect(rank).to_be_hidden()


def test_several_gpus_are_chosen_by_name_and_machines_asked_for_their_address_and_the_command_follows(
    place: Any, visit: Callable[..., Any]
) -> None:
    page = visit(place.url).page
    fill(page)
    part = open_section(page)
    assert "CUDA_VISIBLE_DEVICES" not in " ".join(command(page))
    expect(page.locator("#kl-launcher")).to_be_hidden()
    page.locator("#kl-multi_gpu").check()
    expect(page.locator("#kl-launcher")).to_be_visible()
    expect(page.locator("#kl-multi_gpu")).to_be_focused()
    second = part.get_by_role("checkbox", name="1 · NVIDIA H200 · 139 GiB")
    second.check()
    expect(page.locator("#kl-gpu_ids")).to_have_value(UUIDS[1])
    part.get_by_role("checkbox", name="0 · NVIDIA H200").check()
    expect(page.locator("#kl-gpu_ids")).to_have_value(" ".join(UUIDS))
    words = command(page)
    assert f"CUDA_VISIBLE_DEVICES={','.join(UUIDS)}" in words and after(words, "--num_processes") == "2"
    page.locator("#kl-gpu_ids").fill("1 7")
    expect(second).to_be_checked()
    expect(part.get_by_role("checkbox", name="0 · NVIDIA H200")).not_to_be_checked()
    part.get_by_role("checkbox", name="0 · NVIDIA H200").check()
    expect(page.locator("#kl-gpu_ids")).to_have_value("0 1 7")
    page.locator("#kl-gpu_ids").fill("")
    page.locator("#kl-launcher").select_option("torchrun")
    words = command(page)
    assert "torch.distributed.run" in words and after(words, "--nproc_per_node") == "2"
    page.locator("#kl-num_gpus").fill("2")
    page.locator("#kl-multi_gpu").uncheck()
    asleep = part.locator(".kl-field[data-name=num_gpus]")
    expect(asleep).to_contain_text("Has no effect until Multi-GPU is on.")
    expect(page.locator("#kl-launcher")).to_be_visible()
    awake = page.locator("#kl-output_name").evaluate("field => getComputedStyle(field).color")
    assert page.locator("#kl-num_gpus").evaluate("field => getComputedStyle(field).color") != awake, "it is not greyed"
    assert after(command(page), "--num_processes") == "1", "a switch that is off must not refuse what depends on it"
    expect(page.locator("#kl-num_gpus")).to_have_value("2")
    page.locator("#kl-num_gpus").fill("0")
    expect(page.locator("#kl-num_machines")).to_be_hidden()

    page.locator("#kl-launcher").select_option("accelerate")
    page.locator("#kl-multi_gpu").check()
    page.locator("#kl-num_machines").fill("2")
    page.locator("#kl-print").click()
    expect(page.locator(".kl-problems")).to_contain_text("main_process_ip must be the address of machine 0")
    page.locator("#kl-main_process_ip").fill("10.0.0.7")
    page.locator("#kl-main_process_port").fill("29500")
    page.locator("#kl-machine_rank").fill("1")
    words = command(page)
    told = {
        flag: after(words, f"--{flag}")
        for flag in ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
    }
    assert told == {
        "num_processes": "4",
        "num_machines": "2",
        "machine_rank": "1",
        "main_process_ip": "10.0.0.7",
        "main_process_port": "29500",
    }


def test_what_will_be_resumed_is_told_while_the_form_changes(place: Any, visit: Callable[..., Any]) -> None:
    run = made(place.output_dir, options(place.output_dir), (200, 400))
    desk.say(run.path, {"label": {"before": "", "after": "Best cat"}})
    page = visit(place.url).page
    beside = page.locator(".kl-foresight .kl-foreseen")
    fill(page, output_name="cat", max_train_steps="1600")
    expect(beside).to_have_text("Continues Best cat from step 400 of 1600, saved 12 minutes ago.")
    page.locator("#kl-learning_rate").fill("0.0003")
    expect(beside).to_have_text("Starts a new run from the first step.")
    part = open_section(page)
    expect(part).to_contain_text("Best cat has other settings: learning_rate: 0.0001, now 0.0003.")
    choice = part.get_by_label("Resume", exact=True)
    # The states stand under the run as lists name it.
    assert "Best cat · " in (choice.locator("optgroup").first.get_attribute("label") or "")
    choice.select_option(label="step 200, saved 12 minutes ago")
    expect(beside).to_have_text("Starts a new run from step 200 of Best cat, saved 12 minutes ago.")
    expect(part).to_contain_text("It was trained with other settings (learning_rate: 0.0001, now 0.0003)")
    words = command(page)
    assert f'resume = "{run.state / "000200"}"' in Path(words[-1]).read_text()
    choice.select_option(label="a step or a folder, written below")
    page.locator("#kl-resume").fill("300")
    expect(beside).to_contain_text("no saved state of step 300; it has the steps 200, 400")
    choice.select_option("none")
    expect(page.locator("#kl-resume")).to_be_hidden()
    expect(beside).to_have_text("Starts a new run from the first step, as Resume says.")


def test_a_finished_run_is_not_started_again_by_mistake(place: Any, visit: Callable[..., Any]) -> None:
    run = made(place.output_dir, options(place.output_dir, output_name="done"), (1600,))
    (run.path / "done.safetensors").write_bytes(b"x")
    run.log(RunFinished(step=1600))
    page = visit(place.url).page
    fill(page, output_name="done", max_train_steps="1600")
    expect(page.locator(".kl-foresight .kl-foreseen")).to_contain_text("is finished already (1600 steps)")
    page.locator("#kl-start").click()
    expect(page.locator(".kl-problems")).to_contain_text("finished already")
    page.get_by_role("button", name="resume: ").click()
    expect(page.locator("#kl-resume-choice")).to_be_focused()
    assert len(list(place.output_dir.glob("*-done"))) == 1


def test_the_export_shows_files_and_gives_them_as_one_archive(place: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit(place.url).page
    fill(page, output_name="wide")
    page.locator(".kl-export > summary").click()
    expect(page.locator("#kl-cluster-partition")).to_be_visible()
    page.locator("#kl-cluster-kind").select_option("torchrun")
    expect(page.locator("#kl-cluster-partition")).to_be_hidden()
    page.get_by_role("button", name="Write the files").click()
    expect(page.locator("#kl-cluster-main_address-error, .kl-export .kl-error:visible").first).to_contain_text("This is required")
    page.locator("#kl-cluster-kind").select_option("slurm")
    page.locator("#kl-cluster-machines").fill("3")
    page.get_by_role("button", name="Write the files").click()
    made_files = page.get_by_role("region", name="Files for the cluster")
    expect(made_files).to_be_focused()
    made_files.locator("summary", has_text="job.sbatch").click()
    expect(made_files).to_contain_text("#SBATCH --nodes=3")
    with page.expect_download() as coming:
        page.get_by_role("button", name="Download wide-slurm.zip").click()
    with zipfile.ZipFile(coming.value.path()) as archive:
        names = {name.removeprefix("wide-slurm/") for name in archive.namelist()}
        assert {"README.md", "config.toml", "job.sbatch", "train.sh"} <= names
    assert list(place.output_dir.glob("*-wide")) == [], "an export starts nothing"
    page.locator("#kl-learning_rate").fill("0.0007")
    expect(made_files).to_be_hidden()


def test_the_accordion_is_used_with_the_keyboard_alone(place: Any, visit: Callable[..., Any]) -> None:
    page = visit(place.url).page
    page.get_by_role("searchbox", name="Search all settings").focus()
    keys = {"kl-multi_gpu": "Space", "kl-gpu_ids-1": "Space"}
    for _ in range(60):
        page.keyboard.press("Tab")
        here = page.evaluate("() => ({id: document.activeElement.id, text: document.activeElement.textContent})")
        if here["text"].startswith("Resume & Distributed"):
            page.keyboard.press("Enter")
        if here["id"] == "kl-resume-choice":
            page.keyboard.press("ArrowDown")
        if here["id"] in keys:
            page.keyboard.press(keys.pop(here["id"]))
            # They are asked for when the accordion opens.
            expect(page.locator("#kl-gpu_ids-1")).to_be_visible()
        if here["id"] == "kl-launcher":
            page.keyboard.press("ArrowDown")
            break
    else:
        raise AssertionError("Tab never came to the launcher")
    shown = {name: page.locator(f"#kl-{name}").input_value() for name in ("resume", "gpu_ids", "launcher")}
    assert shown == {"resume": "none", "gpu_ids": UUIDS[1], "launcher": "torchrun"} and not keys


@pytest.mark.parametrize(("width", "theme"), WIDTHS_AND_THEMES)
def test_axe_finds_no_violation_in_the_accordion_and_the_export(place: Any, visit: Callable[..., Any], theme: str, width: int) -> None:
    seen = visit(place.url, width=width, theme=theme)
    page = seen.page
    fill(page)
    part = open_section(page)
    part.get_by_role("button", name="more settings, for when Multi-GPU is on").click()
    expect(page.locator("#kl-num_gpus")).to_be_focused()
    page.locator("#kl-multi_gpu").check()
    part.locator(".kl-gpu input").first.check()
    page.locator("#kl-resume-choice").select_option("?")
    page.locator(".kl-export > summary").click()
    page.get_by_role("button", name="Write the files").click()
    page.locator(".kl-exported summary").first.click()
    assert seen.axe() + seen.overflow() == []


def test_z_image_shows_what_matters_first_and_folds_the_rest(place: Any, visit: Callable[..., Any]) -> None:
    page = visit(place.url).page
    page.get_by_role("radio", name="Z-Image", exact=True).check(force=True)
    part = open_section(page, "Advanced Training")
    page.locator("#kl-objective").select_option("acrf")
    expect(page.locator("#kl-turbo_steps")).to_be_visible()
    for name in ("lambda_fft", "curvature_weight", "logit_mean", "snr_gamma"):
        expect(page.locator(f"#kl-{name}")).to_be_hidden()
    part.locator("summary", has_text="Further terms of the loss").click()
    page.locator("#kl-lambda_fft").fill("0.1")
    expect(part.locator("summary", has_text="Further terms of the loss")).to_contain_text("1 changed")
    page.locator("#kl-anchor_weighting").select_option("min_snr")
    expect(page.locator("#kl-snr_gamma")).to_be_visible()
    page.locator("#kl-objective").select_option("flow")
    expect(page.locator("#kl-logit_mean")).to_be_visible()
    expect(page.locator("#kl-turbo_steps")).to_be_hidden()
    page.get_by_role("searchbox", name="Search all settings").fill("curvature")
    expect(page.locator("#kl-curvature_weight")).to_be_visible()
