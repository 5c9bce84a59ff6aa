"""Runs with kernels, layouts and tiles of their own beside the plain run: the same training, files and states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sd_scripts.runs.rundir import RunDirectory
from tests.runs.conftest import Runs

OPTIONS: dict[str, Any] = {
    "channels_last": True,
    "attention_backend": "math",
    "vae_tiling": True,
    "cuda_allow_tf32": True,
    "cuda_cudnn_benchmark": True,
}


def losses(run: RunDirectory) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in run.events()[0] if event["kind"] == "step"}


@pytest.mark.parametrize(
    "kind",
    [
        ("sdxl", "network"),
        ("ddpm", "scratch"),
        *(pytest.param(kind, marks=pytest.mark.long) for kind in (("lgt", "scratch"), ("sd", "full"))),
    ],
    ids="/".join,
)
def test_a_run_with_other_kernels_is_the_plain_run_and_each_goes_on_from_the_others_state(
    kind: tuple[str, str], runs: Runs, tiny_bases: dict[str, Path], styles: Path
) -> None:
    runs.family, runs.method = kind
    runs.base = Path() if kind[1] == "scratch" else tiny_bases[kind[0]]
    runs.images = styles if kind[0] == "lgt" else runs.images
    options: dict[str, Any] = {
        "max_train_steps": 4,
        # Plain steps along the gradient: an optimizer that divides by the gradient's size makes rounding errors as large as its steps.
        "optimizer_type": "SGD",
        "learning_rate": 1e-3 if kind[0] == "lgt" else 0.1,
        "save_every_n_steps": 2,
        "save_precision": "float",
        "output_name": "trained",
        **({"conv_dim": 2} if kind[1] == "network" else {}),
        **({"sample_steps": 1} if kind[0] == "lgt" else {"sample_prompts": "image 3 --w 64 --h 64 --s 1 --l 1"}),
    }
    output = runs.output

    def train(folder: str, **given: Any) -> RunDirectory:
        runs.output = output / folder
        return runs.train(**options, **given)

    plain, other = train("plain"), train("other", **OPTIONS)
    assert losses(other) == pytest.approx(losses(plain), rel=1e-4) and len(losses(plain)) == 4
    files = [load_file(run.path / "trained.safetensors") for run in (plain, other)]
    assert files[0].keys() == files[1].keys()
    differences = {name: float((files[0][name] - files[1][name]).abs().max()) for name in files[0]}
    assert max(differences.values()) < 1e-4, sorted(differences.items(), key=lambda item: -item[1])[:5]
    shown = [sorted(path.name for path in (run.inference if kind[0] == "lgt" else run.samples).iterdir()) for run in (plain, other)]
    assert shown[0] == shown[1] != []
    later = {step: loss for step, loss in losses(plain).items() if step > 2}
    assert losses(train("on", resume=plain.state / "000002", **OPTIONS)) == pytest.approx(later, rel=1e-4)
    assert losses(train("off", resume=other.state / "000002")) == pytest.approx(later, rel=1e-4)


def test_a_kernel_that_is_not_here_ends_a_start(runs: Runs) -> None:
    process = runs.begin(attention_backend="cudnn")
    process.join()
    assert process.exitcode == 2 and not runs.folders()
