"""Finished images as files: with what made them inside, never over a file that is there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from sd_scripts.library.render.predict import MadeImage
from sd_scripts.library.render.sample import save_image
from sd_scripts.schema.files import new_image

from .adapters import content_hash
from .orders import Variant


def save(made: MadeImage, out: str, source: str, variant: Variant, controls: Sequence[str], suffix: str = "") -> Path:
    """Writes a PNG that tells what made it, adapters by name, strength and SHA-256 among it; the path, which is new."""
    adapters = [
        {"name": Path(file).name, "weight": weight, "sha256": content_hash(file)} for file, weight in zip(variant.lora, variant.lora_weight)
    ]
    with new_image(out, f"{time.strftime('%Y%m%d-%H%M%S')}-{made.preview.seed}{suffix}", suffix) as path:
        save_image(made.image, path, made.preview, source, controls=controls, adapters=adapters)
    return path
