"""Losses of a few steps of every kind of run, kept in a file: a refactor leaves them as they are, a change of numerics changes the file.

`python -m tests.runs.test_golden_losses` writes tests/data/golden_losses.json anew; say in the same commit why.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.library.train.launch import main
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.files import write_atomically
from tests.small_models import model_given

GOLDEN = Path(__file__).parents[1] / "data" / "golden_losses.json"
EDITING = ("qwen_edit", "flux2", "flux2_dev", "flux3", "kontext", "qwen_image21")
"""Families that train on pairs."""
SETTINGS = (
    "--resolution 64 --min_bucket_reso 32 --learning_rate 1e-3 --max_train_steps 6 --train_batch_size 2 --seed 11 "
    "--mixed_precision no --resume none --no_save_state --no_save_state_on_train_end --lr_scheduler constant"
).split()


def losses(kind: tuple[str, str], folder: Path) -> list[float]:
    """The losses of a short run of this kind on the family's tiny model and drawn images; the same everywhere, up to rounding."""
    family = families.family(kind[0])
    if kind[1] != "scratch":
        # CLIP's attention and its MLP draw their first values from torch's generator, which families seed themselves.
        family.save(family.tiny(), folder / "base", "diffusers", None, {})
    draw = np.random.default_rng(5)
    images = folder / "images" / ("target" if kind[0] in EDITING else "")
    for number in range(6):
        size = ((64, 64, 3), (48, 80, 3))[number % 2]
        place = images / f"style {number % 3}" if kind[0] == "lgt" else images
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, size, dtype=np.uint8)).save(place / f"{number}.png")
        (place / f"{number}.txt").write_text(f"picture {number}, a, b")
    if kind[0] in EDITING:
        (folder / "images" / "control").mkdir()
        for number in range(6):
            size = ((64, 64, 3), (48, 80, 3))[number % 2]
            Image.fromarray(draw.integers(0, 255, size, dtype=np.uint8)).save(folder / "images" / "control" / f"{number}.png")
    model = model_given(*kind, folder / "base")
    argv = [f"--{name}" if value is True else f"--{name}={value}" for name, value in model.items()]
    argv += ["--train_data_dir", str(folder / "images"), "--bucket_reso_steps", str(max(16, family.grid))]
    if kind[0] in EDITING[1:]:
        argv += ["--control_resolution", "64"]
    if kind[0] == "zimage":
        # Plain flow matching, its default, is held by the other families.
        argv += ["--objective", "acrf"]
    # Style transfer has no captions, and evaluates where the others are given no prompts.
    argv += ["--no_sample_at_first", "--sample_steps", "1"] if kind[0] == "lgt" else ["--shuffle_caption"]
    with pytest.raises(SystemExit) as ended:
        main(*kind, [*argv, "--output_dir", str(folder / "out"), *SETTINGS])
    assert ended.value.code == 0
    (log,) = (folder / "out").glob("*/events.jsonl")
    return [event["loss"] for event in RunDirectory(log.parent).events()[0] if event["kind"] == "step"]


@pytest.mark.parametrize("kind", RUNS, ids="/".join)
def test_losses_are_what_they_were(kind: tuple[str, str], tmp_path: Path) -> None:
    wanted = json.loads(GOLDEN.read_text(encoding="utf-8"))["/".join(kind)]
    found = losses(kind, tmp_path)
    assert len(found) == len(wanted) == 6
    assert found == pytest.approx(wanted, rel=2e-4)


def test_the_file_has_every_kind_of_run_and_no_other() -> None:
    assert list(json.loads(GOLDEN.read_text(encoding="utf-8"))) == ["/".join(kind) for kind in RUNS]


def rewrite() -> None:
    """Writes the file with the losses of today."""
    torch.set_num_threads(1)
    found = {}
    for kind in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            found["/".join(kind)] = losses(kind, Path(folder))
    write_atomically(GOLDEN, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    rewrite()
