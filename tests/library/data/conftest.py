"""Data sets on disk for the tests of caches and batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sd_scripts.schema.dataset import DatasetOptions

SIZES = [(96, 96), (128, 80), (100, 70), (64, 64), (90, 130)]


def draw(folder: Path, count: int, seed: int = 0) -> None:
    """Smooth random images of several sizes, with captions."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for index in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        coarse.resize(SIZES[index % len(SIZES)], Image.Resampling.BICUBIC).save(folder / f"{index:02d}.png")
        (folder / f"{index:02d}.txt").write_text(f"image {index}, red, green, blue")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with `data` (11 images) and room for `cache`."""
    draw(tmp_path / "data", 11)
    return tmp_path


@pytest.fixture
def options(root: Path) -> DatasetOptions:
    return DatasetOptions(
        train_data_dir=str(root / "data"),
        resolution=(64, 64),
        min_bucket_reso=16,
        bucket_reso_steps=16,
        train_batch_size=2,
        max_data_loader_n_workers=2,
    )
