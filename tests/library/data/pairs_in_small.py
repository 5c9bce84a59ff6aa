"""Small edit pairs on disk, and pipelines of the tiny Qwen-Image-Edit on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from sd_scripts.dataset.buckets import area_size
from sd_scripts.dataset.plan import Plan, make_plan
from sd_scripts.dataset.scan import read_dataset
from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.qwen_edit.options import QwenImageDatasetOptions
from sd_scripts.library.core.protocols import Batch, Parts
from sd_scripts.library.data.cache import open_caches
from sd_scripts.library.data.pipeline import DataPipeline
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.model import Controls

LIVE = {"cache_latents": False, "cache_text_encoder_outputs": False}
INSTRUCTIONS = ("make the circle red", "remove the square", "move it to the left, then up", "a frame, thin, black")
AREA = 64 * 64


class CountingEdit(QwenEdit):
    """The real family, which counts what its encoders are given."""

    def __init__(self) -> None:
        self.images = self.sets = self.texts = 0
        self.on_encode: Callable[[], None] = lambda: None

    def encode_images(self, parts: Parts, pixels: Tensor) -> Tensor:
        self.images += len(pixels)
        self.on_encode()
        return super().encode_images(parts, pixels)

    def encode_instructions(self, parts: Parts, controls: Sequence[Tensor], captions: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        self.sets, self.texts = self.sets + 1, self.texts + len(captions)
        self.on_encode()
        return super().encode_instructions(parts, controls, captions)


def draw(path: Path, size: tuple[int, int], seed: int) -> None:
    """A smooth random image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8))
    coarse.resize(size, Image.Resampling.BICUBIC).save(path)


def pair(root: Path, name: str, size: tuple[int, int], controls: Sequence[tuple[tuple[int, int], int]], caption: str, seed: int) -> None:
    """A target and its control images, (size, seed) each, in the folders of root."""
    draw(root / "target" / f"{name}.png", size, seed)
    (root / "target" / f"{name}.txt").write_text(caption)
    for index, (side, number) in enumerate(controls):
        draw(root / ("control" if index == 0 else f"control_{index}") / f"{name}.png", side, number)


def pairs(root: Path) -> Path:
    """Six pairs: two with one control image at twice the target's size, two with a second one of another shape, two wide ones."""
    for index in range(6):
        size = (96, 64) if index >= 4 else (80, 80)
        controls = [((2 * size[0], 2 * size[1]), 100 + index)] + ([((60, 90), 200 + index)] if index in (1, 2) else [])
        pair(root, f"p{index}", size, controls, INSTRUCTIONS[index % 4], index)
    return root


def options_for(data: Path, **values: object) -> QwenImageDatasetOptions:
    return QwenImageDatasetOptions.model_validate(
        {
            "train_data_dir": str(data),
            "resolution": (64, 64),
            "min_bucket_reso": 32,
            "bucket_reso_steps": 16,
            "train_batch_size": 2,
            "max_data_loader_n_workers": 1,
            **values,
        }
    )


@lru_cache(maxsize=4)
def tiny(version: str = "edit-2509") -> Parts:
    """The tiny model of a version; shared, so nobody may change it."""
    return QwenEdit().tiny(version)


def plan_for(options: DatasetOptions, root: Path, seed: int = 5, controls: Controls | None = None, **shape: int) -> Plan:
    dataset = read_dataset(options, root / "cache", controls=controls or Controls(0, 3))
    return make_plan(dataset, options, seed=seed, grid=16, control_size=partial(area_size, area=AREA), **shape)


def pipeline_for(
    options: DatasetOptions, root: Path, family: QwenEdit | None = None, num_steps: int = 12, seed: int = 5, **values: object
) -> DataPipeline:
    names = ("processes", "accumulation", "batch_size", "controls")
    shape = {name: values.pop(name) for name in names if name in values}
    plan = plan_for(options, root, seed, **shape)  # type: ignore[arg-type]
    made = open_caches(options, root / "cache")
    return DataPipeline(options, family or QwenEdit(), plan, made, seed, num_steps=num_steps, **values)  # type: ignore[arg-type]


def ready(
    options: DatasetOptions, root: Path, family: QwenEdit | None = None, parts: Parts | None = None, **values: object
) -> DataPipeline:
    pipeline = pipeline_for(options, root, family, **values)
    pipeline.prepare(parts or tiny())
    return pipeline


def batches(pipeline: DataPipeline, num_steps: int = 12) -> list[Batch]:
    """The first steps, and the held-out batches."""
    return [pipeline.micro_batch(step, 0, 0) for step in range(num_steps)] + [make() for make in pipeline.validation_batches()]
