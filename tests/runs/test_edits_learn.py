"""Qwen-Image-Edit learns a new instruction on its toy base. Bounds are those of single runs with room for other rounding."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sd_scripts.toy.datasets import write_dataset
from sd_scripts.toy.edits import OLD_KINDS, EditKind
from tests.runs.learning import learn, losses_fall

NEW: tuple[EditKind, ...] = ("border",)
KEPT: tuple[EditKind, ...] = ("keep",)


def test_few_steps_on_few_pairs_begin_to_teach_an_instruction_and_keep_the_old_ones(tmp_path: Path) -> None:
    """All new pairs and a fifth of those that the base is the teacher of: 51 % of the way to borders is left, 53 and 42 % stay."""
    data = write_dataset("edit_border", tmp_path / "data")
    assert data.reg_data_dir is not None
    for folder in data.reg_data_dir.iterdir():
        for stem in sorted(path.stem for path in (folder / "target").glob("*.png"))[:48]:
            for file in folder.glob(f"*/{stem}.*"):
                copy = tmp_path / "few" / file.relative_to(data.reg_data_dir)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)
    folders = {"train_data_dir": str(data.train_data_dir), "reg_data_dir": str(tmp_path / "few")}
    learned = learn("qwen_image_train_network/toy-edit-border", tmp_path, num_images=12, max_train_steps=250, **folders)
    before, after = (learned.distance_to_targets("border", after=when) for when in (False, True))
    old_after, kept = learned.edits_obeyed(OLD_KINDS), learned.edits_obeyed(KEPT)
    print(f"left of a border {after / before:.1%}; recolour, move, remove -> {old_after:.1%}; no change {kept:.1%}")
    assert after <= 0.6 * before
    assert old_after >= 0.4 and kept >= 0.25, "what the base could is lost; the long form below holds it to 90 %"
    assert losses_fall(learned)


@pytest.mark.long
def test_an_editing_model_learns_a_new_instruction_and_keeps_the_old_ones_and_what_is_to_stay(tmp_path: Path) -> None:
    learned = learn("qwen_image_train_network/toy-edit-border", tmp_path, num_images=60)
    before, old_before = learned.edits_obeyed(NEW, after=False), learned.edits_obeyed(OLD_KINDS, after=False)
    after, old_after, kept = learned.edits_obeyed(NEW), learned.edits_obeyed(OLD_KINDS), learned.edits_obeyed(KEPT)
    print(f"border {before:.1%} -> {after:.1%}; recolour, move, remove {old_before:.1%} -> {old_after:.1%}; no change {kept:.1%}")
    assert before < 0.05 and after >= 0.8 and kept >= 0.9
    assert old_before >= 0.8 and old_after >= old_before - 0.1
    assert losses_fall(learned)
