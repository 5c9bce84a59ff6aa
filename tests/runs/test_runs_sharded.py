"""Whole models that are trained with fsdp2: each process holds its share, and nobody can tell from the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from tests.runs.conftest import Runs
from tests.runs.together import trained_together

SHARED: dict[str, Any] = {
    "multi_gpu": True,
    "num_gpus": 2,
    "distributed_strategy": "fsdp2",
    "gradient_checkpointing": True,
    "gradient_checkpointing_share": 0.5,
}
STEPS: dict[str, Any] = {
    "max_train_steps": 4,
    # Plain steps along the gradient: an optimizer that divides by the gradient's size makes rounding errors as large as its steps.
    "optimizer_type": "SGD",
    "learning_rate": 0.2,
    "lr_scheduler": "constant",
    "save_state_every_n_steps": 2,
    "save_last_n_states": 9,
    "save_precision": "float",
    "use_ema": True,
    "max_grad_norm": 0.1,
    "validation_split": 0.2,
    "output_name": "trained",
    "sample_prompts": "image 3, tag1 --w 64 --h 64 --s 2 --l 1 --d 7",
}


def difference(a: Path, b: Path) -> float:
    """Largest difference of any tensor between two files."""
    first, second = load_file(a), load_file(b)
    assert first.keys() == second.keys()
    return max(float((first[name].float() - second[name].float()).abs().max()) for name in first)


@pytest.mark.parametrize("family", [pytest.param("flux", marks=pytest.mark.long), "sd"])
def test_a_whole_model_that_is_sharded_trains_and_resumes_as_one_process_does(
    family: str, runs: Runs, tiny_bases: dict[str, Path], tmp_path: Path
) -> None:
    runs.family, runs.method, runs.base = family, "full", tiny_bases[family]
    shared = trained_together(runs, 2, tmp_path / "two", train_batch_size=1, **SHARED, **STEPS)
    runs.output = tmp_path / "one"
    whole = runs.train(train_batch_size=2, **STEPS)
    for step, group in ((2, "weights"), (4, "weights"), (4, "average")):
        name = f"{step:06d}/{group}.safetensors"
        assert difference(shared.state / name, whole.state / name) < 1e-5, name
    assert difference(whole.state / "000002" / "weights.safetensors", whole.state / "000004" / "weights.safetensors") > 1e-4
    assert difference(shared.path / "trained.safetensors", whole.path / "trained.safetensors") < 1e-5
    losses = [[event["loss"] for event in run.events()[0] if event["kind"] in ("step", "validation")] for run in (shared, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == 5
    norms = [[event["grad_norm"] for event in run.events()[0] if event["kind"] == "step"] for run in (shared, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    shown = [np.asarray(Image.open(run.samples / "trained-000004-00.png"), dtype=np.int16) for run in (shared, whole)]
    assert np.abs(shown[0] - shown[1]).max() <= 1

    # The state of two processes at step 2, then one.
    runs.output = tmp_path / "resumed"
    resumed = runs.train(train_batch_size=2, resume=str(shared.state / "000002"), **STEPS)
    assert difference(resumed.state / "000004" / "weights.safetensors", whole.state / "000004" / "weights.safetensors") < 1e-5
