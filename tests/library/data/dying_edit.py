"""Fills the caches of edit pairs and kills itself, without a farewell, at one of the calls of an encoder."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from sd_scripts.schema.dataset import QwenImageDatasetOptions
from tests.library.data.pairs_in_small import CountingEdit, pipeline_for, tiny


def main() -> None:
    root, calls_to_live = Path(sys.argv[1]), int(sys.argv[2])
    options = QwenImageDatasetOptions.model_validate_json(sys.argv[3])
    family = CountingEdit()
    calls = 0

    def die_in_time() -> None:
        nonlocal calls
        calls += 1
        if calls == calls_to_live:
            os.kill(os.getpid(), signal.SIGKILL)

    family.on_encode = die_in_time
    pipeline_for(options, root, family).prepare(tiny())


if __name__ == "__main__":
    main()
