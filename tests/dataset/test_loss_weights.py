"""Weights in the loss that data sets and images have of their own: from TOML and metadata files to the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from sd_scripts.dataset.plan import Plan, make_plan
from sd_scripts.dataset.scan import read_dataset
from sd_scripts.families.common.clip_t5_options import ClipT5ObjectiveOptions
from sd_scripts.schema.anchored_flow import TERMS, AnchoredFlowOptions
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError

RUN = {**dict.fromkeys(TERMS, 0.0), "lambda_fft": 0.25}
"""Weights of the run."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("one", "two", "reg"):
        (tmp_path / folder).mkdir()
        for name in ("a", "b"):
            Image.new("RGB", (256, 256), "red" if name == "a" else "blue").save(tmp_path / folder / f"{name}.png")
    return tmp_path


def plan_of(root: Path, text: str, terms: dict[str, float] | None = None) -> Plan:
    file = root / "data.toml"
    file.write_text(text.replace("{root}", str(root)))
    options = DatasetOptions(dataset_config=str(file), resolution=(256, 256), prior_loss_weight=0.5)
    return make_plan(read_dataset(options, root / "cache"), options, seed=1, grid=16, terms=RUN if terms is None else terms)


def by_name(plan: Plan) -> dict[str, int]:
    return {f"{image.subset}/{image.name}": index for index, image in enumerate(plan.images)}


def refusal(root: Path, text: str, terms: dict[str, float] | None = None) -> list[str]:
    with pytest.raises(OptionError) as caught:
        plan_of(root, text, terms)
    return [problem.message for problem in caught.value.problems]


NESTED = """
[general]
lambda_tex = 0.125

[[datasets]]
loss_weight = 3

  [[datasets.subsets]]
  image_dir = "{root}/one"
  lambda_fft = 0.75

  [[datasets.subsets]]
  image_dir = "{root}/two"
  loss_weight = 0.25

  [[datasets.subsets]]
  image_dir = "{root}/reg"
  is_reg = true
"""


def test_weights_fall_through_from_subset_to_data_set_to_general_to_the_run(root: Path) -> None:
    plan = plan_of(root, NESTED)
    index = by_name(plan)
    assert plan.own_terms == ("lambda_fft", "lambda_tex")
    assert plan.terms_of(index["0/a.png"]) == {"lambda_fft": 0.75, "lambda_tex": 0.125}
    assert plan.terms_of(index["1/a.png"]) == {"lambda_fft": 0.25, "lambda_tex": 0.125}
    # A regularisation image counts prior_loss_weight, times its own factor.
    assert [plan.weight_of(index[name]) for name in ("0/b.png", "1/b.png", "2/b.png")] == [3.0, 0.25, 1.5]
    assert {ref.weight for ref in plan.samples(40)} == {3.0, 0.25, 1.5}


