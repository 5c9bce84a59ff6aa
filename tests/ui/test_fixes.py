"""What one button does about a failed run: which settings it changes, where the run goes on, and where a person has to decide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kohya_like import causes, fixes
from kohya_like.supervisor import Job, JobSupervisor
from sd_scripts.dataset.scan import UnusableImage, bad_images_error
from sd_scripts.library.core.errors import NonFiniteLoss
from sd_scripts.runs.events import RunFailed
from tests.ui.runs_on_disk import made, options
from tests.ui.standin_runs import command, until

MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobSupervisor]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    supervisor = JobSupervisor(tmp_path, command("quick"))
    yield supervisor
    for job in supervisor.jobs():
        supervisor.stop(job, grace_seconds=0)
    supervisor.close()


def failed(supervisor: JobSupervisor, steps: tuple[int, ...] = (), **values: object) -> Job:
    """A run that was killed, with states of these steps."""
    run = made(supervisor.root, options(supervisor.root, output_name="ill", **values), steps)
    run.log(RunFailed(step=max(steps, default=0), text="It ended."))
    job = supervisor.find(run.name)
    assert job is not None and job.state == "failed"
    return job


def of(line: str, returncode: int | None = 1, said: str = "", refused: bool = False) -> causes.Cause:
    return causes.diagnose([line], returncode, RunFailed(text=said, refused=refused) if said else None)


def test_memory_is_spared_step_by_step_and_the_run_goes_on(supervisor: JobSupervisor) -> None:
    job = failed(supervisor, (100, 200), train_batch_size=2, gradient_accumulation_steps=3)
    found, shown = [], []
    for _ in range(4):
        fix = fixes.fix_of(job, of(MEMORY))
        assert fix is not None and fix.button == "Change this and start again"
        found.append((dict(fix.changes), fix.text))
        shown += fix.shown
        again = fixes.start(supervisor, job, fix)
        until(lambda job=again: supervisor.find(job.name).state == "finished")
        job = replace(again, state="failed")
    names = [set(changes) for changes, _ in found]
    assert names[:2] == [{"gradient_checkpointing", "oom_fallback"}, {"train_batch_size", "gradient_accumulation_steps"}]
    assert names[2:] == [{"resolution"}, {"resolution"}]
    assert shown[0] == ("Gradient checkpointing", "off", "on") and "goes on in its folder, from the state of step 200" in found[0][1]
    assert found[1][0] == {"train_batch_size": 1, "gradient_accumulation_steps": 6}
    # Smaller images train something else: in a run of its own, which begins with the state.
    assert "A new run begins" in found[2][1]
    first = next(each for each in supervisor.jobs() if each.run.options().distributed.resume.endswith("000200"))
    assert first.run.options().dataset.resolution == (768, 768) and first.run.options().memory.gradient_checkpointing


def test_a_loss_that_is_no_number_begins_a_run_with_smaller_steps(supervisor: JobSupervisor) -> None:
    # The last state is saved when the loss is no number; its weights would give it again.
    job = failed(supervisor, (300, 310), mixed_precision="fp16", learning_rate=3e-4)
    fix = fixes.fix_of(job, of("", said=str(NonFiniteLoss(310, ["a.png"]))))
    assert fix is not None and dict(fix.changes) == {"mixed_precision": "bf16", "learning_rate": 1e-4}
    after = fixes.start(supervisor, job, fix)
    assert after.name != job.name and job.run.options().optimizer.learning_rate == 3e-4, "the old run stays as it was"
    assert after.run.options().distributed.resume == str(job.run.state / "000300")
    assert after.run.options().optimizer.learning_rate == 1e-4


def test_a_loss_that_is_no_number_at_the_only_state_begins_from_the_first_step(supervisor: JobSupervisor) -> None:
    job = failed(supervisor, (3,), learning_rate=100.0)
    fix = fixes.fix_of(job, of("", said=str(NonFiniteLoss(3, ["a.png"]))))
    assert fix is not None and fix.text == "A new run begins with these settings, from the first step."
    assert fixes.start(supervisor, job, fix).run.options().distributed.resume == "none"


def test_images_that_cannot_be_read_are_left_out_by_one_button(supervisor: JobSupervisor) -> None:
    job = failed(supervisor)
    cause = of("", 2, str(bad_images_error([UnusableImage("/data/stars/7.png", "is damaged")])), refused=True)
    assert cause.why == "They are damaged, were not copied whole, or are no images."
    fix = fixes.fix_of(job, cause)
    assert fix is not None and fix.shown == (("Unreadable images", "stop", "skip"),) and fix.button == "Change this and start again"
    assert fixes.start(supervisor, job, fix).run.options().dataset.on_bad_image == "skip"


@pytest.mark.parametrize(
    ("line", "returncode", "said", "goes_to", "option"),
    [
        ("OSError: [Errno 28] No space left on device: 'x'", 1, "", fixes.DISK, ""),
        ("", 1, "the state could not be written to /x: no (0.01 GiB are free there).", fixes.DISK, ""),
        ("safetensors_rust.SafetensorError: HeaderTooLarge", 1, "", fixes.FORM, "pretrained_model_name_or_path"),
        ("", 2, "vae: small.safetensors is damaged or was not downloaded whole", fixes.FORM, "vae"),
        ("", 2, "pretrained_model_name_or_path: a.safetensors is a FLUX model; you chose SDXL, which needs one", fixes.FORM,
         "pretrained_model_name_or_path"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/stars/7.png'", 1, "", fixes.FORM, "train_data_dir"),
        ("", 2, "train_data_dir: /data/stars is not a folder", fixes.FORM, "train_data_dir"),
        ("", 2, "", fixes.FORM, ""),
        ("", -9, "", "", ""),
        ("", -15, "", "", ""),
        ("", None, "", "", ""),
        ("The server socket has failed to bind: EADDRINUSE", 1, "", "", ""),
        ("DataLoader worker (pid 3) is killed by signal: Bus error", 1, "", "", ""),
    ],
)  # fmt: skip
def test_each_known_cause_has_one_button(
    line: str, returncode: int | None, said: str, goes_to: str, option: str, supervisor: JobSupervisor
) -> None:
    job = failed(supervisor, train_data_dir="/data/stars", pretrained_model_name_or_path="/models/a.safetensors")
    fix = fixes.fix_of(job, of(line, returncode, said, refused=returncode == 2))
    assert fix is not None and (fix.goes_to, fix.option) == (goes_to, option)
    assert fix.text.endswith(".") and fix.button
    if not goes_to:
        again = fixes.start(supervisor, job, fix)
        until(lambda: supervisor.find(again.name).state == "finished")
        assert again.name == job.name


def test_what_nobody_knows_has_no_button(supervisor: JobSupervisor) -> None:
    job = failed(supervisor)
    assert fixes.fix_of(job, of("ModuleNotFoundError: No module named 'bitsandbytes'")) is None
    assert fixes.fix_of(job, of("", 55)) is None
    job.run.config.write_text("damaged = [")
    assert fixes.fix_of(job, of(MEMORY)) is None
