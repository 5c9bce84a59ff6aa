"""Find images that a model takes for nearly the same."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts the folder of this file first on the path; the package is one level above it.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from sd_scripts.library.tools.run import main

    main(tool="duplicates")
