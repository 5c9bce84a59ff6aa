"""How good a saved model of style transfer is on the built-in styles: a table of all pairs, and a sheet of results.

The same table for what the wanted style makes of the same scene, and for that through the VAE, says how good a transfer can be.

usage: styles.py MODEL SHEET.png [data=styles|photographs] [count=18] [rows=3]
                 [a setting of transfer=its value, such as steps=6 sampler=euler strength=0.8]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image

from sd_scripts.families.lgt.model import Lgt
from sd_scripts.families.lgt.options import LgtModelOptions
from sd_scripts.families.lgt.transfer import Settings
from sd_scripts.toy.datasets import write_dataset
from tests.style_quality import of_model, sheet, table, transferred


def main(model: str, target: str, *given: str) -> None:
    values = dict(text.split("=") for text in given)
    data, count, rows = values.pop("data", "styles"), int(values.pop("count", 18)), int(values.pop("rows", 3))
    settings = Settings(**{name: type(getattr(Settings, name))(value) for name, value in values.items()})
    family = Lgt()
    parts = family.load(LgtModelOptions(pretrained_model_name_or_path=model), torch.device("cpu"), torch.float32)
    with TemporaryDirectory() as folder:
        write_dataset(data, Path(folder) / data)
        ruler = of_model(family, parts, Path(folder) / data)
        pairs = [(source, goal) for source in ruler.styles for goal in ruler.styles if source != goal]
        perfect = {(source, goal): ruler.tests(goal, source, count) for source, goal in pairs}
        began = time.process_time()
        found = transferred(family, parts, ruler, settings, count)
        seconds = (time.process_time() - began) / sum(map(len, found.values()))
        shown: dict[str, dict[tuple[str, str], list[Image.Image]]] = {
            "as the wanted style draws it": perfect,
            "the same through the VAE": {pair: ruler.decode(ruler.encode(images)) for pair, images in perfect.items()},
            f"{Path(model).name}, {settings}, {seconds:.2f} CPU seconds an image": found,
        }
        for title, images in shown.items():
            told = {}
            for source, goal in pairs:
                compared = (ruler.tests(source, source, count), images[source, goal], perfect[source, goal])
                told[source, goal] = (
                    ruler.quality_of_shapes(source, goal, *compared) if data == "styles" else ruler.quality(goal, *compared)
                )
            sys.stdout.write(f"{title}\n{table(told)}\n")
        sheet(ruler, found, min(count, rows)).save(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
