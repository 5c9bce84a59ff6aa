"""Asking a run to end: it finishes its step, saves, says so and leaves with 0; the next start goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from kohya_like.supervisor import Job, JobSupervisor
from sd_scripts.families import RUNS
from sd_scripts.library.train.launch import main
from sd_scripts.runs.launcher import REFUSED_FILE
from sd_scripts.runs.process_trees import RUN_FOLDER, RUN_ID, carried, carriers, ranks
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.command_line import parse_cli
from tests.forked import forked


def ask(how: str, process: Any, run: RunDirectory) -> None:
    if how == "stop file":
        run.request_stop()
    else:
        os.kill(process.pid, {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}[how])


# By signals it is asked below, too.
@pytest.mark.parametrize("how", ["stop file", *(pytest.param(how, marks=pytest.mark.long) for how in ("Ctrl-C", "SIGTERM"))])
def test_a_stopped_run_goes_on_to_the_same_bytes(how: str, runs: Any, long_options: dict[str, Any], undisturbed: RunDirectory) -> None:
    process = runs.begin(**long_options)
    runs.wait(process, lambda: any(event["kind"] == "step" and event["step"] >= 2 for event in runs.events()))
    ask(how, process, runs.newest())
    process.join(120)
    assert process.exitcode == 0
    run = runs.newest()
    last = run.events()[0][-1]
    assert last["kind"] == "stopped"
    assert 2 <= last["step"] < 12
    assert (run.state / f"{last['step']:06d}" / "manifest.json").is_file()
    assert not (run.path / "lora.safetensors").exists()
    assert run.stop_requested() is (how == "stop file"), "an old request, of which the next start sees that it is older"
    done = runs.train(**long_options)
    assert done.path == run.path
    assert (done.path / "lora.safetensors").read_bytes() == (undisturbed.path / "lora.safetensors").read_bytes()
    words = [event["kind"] for event in done.events()[0] if event["kind"] in ("stopped", "finished", "failed")]
    assert words == ["stopped", "finished"], "each start has one last word"


def test_a_run_stopped_while_it_caches_has_nothing_to_save_and_leaves_with_0(runs: Any) -> None:
    process = runs.begin()
    runs.wait(process, lambda: any(event["kind"] == "phase" and event["name"] == "cache" for event in runs.events()))
    os.kill(process.pid, signal.SIGINT)
    process.join(120)
    assert process.exitcode == 0
    last = runs.newest().events()[0][-1]
    assert (last["kind"], last["step"]) in {("stopped", step) for step in range(8)}
    assert runs.train().events()[0][-1]["kind"] == "finished"


def ended_while_it_looks(arguments: list[str]) -> None:
    """main, which gets a SIGTERM as it opens the first image."""
    sys.addaudithook(
        lambda event, details: os.kill(os.getpid(), signal.SIGTERM) if event == "open" and str(details[0]).endswith(".png") else None
    )
    main("sdxl", "network", arguments)


def test_an_answer_that_was_asked_for_and_is_not_given_is_no_success(runs: Any) -> None:
    codes = {}
    for question in ("estimate", "dry_run"):
        process = forked(ended_while_it_looks, runs.arguments(**{question: True}))
        process.join(120)
        codes[question] = process.exitcode
    assert codes == {"estimate": 130, "dry_run": 130}
    assert runs.folders() == []


LAUNCHER = """
import os, subprocess, sys
from pathlib import Path
folder, before = Path(sys.argv[1]), float(sys.argv[3])
(folder / "stop.request").touch()
if before:
    made = (folder / "stop.request").stat().st_mtime - before
    os.utime(folder / "stop.request", (made, made))
rank = "import sys; from sd_scripts.runs import stopping; from pathlib import Path; "
rank += "print(stopping.is_for_earlier_start(stopping.RunDirectory(Path(sys.argv[1])), 'sdxl_train_network.py'))"
subprocess.run([sys.executable, "-c", rank, str(folder)], check=True)
"""
"""What accelerate is: it gets the script among its words, and is there for seconds before the script's own process is."""


def test_a_request_is_old_when_it_is_older_than_the_launcher_and_nobody_took_the_old_one_away(tmp_path: Path) -> None:
    def told(seconds_before: float, **environment: str) -> str:
        words = [sys.executable, "-c", LAUNCHER, str(tmp_path), "scripts/sdxl_train_network.py", str(seconds_before)]
        return subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, check=True).stdout.strip()

    found = {
        "in time": told(0),
        "long before": told(3600),
        "long before, in a folder that was made ready": told(3600, **{RUN_FOLDER: str(tmp_path)}),
    }
    assert found == {"in time": "False", "long before": "True", "long before, in a folder that was made ready": "False"}


