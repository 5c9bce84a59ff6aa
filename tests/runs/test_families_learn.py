"""Adapters and whole models of every family learn a new word on their toy base, by the toy presets.

Bounds are those of single runs with room for other rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sd_scripts.toy import measure
from tests.runs.learning import learn, losses_fall


def color(scores: measure.Scores) -> float:
    return scores.color


def shape(scores: measure.Scores) -> float:
    return scores.shape


@pytest.mark.parametrize(
    ("preset", "kind", "right", "changes", "least"),
    [
        # 100 % after 40 and 60 steps. Whole models of sd learn in test_prior_preservation, adapters of sdxl in test_demo_learns.
        pytest.param(
            "sd_train_network/toy-teal",
            "teal",
            color,
            {"max_train_steps": 40, "learning_rate": 3e-3, "num_images": 12},
            0.8,
            id="sd_train_network, a third",
        ),
        pytest.param(
            "flux_train/toy-finetune-flux", "teal", color, {"max_train_steps": 60, "num_images": 12}, 0.8, id="flux_train, a third"
        ),
        *(
            pytest.param(
                f"{name}_train_network/toy-star-{name}",
                "teal",
                color,
                {"max_train_steps": steps, "train_batch_size": 8, "num_images": 12, "train_data_dir": "toy:large_teal"},
                0.8,
                id=f"{name}_train_network, a color",
            )
            for name, steps in (("anima", 60), ("flux2", 60), ("krea2", 60), ("chroma", 40))
        ),
        *(
            pytest.param(preset, "teal", color, {}, 0.8, marks=pytest.mark.long)
            for preset in (
                "sd_train_network/toy-teal",
                "sd_train/toy-finetune",
                "flux_train_network/toy-teal-flux",
                "flux_train/toy-finetune-flux",
            )
        ),
        pytest.param("sdxl_train/toy-finetune-sdxl", "star", shape, {}, 0.8, id="sdxl_train", marks=pytest.mark.long),
        pytest.param("sd_train_network/toy-star-sd", "star", shape, {}, 0.8, marks=pytest.mark.long),
        pytest.param("flux2_train_network/toy-star-flux2", "star", shape, {}, 0.8, marks=pytest.mark.long),
        pytest.param("flux3_train_network/toy-star-flux3", "star", shape, {}, 0.7, marks=pytest.mark.long),
        pytest.param("krea2_train_network/toy-star-krea2", "star", shape, {}, 0.8, marks=pytest.mark.long),
        pytest.param("anima_train_network/toy-star-anima", "star", shape, {}, 0.8, marks=pytest.mark.long),
        pytest.param("chroma_train_network/toy-star-chroma", "star", shape, {}, 0.8, marks=pytest.mark.long),
        pytest.param("qwen_image21_train_network/toy-star-qwen21", "star", shape, {}, 0.7, marks=pytest.mark.long),
        pytest.param("flux_train_network/toy-star-flux", "star", shape, {}, 0.8, marks=pytest.mark.long),
    ],
)
def test_a_new_word_is_learned_and_the_old_ones_stay(
    preset: str, kind: measure.Kind, right: Callable[[measure.Scores], float], changes: dict[str, object], least: float, tmp_path: Path
) -> None:
    learned = learn(preset, tmp_path, **changes)
    before, old_before = learned.obedience(kind, after=False), learned.obedience("old", after=False)
    after, old_after = learned.obediences(kind, "old")
    print(f"{preset}: {kind} {before} -> {after}; old {old_before} -> {old_after}")
    assert right(before) < 0.1
    assert right(after) >= least, f"{after}"
    assert right(old_after) >= right(old_before) - 0.15, f"{old_before} -> {old_after}"
    assert losses_fall(learned)
