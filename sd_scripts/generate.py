"""Draw images from a prompt: with a base model and LoRA files, a fine-tuned model, or a run."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts the folder of this file first on the path; the package is one level above it.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from sd_scripts.library.render.predicting.command import generate

    generate()
