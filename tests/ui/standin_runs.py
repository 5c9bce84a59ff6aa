"""Orders for the stand-in trainer: options of a small run, the command that starts it, and waiting for what it does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from sd_scripts.families import RUNS
from sd_scripts.schema.flat import build
from sd_scripts.schema.runs import RunOptions

ROOT = Path(__file__).resolve().parents[2]
STANDIN = Path(__file__).with_name("standin_trainer.py")
SCRIPT = RUNS["sdxl", "network"].script


def options(folder: Path, **values: object) -> RunOptions:
    return build(
        RUNS["sdxl", "network"], {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", "output_dir": str(folder), **values}
    )


def command(behaviour: str, ranks: int = 1) -> Callable[[RunOptions, Path], list[str]]:
    launcher = (
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else [sys.executable]
    )
    return lambda _options, run: [*launcher, str(STANDIN), str(run), behaviour]


def until(condition: Callable[[], object], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)
