"""Fill the caches of a data set and die, without a farewell, at one of the calls of an encoder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from sd_scripts.families.qwen_edit.options import QwenImageDatasetOptions
from sd_scripts.schema.dataset import DatasetOptions
from tests.library.data import pairs_in_small, standin_family


def _at_call(calls_to_live: int) -> Callable[[], None]:
    """What kills this process when it is called for this time, counted from 1."""
    calls = 0

    def die_in_time() -> None:
        nonlocal calls
        calls += 1
        if calls == calls_to_live:
            os.kill(os.getpid(), signal.SIGKILL)

    return die_in_time


def fill_images(root: Path, calls_to_live: int, options: DatasetOptions) -> None:
    """The caches of images and captions."""
    family = standin_family.SmallFamily(batch_effect=0.01)
    family.on_encode = _at_call(calls_to_live)
    standin_family.pipeline_for(options, root, family).prepare(family.tiny())


def fill_edit_pairs(root: Path, calls_to_live: int, options: QwenImageDatasetOptions) -> None:
    """The caches of edit pairs."""
    family = pairs_in_small.CountingEdit()
    family.on_encode = _at_call(calls_to_live)
    pairs_in_small.pipeline_for(options, root, family).prepare(pairs_in_small.tiny())
