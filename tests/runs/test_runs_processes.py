"""How a global batch is shared between processes and micro-batches changes nothing, nor does changing it on the way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

SAME: dict[str, Any] = {
    "max_train_steps": 10,
    "save_state_every_n_steps": 5,
    "save_last_n_states": 9,
    "lr_scheduler": "constant",
    # Plain steps along the gradient: an optimizer that divides by the gradient's size makes rounding errors as large as its steps.
    "optimizer_type": "SGD",
    "learning_rate": 2.0,
    "shuffle_caption": True,
}


def difference(a: Path, b: Path) -> float:
    """Largest difference of any trained weight between two states."""
    first, second = (load_file(path / "weights.safetensors") for path in (a, b))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_two_processes_one_larger_batch_and_accumulation_train_the_same(runs: Any) -> None:
    two = runs.launched(2, train_batch_size=1, **SAME)
    assert len(runs.folders()) == 1, "both processes write one folder"
    runs.output = runs.output.parent / "large"
    large = runs.train(train_batch_size=2, **SAME)
    runs.output = runs.output.parent / "accumulated"
    accumulated = runs.train(train_batch_size=1, gradient_accumulation_steps=2, **SAME)
    end = "000010"
    assert difference(large.state / "000005", large.state / end) > 1e-3, "it trains at all"
    assert difference(two.state / end, large.state / end) < 1e-5
    assert difference(accumulated.state / end, large.state / end) < 1e-5

    # Two processes up to step 5, then one: auto takes it for the same run, because the global batch is the same.
    for path in [two.state / end, *two.path.glob("lora*.safetensors")]:
        path.rename(two.path.parent.parent / f"moved-{path.name}")
    runs.output = two.path.parent
    resumed = runs.train(train_batch_size=2, **SAME)
    assert resumed.path == two.path
    starts = [event["start_step"] for event in resumed.events()[0] if event["kind"] == "started"]
    assert starts == [0, 5]
    assert difference(resumed.state / end, large.state / end) < 1e-5


def test_one_process_through_accelerate_launch_is_the_same_run(runs: Any) -> None:
    launched = runs.launched(1, max_train_steps=3)
    runs.output = runs.output.parent / "direct"
    direct = runs.train(max_train_steps=3)
    assert (launched.path / "lora.safetensors").read_bytes() == (direct.path / "lora.safetensors").read_bytes()


def test_both_processes_stop_after_the_same_step(runs: Any) -> None:
    with runs.launch(2, train_batch_size=1, max_train_steps=5000, use_ema=True) as started:
        end = time.monotonic() + 200
        while not any(event["kind"] == "step" for event in runs.events()):
            assert started.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        runs.newest().request_stop()
        said = started.communicate(timeout=200)[0]
    assert started.returncode == 0, said[:4000]
    last = runs.newest().events()[0][-1]
    assert last["kind"] == "stopped" and (runs.newest().state / f"{last['step']:06d}" / "manifest.json").is_file()
