"""Captions with random parts follow from sample numbers, whoever reads them and in whichever order."""

from __future__ import annotations

import random
from pathlib import Path

from sd_scripts.schema.dataset import DatasetOptions
from tests.library.data.standin_family import SmallFamily, pipeline_for

DROPS = {
    "caption_token_dropout_rate": 0.4,
    "caption_tag_dropout_rate": 0.2,
    "caption_dropout_rate": 0.2,
    "caption_variants": 0,
    "cache_text_encoder_outputs": False,
    "validation_split": 0.2,
}
STEPS = 25


def captions(options: DatasetOptions, root: Path, workers: int, order: list[int]) -> dict[int, list[str]]:
    """Captions of each step, asked for in this order."""
    changed = DatasetOptions.model_validate({**options.model_dump(), **DROPS, "max_data_loader_n_workers": workers})
    family = SmallFamily()
    pipeline = pipeline_for(changed, root, family)
    pipeline.prepare(family.tiny())
    found = {step: pipeline.micro_batch(step, 0, 0).captions for step in order}
    for make in pipeline.validation_batches():
        batch = make()
        assert batch.captions == [Path(name).with_suffix(".txt").read_text().strip() for name in batch.names], "held-out captions are whole"
    pipeline.close()
    return found


def test_dropped_words_do_not_depend_on_workers_or_order(options: DatasetOptions, root: Path) -> None:
    for image in sorted((root / "data").glob("*.png")):
        image.with_suffix(".txt").write_text(f"a {image.stem} beside two trees, under one blue sky, at noon")
    order = list(range(STEPS))
    base = captions(options, root, 0, order)
    texts = [text for step in base.values() for text in step]
    assert 0.05 < texts.count("") / len(texts) < 0.4 and len(set(texts)) > 0.6 * len(texts), "words are dropped"
    for workers in (1, 4):
        assert captions(options, root, workers, random.sample(order, STEPS)) == base
