"""Real runs on a tiny model: a base folder, images, and processes that train in parts of a second."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sd_scripts.families import RUNS
from sd_scripts.library.train.launch import main
from sd_scripts.runs.command import SCRIPTS
from sd_scripts.runs.rundir import RunDirectory
from tests.forked import forked
from tests.small_models import model_given, model_options

PATIENCE_SECONDS = 240.0


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny SDXL as a diffusers folder, as users have them."""
    from diffusers.utils import logging as diffusers_logging

    from sd_scripts.families import family
    from tests.small_models import pipeline_of

    diffusers_logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("base") / "tiny"
    parts = family("sdxl").tiny()
    pipeline_of(parts).save_pretrained(folder)
    return folder


class TinyBases(dict[str, Path]):
    """Folders of tiny models by family, written when they are first asked for."""

    def __init__(self, factory: pytest.TempPathFactory, sdxl: Path) -> None:
        super().__init__(sdxl=sdxl)
        self._factory = factory

    def __missing__(self, name: str) -> Path:
        from sd_scripts.families import family

        made, folder = family(name), self._factory.mktemp(f"base_{name}") / "tiny"
        made.save(made.tiny(), folder, "diffusers", None, {})
        self[name] = folder
        return folder


@pytest.fixture(scope="session")
def tiny_bases(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyBases:
    """The tiny model of each family as a diffusers folder; SDXL's is written by diffusers, the others by the family."""
    return TinyBases(tmp_path_factory, tiny_base)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 small images of three shapes with captions."""
    folder = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(random.getrandbits(32))
    for number in range(24):
        width, height = ((64, 64), (96, 64), (64, 96))[number % 3]
        Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(folder / f"p{number:02d}.png")
        (folder / f"p{number:02d}.txt").write_text(f"image {number}, tag{number % 4}, tag{number % 5}")
    return folder


@pytest.fixture(scope="session")
def pairs(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images as targets, each with a control image; that of every fourth has another shape."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "control").mkdir()
    shutil.copytree(images, folder / "target")
    for number, path in enumerate(sorted((folder / "target").glob("*.png"))):
        control = Image.open(path).transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        control = control if number % 4 else control.resize((64, 80))
        control.save(folder / "control" / path.name)
    return folder


@pytest.fixture(scope="session")
def styles(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images in three styles: as they are, darker and striped."""
    folder = tmp_path_factory.mktemp("styles")
    for number, path in enumerate(sorted(images.glob("*.png"))):
        pixels = np.asarray(Image.open(path))
        style, pixels = (
            ("as it is", pixels),
            ("dark", pixels // 4),
            ("striped", np.where(np.arange(pixels.shape[1])[:, None] % 8 < 4, pixels, 255).astype(np.uint8)),
        )[number // 3 % 3]
        (folder / style).mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / style / path.name)
    return folder


@dataclass
class Runs:
    """Starts training processes that share one output folder. Methods that make their model do not look at base."""

    base: Path
    images: Path
    output: Path
    family: str = "sdxl"
    method: str = "network"

    def arguments(self, **options: Any) -> list[str]:
        """A command line for the tiny model; True stands for a switch, None takes an option out."""
        values: dict[str, Any] = {
            **model_given(self.family, self.method, self.base),
            "train_data_dir": self.images,
            "output_dir": self.output,
            "resolution": 64,
            "min_bucket_reso": 32,
            "bucket_reso_steps": max(16, model_options(self.family).grid),
            **({"network_dim": 4} if self.method == "network" else {}),
            "learning_rate": 1e-2,
            "max_train_steps": 8,
            "train_batch_size": 2,
            "max_data_loader_n_workers": 1,
            **options,
        }
        return [
            word
            for name, value in values.items()
            if value is not None
            for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
        ]

    def begin(self, **options: Any) -> BaseProcess:
        """Starts a process and does not wait for it. It is forked from a server that has imported the libraries once."""
        return forked(main, self.family, self.method, self.arguments(**options))

    def train(self, code: int = 0, **options: Any) -> RunDirectory:
        """Trains to the end of the process; the newest run folder."""
        process = self.begin(**options)
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == code, f"exit code {process.exitcode}"
        return self.newest()

    def newest(self) -> RunDirectory:
        """The run whose log was written last."""
        logs = sorted(self.output.glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime)
        return RunDirectory(logs[-1].parent)

    def folders(self) -> list[Path]:
        return sorted(path for path in self.output.glob("*") if (path / "config.toml").is_file())

    def killed(self, moment: str, count: int, **options: Any) -> None:
        """Trains until the process is killed, which is certain to happen: see doomed."""
        process = forked(doomed, moment, count, self.family, self.method, self.arguments(**options))
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == -signal.SIGKILL, f"the moment did not come: {moment} {count}; exit code {process.exitcode}"

    def wait(self, process: BaseProcess, seen: Callable[[], bool]) -> None:
        """Returns as soon as something can be seen from outside; fails when the process ends before."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not seen():
            assert process.is_alive(), "the process ended before the moment came"
            assert time.monotonic() < end, "the moment did not come"
            time.sleep(0.0005)

    def kill(self, process: BaseProcess) -> None:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def events(self) -> list[dict[str, Any]]:
        """All events of all runs."""
        return [event for folder in self.folders() for event in RunDirectory(folder).events()[0]]

    def launch(self, processes: int, **options: Any) -> subprocess.Popen[str]:
        """What users do: `accelerate launch`, here with several processes on a CPU. Does not wait."""
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes), "--num_machines", "1"]
        command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "--num_cpu_threads_per_process", "1"]
        command += ["--multi_gpu"] if processes > 1 else []
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*command, str(SCRIPTS / RUNS[self.family, self.method].script), *self.arguments(**options)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def launched(self, processes: int, **options: Any) -> RunDirectory:
        """Trains to the end with `accelerate launch`."""
        with self.launch(processes, **options) as started:
            said = started.communicate(timeout=PATIENCE_SECONDS)[0]
        assert started.returncode == 0, said[:4000]
        return self.newest()


MOMENTS = {
    "caching": r"/\.cache/latents/",
    "sampling": r"/samples/[^/]+\.png$",
    "evaluating": r"/inference/epoch_[^/]+$",
    "saving a state": r"/state/\d+$",
    "exporting": r"/lora-\d+\.safetensors$",
}
"""Names that files and folders get once they are whole."""


def doomed(moment: str, count: int, family: str, method: str, arguments: list[str]) -> None:
    """main in a process that the system kills: before the count-th file of a moment gets its name, or after so many steps.

    From outside a process can be killed when a moment is seen, which may be too late. Python tells of renaming and opening before they are
    done (PEP 578), here to a hook that sends the signal from inside.
    """
    come = 0

    def watch(event: str, details: tuple[Any, ...]) -> None:
        nonlocal come
        if event == "os.rename" and moment in MOMENTS:
            come += re.search(MOMENTS[moment], os.fspath(details[1])) is not None
        elif event == "open" and moment == "a step" and details[2] & os.O_APPEND and str(details[0]).endswith("events.jsonl"):
            steps = (event["step"] for event in RunDirectory(Path(details[0]).parent).events()[0] if event["kind"] == "step")
            come = max(steps, default=0)
        else:
            return
        if come >= count:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    main(family, method, arguments)


STYLES: dict[str, Any] = {
    # Two epochs of 6 steps.
    "max_train_steps": 12,
    "train_batch_size": 4,
    "save_last_n_states": 9,
    "save_every_n_steps": 3,
    "caption_dropout_rate": 0.2,
    "ode_integration_steps": 2,
    "sample_steps": 1,
    "sample_every_n_epochs": None,
    "output_name": "trained",
    "learning_rate": 1e-3,
}
"""The same of style transfer: drop-out of styles and in layers, an average, saves and evaluations."""


LONG: dict[str, Any] = {
    "max_train_steps": 12,
    "save_every_n_steps": 3,
    "sample_prompts": "an image --w 64 --h 64 --s 8",
    "shuffle_caption": True,
    "caption_dropout_rate": 0.2,
    "network_dropout": 0.1,
    "use_ema": True,
}
"""Saves, previews, dropout in captions and layers, and an average: everything that could remember something."""


@pytest.fixture(scope="session")
def long_options() -> dict[str, Any]:
    return dict(LONG)


@pytest.fixture(scope="session")
def undisturbed(tiny_base: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run with long_options that was left alone, from caches of its own."""
    return Runs(tiny_base, images, tmp_path_factory.mktemp("undisturbed")).train(**LONG)


@pytest.fixture(scope="session")
def undisturbed_styles(styles: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of style transfer with STYLES that was left alone."""
    return Runs(Path(), styles, tmp_path_factory.mktemp("undisturbed_styles"), "lgt", "scratch").train(**STYLES)


@pytest.fixture
def style_runs(runs: Runs, styles: Path) -> Runs:
    """Runs of style transfer."""
    runs.family, runs.method, runs.images = "lgt", "scratch", styles
    return runs


@pytest.fixture
def runs(tiny_base: Path, images: Path, tmp_path: Path) -> Iterator[Runs]:
    others = {child.pid for child in multiprocessing.active_children()}
    yield Runs(tiny_base, images, tmp_path / "out")
    for child in multiprocessing.active_children():
        # Those that were there before serve other tests.
        if child.pid not in others:
            child.kill()
