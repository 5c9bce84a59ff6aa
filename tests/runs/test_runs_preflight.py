"""A run with a preflight before its first step, and when it is resumed, is the run that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sd_scripts.runs.rundir import RunDirectory
from tests.runs.conftest import Runs
from tests.runs.together import Together, trained_together


def losses(run: RunDirectory) -> list[tuple[int, float, float]]:
    return [(event["step"], event["loss"], event["grad_norm"]) for event in run.events()[0] if event["kind"] == "step"]


def preflights(run: RunDirectory) -> list[str]:
    return [event["what"] for event in run.events()[0] if event["kind"] == "preflight"]


@pytest.mark.parametrize("kind", [("sdxl", "network"), pytest.param(("lgt", "scratch"), marks=pytest.mark.long)], ids="/".join)
def test_a_run_with_a_preflight_is_the_plain_run(kind: tuple[str, str], runs: Runs, tiny_bases: dict[str, Path], styles: Path) -> None:
    styled = kind[0] == "lgt"
    runs.family, runs.method, runs.base = *kind, Path() if styled else tiny_bases[kind[0]]
    runs.images = styles if styled else runs.images
    previews = {"sample_steps": 2} if styled else {"sample_prompts": "an image --w 64 --h 96 --s 3", "network_dropout": 0.2}
    options: dict[str, Any] = {"max_train_steps": 4, "save_every_n_steps": 2, "use_ema": True, "output_name": "trained", **previews}
    output, found = runs.output, {}
    for name, given in (("plain", {}), ("preflight", {"preflight": "on"})):
        runs.output = output / name
        found[name] = runs.train(**options, save_precision="float", **given)
    plain, other = found["plain"], found["preflight"]
    assert losses(other) == losses(plain) and len(losses(plain)) == 4
    weights = [load_file(next(run.path.glob("trained.safetensors"))) for run in (plain, other)]
    assert weights[0].keys() == weights[1].keys() and all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    shown = [sorted(path.name for path in (run.inference if styled else run.samples).rglob("*")) for run in (plain, other)]
    assert shown[0] == shown[1] != []
    images = [{path.name: path.read_bytes() for path in run.samples.glob("*.png")} for run in (plain, other)]
    assert images[0] == images[1]
    assert preflights(plain) == []
    (what,) = preflights(other)
    assert what == f"a batch of 2 images of 64 x 64; {'an evaluation of 64 x 64' if styled else '1 preview of 64 x 96'}"
    phases = [event["name"] for event in other.events()[0] if event["kind"] == "phase"]
    assert phases.index("preflight") < phases.index("warmup")
    # From the state of the other run, in a run of its own.
    runs.output = output / "resumed"
    resumed = runs.train(**options, preflight="on", resume=plain.state / "000002")
    assert losses(resumed) == losses(plain)[2:] and len(preflights(resumed)) == 1


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.long), "fsdp2"])
def test_processes_have_a_preflight_together(strategy: str, runs: Runs, tiny_bases: dict[str, Path], tmp_path: Path) -> None:
    runs.family, runs.method, runs.base = "sd", "full", tiny_bases["sd"]
    options: dict[str, Any] = {
        "multi_gpu": True,
        "num_gpus": 2,
        "distributed_strategy": strategy,
        "train_batch_size": 1,
        "max_train_steps": 3,
        "sample_prompts": "an image --w 64 --h 64 --s 2",
        "log_every_n_steps": 1,
    }
    plain = trained_together(runs, 2, tmp_path / "plain", **options)
    runs.output = tmp_path / "other"
    other = trained_together(runs, 2, tmp_path / "preflight", preflight="on", **options)
    assert losses(other) == losses(plain) and len(losses(plain)) == 3
    assert preflights(other) == ["a batch of 1 image of 64 x 64; 1 preview of 64 x 64"]


def test_processes_that_train_together_have_no_oom_fallback(runs: Runs, tmp_path: Path) -> None:
    started = Together(runs, 2, tmp_path / "two", multi_gpu=True, num_gpus=2, oom_fallback=True)
    assert started.end() == [2, 2] and "oom_fallback: 2 processes train together" in started.said()
