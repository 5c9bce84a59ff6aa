"""What goes wrong ends as a sentence, an event and an exit code, and what was saved before stays."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.states import newest_whole


def last(run: RunDirectory) -> dict[str, Any]:
    return run.events()[0][-1]


def test_a_loss_that_is_no_number_stops_before_the_step_and_names_the_images(runs: Any) -> None:
    run = runs.train(code=1, optimizer_type="SGD", learning_rate=100, network_alpha=1e9, lr_scheduler="constant", max_grad_norm=0)
    failed = last(run)
    assert failed["kind"] == "failed"
    assert "not a finite number" in failed["text"] and "p0" in failed["text"] + "p1" and ".png" in failed["text"]
    state, broken = newest_whole(run.state)
    assert state is not None and int(state.name) == failed["step"] and not broken, "the last good state is there"
    assert failed["step"] == [event["step"] for event in run.events()[0] if event["kind"] == "step"][-1]
    assert "Traceback" not in run.console.read_text()


def test_a_disk_that_fills_up_is_a_sentence_and_earlier_states_stay(runs: Any) -> None:
    options: dict[str, Any] = {"max_train_steps": 400, "save_state_every_n_steps": 3}
    process = runs.begin(**options)
    runs.wait(process, lambda: any(event["kind"] == "saved" for event in runs.events()))
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (60_000, 60_000))
    process.join(200)
    assert process.exitcode == 1
    run = runs.newest()
    assert last(run)["kind"] == "failed" and "could not be written" in last(run)["text"] and "untouched" in last(run)["text"]
    state, broken = newest_whole(run.state)
    assert state is not None and not broken
    assert [path.name for path in run.state.iterdir() if path.name.startswith(".")] == []
    assert runs.train(**{**options, "max_train_steps": int(state.name) + 3}).path == run.path


def test_a_run_folder_that_is_taken_away_is_a_sentence(runs: Any, tmp_path: Path) -> None:
    process = runs.begin(max_train_steps=400)
    runs.wait(process, lambda: any(event["kind"] == "step" for event in runs.events()))
    folder = runs.newest().path
    folder.rename(tmp_path / "elsewhere")
    process.join(200)
    assert process.exitcode == 1 and not folder.exists(), "nothing is written where the folder was"
    said = (tmp_path / "elsewhere" / "console.log").read_text()
    assert "Traceback" not in said and f"the run's folder {folder} is gone" in said


def test_a_run_that_is_finished_says_so_and_leaves_with_0(runs: Any) -> None:
    run = runs.train(max_train_steps=4)
    before = (run.path / "lora.safetensors").stat().st_mtime_ns
    again = runs.train(max_train_steps=4)
    assert again.path == run.path and len(runs.folders()) == 1
    assert (run.path / "lora.safetensors").stat().st_mtime_ns == before
    runs.train(max_train_steps=4, run_dir=run.path)
    assert "finished already" in last(run)["text"] and last(run)["kind"] == "finished"
    longer = runs.train(max_train_steps=6)
    assert longer.path == run.path and last(longer)["step"] == 6, "more steps make it longer"
    assert runs.train(max_train_steps=4, resume="none").path != run.path


def test_other_settings_or_other_images_are_another_run(runs: Any, tmp_path: Path) -> None:
    first = runs.train(max_train_steps=2)
    assert runs.train(max_train_steps=2, learning_rate=2e-2).path != first.path
    runs.train(max_train_steps=2, vae_batch_size=3, log_every_n_steps=2)
    assert len(runs.folders()) == 2, "harmless options make no difference"
    caption = runs.images / "p00.txt"
    text = caption.read_text()
    caption.write_text("something else")
    try:
        assert runs.train(max_train_steps=2).path != first.path
    finally:
        caption.write_text(text)
    run = runs.train(code=2, max_train_steps=3, learning_rate=5e-2, run_dir=first.path)
    assert last(run)["kind"] == "failed" and "learning_rate: 0.01, now 0.05" in last(run)["text"]


def test_an_explicit_state_wins_and_steps_that_do_not_exist_are_told(runs: Any) -> None:
    first = runs.train(max_train_steps=6, save_state_every_n_steps=2, save_last_n_states=9, lr_scheduler="constant")
    branch = runs.train(max_train_steps=6, lr_scheduler="constant", resume=first.state / "000002")
    assert branch.path != first.path
    started = next(event for event in branch.events()[0] if event["kind"] == "started")
    assert started["start_step"] == 2
    wanted, found = load_file(first.path / "lora.safetensors"), load_file(branch.path / "lora.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    process = runs.begin(max_train_steps=6, resume="5", run_dir=first.path)
    process.join(120)
    assert process.exitcode == 2
    assert "it has the steps 2, 4, 6" in last(first)["text"]
    back = runs.train(max_train_steps=6, lr_scheduler="constant", resume="4", run_dir=first.path)
    assert [event["start_step"] for event in back.events()[0] if event["kind"] == "started"] == [0, 4]


def test_a_broken_newest_state_is_named_and_the_one_before_is_used(
    runs: Any, long_options: dict[str, Any], undisturbed: RunDirectory
) -> None:
    run = RunDirectory(runs.output / undisturbed.name)
    shutil.copytree(undisturbed.path, run.path)
    (run.path / "lora.safetensors").unlink()
    (run.path / "events.jsonl").write_text("")
    newest = sorted(path for path in run.state.iterdir() if path.name.isdigit())[-1]
    weights = newest / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    run = runs.train(**long_options)
    warnings = [event["text"] for event in run.events()[0] if event["kind"] == "warning"]
    assert any(f"state of step {int(newest.name)} is broken" in text for text in warnings)
    assert (run.path / "lora.safetensors").read_bytes() == (undisturbed.path / "lora.safetensors").read_bytes()


def test_two_processes_do_not_train_in_one_folder(runs: Any) -> None:
    first = runs.begin(max_train_steps=2000)
    runs.wait(first, lambda: any(event["kind"] == "step" for event in runs.events()))
    second = runs.begin(max_train_steps=2000)
    second.join(120)
    assert second.exitcode == 2 and first.is_alive()
    runs.kill(first)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_on_a_cpu_too(precision: str, runs: Any) -> None:
    run = runs.train(max_train_steps=3, mixed_precision=precision, gradient_checkpointing=True, use_ema=True)
    assert last(run)["kind"] == "finished"
    assert (run.path / "lora.safetensors").is_file()


def test_text_encoders_train_with_live_captions_and_held_out_images_are_measured(runs: Any) -> None:
    run = runs.train(
        max_train_steps=4,
        train_text_encoder=True,
        no_cache_text_encoder_outputs=True,
        validation_split=0.25,
        validate_every_n_steps=2,
        gradient_checkpointing=True,
        log_with="tensorboard",
    )
    events = run.events()[0]
    assert [event["step"] for event in events if event["kind"] == "validation"] == [2, 4]
    assert list(run.path.rglob("events.out.tfevents*"))
    with safe_open(run.path / "lora.safetensors", "pt") as file:
        ups = [file.get_tensor(name).abs().max() for name in file.keys() if name.startswith("lora_te1") and "lora_up" in name]  # noqa: SIM118
    assert max(ups) > 0, "the first text encoder moved"


def test_a_package_that_cannot_be_imported_is_a_sentence_and_a_last_event(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('raise ImportError("its libraries are missing")')
    (tmp_path / "run").mkdir()
    script = Path(__file__).parents[2] / "sd_scripts" / "sdxl_train_network.py"
    command = [
        sys.executable,
        str(script),
        "--pretrained_model_name_or_path=toy",
        "--train_data_dir=toy:star",
        f"--run_dir={tmp_path / 'run'}",
    ]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(tmp_path)}, cwd=tmp_path
    )
    assert ended.returncode == 1
    assert "doctor" in ended.stderr
    last = RunDirectory(tmp_path / "run").events()[0][-1]
    assert last["kind"] == "failed" and "its libraries are missing" in last["text"]
