"""The small DDPM learns from nothing. Bounds are those of single runs with room for other rounding."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sd_scripts.toy.datasets import write_dataset
from tests.runs.learning import learn, losses_fall


def test_a_model_from_nothing_soon_draws_the_color_that_it_is_asked_for(tmp_path: Path) -> None:
    """A smaller model, a sixth of the images and a sixtieth of the preset's samples: 67 % colours."""
    data = write_dataset("shapes", tmp_path / "data")
    for image in sorted(data.train_data_dir.rglob("*.png"))[::6]:
        copy = tmp_path / "few" / image.relative_to(data.train_data_dir)
        copy.parent.mkdir(parents=True, exist_ok=True)
        for ending in (".png", ".txt"):
            shutil.copy(image.with_suffix(ending), copy.with_suffix(ending))
    learned = learn(
        "ddpm_train/toy-shapes",
        tmp_path / "out",
        num_images=12,
        train_data_dir=str(tmp_path / "few"),
        channel_multipliers=(1, 2),
        text_width=96,
        optimizer_args=(),
        max_train_steps=100,
        train_batch_size=8,
        learning_rate=2e-3,
        lr_warmup_steps=20,
        ema_decay=0.98,
        sample_every_n_steps=1000,
    )
    scores = learned.obedience("old")
    print(f"from nothing, a few steps: {scores}")
    assert scores.color >= 0.45, f"{scores}"
    assert losses_fall(learned)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_model_from_nothing_learns_what_the_words_mean(tmp_path: Path) -> None:
    learned = learn("ddpm_train/toy-shapes", tmp_path)
    scores = learned.obedience("old")
    print(f"from nothing: {scores}")
    assert min(scores.color, scores.shape, scores.place) >= 0.9, f"{scores}"
    assert losses_fall(learned)
