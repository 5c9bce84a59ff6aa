"""Qwen-Image-Edit learns a new instruction on its toy base. Bounds are those of single runs with room for other rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from sd_scripts.toy.edits import OLD_KINDS, EditKind
from tests.runs.learning import learn, losses_fall


@pytest.mark.parametrize(
    ("changes", "least"),
    [pytest.param({"max_train_steps": 600}, 0.5, id="a third"), pytest.param({}, 0.8, id="whole", marks=pytest.mark.long)],
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
