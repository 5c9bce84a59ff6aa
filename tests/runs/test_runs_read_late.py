"""On a GPU the denoising network is read straight to it when the encoders have left; here both orders end with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sd_scripts.families import RUNS
from sd_scripts.library.train import load
from sd_scripts.library.train.launch import main
from sd_scripts.runs.rundir import RunDirectory
from tests.forked import forked
from tests.runs.conftest import PATIENCE_SECONDS, Runs
from tests.runs.test_runs_with_memory_options import same_weights


def as_on_a_gpu(family: str, method: str, arguments: list[str]) -> None:
    """main in a process that reads the denoising network late, though it trains on the CPU."""
    load._is_read_late = lambda prepared: True
    main(family, method, arguments)


def phases(run: RunDirectory) -> list[str]:
    return [event["name"] for event in run.events()[0] if event["kind"] == "phase"]


@pytest.mark.parametrize(
    "kind",
    [
        ("sdxl", "network"),
        ("flux", "full"),
        *(pytest.param((name, "network"), marks=pytest.mark.long) for name, method in RUNS if method == "network" and name != "sdxl"),
    ],
    ids="/".join,
)
def test_a_network_that_is_read_after_the_caches_is_trained_to_the_same_weights(
    kind: tuple[str, str], runs: Runs, tiny_bases: dict[str, Path], pairs: Path
) -> None:
    runs.family, runs.method, runs.base = *kind, tiny_bases[kind[0]]
    runs.images = pairs if kind[0] in ("qwen_edit", "kontext") else runs.images
    output, name = runs.output, "trained.safetensors"
    options: dict[str, Any] = {"max_train_steps": 3, "output_name": "trained"}

    def both(**more: Any) -> RunDirectory:
        runs.output = output / f"plain-{len(more)}"
        plain = runs.train(**options, **more)
        runs.output = output / f"late-{len(more)}"
        process = forked(as_on_a_gpu, *kind, runs.arguments(**options, **more))
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0
        late = runs.newest()
        assert same_weights(late, plain, name)
        assert phases(plain)[:2] == ["load", "cache"] and phases(late)[:3] == ["load", "cache", "load"]
        return plain

    first = both()
    if kind[1] == "network":
        # A file that is merged into the network, and into its text encoders, each when it is there.
        both(base_weights=first.path / name)
