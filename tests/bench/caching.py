"""Filling the latent cache beside a bare loop that encodes the same images, already decoded, with the same VAE and batch size.

The VAE has the real architecture and random weights; the images are PNG files that must be read, rotated, resized and cut.

usage: caching.py [images, default 12] [side, default 256]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from report import report

from sd_scripts import families
from sd_scripts.dataset import plan as plans
from sd_scripts.dataset.scan import read_dataset
from sd_scripts.library.data.cache import open_caches
from sd_scripts.library.data.pipeline import DataPipeline
from sd_scripts.schema.dataset import DatasetOptions

CONFIGS = Path(__file__).resolve().parents[2] / "sd_scripts" / "families" / "sdxl" / "configs"


def fill(root: Path, cache: str, parts, side: int) -> float:  # type: ignore[no-untyped-def]
    """Seconds that the product takes to fill an empty cache."""
    options = DatasetOptions(train_data_dir=str(root / "images"), resolution=(side, side), cache_text_encoder_outputs=False)
    dataset = read_dataset(options, root / cache)
    plan = plans.make_plan(dataset, options, seed=1, grid=8, processes=1, accumulation=1)
    data = DataPipeline(options, families.family("sdxl"), plan, open_caches(options, root / cache), 1, num_steps=1)
    started = time.perf_counter()
    data.prepare(parts)
    seconds = time.perf_counter() - started
    data.close()
    return seconds


def bare(parts, count: int, side: int) -> float:  # type: ignore[no-untyped-def]
    """Seconds of the VAE alone."""
    pixels = torch.rand(count, 1, 3, side, side) * 2 - 1
    started = time.perf_counter()
    with torch.no_grad():
        for image in pixels:
            parts.vae.encode(image).latent_dist.mean.float()
    return time.perf_counter() - started


if __name__ == "__main__":
    count, side = (int(sys.argv[1]) if len(sys.argv) > 1 else 12), (int(sys.argv[2]) if len(sys.argv) > 2 else 256)
    config = json.loads((CONFIGS / "vae" / "config.json").read_text())
    vae = AutoencoderKL.from_config(config).eval()
    parts = replace(families.family("sdxl").tiny(), vae=vae)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "images").mkdir()
        rng = np.random.default_rng(0)
        for number in range(count):
            noise = rng.integers(0, 255, (4 * side, 4 * side, 3), dtype=np.uint8)
            Image.fromarray(noise).save(root / "images" / f"{number}.png")
        bare(parts, 1, side)
        ours, theirs = [], []
        for turn in range(3):
            theirs.append(bare(parts, count, side))
            ours.append(fill(root, f"cache{turn}", parts, side))
    report(
        "latent_caching",
        "at least 0.95 of a bare encode loop",
        speed_beside_bare=min(theirs) / min(ours),
        images=count,
        side=side,
        cache_seconds=min(ours),
        bare_seconds=min(theirs),
    )
