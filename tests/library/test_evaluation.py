"""Evaluations on a small model: a complete folder or none, numbers that mean what they say, and sentences about test images."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from kohya_like import evaluations
from sd_scripts.dataset.plan import Plan, make_plan
from sd_scripts.dataset.scan import read_dataset
from sd_scripts.families.lgt.evaluation import METRICS, Evaluation, correlation, edges, sources_of
from sd_scripts.families.lgt.model import Lgt
from sd_scripts.families.lgt.options import LgtDatasetOptions, LgtSampleOptions
from sd_scripts.library.data.cache import open_caches
from sd_scripts.library.data.pipeline import DataPipeline
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.errors import OptionError
from tests.library.data.conftest import draw
from tests.ui.runs_on_disk import BASELINES, MEASURES

LGT = Lgt()
STYLES = ("flat", "line", "night")
"""Those of the tiny model."""


@pytest.fixture
def dataset(tmp_path: Path) -> LgtDatasetOptions:
    for number, style in enumerate(STYLES):
        draw(tmp_path / "data" / style, 4, seed=number)
        draw(tmp_path / "test" / style, 3, seed=10 + number)
    small: dict[str, Any] = {"resolution": (64, 64), "min_bucket_reso": 16, "bucket_reso_steps": 16, "train_batch_size": 2}
    return LgtDatasetOptions(train_data_dir=str(tmp_path / "data"), max_data_loader_n_workers=0, **small)


def plan_of(dataset: LgtDatasetOptions, tmp_path: Path) -> Plan:
    return make_plan(read_dataset(dataset, tmp_path / "cache"), dataset, seed=3, grid=8)


def evaluation(tmp_path: Path, dataset: LgtDatasetOptions, **options: Any) -> Evaluation:
    parts, plan = LGT.tiny(), plan_of(dataset, tmp_path)
    data = DataPipeline(dataset, LGT, plan, open_caches(dataset, tmp_path / "cache"), 3, num_steps=20)
    data.prepare(parts)
    samples = LgtSampleOptions(sample_steps=2, **options)
    sources = sources_of(samples, dataset, plan, tmp_path / "cache").items
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir(exist_ok=True)
    return Evaluation(LGT, parts, samples, dataset, plan, sources, data, run, 5)


def events(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in RunDirectory(tmp_path / "run").events()[0] if event["kind"] == kind]


def test_a_folder_has_every_pair_the_sheet_and_the_numbers(tmp_path: Path, dataset: LgtDatasetOptions) -> None:
    made = evaluation(tmp_path, dataset, test_image_dir=str(tmp_path / "test"))
    made.render(0)
    folder = tmp_path / "run" / "inference" / "epoch_0000"
    pairs = {f"{one}_to_{other}.jpg" for one in STYLES for other in STYLES}
    beside = {f"{style}_{what}.jpg" for style in STYLES for what in ("source", "vae")}
    assert {path.name for path in folder.iterdir()} == pairs | beside | {"grid.jpg", "metrics.csv", "summary.json"}
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["styles"] == list(STYLES) and (summary["step"], summary["epoch"]) == (0, 0)
    assert {pair["file"] for pair in summary["pairs"]} == pairs and len(summary["pairs"]) == 9
    assert [source["stem"] for source in summary["sources"]] == ["00"] * 3
    assert set(summary["baselines"]) == {"source", "vae_round_trip", "random_source", "real_target"}
    assert summary["baselines"]["source"]["swd_ratio"] == 1 and summary["baselines"]["source"]["ssm_source"] == 0
    assert summary["baselines"]["source"]["structure"] == pytest.approx(1)
    assert summary["baselines"]["random_source"]["structure"] < summary["baselines"]["vae_round_trip"]["structure"]
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    # A real image of the same style is another one, and there is but one of each.
    assert len(rows) == 9 * 4 + 6 and all(row[name] for row in rows for name in METRICS), "no empty column"
    (own,) = [row for row in rows if row["what"] == "source" and row["from"] == row["to"] == "night"]
    towards = [row for row in rows if row["what"] == "real_target" and row["to"] == "night"]
    assert len(towards) == 2 and {row["swd_target"] for row in towards} == {own["swd_target"]}
    moved = [pair["swd_target"] for pair in summary["pairs"] if pair["from"] != pair["to"]]
    assert summary["means"]["swd_target"] == pytest.approx(sum(moved) / 6)
    (event,) = events(tmp_path, "evaluation")
    assert event["folder"] == "inference/epoch_0000" and event["means"] == summary["means"]
    # The studio reads all of it, and its tests are made with the same measures.
    shown = evaluations.summary(folder)
    assert shown is not None and {name: shown[name] for name in ("styles", "step", "epoch", "sources")} == {
        name: summary[name] for name in ("styles", "step", "epoch", "sources")
    }
    for found, wrote in [*zip(shown["pairs"], summary["pairs"]), ({"measures": shown["means"]}, summary["means"])]:
        numbers = {name: value for name, value in wrote.items() if isinstance(value, int | float)}
        assert found["measures"] == numbers and set(numbers) <= set(METRICS) == set(MEASURES)
    assert set(shown["baselines"]) == set(BASELINES) and all(set(values) == set(METRICS) for values in shown["baselines"].values())
    with Image.open(folder / "flat_source.jpg") as image, Image.open(folder / "grid.jpg") as sheet:
        assert image.size == (64, 64)
        assert sheet.size == (5 * 64 + 4 * 2, 16 + 3 * 64 + 2 * 2)


def test_it_is_the_same_again_and_made_only_where_it_is_missing(tmp_path: Path, dataset: LgtDatasetOptions) -> None:
    made = evaluation(tmp_path, dataset, sample_start="noise", sample_temperature=0.3, test_images_per_style=2)
    folder = made.folder(0)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    made.render(0)
    assert torch.equal(torch.random.get_rng_state(), before), "training does not notice"
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "line_00_to_night.jpg" in first and "line_01_to_night.jpg" in first and len(first) == 2 * 3 * 5 + 3
    (folder / "grid.jpg").unlink()
    made.render(0, missing_only=True)
    assert not (folder / "grid.jpg").exists()
    made.render(0)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first


def test_it_begins_with_the_start_noise_that_is_asked_for(tmp_path: Path, dataset: LgtDatasetOptions) -> None:
    found = []
    for level in (0.0, 0.5, 0.5):
        made = evaluation(tmp_path, dataset, sample_start_noise=level)
        made.render(0)
        found.append((made.folder(0) / "flat_to_line.jpg").read_bytes())
    assert found[0] != found[1] == found[2], "noise of the run's seed"


def test_a_folder_is_named_by_epochs_and_within_them_by_steps(tmp_path: Path, dataset: LgtDatasetOptions) -> None:
    made = evaluation(tmp_path, dataset)
    plan = plan_of(dataset, tmp_path)
    end = plan.steps_of_epochs(2)
    assert made.folder(end).name == "epoch_0002" and made.folder(end + 1).name == f"epoch_0002_step_{end + 1:06d}"


def test_one_that_fails_is_a_warning_and_leaves_nothing(tmp_path: Path, dataset: LgtDatasetOptions) -> None:
    made = evaluation(tmp_path, dataset, test_image_dir=str(tmp_path / "test"))
    (tmp_path / "test" / "line" / "00.png").unlink()
    made.render(0)
    (warning,) = events(tmp_path, "warning")
    assert "evaluation could not be made" in warning["text"] and warning["text"].endswith("training goes on")
    assert not (tmp_path / "run" / "inference").exists()


def test_styles_without_test_images_are_one_sentence_and_others_are_told_of(tmp_path: Path, dataset: LgtDatasetOptions) -> None:
    plan = plan_of(dataset, tmp_path)
    for style in ("flat", "night"):
        for path in (tmp_path / "test" / style).iterdir():
            path.unlink()
    options = LgtSampleOptions(test_image_dir=str(tmp_path / "test"))
    with pytest.raises(OptionError, match="has no images of flat, night"):
        sources_of(options, dataset, plan, tmp_path / "cache")
    for style in ("flat", "night", "unknown"):
        draw(tmp_path / "test" / style, 1)
    found = sources_of(options, dataset, plan, tmp_path / "cache")
    assert len(found.items) == 3 and "unknown" in found.warnings[0]
    (tmp_path / "test" / "flat" / "00.png").write_bytes(b"no image")
    with pytest.raises(OptionError, match=r"00\.png"):
        sources_of(options, dataset, plan, tmp_path / "cache")
    with pytest.raises(OptionError, match="is not there"):
        sources_of(LgtSampleOptions(test_image_dir=str(tmp_path / "nowhere")), dataset, plan, tmp_path / "cache")


def test_without_a_folder_held_out_images_come_first(tmp_path: Path, dataset: LgtDatasetOptions) -> None:
    held = dataset.model_copy(update={"validation_split": 0.5})
    plan = plan_of(held, tmp_path)
    first = sources_of(LgtSampleOptions(test_images_per_style=1), held, plan, tmp_path / "cache").items
    assert len(first) == 3 and {source.image for source in first} <= set(plan.held_out)
    everything = sources_of(LgtSampleOptions(test_images_per_style=0), held, plan, tmp_path / "cache").items
    assert sorted(source.image for source in everything) == list(range(12))


def test_structure_is_about_edges_and_not_about_colours() -> None:
    draws = torch.Generator().manual_seed(torch.randint(2**31, ()).item())
    coarse = torch.rand(2, 3, 8, 8, generator=draws)
    one, other = F.interpolate(coarse, size=(64, 64), mode="bicubic").clamp(0, 1).mul(2).sub(1)
    strength = edges(torch.stack([one, -0.5 * one, other, torch.full_like(one, 0.3)]))
    assert strength.shape == (4, 64, 64)
    assert correlation(strength[0], strength[0]) == pytest.approx(1)
    assert correlation(strength[0], strength[1]) == pytest.approx(1, abs=1e-4), "a negative of half the contrast has the same edges"
    assert abs(correlation(strength[0], strength[2])) < 0.5
    assert correlation(strength[0], strength[3]) == 0
