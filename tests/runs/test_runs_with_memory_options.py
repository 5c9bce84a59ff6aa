"""Runs with many memory options at once: killed, continued without them, and the reverse: they end with the plain run's weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sd_scripts.runs.rundir import RunDirectory
from tests.runs.conftest import Runs

OPTIONS: dict[str, Any] = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_share": 0.6,
    "gradient_checkpointing_cpu_offload": True,
    "blocks_to_swap": 7,
    "oom_fallback": True,
    "preflight": "on",
}


def same_weights(run: RunDirectory, other: RunDirectory, name: str) -> bool:
    """Whether two runs saved the same numbers; what the files say of themselves names the memory options."""
    ours, theirs = load_file(run.path / name), load_file(other.path / name)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_killed_run_goes_on_with_other_memory_options_and_again_without(
    runs: Runs, long_options: dict[str, Any], undisturbed: RunDirectory
) -> None:
    runs.killed("a step", random.randint(4, 5), **long_options)
    runs.killed("a step", random.randint(7, 8), **long_options, **OPTIONS)
    run = runs.train(**long_options)
    starts = [event["start_step"] for event in run.events()[0] if event["kind"] == "started"]
    assert starts == [0, 3, 6]
    assert len(runs.folders()) == 1 and same_weights(run, undisturbed, "lora.safetensors")
    assert [path.read_bytes() for path in sorted(run.samples.glob("*.png"))] == [
        path.read_bytes() for path in sorted(undisturbed.samples.glob("*.png"))
    ]


@pytest.mark.parametrize(
    "kind",
    [("flux", "full"), pytest.param(("sdxl", "full"), marks=pytest.mark.long), pytest.param(("zimage", "full"), marks=pytest.mark.long)],
    ids="/".join,
)
def test_a_whole_model_in_host_ram_is_trained_to_the_same_weights(kind: tuple[str, str], runs: Runs, tiny_bases: dict[str, Path]) -> None:
    runs.family, runs.method, runs.base = *kind, tiny_bases[kind[0]]
    options: dict[str, Any] = {
        "max_train_steps": 4,
        "save_every_n_steps": 2,
        "max_grad_norm": 0.0,
        "learning_rate": 1e-3,
        "save_precision": "float",
        "output_name": "trained",
    }
    memory_options = {"blocks_to_swap": 4, "fused_backward_pass": True, "gradient_checkpointing": True}
    output = runs.output

    def train(folder: str, **given: Any) -> RunDirectory:
        runs.output = output / folder
        return runs.train(**options, **given)

    plain, small = train("plain"), train("small", **memory_options)
    assert same_weights(small, plain, "trained.safetensors")
    assert same_weights(train("on", resume=plain.state / "000002", **memory_options), plain, "trained.safetensors")
    assert same_weights(train("off", resume=small.state / "000002"), plain, "trained.safetensors")