def test_a_line_of_a_metadata_file_has_weights_that_win(root: Path) -> None:
    lines = [{"file_name": "a.png", "text": "x", "loss_weight": 2, "lambda_cosine": 0.5}, {"file_name": "b.png", "text": "y"}]
    (root / "meta.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = '[[datasets]]\nloss_weight = 4\n[[datasets.subsets]]\nimage_dir = "{root}/one"\nmetadata_file = "{root}/meta.jsonl"\n'
    plan = plan_of(root, text)
    index = by_name(plan)
    assert [plan.weight_of(index[name]) for name in ("0/a.png", "0/b.png")] == [2.0, 4.0]
    assert [plan.terms_of(index[name]) for name in ("0/a.png", "0/b.png")] == [{"lambda_cosine": 0.5}, {"lambda_cosine": 0.0}]


@pytest.mark.parametrize("place", ["metadata.jsonl", "weights.csv"])
def test_other_lists_have_weights_too(root: Path, place: str) -> None:
    if place == "metadata.jsonl":
        (root / "one" / place).write_text('{"file_name": "a.png", "text": "x", "alpha_hf": 0.5}\n')
        options = DatasetOptions(train_data_dir=str(root / "one"), resolution=(256, 256))
    else:
        (root / "one" / place).write_text("file_name,prompt,alpha_hf\na.png,x,0.5\nb.png,y,\n")
        options = DatasetOptions(train_data_dir=str(root / "one"), resolution=(256, 256), in_json=str(root / "one" / place))
    plan = make_plan(read_dataset(options, root / "cache"), options, seed=1, grid=16, terms=RUN)
    weights = {image.name.rpartition("/")[2]: plan.terms_of(index)["alpha_hf"] for index, image in enumerate(plan.images)}
    assert weights == {"a.png": 0.5, "b.png": 0.0}


ONE = '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "{root}/one"\n'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lambda_ftt = 0.5", ["lambda_ftt", "did you mean lambda_fft?"]),
        ("loss_weigth = 0.5", ["loss_weigth", "did you mean loss_weight?"]),
        ("lambda_fft = -0.5", ["lambda_fft is -0.5; wanted is a number from 0 on"]),
        ("lambda_fft = true", ["lambda_fft is True"]),
        ('loss_weight = "much"', ["loss_weight is 'much'"]),
        ("loss_weight = inf", ["loss_weight is inf"]),
    ],
)
def test_what_is_no_weight_in_a_data_set_is_a_sentence(root: Path, line: str, said: list[str]) -> None:
    (message,) = refusal(root, ONE + line)
    assert "subset 1" in message and all(text in message for text in said), message


def test_what_is_no_weight_in_a_list_is_a_sentence_for_each_line(root: Path) -> None:
    lines = [
        {"file_name": "a.png", "text": "x", "lambda_ftt": 1},
        {"file_name": "b.png", "text": "y", "loss_weight": -1, "width": 5, "score": 3},
        {"file_name": "c.png", "text": "z", "lambda_other": 1},
    ]
    (root / "meta.jsonl").write_text("\n".join(map(json.dumps, lines)))
    messages = refusal(root, ONE + 'metadata_file = "{root}/meta.jsonl"')
    assert [message.partition(": ")[0] for message in messages] == [f"meta.jsonl, line {number}" for number in (1, 2, 3)]
    for message, said in zip(messages, ("did you mean lambda_fft?", "loss_weight is -1", "lambda_other is no weight"), strict=True):
        assert said in message


def test_terms_that_the_model_is_trained_without_are_refused_and_loss_weight_is_not(root: Path) -> None:
    assert ClipT5ObjectiveOptions().term_weights == {}
    (message,) = refusal(root, ONE + "lambda_fft = 0.5\nalpha_hf = 1", {})
    assert "alpha_hf, lambda_fft" in message and "trained without" in message
    plan = plan_of(root, ONE + "loss_weight = 0.5", {})
    assert plan.own_terms == () and {ref.weight for ref in plan.samples(4)} == {0.5}


def test_the_objective_of_zimage_has_all_terms() -> None:
    given = {name: 0.1 * index for index, name in enumerate(TERMS)}
    assert AnchoredFlowOptions(**given).term_weights == given and tuple(given) == TERMS


def test_weights_are_part_of_the_identity_of_the_data(root: Path) -> None:
    plain = plan_of(root, ONE).dataset_hash
    hashes = {plan_of(root, ONE + line).dataset_hash for line in ("loss_weight = 2", "lambda_fft = 2", "loss_weight = 3")}
    (root / "meta.jsonl").write_text('{"file_name": "a.png", "text": ""}\n{"file_name": "b.png", "text": ""}\n')
    listed = plan_of(root, ONE + 'metadata_file = "{root}/meta.jsonl"').dataset_hash
    (root / "meta.jsonl").write_text('{"file_name": "a.png", "text": "", "alpha_hf": 1}\n{"file_name": "b.png", "text": ""}\n')
    weighted = plan_of(root, ONE + 'metadata_file = "{root}/meta.jsonl"').dataset_hash
    assert len({plain, *hashes, weighted}) == 5 and listed != weighted
