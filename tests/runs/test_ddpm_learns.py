"""The small DDPM learns from nothing. Bounds are those of single runs with room for other rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.learning import learn, losses_fall


@pytest.mark.parametrize(
    ("changes", "colors", "shapes"),
    [
        pytest.param({"max_train_steps": 250, "base_channels": 32}, 0.7, 0.0, id="short"),
        pytest.param({}, 0.9, 0.7, id="whole", marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
def test_a_model_from_nothing_learns_what_the_words_mean(changes: dict[str, object], colors: float, shapes: float, tmp_path: Path) -> None:
    learned = learn("ddpm_train/toy-shapes", tmp_path, **changes)
    scores = learned.obedience("old")
    print(f"from nothing, {changes or 'whole'}: {scores}; held-out combinations {learned.obedience('held_out')}")
    assert scores.color >= colors, f"{scores}"
    assert scores.shape >= shapes, f"{scores}"
    assert losses_fall(learned)
