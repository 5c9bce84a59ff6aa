"""Recording steps with the profiler: what is written, when, and that training does not notice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sd_scripts.library.train.profiling import StepProfiler
from sd_scripts.runs.rundir import RunDirectory

CPU = torch.device("cpu")


def train(folder: Path, num_recorded: int, steps: int) -> list[float]:
    """Losses of a small training with dropout."""
    folder.mkdir()
    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(network.parameters())
    profiler = StepProfiler(RunDirectory(folder), num_recorded, CPU)
    losses = []
    for step in range(steps):
        profiler.before_step()
        loss = network(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.after_step(step + 1)
        losses.append(loss.item())
    profiler.finish(steps)
    return losses


def test_the_recorded_steps_are_a_trace_and_a_text_and_change_no_number(tmp_path: Path) -> None:
    assert train(tmp_path / "recorded", 2, 7) == train(tmp_path / "plain", 0, 7)
    assert not (tmp_path / "plain" / "profile").exists()
    run = RunDirectory(tmp_path / "recorded")
    (told,) = run.events()[0]
    assert (told["kind"], told["step"], told["steps"]) == ("profiled", 5, 2)
    assert told["files"] == ["profile/trace-000005.json", "profile/top-000005.txt"]
    assert sorted(path.name for path in (run.path / "profile").iterdir()) == ["top-000005.txt", "trace-000005.json"]
    trace = json.loads((run.path / "profile" / "trace-000005.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert sum(name == "Optimizer.step#AdamW.step" for name in names) == 2, "two steps and no more"
    text = (run.path / "profile" / "top-000005.txt").read_text()
    assert "2 steps up to step 5, by self_cpu_time_total" in text and "aten::addmm" in text


@pytest.mark.parametrize(("steps", "recorded"), [(4, 1), (5, 2)])
def test_a_session_that_ends_early_writes_what_it_has(steps: int, recorded: int, tmp_path: Path) -> None:
    train(tmp_path / "run", 100, steps)
    (told,) = RunDirectory(tmp_path / "run").events()[0]
    assert (told["kind"], told["step"], told["steps"]) == ("profiled", steps, recorded)


def test_a_session_too_short_to_be_recorded_says_so(tmp_path: Path) -> None:
    train(tmp_path / "run", 1, 3)
    (told,) = RunDirectory(tmp_path / "run").events()[0]
    assert told["kind"] == "warning" and "before its step 4" in told["text"]
    assert not (tmp_path / "run" / "profile").exists()
