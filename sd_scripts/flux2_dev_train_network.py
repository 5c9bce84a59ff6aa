"""Train a LoRA, or one of its relatives, on FLUX.2 dev."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # A launcher puts the folder of this file first on the path; the package is one level above it.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from sd_scripts.library.train.launch import main

    main(family="flux2_dev", method="network")
