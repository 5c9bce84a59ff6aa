"""Run folders with states as a training process leaves them, written by what a training process writes them with."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image

from sd_scripts.families import RUNS
from sd_scripts.library.train.checkpoint import Checkpointer, Identity
from sd_scripts.library.train.run_meta import write_meta
from sd_scripts.runs import resume
from sd_scripts.runs.events import Evaluated, RunStarted, RunStopped, StepDone
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat
from sd_scripts.schema.output import OutputOptions
from sd_scripts.schema.runs import RunOptions

RUN = RUNS["sdxl", "network"]
BASE = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", "max_train_steps": 1600, "output_name": "cat"}


def options(output: Path, **values: object) -> RunOptions:
    return flat.build(RUN, {**BASE, "output_dir": str(output), **values})


def settings(of: RunOptions) -> dict[str, Any]:
    return resume.training_settings(of, of.dataset.train_batch_size * of.training.gradient_accumulation_steps)


def state(run: RunDirectory, step: int, fingerprint: str, minutes_ago: float = 0) -> Path:
    """A whole state, without tensors."""
    options = OutputOptions(output_dir=str(run.path.parent), output_name="cat", save_last_n_states=99)
    folder = Checkpointer(run, options, Identity(fingerprint, "d", 1), lambda step: 0, sys.maxsize).save_state(step, {})
    then = time.time() - 60 * minutes_ago
    os.utime(folder / "manifest.json", (then, then))
    return folder


def made(output: Path, of: RunOptions, steps: tuple[int, ...] = (), minutes_ago: float = 12) -> RunDirectory:
    run = RunDirectory.create(output, of.output.output_name, of)
    print_of = resume.fingerprint(settings(of))
    known = {"settings": settings(of), "model_files": {}, "dataset": {"dataset_hash": "d"}}
    write_meta(run, fingerprint=print_of, **known, seed=of.training.seed, processes=1)
    for step in steps:
        state(run, step, print_of, minutes_ago)
    run.log(RunStopped(step=max(steps, default=0)))
    return run


STYLES = ("flat", "line", "night")
MEASURES = ("swd_target", "swd_source", "swd_ratio", "ssm_source", "structure")
BASELINES = ("source", "vae_round_trip", "random_source", "real_target")
"""As an evaluation writes them, which tests/library/test_evaluation.py holds."""


def colour_of(style: str, epoch: int) -> tuple[int, int, int]:
    """The plain colour of an image in a style after an epoch."""
    return 40 + 80 * STYLES.index(style), min(255, 20 * epoch), 120


def evaluated(run: RunDirectory, epoch: int, step: int | None = None, sources: tuple[tuple[str, str], ...] | None = None) -> Path:
    """The folder of an evaluation, as a run of style transfer leaves it. sources: style and stem of each image."""
    sources = sources or tuple((style, "") for style in STYLES)
    folder = run.inference / (f"epoch_{epoch:04d}" if step is None else f"epoch_{epoch:04d}_step_{step:06d}")
    folder.mkdir(parents=True)
    pairs, listed = [], []
    for style, stem in sources:
        name = f"{style}_{stem}" if stem else style
        listed.append({"style": style, "stem": stem, "file": f"{name}_source.jpg", "vae": f"{name}_vae.jpg"})
        for beside in ("source", "vae"):
            Image.new("RGB", (48, 48), colour_of(style, 0)).save(folder / f"{name}_{beside}.jpg")
        for target in STYLES:
            file = f"{name}_to_{target}.jpg"
            Image.new("RGB", (48, 48), colour_of(target, epoch)).save(folder / file)
            told = {measure: round(1 / (1 + epoch + place), 4) for place, measure in enumerate(MEASURES)}
            pairs.append({"from": style, "to": target, "stem": stem, "file": file, **told})
    Image.new("RGB", (96, 96)).save(folder / "grid.jpg")
    (folder / "metrics.csv").write_text("from,to\n")
    means = dict.fromkeys(MEASURES, 1 / (1 + epoch))
    baselines = {name: dict.fromkeys(MEASURES, 2.0 + place) for place, name in enumerate(BASELINES)}
    summary = {"styles": list(STYLES), "step": 10 * epoch, "epoch": epoch, "pairs": pairs, "sources": listed, "baselines": baselines}
    (folder / "summary.json").write_text(json.dumps({**summary, "means": means}))
    run.log(
        Evaluated(
            step=10 * epoch if step is None else step,
            epoch=epoch,
            folder=f"inference/{folder.name}",
            means={**means, "swd_ratio": 0.5},
        )
    )
    return folder


def style_run(output: Path, name: str, steps: int = 30) -> RunDirectory:
    """A run of style transfer that was stopped: the log of its steps, and a saved file that is none."""
    of = flat.build(RUNS["lgt", "scratch"], {"train_data_dir": "toy:styles", "vae": "toy", "output_dir": str(output), "output_name": name})
    run = RunDirectory.create(output, name, of)
    run.log(RunStarted(steps=steps, start_step=0))
    for step in range(1, steps + 1):
        parts = {"swd": 4.0 / step, "ssm": 0.05, "flow": 1.0 + 0.1 * (step % 3)}
        run.log(StepDone(step=step, epoch=step // 10, loss=sum(parts.values()), lr=1e-3, step_total=0.1, grad_norm=1.0, parts=parts))
    (run.path / "styles.json").write_text(json.dumps(STYLES))
    (run.path / f"{name}.safetensors").write_bytes(b"no model")
    return run
