"""`python -m sd_scripts.schema docs` writes docs/options.md."""

from __future__ import annotations

import sys
from pathlib import Path

from .docs import page
from .files import write_atomically

PATH = Path(__file__).resolve().parents[2] / "docs" / "options.md"

if __name__ == "__main__":
    if sys.argv[1:] != ["docs"]:
        raise SystemExit("usage: python -m sd_scripts.schema docs")
    write_atomically(PATH, page())
