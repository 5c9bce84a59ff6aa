"""DreamBooth with and without prior preservation. Bounds are those of single runs with room for other rounding."""

from __future__ import annotations

from pathlib import Path

from sd_scripts.toy.datasets import write_dataset
from tests.runs.learning import learn


def test_prior_preservation_keeps_the_class_from_becoming_the_subject(tmp_path: Path) -> None:
    """DreamBooth on one subject, the same steps with and without regularisation pictures (Ruiz et al. 2023, section 3.3)."""
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
