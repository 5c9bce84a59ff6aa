"""Options of the trainers that AC-RF comes from: each is an option here, or answered in a sentence that can be followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sd_scripts.families import RUNS
from sd_scripts.schema import legacy
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.flat import build, fields

NAMES = (Path(__file__).parents[1] / "data" / "acrf_option_names.txt").read_text().split()
"""Flags of train_acrf.py and train_zimage_v2.py, and keys that their pages write."""
METHODS = ("network", "full")


@pytest.mark.parametrize("method", METHODS)
def test_every_option_of_the_other_trainer_is_an_option_or_answered(method: str) -> None:
    run = RUNS["zimage", method]
    for name in NAMES:
        if name in fields(run):
            continue
        with pytest.raises(OptionError) as caught:
            build(run, {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", name: "1"})
        (problem,) = [problem for problem in caught.value.problems if problem.option == name]
        assert "there is no such option" not in problem.message, name


@pytest.mark.parametrize("method", METHODS)
def test_what_is_called_otherwise_is_an_option_of_the_run(method: str) -> None:
    known = {*fields(RUNS["zimage", method]), "config_file"}
    for name in NAMES:
        kind, advice = legacy.find(name, "zimage", method) or ("", "")
        if kind == "renamed":
            assert advice.split()[0].rstrip(",;:") in known, name
        assert name not in known or not kind, f"{name} is an option, and its answer is never given"


def test_the_same_names_keep_their_meaning_for_other_families() -> None:
    for name in ("shift", "loss_mode", "raft_mode", "auto_optimize"):
        assert legacy.find(name, "flux", "network") is None
        assert legacy.find(name, "zimage", "network") is not None