def tried_within(folder: str, arguments: list[str]) -> None:
    """A dry run by a program that has a process group of its own; ends with 0 when that is still there afterwards."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    with open(f"{folder}/said", "w") as said, pytest.raises(SystemExit) as left, redirect_stdout(said):
        main("sdxl", "network", arguments)
    os._exit(int(left.value.code or not torch.distributed.is_initialized()))


def test_a_dry_run_leaves_a_request_to_stop_and_a_process_group_of_others_alone(runs: Any, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.request_stop()
    process = forked(tried_within, str(tmp_path), runs.arguments(run_dir=run.path, dry_run=True))
    process.join(120)
    assert process.exitcode == 0 and run.stop_requested()
    assert "steps" in (tmp_path / "said").read_text()


@pytest.mark.long
def test_a_stop_that_is_asked_for_while_the_libraries_are_loaded_is_heard(runs: Any, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    with runs.launch(1, run_dir=run.path, max_train_steps=200) as started:
        run.request_stop()
        said = started.communicate(timeout=240)[0]
    assert started.returncode == 0, said
    assert [event["kind"] for event in run.events()[0] if event["kind"] in ("step", "finished", "stopped", "failed")] == ["stopped"]


SEVERAL: dict[str, Any] = {
    "multi_gpu": True,
    "num_gpus": 2,
    "train_batch_size": 1,
    "max_data_loader_n_workers": 2,
    "save_state_every_n_steps": 2,
    "save_last_n_states": 3,
}


class Studio:
    """A supervisor over the tiny model's runs, on two processes of the CPU."""

    def __init__(self, runs: Any) -> None:
        self.runs = runs
        self.supervisor = JobSupervisor(runs.output)

    def start(self, **options: Any) -> Job:
        asked = parse_cli(RUNS["sdxl", "network"], self.runs.arguments(**SEVERAL, **options)).options
        return self.supervisor.start(asked.script, asked)

    def now(self, job: Job) -> Job:
        found = self.supervisor.find(job.name)
        assert found is not None
        return found

    def until(self, job: Job, condition: Callable[[Job], object]) -> Job:
        end = time.monotonic() + 400
        while not condition(self.now(job)):
            assert time.monotonic() < end and (self.now(job).state in ("running", "queued") or condition(self.now(job))), self.said(job)
            # Each look at the processes takes 20 ms.
            time.sleep(0.2)
        return self.now(job)

    def said(self, job: Job) -> str:
        return job.run.console.read_text()[-4000:]

    def starts(self, job: Job) -> list[int]:
        """The step at which each start has begun."""
        return [event["start_step"] for event in job.run.events()[0] if event["kind"] == "started"]

    def members(self, job: Job) -> list[psutil.Process]:
        return carriers(RUN_ID).get(job.run_id or "", [])

    def rank(self, job: Job, number: int) -> psutil.Process:
        return next(process for process in ranks(self.members(job)) if carried(process, "RANK") == str(number))


@pytest.fixture
def studio(runs: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Studio]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = Studio(runs)
    yield made
    for job in made.supervisor.jobs():
        made.supervisor.stop(job, grace_seconds=0)
    made.supervisor.close()


def stopped(studio: Studio, job: Job) -> None:
    """Stops a job, and sees that it has saved and that nothing is left."""
    studio.supervisor.stop(job, grace_seconds=60)
    done = studio.now(job)
    assert (done.state, done.returncode) == ("stopped", 0), studio.said(job)
    assert studio.members(job) == []
    last = job.run.events()[0][-1]
    assert last["kind"] == "stopped" and (job.run.state / f"{last['step']:06d}" / "manifest.json").is_file()


def test_wrong_options_that_a_process_finds_are_marked_as_refused(runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whereupon launchers do not start it again, see test_launchers and the long test below."""
    monkeypatch.setenv(REFUSED_FILE, str(tmp_path / "refused"))
    runs.output.mkdir()
    with pytest.raises(SystemExit) as ended:
        main("sdxl", "network", runs.arguments(max_train_epochs=1, max_train_steps=None, train_data_dir=runs.output))
    assert ended.value.code == 2 and (tmp_path / "refused").is_file()


@pytest.mark.parametrize("launcher", ["filestore", *(pytest.param(name, marks=pytest.mark.long) for name in ("accelerate", "torchrun"))])
def test_stopping_several_processes_saves_and_ends_every_rank_and_worker(launcher: str, studio: Studio) -> None:
    """That a killed rank is started again with --resume auto, test_launchers tries always; that it goes on, test_runs_processes."""
    job = studio.start(launcher=launcher, max_train_steps=5000)
    studio.until(job, lambda now: now.summary.step >= 3)
    assert len(ranks(studio.members(job))) == 2
    stopped(studio, job)


@pytest.mark.long
def test_a_killed_rank_ends_the_run_with_a_sentence_and_no_orphan(studio: Studio) -> None:
    job = studio.start(launcher="filestore", max_train_steps=5000)
    studio.until(job, lambda now: now.summary.step >= 3)
    studio.rank(job, 1).kill()
    done = studio.until(job, lambda now: now.state != "running")
    assert done.state == "failed" and done.returncode == 128 + 9, studio.said(job)
    assert "process 2 of 2 (rank 1) was killed (signal 9)" in studio.said(job)
    assert studio.members(job) == []


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["filestore", "accelerate", "torchrun"])
def test_a_killed_rank_is_started_again_and_the_run_arrives(launcher: str, studio: Studio) -> None:
    job = studio.start(launcher=launcher, max_train_steps=30, max_restarts=2, resume="none")
    studio.until(job, lambda now: now.summary.step >= 6)
    studio.rank(job, 1).kill()
    done = studio.until(job, lambda now: now.state != "running")
    assert (done.state, done.returncode) == ("finished", 0), studio.said(job)
    events = job.run.events()[0]
    starts = studio.starts(job)
    assert starts[0] == 0 and len(starts) == 2 and starts[1] >= 4, "it goes on from the newest state"
    assert any(event["kind"] == "warning" and "restart 1 of 2" in event["text"] for event in events)
    assert (job.path / "lora.safetensors").is_file() and studio.members(job) == []


@pytest.mark.long
def test_wrong_options_are_refused_once(studio: Studio) -> None:
    # Found only by the processes themselves, after they have started.
    job = studio.start(launcher="accelerate", max_restarts=3, max_train_epochs=1, max_train_steps=None, train_data_dir=studio.runs.output)
    done = studio.until(job, lambda now: now.state != "running")
    assert (done.state, done.returncode) == ("failed", 2), studio.said(job)
    assert "started again" not in studio.said(job)
