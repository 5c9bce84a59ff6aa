"""A run that is killed at any moment and started again writes the same bytes as one that nobody disturbed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sd_scripts.schema.files import TEMPORARY_MARK
from sd_scripts.schema.rundir import RunDirectory


def num_files(folder: Path, pattern: str) -> int:
    return sum(1 for _ in folder.glob(pattern)) if folder.is_dir() else 0


def moment_of(what: str, runs: Any) -> Callable[[], bool]:
    """A question that can be asked from outside: has the process come to this moment?"""
    if what == "caching":
        wanted = random.randint(2, 20)
        return lambda: num_files(runs.output / ".cache" / "latents", "*/*.safetensors") >= wanted
    if what == "a step":
        step = random.randint(1, 8)
        return lambda: any(event["kind"] == "step" and event["step"] >= step for event in runs.events())
    if what == "sampling":
        return lambda: any(event["kind"] == "phase" and event["name"] == "sample" for event in runs.events())
    place = {"saving a state": "state", "exporting": "."}[what]
    return lambda: any(num_files(folder / place, f".[0l]*{TEMPORARY_MARK}*") for folder in runs.folders())


@pytest.mark.parametrize("what", ["caching", "a step", "saving a state", "exporting", "sampling"])
def test_a_killed_run_continues_to_the_same_bytes(what: str, runs: Any, long_options: dict[str, Any], undisturbed: RunDirectory) -> None:
    process = runs.begin(**long_options)
    runs.wait(process, moment_of(what, runs))
    time.sleep(random.uniform(0, 0.01) if what in ("a step", "sampling") else 0)
    runs.kill(process)
    assert not any((folder / "lora.safetensors").exists() for folder in runs.folders()), "it was done before it was killed"
    run = runs.train(**long_options)
    assert len(runs.folders()) == 1, "the second start continues the folder of the first"
    assert (run.path / "lora.safetensors").read_bytes() == (undisturbed.path / "lora.safetensors").read_bytes()
    assert not list(run.path.rglob(f"*{TEMPORARY_MARK}*"))
    names = sorted(path.name for path in run.samples.iterdir())
    assert names == [f"lora-{step:06d}-00.png" for step in (0, 3, 6, 9, 12)], "no preview is missing"
    assert [path.name for path in sorted(run.path.glob("lora-*.safetensors"))] == [f"lora-{step:06d}.safetensors" for step in (3, 6, 9)]


@pytest.mark.long
def test_a_run_killed_again_and_again_still_arrives(runs: Any, long_options: dict[str, Any], undisturbed: RunDirectory) -> None:
    for last in (3, 6, 9):
        process = runs.begin(**long_options)
        runs.wait(process, lambda last=last: any(event["kind"] == "step" and event["step"] > last for event in runs.events()))
        runs.kill(process)
    run = runs.train(**long_options)
    assert (run.path / "lora.safetensors").read_bytes() == (undisturbed.path / "lora.safetensors").read_bytes()
