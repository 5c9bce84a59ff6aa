"""The pipeline with the real SDXL classes, on the photographs that come with scikit-image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from PIL import Image

from sd_scripts.dataset.plan import make_plan
from sd_scripts.dataset.scan import read_dataset
from sd_scripts.families.sdxl.model import Sdxl
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.data.cache import fingerprint, open_caches
from sd_scripts.library.data.pipeline import DataPipeline
from sd_scripts.schema.dataset import DatasetOptions

PHOTOGRAPHS = ("chelsea.png", "rocket.jpg", "coffee.png", "camera.png")


@pytest.fixture(scope="module")
def parts() -> Parts:
    return Sdxl().tiny()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photographs")
    source = Path(skimage.__file__).parent / "data"
    for name in PHOTOGRAPHS:
        (root / name).write_bytes((source / name).read_bytes())
    exif = Image.Exif()
    exif[274] = 8
    with Image.open(source / "rocket.jpg") as rocket:
        rocket.save(root / "turned.jpg", exif=exif)
    with Image.open(source / "astronaut.png") as astronaut:
        alpha = Image.fromarray(np.tile(np.linspace(0, 255, 512).astype(np.uint8), (512, 1)))
        astronaut.putalpha(alpha)
        astronaut.save(root / "transparent.png")
    for path in list(root.iterdir()):
        path.with_suffix(".txt").write_text(f"a photo of {path.stem}, sharp, daylight")
    return root


def pipeline(folder: Path, cache: Path, parts: Parts, **values: object) -> DataPipeline:
    options = DatasetOptions(
        **{
            "train_data_dir": str(folder),
            "resolution": (96, 96),
            "min_bucket_reso": 32,
            "bucket_reso_steps": 32,
            "train_batch_size": 2,
            "shuffle_caption": True,
            "caption_dropout_rate": 0.2,
            "flip_aug": True,
            **values,
        }
    )
    plan = make_plan(read_dataset(options, cache), options, seed=7, grid=Sdxl.grid)
    made = DataPipeline(options, Sdxl(), plan, open_caches(options, cache), 7, num_steps=9)
    made.prepare(parts)
    return made


def test_cached_batches_of_sdxl_equal_live_ones(folder: Path, tmp_path: Path, parts: Parts) -> None:
    cached = pipeline(folder, tmp_path, parts, vae_batch_size=2)
    live = pipeline(folder, tmp_path, parts, cache_latents=False, cache_text_encoder_outputs=False)
    for step in range(9):
        one, other = cached.micro_batch(step, 0, 0), live.micro_batch(step, 0, 0)
        assert one.names == other.names and one.captions == other.captions
        torch.testing.assert_close(one.x0, other.x0, atol=1e-5, rtol=0)
        for a, b in zip(one.conditions, other.conditions, strict=True):
            assert a.keys() == b.keys()
            for name in a:
                torch.testing.assert_close(a[name], b[name], atol=1e-5, rtol=0)
    cached.close()
    live.close()


def test_a_turned_photograph_trains_upright(folder: Path, tmp_path: Path, parts: Parts) -> None:
    plan = pipeline(folder, tmp_path, parts, cache_latents=False, cache_text_encoder_outputs=False).plan
    sizes = {image.name: (image.width, image.height) for image in plan.images}
    assert sizes["turned.jpg"] == sizes["rocket.jpg"][::-1]


def test_the_fingerprint_of_the_vae_sees_its_scaling_factor(parts: Parts) -> None:
    before = fingerprint(parts.vae)
    factor = parts.vae.config.scaling_factor
    parts.vae.register_to_config(scaling_factor=factor * 2)
    try:
        assert fingerprint(parts.vae) != before
    finally:
        parts.vae.register_to_config(scaling_factor=factor)
    assert fingerprint(parts.vae) == before
