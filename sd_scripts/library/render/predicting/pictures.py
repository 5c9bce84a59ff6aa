"""Finished pictures as files: with what made them inside, never over a file that is there; and several of them as one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from sd_scripts.library.render.predict import Made
from sd_scripts.library.render.sample import save_picture
from sd_scripts.schema.files import new_picture

from .adapters import content_hash
from .orders import Variant

_GAP = 8


def save(made: Made, out: str, source: str, variant: Variant, controls: Sequence[str], suffix: str = "") -> Path:
    """Writes a PNG that tells what made it, adapters by name, strength and SHA-256 among it; the path, which is new."""
    adapters = [
        {"name": Path(file).name, "weight": weight, "sha256": content_hash(file)} for file, weight in zip(variant.lora, variant.lora_weight)
    ]
    path = new_picture(out, f"{time.strftime('%Y%m%d-%H%M%S')}-{made.preview.seed}{suffix}", suffix)
    try:
        save_picture(made.image, path, made.preview, source, controls=controls, adapters=adapters)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def grid(rows: Sequence[Sequence[Image.Image]], labels: Sequence[str]) -> Image.Image:
    """Pictures of one size as a table with a label over each column."""
    width, height = rows[0][0].size
    size = max(12, min(32, width // 16))
    font = ImageFont.load_default(size)
    band = 2 * _GAP + size
    table = Image.new("RGB", (len(labels) * (width + _GAP) - _GAP, band + len(rows) * (height + _GAP) - _GAP), "white")
    draw = ImageDraw.Draw(table)
    for column, label in enumerate(labels):
        left = column * (width + _GAP)
        text = label
        while len(text) > 1 and draw.textlength(text, font) > width:
            text = text.rstrip("…")[:-1] + "…"
        draw.text((left, _GAP), text, fill="black", font=font)
        for number, row in enumerate(rows):
            table.paste(row[column], (left, band + number * (height + _GAP)))
    return table
