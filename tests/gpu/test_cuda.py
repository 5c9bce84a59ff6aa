"""The same short run on a GPU, in each precision; left out, with the reason, where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sd_scripts.runs.rundir import RunDirectory

SCRIPT = Path(__file__).parents[2] / "sd_scripts" / "sdxl_train_network.py"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device; torch sees none")]


def train(folder: Path, *arguments: str, visible: bool = True) -> tuple[int, RunDirectory, str]:
    """A run of 12 steps on the toy model in a process of its own: exit code, run, console."""
    command = [sys.executable, str(SCRIPT), "--pretrained_model_name_or_path=toy", "--train_data_dir=toy:star", f"--output_dir={folder}"]
    command += "--resolution=64 --min_bucket_reso=32 --bucket_reso_steps=16 --train_batch_size=4 --max_train_steps=12".split()
    environment = os.environ | ({} if visible else {"CUDA_VISIBLE_DEVICES": ""})
    ended = subprocess.run([*command, "--save_precision=float", *arguments], capture_output=True, text=True, check=False, env=environment)
    return ended.returncode, RunDirectory(next(folder.glob("2*"), folder)), ended.stdout + ended.stderr


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_gpu_learns_what_a_cpu_learns(precision: str, tmp_path: Path) -> None:
    code, run, said = train(tmp_path / "gpu", f"--mixed_precision={precision}")
    assert code == 0, said
    _, other, _ = train(tmp_path / "cpu", "--mixed_precision=no", visible=False)
    ours = [event["loss"] for event in run.events()[0] if event["kind"] == "step"]
    theirs = [event["loss"] for event in other.events()[0] if event["kind"] == "step"]
    # Times and noise are drawn on the CPU from sample numbers, so both devices see the same steps.
    assert ours == pytest.approx(theirs, rel=1e-3 if precision == "no" else 3e-2)
    assert all(event["peak_gib"] > 0 for event in run.events()[0] if event["kind"] == "step")


def test_style_transfer_on_a_gpu_is_that_on_a_cpu(tmp_path: Path) -> None:
    """Flow and energy, in batches of several styles."""
    preset = Path(__file__).parents[2] / "presets" / "lgt_train" / "toy-styles.toml"
    small = "--max_train_steps=4 --train_batch_size=4 --energy_from_step=1 --sample_steps=2 --optimizer_type=SGD --learning_rate=0.01"
    small += " --w_style=3 --w_content=1.5 --w_edges=1 --log_every_n_steps=1"
    losses = {}
    for device, environment in (("gpu", os.environ), ("cpu", os.environ | {"CUDA_VISIBLE_DEVICES": ""})):
        command = [sys.executable, str(SCRIPT.with_name("lgt_train.py")), f"--config_file={preset}", f"--output_dir={tmp_path / device}"]
        command += [*small.split(), "--mixed_precision=no"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert ended.returncode == 0, ended.stderr
        events = RunDirectory(next((tmp_path / device).glob("2*"))).events()[0]
        assert any(event["kind"] == "evaluation" for event in events)
        losses[device] = [event["loss"] for event in events if event["kind"] == "step"]
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=1e-3)


def test_deterministic_kernels_repeat_bit_for_bit(tmp_path: Path) -> None:
    files = []
    for name in "ab":
        code, run, said = train(tmp_path / name, "--mixed_precision=no", "--deterministic", "--output_name=x")
        assert code == 0, said
        files.append(load_file(run.path / "x.safetensors"))
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])


def test_gradient_checkpointing_saves_memory_and_changes_nothing(tmp_path: Path) -> None:
    losses, peaks = [], []
    for name, extra in (("plain", []), ("checkpointed", ["--gradient_checkpointing"])):
        code, run, said = train(tmp_path / name, "--mixed_precision=no", "--train_batch_size=16", *extra)
        assert code == 0, said
        steps = [event for event in run.events()[0] if event["kind"] == "step"]
        losses.append([event["loss"] for event in steps])
        peaks.append(max(event["peak_gib"] for event in steps))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert peaks[1] < peaks[0]


def test_running_out_of_memory_is_a_sentence_with_three_memory_options(tmp_path: Path) -> None:
    free = torch.cuda.mem_get_info()[0]
    # Enough for the libraries, which take over half a GiB on a large card, and for everything before the first step.
    held = torch.empty(max(0, free - 2 * 2**30), dtype=torch.uint8, device="cuda")
    code, run, said = train(tmp_path, "--train_batch_size=512", "--mixed_precision=no")
    del held
    assert code == 1 and "Traceback" not in said
    last = run.events()[0][-1]
    assert last["kind"] == "failed" and last["advice"].count(";") == 2
