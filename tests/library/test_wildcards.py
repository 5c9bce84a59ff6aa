"""Wildcards of prompts: drawn from the seed, evenly, from a folder's files, and never by anything else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from sd_scripts.library.render.predict import Predictor, check_without_model
from sd_scripts.library.render.predicting.orders import order_of
from sd_scripts.library.render.predicting.work import request_of
from sd_scripts.library.render.wildcards import drawn
from sd_scripts.runs import drawing
from sd_scripts.schema.errors import OptionError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "colour.txt").write_text("# a note\nred\n\nblue\n", encoding="utf-8")
    (tmp_path / "animals").mkdir()
    (tmp_path / "animals" / "cat.txt").write_text("__colour__ cat\n{big|small} cat\n", encoding="utf-8")
    (tmp_path / "empty.txt").write_text("# nothing\n", encoding="utf-8")
    (tmp_path / "circle.txt").write_text("__circle__\n", encoding="utf-8")
    return tmp_path


def test_every_choice_is_drawn_about_equally_often_and_the_same_for_a_seed(folder: Path) -> None:
    text = "a __animals/cat__, {dawn|noon|{late|early} night}"
    found = [drawn(text, str(folder), seed, "prompt") for seed in range(1200)]
    assert found == [drawn(text, str(folder), seed, "prompt") for seed in range(1200)]
    assert found != [drawn(text, str(folder), seed, "negative_prompt") for seed in range(1200)]
    cats, times = (Counter(one.split(", ")[place] for one in found) for place in (0, 1))
    assert cats.keys() == {"a red cat", "a blue cat", "a big cat", "a small cat"} and all(240 < count < 360 for count in cats.values())
    assert times.keys() == {"dawn", "noon", "late night", "early night"} and 340 < times["dawn"] < 460 and 140 < times["late night"] < 260


def test_what_is_no_wildcard_stays(folder: Path) -> None:
    for text in ("a {star} in {{braces}}", "__../no name__", "snake__case and __", 'json {"a": 1}'):
        assert drawn(text, str(folder), 3, "prompt") == text
    assert drawn("{{a|b}} {c|c}", "", 3, "prompt") == "{a|b} c"
    assert drawn("a __colour__ star", "", 3, "prompt") == "a __colour__ star", "without a folder there are no files"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a __size__ star", "__size__ needs the file .*size.txt, which cannot be read: No such file"),
        ("__animals/../../secret__", "leads out of"),
        ("__empty__", "has no line to draw"),
        ("__circle__", "in a circle"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence_before_a_model_is_loaded(folder: Path, text: str, words: str) -> None:
    given = {"draw_with": "toy", "family": "sdxl", "prompt": text, "wildcard_dir": str(folder)}
    order = order_of(drawing.completed, {"id": "a", **given}, {})
    with pytest.raises(OptionError, match=words) as caught:
        check_without_model(request_of(order), 8)
    assert caught.value.problems[0].option == "wildcard_dir"


@pytest.mark.long
def test_each_image_of_an_order_has_words_of_its_own_and_says_them(folder: Path) -> None:
    given = {
        "draw_with": "toy",
        "family": "sdxl",
        "prompt": "a __colour__ star",
        "negative_prompt": "{low|bad}",
        "seed": 4,
        "num_images": 6,
    }
    order = order_of(drawing.completed, {"id": "a", **given, "wildcard_dir": str(folder)}, {})
    previews = Predictor.load(order.options).prepared(request_of(order))
    assert [one.prompt for one in previews] == [drawn("a __colour__ star", str(folder), 4 + index, "prompt") for index in range(6)]
    assert {one.prompt for one in previews} == {"a red star", "a blue star"} and {one.negative_prompt for one in previews} == {"low", "bad"}
