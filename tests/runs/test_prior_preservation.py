"""DreamBooth with and without prior preservation. Bounds are those of single runs with room for other rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from sd_scripts.toy.datasets import write_dataset
from tests.runs.learning import learn


def test_without_its_class_images_a_subject_takes_over_the_class_in_few_steps(tmp_path: Path) -> None:
    """A sixth of the preset's steps at thrice its rates: 50 % subjects, 25 and 83 % of "a circle", class colours of 83 and 42 %."""
    data = write_dataset("subject", tmp_path / "data")
    quicker = {"max_train_steps": 50, "learning_rate": 5e-4, "text_encoder_lr": [3e-3], "num_images": 12}
    kept = learn("sd_train/toy-dreambooth", tmp_path / "with", **quicker)
    drifted = learn("sd_train/toy-dreambooth", tmp_path / "without", train_data_dir=str(data.train_data_dir), **quicker)
    scores = [model.obediences("subject", "class") for model in (kept, drifted)]
    subject, class_color = ([both[number].color for both in scores] for number in (0, 1))
    leaked = kept.share("a circle"), drifted.share("a circle")
    print(f"with prior and without: subject {subject}, 'a circle' is the subject {leaked}, class colour {class_color}")
    assert kept.obedience("subject", after=False).color < 0.1
    assert subject[0] >= 0.25 and subject[1] >= 0.75
    assert leaked[1] >= leaked[0] + 0.35
    assert class_color[0] >= 0.65 and class_color[1] <= class_color[0] - 0.2


@pytest.mark.long
def test_prior_preservation_keeps_the_class_from_becoming_the_subject(tmp_path: Path) -> None:
    """DreamBooth on one subject, the same steps with and without regularisation images (Ruiz et al. 2023, section 3.3)."""
    data = write_dataset("subject", tmp_path / "data")
    assert data.reg_data_dir is not None
    preset = "sd_train/toy-dreambooth"
    kept = learn(preset, tmp_path / "with")
    drifted = learn(preset, tmp_path / "without", train_data_dir=str(data.train_data_dir))
    figures = {
        name: (learned.obedience("subject").color, learned.share("a circle"), learned.obedience("class").color)
        for name, learned in (("with prior", kept), ("without", drifted))
    }
    print(f"subject, 'a circle' is the subject, class colour: {figures}; before: {kept.obedience('subject', after=False)}")
    assert kept.obedience("subject", after=False).color < 0.1 and kept.share("a circle", after=False) < 0.1
    subject, leaked, class_color = figures["with prior"]
    assert subject >= 0.75 and leaked <= 0.4 and class_color >= 0.85, figures
    assert figures["without"][0] >= 0.75, figures
    assert figures["without"][1] >= leaked + 0.3 and figures["without"][2] <= class_color - 0.1, figures
