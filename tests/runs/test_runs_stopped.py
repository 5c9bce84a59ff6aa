"""Asking a run to end: it finishes its step, saves, says so and leaves with 0; the next start goes on from there."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from sd_scripts.schema.rundir import RunDirectory


def ask(how: str, process: Any, run: RunDirectory) -> None:
    if how == "stop file":
        run.request_stop()
    else:
        os.kill(process.pid, {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}[how])


@pytest.mark.parametrize("how", ["stop file", "Ctrl-C", "SIGTERM"])
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
    if how == "stop file":
        # Whoever asked takes the request back when the run is to go on.
        run.clear_stop()
    done = runs.train(**long_options)
    assert done.path == run.path
    assert (done.path / "lora.safetensors").read_bytes() == (undisturbed.path / "lora.safetensors").read_bytes()
    words = [event["kind"] for event in done.events()[0] if event["kind"] in ("stopped", "finished", "failed")]
    assert words == ["stopped", "finished"], "each start has one last word"


def test_a_run_stopped_while_it_caches_has_nothing_to_save_and_leaves_with_0(runs: Any) -> None:
    process = runs.begin()
    runs.wait(process, lambda: any(event["kind"] == "phase" and event["name"] == "cache" for event in runs.events()))
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    assert process.exitcode == 0
    last = runs.newest().events()[0][-1]
    assert (last["kind"], last["step"]) in {("stopped", step) for step in range(8)}
    assert runs.train().events()[0][-1]["kind"] == "finished"
