"""Qwen-Image-Edit learns a new instruction on its toy base. Bounds are those of single runs with room for other rounding."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sd_scripts.toy.datasets import write_dataset
from sd_scripts.toy.edits import OLD_KINDS, EditKind
from tests.runs.learning import learn, losses_fall


def test_few_steps_on_few_pairs_begin_to_teach_an_instruction_and_keep_the_old_ones(tmp_path: Path) -> None:
    """All new pairs and a fifth of the old ones: 42 % borders, 61 % of the old instructions."""
    data = write_dataset("edit_border", tmp_path / "data")
    for folder in data.train_data_dir.iterdir():
        for stem in sorted(path.stem for path in (folder / "target").glob("*.png"))[:48]:
            for file in folder.glob(f"*/{stem}.*"):
                copy = tmp_path / "few" / file.relative_to(data.train_data_dir)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)
    few = str(tmp_path / "few")
    learned = learn("qwen_image_train_network/toy-edit-border", tmp_path, num_pictures=12, max_train_steps=250, train_data_dir=few)
    new: tuple[EditKind, ...] = ("border",)
    before, after, old_after = learned.edits_obeyed(new, after=False), learned.edits_obeyed(new), learned.edits_obeyed(OLD_KINDS)
    print(f"border {before:.1%} -> {after:.1%}; recolour, move, remove -> {old_after:.1%}")
    assert before < 0.05 and after >= 0.16
    assert old_after >= 0.4
    assert losses_fall(learned)


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "least"),
    [pytest.param({"max_train_steps": 600}, 0.5, id="a third"), pytest.param({}, 0.8, id="whole")],
)
def test_an_editing_model_learns_a_new_instruction_and_keeps_the_old_ones(changes: dict[str, object], least: float, tmp_path: Path) -> None:
    learned = learn("qwen_image_train_network/toy-edit-border", tmp_path, **changes)
    new: tuple[EditKind, ...] = ("border",)
    before, old_before = learned.edits_obeyed(new, after=False), learned.edits_obeyed(OLD_KINDS, after=False)
    after, old_after = learned.edits_obeyed(new), learned.edits_obeyed(OLD_KINDS)
    print(f"border {before:.1%} -> {after:.1%}; recolour, move, remove {old_before:.1%} -> {old_after:.1%}")
    assert before < 0.05 and after >= least
    assert old_before >= 0.8 and old_after >= old_before - 0.1
    assert losses_fall(learned)
