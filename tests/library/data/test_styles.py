"""Which style a sample takes on, and which images it is compared with: draws of its number alone, on real batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from sd_scripts.dataset.plan import Plan, make_plan
from sd_scripts.dataset.scan import read_dataset
from sd_scripts.families.lgt.loading import styles_text
from sd_scripts.families.lgt.model import Lgt
from sd_scripts.families.lgt.options import LgtDatasetOptions, LgtModelOptions
from sd_scripts.library.core.protocols import Batch, Beginning
from sd_scripts.library.data.cache import open_caches
from sd_scripts.library.data.pipeline import DataPipeline
from sd_scripts.library.data.styles import StyleDraws
from tests.library.data.conftest import draw

LGT = Lgt()
MODEL = LgtModelOptions(vae="toy", base_channels=8, channel_multipliers=(1, 2), layers_per_block=1, attention_head_dim=8)


def made(root: Path, counts: dict[str, int], **values: object) -> LgtDatasetOptions:
    """Folders of styles with so many images of several sizes each."""
    for number, (style, count) in enumerate(counts.items()):
        draw(root / "data" / style, count, seed=number)
    small = {"resolution": (64, 64), "min_bucket_reso": 16, "bucket_reso_steps": 16, "train_batch_size": 2, "num_references": 5}
    return LgtDatasetOptions.model_validate({"train_data_dir": str(root / "data"), "max_data_loader_n_workers": 0, **small, **values})


def plan_of(options: LgtDatasetOptions, root: Path, **values: int) -> Plan:
    return make_plan(read_dataset(options, root / "cache"), options, seed=3, grid=8, **values)


def draws_of(options: LgtDatasetOptions, root: Path) -> StyleDraws:
    return StyleDraws(plan_of(options, root), options, 3)


def pipeline_of(options: LgtDatasetOptions, root: Path, cache: str = "cache", **values: int) -> DataPipeline:
    plan = plan_of(options, root, **values)
    parts = LGT.build(MODEL, Beginning(0, ((64, 64),), {"styles.json": styles_text(plan.captions())}), torch.device("cpu"), torch.float32)
    pipeline = DataPipeline(options, LGT, plan, open_caches(options, root / cache), 3, num_steps=20)
    pipeline.prepare(parts)
    return pipeline


def test_another_style_is_wanted_except_at_the_given_rate(tmp_path: Path) -> None:
    options = made(tmp_path, dict.fromkeys("abcdefg", 2), same_style_rate=0.25)
    draws = draws_of(options, tmp_path)
    goals = Counter(draws.goal(number, "c", "c") for number in range(4000))
    assert draws.styles == tuple("abcdefg") and set(goals) == set("abcdefg")
    # Binomial: 4.5 standard deviations.
    assert abs(goals.pop("c") - 1000) < 124
    assert all(abs(count - 500) < 94 for count in goals.values())
    never = draws_of(options.model_copy(update={"same_style_rate": 0.0}), tmp_path)
    assert "c" not in {never.goal(number, "c", "c") for number in range(500)}


def test_with_one_style_it_is_its_own_and_a_dropped_style_leads_to_none(tmp_path: Path) -> None:
    draws = draws_of(made(tmp_path, {"only": 3}, same_style_rate=0.0), tmp_path)
    assert {draws.goal(number, "only", "only") for number in range(20)} == {"only"}
    assert {draws.goal(number, "only", "") for number in range(20)} == {""}


def test_references_are_of_the_wanted_style_and_of_one_size(tmp_path: Path) -> None:
    options = made(tmp_path, {"large": 30, "small": 1, "middle": 7})
    plan = plan_of(options, tmp_path)
    draws = StyleDraws(plan, options, 3)
    several = set()
    for number in range(60):
        for goal in draws.styles:
            views = draws.references(number, goal)
            assert len(views) == 5 and {plan.images[view.image].caption for view in views} == {goal}
            assert len({plan.cut(view.image, view.resolution).bucket for view in views}) == 1
            several |= {view.image for view in views if goal == "large"}
    assert len(several) > 25, "every image of a style has its turn"
    average = Counter(plan.images[view.image].caption for number in range(200) for view in draws.references(number, "")[:1])
    assert set(average) == set(draws.styles), "the average is of all styles, each as likely, however many images it has"
    assert all(abs(count - 200 / 3) < 31 for count in average.values())


def test_held_out_images_are_no_references(tmp_path: Path) -> None:
    options = made(tmp_path, {"a": 10, "b": 10}, validation_split=0.3)
    plan = plan_of(options, tmp_path)
    draws = StyleDraws(plan, options, 3)
    shown = {view.image for number in range(100) for goal in ("a", "b", "") for view in draws.references(number, goal)}
    assert plan.held_out and not shown & set(plan.held_out)
    assert not {view.image for view in draws.examples("a", 99)} & set(plan.held_out)


def test_examples_are_different_images_and_always_the_same(tmp_path: Path) -> None:
    options = made(tmp_path, {"a": 10, "b": 2})
    draws = draws_of(options, tmp_path)
    assert len({view.image for view in draws.examples("a", 6)}) == 6 and len(draws.examples("b", 6)) == 2
    assert draws.examples("a", 4) == draws_of(options, tmp_path).examples("a", 6)[:4]


def assert_equal(one: Batch, other: Batch) -> None:
    assert one.names == other.names and one.goals == other.goals and one.captions == other.captions
    for name in ("conditions", "towards"):
        for first, second in zip(getattr(one, name), getattr(other, name), strict=True):
            assert torch.equal(first["style"], second["style"])
    assert torch.equal(one.x0, other.x0)
    assert all(torch.equal(first, second) for first, second in zip(one.references, other.references, strict=True))


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_batch_has_goals_conditions_and_latents_of_real_images(on_disk: bool, tmp_path: Path) -> None:
    options = made(tmp_path, {"dark": 5, "light": 5}, caption_dropout_rate=0.4, cache_latents_to_disk=on_disk)
    pipeline = pipeline_of(options, tmp_path)
    own = {style: torch.cat([latents.flatten() for latents in pipeline.latents_of_style(style, 99)]) for style in ("dark", "light")}
    seen = Counter[tuple[str, str]]()
    for step in range(20):
        batch = pipeline.micro_batch(step, 0, 0)
        assert batch.x0.shape[0] == len(batch.goals) == len(batch.towards) == len(batch.references) == 2
        for row in range(2):
            caption, goal, references = batch.captions[row], batch.goals[row], batch.references[row]
            seen[caption, goal] += 1
            assert references.shape[:2] == (5, batch.x0.shape[1]) and references.dtype == torch.float32
            names = [*("dark", "light"), ""]
            assert batch.conditions[row]["style"].tolist() == [float(name == caption) for name in names]
            assert batch.towards[row]["style"].tolist() == [float(name == goal) for name in names]
            if goal:
                assert torch.isin(references, own[goal]).all()
    assert {caption for caption, goal in seen if not goal} == {""} == {goal for caption, goal in seen if not caption}
    assert seen["dark", "light"] and seen["light", "dark"]


def test_workers_processes_and_caches_change_nothing(tmp_path: Path) -> None:
    options = made(tmp_path, {"a": 6, "b": 6, "c": 6}, train_batch_size=4, caption_dropout_rate=0.3)
    whole = pipeline_of(options, tmp_path)
    threads = pipeline_of(options.model_copy(update={"max_data_loader_n_workers": 3}), tmp_path, "other")
    split = pipeline_of(
        options.model_copy(update={"train_batch_size": 1, "cache_latents_to_disk": False}), tmp_path, processes=2, accumulation=2
    )
    for step in (0, 1, 2, 7, 3):
        batch = whole.micro_batch(step, 0, 0)
        assert_equal(batch, threads.micro_batch(step, 0, 0))
        parts = [split.micro_batch(step, micro, rank) for micro in (0, 1) for rank in (0, 1)]
        assert [goal for part in parts for goal in part.goals] == batch.goals
        for row, part in enumerate(parts):
            assert torch.allclose(part.references[0], batch.references[row], atol=1e-5)
    threads.close()


def test_any_name_a_folder_can_have_is_a_style(tmp_path: Path) -> None:
    names = ["oil, dark", "a|b {x}", "#1", "Ukiyo-e 浮世絵", "two  spaces", "0.5", "--x"]
    pipeline = pipeline_of(made(tmp_path, dict.fromkeys(names, 2), caption_dropout_rate=0.0), tmp_path)
    assert list(pipeline.styles) == sorted(names) == pipeline.plan.captions()
    seen = {name for step in range(20) for batch in [pipeline.micro_batch(step, 0, 0)] for name in (*batch.captions, *batch.goals)}
    assert seen == set(names)
