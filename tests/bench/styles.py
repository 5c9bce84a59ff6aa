"""How good a saved model of style transfer is on the toy's styles: a table of each pair beside its upper bounds, and a sheet.

usage: styles.py MODEL SHEET.png [name of a setting=value, such as steps=6 sampler=euler strength=0.8] [count=9]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from sd_scripts.library.families.lgt import Lgt
from sd_scripts.library.families.lgt_transfer import Settings
from sd_scripts.schema.lgt import LgtModelOptions
from sd_scripts.toy.datasets import write_dataset
from tests import style_quality


def main(model: str, target: str, *given: str) -> None:
    values = dict(text.split("=") for text in given)
    count = int(values.pop("count", 9))
    settings = Settings(**{name: type(getattr(Settings, name))(value) for name, value in values.items()})
    family = Lgt()
    parts = family.load(LgtModelOptions(pretrained_model_name_or_path=model), torch.device("cpu"), torch.float32)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        data = Path(folder) / "styles"
        write_dataset("styles", data)
        with torch.enable_grad():
            ruler = style_quality.of_model(family, parts, data)
        pairs = [(source, goal) for source in ruler.styles for goal in ruler.styles if source != goal]
        before = {style: ruler.tests(style, style, count) for style in ruler.styles}
        perfect = {pair: ruler.tests(pair[1], pair[0], count) for pair in pairs}
        started = time.process_time()
        found = style_quality.transferred(family, parts, ruler, settings, count)
        seconds = (time.process_time() - started) / sum(map(len, found.values()))
        shown = {
            "as the style draws the scene": perfect,
            "the same through the VAE": {pair: ruler.decode(ruler.encode(images)) for pair, images in perfect.items()},
            f"{model} {settings}, {seconds:.2f} s an image": found,
        }
        for title, images in shown.items():
            if title.startswith(("as", "the")) and not {"bounds"} & {*sys.argv}:
                continue
            rows = {pair: ruler.quality(*pair, before[pair[0]], images[pair], perfect[pair]) for pair in pairs}
            sys.stdout.write(f"{title}\n{style_quality.table(rows)}\n")
        style_quality.sheet(ruler, found, min(count, 3)).save(target)


if __name__ == "__main__":
    main(*sys.argv[1:3], *(text for text in sys.argv[3:] if text != "bounds"))
