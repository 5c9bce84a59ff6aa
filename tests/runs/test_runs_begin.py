"""Where a start begins when something has changed since the run was begun, or when somebody else starts at the same moment."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sd_scripts.families import RUNS
from sd_scripts.library.train.prepare import files_of, read, resolved_options, wanted_of
from sd_scripts.library.train.process import Process
from sd_scripts.runs import resume
from sd_scripts.runs.stopping import StopRequest
from sd_scripts.schema.command_line import parse_cli
from sd_scripts.schema.errors import OptionError
from tests.library.test_model_files import flip


def beginning(runs: Any, *more: str, **options: Any) -> str:
    """Where a start would begin, and what it says."""
    asked = parse_cli(RUNS["sdxl", "network"], [*runs.arguments(**options), *more])
    process = Process.begin(asked, StopRequest())
    try:
        found = read(process, asked, resolved_options(process, asked))
        start = resume.choose(wanted_of(found, lambda: files_of(found)))
    except OptionError as err:
        return f"refused: {err}"
    finally:
        process.close()
    return f"{'new' if start.state is None else int(start.state.name)}: {'; '.join(start.warnings)}"


def test_what_has_changed_since_a_run_was_begun_is_said(runs: Any, images: Path, tiny_base: Path, tmp_path: Path) -> None:
    runs.images, runs.base = tmp_path / "images", tmp_path / "base"
    shutil.copytree(images, runs.images)
    shutil.copytree(tiny_base, runs.base)
    run = runs.train(max_train_steps=1)
    image, caption, unet = runs.images / "p00.png", runs.images / "p01.txt", runs.base / "unet" / "diffusion_pytorch_model.safetensors"
    kept, said = image.read_bytes(), caption.read_text()
    more = {"max_train_steps": 2}
    wrong = []

    def expect(wanted: tuple[str, ...], *arguments: str) -> None:
        told = beginning(runs, *arguments, **more)
        wrong.extend((word, told) for word in wanted if word not in told)

    def during(change: Callable[[], object], undo: Callable[[], object], auto: tuple[str, ...], within: tuple[str, ...]) -> None:
        change()
        expect(("new: ", "a new run begins", str(run.path), *auto))
        expect(within, "--run_dir", str(run.path))
        undo()

    expect(("1: ",))
    during(
        lambda: image.write_bytes((runs.images / "p03.png").read_bytes()),
        lambda: image.write_bytes(kept),
        ("1 image changed (p00.png)",),
        ("1: ", "1 image changed (p00.png)"),
    )
    during(
        lambda: caption.write_text("something else"),
        lambda: caption.write_text(said),
        ("1 image with another caption (p01.png)",),
        ("1: ", "another caption (p01.png)"),
    )
    during(
        lambda: (shutil.copy(image, runs.images / "x.png"), (runs.images / "p02.png").rename(tmp_path / "p02.png")),
        lambda: ((runs.images / "x.png").unlink(), (tmp_path / "p02.png").rename(runs.images / "p02.png")),
        ("1 image new (x.png)", "1 image gone (p02.png)"),
        ("1: ",),
    )
    bit = lambda: flip(unet, unet.stat().st_size - 9, 2)  # noqa: E731
    during(
        bit, bit, ("unet/diffusion_pytorch_model.safetensors",), ("refused: ", "unet/diffusion_pytorch_model.safetensors", str(run.state))
    )
    bit()
    expect(("1: ", "unet/diffusion_pytorch_model.safetensors"), "--resume", str(run.path))
    bit()
    expect(("1: ",))
    assert wrong == []


def test_of_two_starts_at_once_one_makes_the_run_and_the_other_says_so(runs: Any) -> None:
    both = [runs.begin(max_train_steps=50_000, max_data_loader_n_workers=0) for _ in range(2)]
    end = time.monotonic() + 240
    while all(process.is_alive() for process in both) and len(runs.folders()) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert len(runs.folders()) == 1
    loser, winner = sorted(both, key=lambda process: process.is_alive())
    loser.join()
    assert loser.exitcode == 2 and winner.is_alive()
    os.kill(winner.pid or 0, signal.SIGTERM)
    winner.join(120)
    assert winner.exitcode == 0 and runs.newest().events()[0][-1]["kind"] == "stopped"
