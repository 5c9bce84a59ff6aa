"""Run folders with states as a training process leaves them, as far as their files go."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from PIL import Image

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


STYLES = ("flat", "line", "night")
MEASURES = ("swd_target", "swd_source", "ssm_source", "structure")


def colour_of(style: str, epoch: int) -> tuple[int, int, int]:
    """The plain colour of a picture in a style after an epoch."""
    return 40 + 80 * STYLES.index(style), min(255, 20 * epoch), 120


def evaluated(run: RunDirectory, epoch: int, step: int | None = None, sources: tuple[tuple[str, str], ...] | None = None) -> Path:
    """The folder of an evaluation, as a run of style transfer leaves it. sources: style and stem of each picture."""
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
    baselines = {"source": dict.fromkeys(MEASURES, 2.0), "random_source": dict.fromkeys(MEASURES, 3.0)}
    summary = {"styles": list(STYLES), "step": 10 * epoch, "epoch": epoch, "pairs": pairs, "sources": listed, "baselines": baselines}
    (folder / "summary.json").write_text(json.dumps({**summary, "means": means}))
    run.log("evaluation", step=10 * epoch if step is None else step, epoch=epoch, folder=f"inference/{folder.name}", swd_ratio=0.5, **means)
    return folder


def style_run(output: Path, name: str, steps: int = 30) -> RunDirectory:
    """A run of style transfer that was stopped: the log of its steps, and a saved file that is none."""
    of = flat.build(RUNS["lgt", "scratch"], {"train_data_dir": "toy:styles", "vae": "toy", "output_dir": str(output), "output_name": name})
    run = RunDirectory.create(output, name, of)
    run.log("started", steps=steps, start_step=0)
    for step in range(1, steps + 1):
        parts = {"swd": 4.0 / step, "ssm": 0.05, "flow": 1.0 + 0.1 * (step % 3)}
        run.log("step", step=step, epoch=step // 10, loss=sum(parts.values()), lr=1e-3, step_total=0.1, grad_norm=1.0, **parts)
    (run.path / "styles.json").write_text(json.dumps(STYLES))
    (run.path / f"{name}.safetensors").write_bytes(b"no model")
    return run
