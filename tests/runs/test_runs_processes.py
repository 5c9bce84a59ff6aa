"""How a global batch is shared between processes and micro-batches changes nothing, nor does changing it on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from kohya_like import cleanup
from sd_scripts.families import RUNS
from sd_scripts.runs.command import OWN_LAUNCHER, SCRIPTS
from sd_scripts.runs.rundir import RunDirectory
from tests.runs.conftest import Runs
from tests.runs.together import Together, trained_together

SAME: dict[str, Any] = {
    "max_train_steps": 10,
    "save_state_every_n_steps": 5,
    "save_last_n_states": 9,
    "lr_scheduler": "constant",
    # Plain steps along the gradient: an optimizer that divides by the gradient's size makes rounding errors as large as its steps.
    "optimizer_type": "SGD",
    "learning_rate": 2.0,
    "shuffle_caption": True,
}


def difference(a: Path, b: Path) -> float:
    """Largest difference of any trained weight between two states."""
    first, second = (load_file(path / "weights.safetensors") for path in (a, b))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_two_processes_one_larger_batch_and_accumulation_train_the_same(runs: Runs, tmp_path: Path) -> None:
    two = trained_together(runs, 2, tmp_path / "start", train_batch_size=1, **SAME)
    assert len(runs.folders()) == 1, "both processes write one folder"
    runs.output = runs.output.parent / "large"
    large = runs.train(train_batch_size=2, **SAME)
    runs.output = runs.output.parent / "accumulated"
    accumulated = runs.train(train_batch_size=1, gradient_accumulation_steps=2, **SAME)
    end = "000010"
    assert difference(large.state / "000005", large.state / end) > 1e-3, "it trains at all"
    assert difference(two.state / end, large.state / end) < 1e-5
    assert difference(accumulated.state / end, large.state / end) < 1e-5

    # Two processes up to step 5, then one: auto takes it for the same run, because the global batch is the same.
    for path in [two.state / end, *two.path.glob("lora*.safetensors")]:
        path.rename(two.path.parent.parent / f"moved-{path.name}")
    runs.output = two.path.parent
    resumed = runs.train(train_batch_size=2, **SAME)
    assert resumed.path == two.path
    starts = [event["start_step"] for event in resumed.events()[0] if event["kind"] == "started"]
    assert starts == [0, 5]
    assert difference(resumed.state / end, large.state / end) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_processes_through_accelerate_launch_are_the_same_run(processes: int, runs: Runs, tmp_path: Path) -> None:
    """Two at once, one on each of two machines, are always tried in test_several_machines, and one in test_demo_learns."""
    launched = runs.launched(processes, max_train_steps=3)
    runs.output = runs.output.parent / "direct"
    direct = trained_together(runs, processes, tmp_path / "start", max_train_steps=3)
    assert (launched.path / "lora.safetensors").read_bytes() == (direct.path / "lora.safetensors").read_bytes()


def within(runs: Runs) -> list[cleanup.Found]:
    """What cleanup finds of these runs; it tells of those of others on this machine too, and leaves them alone."""
    return [found for found in cleanup.look([runs.output]) if found.folder is not None and found.folder.parent == runs.output]


def test_both_processes_stop_after_the_same_step(runs: Runs, tmp_path: Path) -> None:
    started = Together(runs, 2, tmp_path / "start", train_batch_size=1, max_train_steps=5000, use_ema=True)
    started.wait(lambda: any(event["kind"] == "step" for event in runs.events()))
    (orphans,) = within(runs)
    assert orphans.is_orphan and {process.pid for process in orphans.members} == {process.pid for process in started.processes}, (
        "nothing that was given the script watches them"
    )
    runs.newest().request_stop()
    assert started.end() == [0, 0], started.said()
    last = runs.newest().events()[0][-1]
    assert last["kind"] == "stopped" and (runs.newest().state / f"{last['step']:06d}" / "manifest.json").is_file()


@pytest.mark.long
def test_ranks_from_a_terminal_whose_launcher_and_guard_were_killed_are_found_and_ended(
    runs: Runs, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = [str(SCRIPTS / RUNS["sdxl", "network"].script), *runs.arguments(multi_gpu=True, num_gpus=2, max_train_steps=5000)]
    with (
        (tmp_path / "said").open("w") as said,
        subprocess.Popen([sys.executable, str(OWN_LAUNCHER), "--num_processes", "2", *script], stderr=said) as launcher,
    ):
        end = time.monotonic() + 240
        while not (runs.output.is_dir() and any(event["kind"] == "step" for event in runs.events())):
            assert time.monotonic() < end and launcher.poll() is None
            time.sleep(0.1)
        (found,) = within(runs)
        assert (found.is_orphan, found.reason) == (False, "its launcher lives")
        (guard,) = [
            child for child in psutil.Process(launcher.pid).children() if any(word.endswith("ranks.py") for word in child.cmdline())
        ]
        guard.suspend()
        launcher.kill()
        launcher.wait()
        (found,) = within(runs)
        assert (found.is_orphan, found.reason) == (False, "its launcher was killed, and its guard is ending it")
        guard.kill()
        psutil.wait_procs([guard], 30)
    cleanup.main(["cleanup", "--yes", str(runs.output)])
    told = capsys.readouterr().out
    assert f"orphaned: {runs.newest().path}: its launcher is gone" in told and "rank 0" in told and "rank 1" in told, told
    assert "Ended: 2 processes." in told and within(runs) == []


NEVER_SAME: dict[str, Any] = {
    "max_train_steps": 10,
    "train_batch_size": 1,
    "save_state_every_n_steps": 3,
    "network_dropout": 0.1,
    "use_ema": True,
    "shuffle_caption": True,
    "caption_dropout_rate": 0.2,
}
"""Whatever could remember something."""


@pytest.fixture(scope="module")
def undisturbed_pair(tiny_base: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Two processes that were left alone, from caches of their own."""
    folder = tmp_path_factory.mktemp("pair")
    return trained_together(Runs(tiny_base, images, folder / "out"), 2, folder / "start", **NEVER_SAME)


