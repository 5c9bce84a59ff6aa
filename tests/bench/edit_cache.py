"""The cache of instructions in two parts beside the plain scheme: the whole prompt and the whole empty prompt of every sample.

The tiny Qwen-Image-Edit with control images at the area that the real one's text encoder sees (384 x 384, 196 vision tokens), so that
the rows of images and of instructions are about as many as there. Both write the same kind of files; the plain one reads every text
from the start.

usage: edit_cache.py [pairs, default 24] [captions of each pair, default 1]
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from report import report

from sd_scripts.dataset import plan as plans
from sd_scripts.dataset.buckets import area_size
from sd_scripts.dataset.instructions import instructions_of_run
from sd_scripts.dataset.scan import read_dataset
from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.qwen_edit.options import QwenImageDatasetOptions
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.data.cache import Cache, key_of, open_caches
from sd_scripts.library.data.pipeline import DataPipeline
from sd_scripts.library.data.views import cached_view, control_views, see_control
from sd_scripts.schema.model import Controls

SIDE = 64
WORDS = "make the small circle on the left red, remove the square, keep the background, add a thin frame, all in daylight"


def draw(root: Path, count: int) -> None:
    """Pairs of one size with instructions of many parts."""
    rng = np.random.default_rng(0)
    for number in range(count):
        for folder in ("target", "control"):
            path = root / folder / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)).save(path)
        (root / "target" / f"{number:03d}.txt").write_text(f"{WORDS}, number {number}")


def plan_of(root: Path, captions: int) -> tuple[QwenImageDatasetOptions, plans.Plan]:
    """The data set, with an empty text for each pair, and several texts when asked."""
    options = QwenImageDatasetOptions(
        train_data_dir=str(root / "pairs"),
        resolution=(SIDE, SIDE),
        min_bucket_reso=32,
        cache_latents=False,
        caption_dropout_rate=0.1,
        shuffle_caption=captions > 1,
        caption_variants=captions,
    )
    dataset = read_dataset(options, root / "index", controls=Controls(1, 3))
    return options, plans.make_plan(dataset, options, seed=1, grid=16, control_size=partial(area_size, area=SIDE * SIDE))


def ours(root: Path, cache: str, parts: Parts, captions: int, num_steps: int) -> tuple[float, int]:
    """Seconds and bytes of the product."""
    options, plan = plan_of(root, captions)
    data = DataPipeline(options, QwenEdit(), plan, open_caches(options, root / cache), 1, num_steps=num_steps)
    started = time.perf_counter()
    data.prepare(parts)
    seconds = time.perf_counter() - started
    data.close()
    return seconds, data.kept()[0].num_bytes


def plain(root: Path, cache: str, parts: Parts, captions: int, num_steps: int) -> tuple[float, int]:
    """Seconds and bytes of whole texts, each read from the start."""
    _, plan = plan_of(root, captions)
    family, kept, keys = QwenEdit(), Cache(root / cache), []
    started = time.perf_counter()
    for shown in instructions_of_run(plan, num_steps):
        view = cached_view(plan, 1, shown.image, shown.resolution, shown.mirrored)
        for text in shown.texts:
            controls = [see_control(plan, 1, control) for control in control_views(plan, view)]
            with torch.no_grad():
                prefix, (suffix,) = family.encode_instructions(parts, controls, [text])
            keys.append(key_of({"picture": shown.image, "text": text}))
            kept.put(keys[-1], {"text": torch.cat([prefix, suffix])})
    return time.perf_counter() - started, kept.num_bytes(keys)


if __name__ == "__main__":
    count, captions = (int(sys.argv[1]) if len(sys.argv) > 1 else 24), (int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    tiny = QwenEdit().tiny()
    parts = replace(tiny, settings={**tiny.settings, "condition_area": 384 * 384, "max_token_length": 512})
    parts.text_encoders["te1"].bfloat16()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        draw(root / "pairs", count)
        # Long enough for every text to be shown.
        steps = 100 * count
        plain(root, "warm", parts, captions, steps)
        two_parts, whole = [], []
        for turn in range(3):
            whole.append(plain(root, f"plain{turn}", parts, captions, steps))
            two_parts.append(ours(root, f"ours{turn}", parts, captions, steps))
    report(
        "edit_cache",
        "size at most 0.6, time at most 0.7 of the plain scheme with one caption and the empty one",
        size_beside_plain=two_parts[0][1] / whole[0][1],
        time_beside_plain=min(two_parts)[0] / min(whole)[0],
        pairs=count,
        captions=captions,
        seconds=min(two_parts)[0],
        plain_seconds=min(whole)[0],
        mebibytes=two_parts[0][1] / 2**20,
        plain_mebibytes=whole[0][1] / 2**20,
    )
