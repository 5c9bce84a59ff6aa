"""Fetch a model from the hub, with its size, licence and free disk said before."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts the folder of this file first on the path; the package is two levels above it.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from sd_scripts.library.tools.run import main

    main(tool="fetch_model")
