"""Whole runs whose blocks wait in host RAM: the same losses, files and states as without, and each goes on from the other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sd_scripts.runs.rundir import RunDirectory
from tests.runs.conftest import PATIENCE_SECONDS, Runs


def losses(run: RunDirectory) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in run.events()[0] if event["kind"] == "step"}


def saved(run: RunDirectory) -> dict[str, torch.Tensor]:
    (file,) = run.path.glob("trained.safetensors")
    return load_file(file)


def previews(run: RunDirectory) -> list[bytes]:
    from PIL import Image

    return [Image.open(path).tobytes() for path in sorted(run.samples.glob("*.png"))]


@pytest.mark.parametrize(
    ("family", "method", "memory_options"),
    [
        pytest.param("sdxl", "network", {"blocks_to_swap": 16, "max_grad_norm": 0.1}, id="sdxl/network", marks=pytest.mark.long),
        pytest.param("flux", "full", {"blocks_to_swap": 3, "gradient_checkpointing": True, "max_grad_norm": 0.01}, id="flux/full"),
    ],
)
def test_a_swapped_run_is_the_plain_run(
    family: str, method: str, memory_options: dict[str, Any], runs: Runs, tiny_bases: dict[str, Path]
) -> None:
    runs.family, runs.method, runs.base = family, method, tiny_bases[family]
    options: dict[str, Any] = {
        "max_train_steps": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "use_ema": True,
        "save_every_n_steps": 2,
        "save_precision": "float",
        "sample_every_n_steps": 2,
        "sample_prompts": "image 3 --w 64 --h 64 --s 1 --l 1",
        "output_name": "trained",
    }
    plain_options = options | {name: value for name, value in memory_options.items() if name == "max_grad_norm"}
    output = runs.output

    def train(folder: str, given: dict[str, Any]) -> RunDirectory:
        runs.output = output.with_name(folder)
        return runs.train(**given)

    plain, swapped = train("plain", plain_options), train("swapped", options | memory_options)
    assert losses(swapped) == losses(plain) and len(losses(plain)) == 3
    ours, theirs = saved(swapped), saved(plain)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert previews(swapped) == previews(plain) != []
    assert "blocks are swapped" in (swapped.console.read_text(encoding="utf-8"))
    later = {3: losses(plain)[3]}
    assert losses(train("on", options | memory_options | {"resume": plain.state / "000002"})) == later
    assert losses(train("off", plain_options | {"resume": swapped.state / "000002"})) == later


def test_more_blocks_than_there_are_is_a_sentence(runs: Runs) -> None:
    runs.train(code=2, blocks_to_swap=99, max_train_steps=1)
    (said,) = [event["text"] for event in runs.events() if event["kind"] == "failed"]
    assert "blocks_to_swap: the network has 16 blocks, not 99; set it to 16 or less" in said


@pytest.mark.long
def test_processes_that_train_an_adapter_together_may_swap(runs: Runs) -> None:
    output, found = runs.output, []
    for number in (0, 9):
        runs.output = output.with_name(f"swapped_{number}")
        found.append(runs.launched(2, blocks_to_swap=number, max_train_steps=2, output_name="trained", save_precision="float"))
    assert losses(found[1]) == losses(found[0])
    ours, theirs = saved(found[1]), saved(found[0])
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.long
def test_processes_that_train_blocks_together_may_not(runs: Runs) -> None:
    runs.method = "full"
    with runs.launch(2, blocks_to_swap=4, max_train_steps=1) as started:
        said = started.communicate(timeout=PATIENCE_SECONDS)[0]
    assert started.returncode != 0 and "trained themselves cannot be swapped by several processes" in said


def test_more_blocks_than_there_are_is_told_before_anything_is_encoded(runs: Runs) -> None:
    runs.train(code=2, blocks_to_swap=99)
    assert not list(runs.output.glob(".cache/latents/*/*.safetensors"))
    (failed,) = [event for event in runs.events() if event["kind"] == "failed"]
    assert "the network has" in failed["text"] and "not 99" in failed["text"]
