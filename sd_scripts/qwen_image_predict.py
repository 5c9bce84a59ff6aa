"""Make images with Qwen-Image, or edit images with Qwen-Image-Edit."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts the folder of this file first on the path; the package is one level above it.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from sd_scripts.families.qwen_edit.predict_options import QwenImagePredict
    from sd_scripts.library.render.predicting.command import main

    main(QwenImagePredict)
