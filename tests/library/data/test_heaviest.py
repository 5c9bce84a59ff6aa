"""The batch that takes most memory: the largest images that the run shows, with the longest text that it shows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sd_scripts import families
from sd_scripts.library.core.protocols import Batch
from sd_scripts.library.data.pipeline import DataPipeline
from sd_scripts.schema.dataset import DatasetOptions
from tests.library.data import pairs_in_small, standin_family
from tests.library.data.standin_family import SmallFamily

STEPS = 20


class Wordy(SmallFamily):
    """A family whose texts have as many rows as letters."""

    def encode_prompts(self, parts: Any, captions: Any, encoders: object = None) -> list[dict[str, torch.Tensor]]:
        return [{"hidden": torch.ones(len(caption) + 1, 5)} for caption in captions]


def area(batch: Batch) -> int:
    controls = sum(tensor.numel() for name, tensor in batch.conditions[0].items() if name.startswith("control_"))
    return batch.x0[0].numel() + controls


def rows(batch: Batch, name: str) -> list[int]:
    return [len(condition[name]) for condition in batch.conditions]


def check(pipeline: DataPipeline, name: str, steps: int) -> None:
    before = [pipeline.micro_batch(step, 0, 0) for step in range(steps)]
    found, words = pipeline.heaviest()
    assert area(found) == max(map(area, before)) and len(found.numbers) == len(before[0].numbers)
    longest = max(length for batch in before for length in rows(batch, name))
    assert rows(found, name) == [longest] * len(found.numbers)
    assert (found.step, found.progress) == (steps - 1, (steps - 1) / steps)
    assert words.startswith(f"a batch of {len(found.numbers)} image") and f"{found.x0.shape[-1] * 8} x {found.x0.shape[-2] * 8}" in words
    for step, batch in enumerate(before):
        again = pipeline.micro_batch(step, 0, 0)
        assert torch.equal(again.x0, batch.x0) and rows(again, name) == rows(batch, name) and again.captions == batch.captions


@pytest.mark.parametrize("values", [{}, {"cache_latents": False, "cache_text_encoder_outputs": False}, {"flip_aug": True}])
def test_it_has_the_largest_images_and_the_longest_text_of_the_run(options: DatasetOptions, root: Path, values: dict[str, object]) -> None:
    chosen = DatasetOptions.model_validate({**options.model_dump(), "additional_resolutions": (32, 48), **values})
    family = Wordy()
    longest = random.choice(sorted((root / "images").rglob("*.png")) or sorted(root.rglob("*.png")))
    longest.with_suffix(".txt").write_text("a very long caption " * random.randint(5, 9))
    pipeline = standin_family.pipeline_for(chosen, root, family, num_steps=STEPS)
    pipeline.prepare(family.tiny())
    check(pipeline, "hidden", STEPS)


def test_buckets_that_give_no_step_do_not_count(options: DatasetOptions, root: Path) -> None:
    family = Wordy()
    for steps in (1, 2, 3):
        pipeline = standin_family.pipeline_for(options, root, family, num_steps=steps)
        pipeline.prepare(family.tiny())
        shown = [pipeline.micro_batch(step, 0, 0) for step in range(steps)]
        assert area(pipeline.heaviest()[0]) == max(map(area, shown))
        step = pipeline.plan.heaviest_step(steps)
        assert area(shown[step]) == max(map(area, shown)) and all(area(batch) < area(shown[step]) for batch in shown[:step])


@pytest.mark.parametrize("values", [{}, {"cache_latents": False, "cache_text_encoder_outputs": False}])
def test_pairs_have_their_control_images_with_it(tmp_path: Path, values: dict[str, object]) -> None:
    data = pairs_in_small.pairs(tmp_path)
    pipeline = pairs_in_small.ready(pairs_in_small.options_for(data, **values), tmp_path, num_steps=12)
    found, words = pipeline.heaviest()
    shown = [pipeline.micro_batch(step, 0, 0) for step in range(12)]
    assert area(found) == max(map(area, shown)) and "with control images of" in words
    alike = [batch for batch in shown if area(batch) == area(found)]
    assert min(rows(found, "text")) >= max(length for batch in alike for length in rows(batch, "text"))
    parts = families.family("qwen_edit").tiny()
    t = torch.full((len(found.numbers),), 0.5)
    assert families.family("qwen_edit").denoise(parts, found.x0, t, found.conditions).shape == found.x0.shape