@pytest.mark.parametrize(
    ("moment", "victim"),
    [("a step", 0), *(pytest.param(*case, marks=pytest.mark.long) for case in (("caching", 0), ("caching", 1), ("a step", 1)))],
)
def test_when_one_of_two_is_killed_the_other_ends_with_a_sentence_and_both_continue_to_the_same_bytes(
    moment: str, victim: int, runs: Runs, undisturbed_pair: RunDirectory, tmp_path: Path
) -> None:
    def has_come() -> bool:
        if moment == "caching":
            return len(list((runs.output / ".cache" / "latents").glob("*/*.safetensors"))) > 2
        return any(event["kind"] == "step" and event["step"] >= 4 for event in runs.events())

    started = Together(runs, 2, tmp_path / "first", **NEVER_SAME)
    started.wait(has_come)
    killed = started.processes[victim]
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    # Who waits for the timeout of half an hour says so, and this test would end before.
    codes = started.end()
    assert codes[victim] == -9 and codes[1 - victim] == 1, started.said()
    last = runs.newest().events()[0][-1]
    assert last["kind"] == "failed" and last["text"].startswith(f"process {victim + 1} of 2 ended without a word")
    assert last["text"] in started.said() and "Traceback" not in started.said()
    if moment == "a step":
        states = sorted(int(path.name) for path in runs.newest().state.iterdir())
        assert f"the last saved state is that of step {states[-1]}" in last["text"]

    run = trained_together(runs, 2, tmp_path / "second", **NEVER_SAME)
    assert len(runs.folders()) == 1, "the second start continues the folder of the first"
    assert (run.path / "lora.safetensors").read_bytes() == (undisturbed_pair.path / "lora.safetensors").read_bytes()


@pytest.mark.long
def test_a_run_of_one_global_batch_goes_from_two_processes_to_one_and_back(runs: Runs, tmp_path: Path) -> None:
    options = SAME | {"global_batch_size": 4, "train_batch_size": 1, "save_state_every_n_steps": 2}
    once = runs.train(**options | {"train_batch_size": 2})
    runs.output = tmp_path / "out-again"
    for number, (processes, until) in enumerate([(2, 3), (1, 6)]):
        started = Together(runs, processes, tmp_path / f"start-{number}", **options)
        started.wait(lambda until=until: any(event["kind"] == "step" and event["step"] >= until for event in runs.events()))
        for process in started.processes:
            process.kill()
        started.end()
    last = trained_together(runs, 2, tmp_path / "last", **options)
    assert len(runs.folders()) == 1, "it stays the same run"
    begins = [event["start_step"] for event in last.events()[0] if event["kind"] == "started"]
    assert begins[0] == 0 and 2 <= begins[1] < begins[2]
    assert difference(last.state / "000010", once.state / "000010") < 1e-5


def test_a_run_of_one_global_batch_goes_from_one_process_to_two(runs: Runs, tmp_path: Path) -> None:
    """The other way round, test_two_processes_one_larger_batch_and_accumulation_train_the_same."""
    options = SAME | {"global_batch_size": 4, "train_batch_size": 2, "max_train_steps": 4, "save_state_every_n_steps": 2}
    once = runs.train(**options)
    for path in [once.state / "000004", *once.path.glob("lora*.safetensors")]:
        path.rename(tmp_path / path.name)
    two = trained_together(runs, 2, tmp_path / "start", **options | {"train_batch_size": 1})
    assert two.path == once.path and len(runs.folders()) == 1, "it stays the same run"
    assert [event["start_step"] for event in two.events()[0] if event["kind"] == "started"] == [0, 2]
    assert difference(two.state / "000002", tmp_path / "000004") > 1e-3, "it trains at all"
    assert difference(two.state / "000004", tmp_path / "000004") < 1e-5


def test_a_global_batch_that_does_not_fit_is_refused(runs: Runs, tmp_path: Path) -> None:
    started = Together(runs, 2, tmp_path / "start", global_batch_size=5, train_batch_size=1)
    assert 2 in started.end()
    assert "5 samples cannot be shared evenly by 2 processes" in started.said() and "Traceback" not in started.said()
