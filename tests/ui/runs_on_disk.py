"""Run folders with states as a training process leaves them, as far as their files go."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from sd_scripts.library import resume
from sd_scripts.library.states import FORMAT, sha256
from sd_scripts.schema import flat
from sd_scripts.schema.rundir import RunDirectory
from sd_scripts.schema.runs import RUNS, RunOptions

RUN = RUNS["sdxl", "network"]
BASE = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", "max_train_steps": 1600, "output_name": "cat"}


def options(output: Path, **values: object) -> RunOptions:
    return flat.build(RUN, {**BASE, "output_dir": str(output), **values})


def settings(of: RunOptions) -> dict[str, Any]:
    return resume.training_settings(of, of.dataset.train_batch_size * of.training.gradient_accumulation_steps)


def state(run: RunDirectory, step: int, fingerprint: str, minutes_ago: float = 0) -> Path:
    """A whole state, as far as files go."""
    folder = run.state / f"{step:06d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    files = {"state.json": {"size": 2, "sha256": sha256(folder / "state.json")}}
    manifest = {"format": FORMAT, "step": step, "fingerprint": fingerprint, "dataset": "d", "world": 1, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    then = time.time() - 60 * minutes_ago
    os.utime(folder / "manifest.json", (then, then))
    return folder


def made(output: Path, of: RunOptions, steps: tuple[int, ...] = (), minutes_ago: float = 12) -> RunDirectory:
    run = RunDirectory.create(output, of.output.output_name, of)
    print_of = resume.fingerprint(settings(of))
    run.meta.write_text(json.dumps({"fingerprint": print_of, "settings": settings(of), "dataset_hash": "d"}, default=list))
    for step in steps:
        state(run, step, print_of, minutes_ago)
    run.log("stopped", step=max(steps, default=0))
    return run
