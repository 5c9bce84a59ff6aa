"""Scanning many images: headers and captions, then the full decode of each that finds broken ones; again with everything indexed.

usage: scan.py [number of files, default 100000]
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from PIL import Image
from report import report, resident_mib

from sd_scripts.dataset.config import subsets_of
from sd_scripts.dataset.scan import read_dataset, scan
from sd_scripts.schema.dataset import DatasetOptions


def draw(folder: Path, count: int) -> None:
    """Small images of many sizes, half PNG and half JPEG, each with a caption."""
    rng = np.random.default_rng(0)
    kinds = []
    for number in range(64):
        size = tuple(int(side) for side in rng.integers(16, 96, 2))
        image = Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8))
        kind = ("png", "jpg")[number % 2]
        file = folder / f"kind.{kind}"
        image.save(file)
        kinds.append((kind, file.read_bytes()))
        file.unlink()
    for number in range(count):
        kind, data = kinds[number % len(kinds)]
        part = folder / f"1_part {number // 5000}"
        part.mkdir(exist_ok=True)
        (part / f"{number:06d}.{kind}").write_bytes(data)
        (part / f"{number:06d}.txt").write_text(f"image {number}, a tag, another tag")


def most_memory(stop: threading.Event, found: list[float]) -> None:
    """Watches this process until told to stop."""
    while not stop.wait(0.05):
        found.append(resident_mib())


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "images").mkdir()
        draw(root / "images", count)
        options = DatasetOptions(train_data_dir=str(root / "images"))
        stop, memory = threading.Event(), [resident_mib()]
        watcher = threading.Thread(target=most_memory, args=(stop, memory))
        watcher.start()
        seconds = []
        subsets = subsets_of(options, root / "cache")
        for do in (lambda: scan(subsets, root / "cache"), lambda: read_dataset(options, root / "cache")):
            for _ in range(2):
                started = time.perf_counter()
                dataset = do()
                seconds.append(time.perf_counter() - started)
                assert len(dataset.images) == count
        stop.set()
        watcher.join()
    report(
        "scan",
        "over 4000 files/s, under 300 MiB",
        files=count,
        first_images_per_second=count / seconds[0],
        first_files_per_second=2 * count / seconds[0],
        again_images_per_second=count / seconds[1],
        verified_images_per_second=count / seconds[2],
        verified_again_images_per_second=count / seconds[3],
        peak_mib=max(memory),
        start_mib=memory[0],
    )
