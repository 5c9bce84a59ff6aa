"""The small DDPM learns from nothing. Bounds are those of single runs with room for other rounding."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sd_scripts.toy.datasets import write_dataset
from tests.runs.learning import learn, losses_fall


def test_a_model_from_nothing_soon_draws_the_color_that_it_is_asked_for(tmp_path: Path) -> None:
    """A sixth of the pictures and a twenty-fifth of the preset's samples: 79 % colours."""
    data = write_dataset("shapes", tmp_path / "data")
    for picture in sorted(data.train_data_dir.rglob("*.png"))[::6]:
        copy = tmp_path / "few" / picture.relative_to(data.train_data_dir)
        copy.parent.mkdir(parents=True, exist_ok=True)
        for ending in (".png", ".txt"):
            shutil.copy(picture.with_suffix(ending), copy.with_suffix(ending))
    learned = learn(
        "ddpm_train/toy-shapes",
        tmp_path / "out",
        num_pictures=24,
        train_data_dir=str(tmp_path / "few"),
        base_channels=32,
        max_train_steps=120,
        train_batch_size=16,
        lr_warmup_steps=20,
        ema_decay=0.98,
        sample_every_n_steps=1000,
    )
    scores = learned.obedience("old")
    print(f"from nothing, a few steps: {scores}")
    assert scores.color >= 0.5, f"{scores}"
    assert losses_fall(learned)


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "colors", "shapes"),
    [
        pytest.param({"max_train_steps": 150, "base_channels": 32, "num_pictures": 24}, 0.7, 0.0, id="short"),
        pytest.param({}, 0.9, 0.7, id="whole", marks=pytest.mark.timeout(1800)),
    ],
)
def test_a_model_from_nothing_learns_what_the_words_mean(changes: dict[str, object], colors: float, shapes: float, tmp_path: Path) -> None:
    learned = learn("ddpm_train/toy-shapes", tmp_path, **changes)
    scores = learned.obedience("old")
    print(f"from nothing, {changes or 'whole'}: {scores}")
    assert scores.color >= colors, f"{scores}"
    assert scores.shape >= shapes, f"{scores}"
    assert losses_fall(learned)
