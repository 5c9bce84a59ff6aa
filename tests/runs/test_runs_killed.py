"""A run that is killed at any moment and started again writes the same bytes as one that nobody disturbed."""

from __future__ import annotations

import csv
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sd_scripts.schema.files import TEMPORARY_MARK
from sd_scripts.schema.rundir import RunDirectory
from tests.runs.conftest import STYLES, Runs


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
    if what == "evaluating":
        return lambda: any(num_files(folder / "inference", f".epoch*{TEMPORARY_MARK}*") for folder in runs.folders())
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


def table(run: RunDirectory) -> list[dict[str, str]]:
    """epochs.csv without the seconds, which no two runs have in common."""
    with run.epochs.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(float(row.pop("seconds")) > 0 for row in rows)
    return rows


def check_styles(run: RunDirectory, undisturbed: RunDirectory) -> None:
    """Everything that training style transfer writes is as in a run that was left alone."""
    assert (run.path / "trained.safetensors").read_bytes() == (undisturbed.path / "trained.safetensors").read_bytes()
    assert table(run) == table(undisturbed) and [row["epoch"] for row in table(run)] == ["1", "2"]
    assert not list(run.path.rglob(f"*{TEMPORARY_MARK}*"))


@pytest.mark.parametrize("what", ["a step", "saving a state", "evaluating"])
def test_a_killed_style_transfer_continues_to_the_same_bytes(what: str, style_runs: Runs, undisturbed_styles: RunDirectory) -> None:
    process = style_runs.begin(**STYLES)
    style_runs.wait(process, moment_of(what, style_runs))
    style_runs.kill(process)
    run = style_runs.train(**STYLES)
    assert len(style_runs.folders()) == 1, "the second start continues the folder of the first"
    check_styles(run, undisturbed_styles)
    wanted = ["epoch_0000", "epoch_0000_step_000003", "epoch_0001", "epoch_0001_step_000009", "epoch_0002"]
    for one in (run, undisturbed_styles):
        assert sorted(path.name for path in one.inference.iterdir()) == wanted
    for name in wanted:
        for file in sorted((undisturbed_styles.inference / name).iterdir()):
            assert (run.inference / name / file.name).read_bytes() == file.read_bytes(), f"{name}/{file.name}"


@pytest.mark.parametrize("how", ["latest", "3", "epoch:1", "path"])
def test_style_transfer_goes_on_from_whatever_is_named(how: str, style_runs: Runs, undisturbed_styles: RunDirectory) -> None:
    copy = style_runs.output / undisturbed_styles.name
    shutil.copytree(undisturbed_styles.path, copy)
    (copy / "trained.safetensors").unlink()
    (copy / "events.jsonl").write_text("")
    resume = str(undisturbed_styles.state / "000009") if how == "path" else how
    if how == "latest":
        shutil.rmtree(copy / "state" / "000012")
    run = style_runs.train(**STYLES, resume=resume)
    assert (run.path == copy) is (how == "latest"), "what is named by hand branches off into a new folder"
    (started,) = (event for event in run.events()[0] if event["kind"] == "started")
    assert started["start_step"] == {"latest": 9, "3": 3, "epoch:1": 6, "path": 9}[how]
    check_styles(run, undisturbed_styles)
