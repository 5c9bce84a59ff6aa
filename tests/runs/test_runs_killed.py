"""A run that is killed at any moment and started again writes the same bytes as one that nobody disturbed."""

from __future__ import annotations

import csv
import random
import shutil
from typing import Any

import pytest

from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.files import TEMPORARY_MARK
from tests.runs.conftest import STYLES, Runs


def drawn(moment: str) -> int:
    """Which of the times that a moment comes."""
    most = {"caching": 20, "a step": 8, "saving a state": 2, "exporting": 2}.get(moment, 1)
    return random.randint(2 if moment == "caching" else 1, most)


ALL = ("caching", "sampling", "a step", "saving a state", "exporting")


@pytest.mark.parametrize("moments", [ALL, *(pytest.param((one,), marks=pytest.mark.long) for one in ALL)], ids=" ".join)
def test_a_killed_run_continues_to_the_same_bytes(
    moments: tuple[str, ...], runs: Runs, long_options: dict[str, Any], undisturbed: RunDirectory
) -> None:
    """One moment after the other, or a single one."""
    for moment in moments:
        runs.killed(moment, min(drawn(moment), 2 if moments == ALL and moment == "a step" else 99), **long_options)
        assert not any((folder / "lora.safetensors").exists() for folder in runs.folders()), "it was done before it was killed"
    run = runs.train(**long_options)
    assert len(runs.folders()) == 1, "every start continues the folder of the first"
    assert (run.path / "lora.safetensors").read_bytes() == (undisturbed.path / "lora.safetensors").read_bytes()
    assert not list(run.path.rglob(f"*{TEMPORARY_MARK}*"))
    names = sorted(path.name for path in run.samples.iterdir())
    assert names == [f"lora-{step:06d}-00.png" for step in (0, 3, 6, 9, 12)], "no preview is missing"
    assert [path.name for path in sorted(run.path.glob("lora-*.safetensors"))] == [f"lora-{step:06d}.safetensors" for step in (3, 6, 9)]


@pytest.mark.long
def test_a_run_killed_again_and_again_still_arrives(runs: Runs, long_options: dict[str, Any], undisturbed: RunDirectory) -> None:
    for step in (4, 7, 10):
        runs.killed("a step", step, **long_options)
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


OF_STYLES = ("a step", "saving a state", "evaluating")


@pytest.mark.parametrize(
    "moments",
    [OF_STYLES[1:], *(pytest.param(moments, marks=pytest.mark.long) for moments in (OF_STYLES, *((one,) for one in OF_STYLES)))],
    ids=" ".join,
)
def test_a_killed_style_transfer_continues_to_the_same_bytes(
    moments: tuple[str, ...], style_runs: Runs, undisturbed_styles: RunDirectory
) -> None:
    for moment in moments:
        style_runs.killed(moment, min(drawn(moment), 2), **STYLES)
    run = style_runs.train(**STYLES)
    assert len(style_runs.folders()) == 1, "every start continues the folder of the first"
    check_styles(run, undisturbed_styles)
    wanted = ["epoch_0000", "epoch_0000_step_000003", "epoch_0001", "epoch_0001_step_000009", "epoch_0002"]
    for one in (run, undisturbed_styles):
        assert sorted(path.name for path in one.inference.iterdir()) == wanted
    for name in wanted:
        for file in sorted((undisturbed_styles.inference / name).iterdir()):
            assert (run.inference / name / file.name).read_bytes() == file.read_bytes(), f"{name}/{file.name}"


@pytest.mark.parametrize("how", ["latest", "epoch:1", *(pytest.param(how, marks=pytest.mark.long) for how in ("3", "path"))])
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
