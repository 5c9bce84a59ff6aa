"""What a batch tells an objective beyond images and captions: kind of sample, its weights, where in the run, and the empty caption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from sd_scripts.dataset.plan import make_plan
from sd_scripts.dataset.scan import read_dataset
from sd_scripts.library.data.cache import open_caches
from sd_scripts.library.data.pipeline import DataPipeline
from sd_scripts.schema.dataset import DatasetOptions
from tests.library.data.standin_family import SmallFamily, pipeline_for


def changed(options: DatasetOptions, **values: object) -> DatasetOptions:
    return type(options).model_validate({**options.model_dump(), **values})


def test_a_batch_says_which_samples_are_regularisation_and_where_in_the_run_it_is(options: DatasetOptions, root: Path) -> None:
    (root / "reg").mkdir()
    for name in ("r", "s"):
        Image.new("RGB", (80, 80), "gray").save(root / "reg" / f"{name}.png")
    family = SmallFamily()
    pipeline = pipeline_for(changed(options, reg_data_dir=str(root / "reg")), root, family, num_steps=20)
    pipeline.prepare(family.tiny())
    seen: list[bool] = []
    for step in range(20):
        batch = pipeline.micro_batch(step, 0, 0)
        assert batch.regularisation is not None and batch.regularisation.dtype == torch.bool
        assert batch.regularisation.tolist() == [Path(name).parent.name == "reg" for name in batch.names]
        assert batch.step == step and batch.progress == step / 20 and batch.terms == {}
        seen += batch.regularisation.tolist()
    pipeline.close()
    assert 10 < sum(seen) < 30


def test_weights_of_terms_reach_the_samples_of_their_data_set(options: DatasetOptions, root: Path) -> None:
    (root / "other").mkdir()
    for index in range(5):
        Image.new("RGB", (64, 64), (0, 40 * index, 0)).save(root / "other" / f"{index}.png")
    folders = [
        f'[[datasets.subsets]]\nimage_dir = "{root}/{name}"\n{more}\n' for name, more in (("data", ""), ("other", "alpha_hf = 0.75"))
    ]
    (root / "data.toml").write_text("[[datasets]]\n" + "".join(folders))
    own = changed(options, train_data_dir=None, dataset_config=str(root / "data.toml"), validation_split=0.3)
    plan = make_plan(read_dataset(own, root / "cache"), own, seed=5, grid=8, terms={"alpha_hf": 0.25, "beta_lf": 0.5})
    family = SmallFamily()
    pipeline = DataPipeline(own, family, plan, open_caches(own, root / "cache"), 5, num_steps=12)
    pipeline.prepare(family.tiny())
    batches = [pipeline.micro_batch(step, 0, 0) for step in range(12)] + [make() for make in pipeline.validation_batches()]
    for batch in batches:
        wanted = [0.75 if Path(name).parent.name == "other" else 0.25 for name in batch.names]
        assert batch.terms.keys() == {"alpha_hf"} and batch.terms["alpha_hf"].tolist() == wanted
    assert {value for batch in batches for value in batch.terms["alpha_hf"].tolist()} == {0.25, 0.75}
    pipeline.close()


def test_held_out_images_are_shown_until_there_are_enough_samples_and_belong_to_no_step(options: DatasetOptions, root: Path) -> None:
    family = SmallFamily()
    own = changed(options, validation_split=0.3)
    once = pipeline_for(own, root, family)
    once.prepare(family.tiny())
    names = [name for make in once.validation_batches() for name in make().names]
    assert len(names) == len(set(names)) == 3
    several = pipeline_for(own, root, family, validation_samples=8)
    several.prepare(family.tiny())
    batches = [make() for make in several.validation_batches()]
    assert [name for batch in batches for name in batch.names] == names * 3
    assert torch.cat([batch.numbers for batch in batches]).tolist() == list(range(9))
    assert {(batch.step, batch.progress) for batch in batches} == {(-1, 0.0)}
    enough = pipeline_for(own, root, family, validation_samples=3)
    enough.prepare(family.tiny())
    assert len(enough.validation_batches()) == len(once.validation_batches())


@pytest.mark.parametrize("cached", [True, False])
def test_the_empty_caption_is_encoded_once_and_only_when_it_is_wanted(options: DatasetOptions, root: Path, cached: bool) -> None:
    own = changed(options, cache_text_encoder_outputs=cached)
    family = SmallFamily()
    parts = family.tiny()
    with torch.no_grad():
        wanted = family.encode_prompts(parts, [""])[0]
    pipeline = pipeline_for(own, root, family, empty_text=True)
    before = family.encoded_texts
    pipeline.prepare(parts)
    assert family.encoded_texts == before + (12 if cached else 1)
    found = pipeline.empty_text()
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) and not found[name].requires_grad for name in wanted)
    if cached:
        again = pipeline_for(own, root, family, empty_text=True)
        again.prepare(parts)
        assert family.encoded_texts == before + 12 and torch.equal(again.empty_text()["sum"], found["sum"])
    without = pipeline_for(own, root, family)
    without.prepare(parts)
    with pytest.raises(AssertionError, match="empty caption"):
        without.empty_text()


def test_with_trained_text_encoders_the_empty_caption_is_left_to_the_trainer(options: DatasetOptions, root: Path) -> None:
    family = SmallFamily()
    pipeline = pipeline_for(
        changed(options, cache_text_encoder_outputs=False), root, family, empty_text=True, trained_encoders=("te1", "te2")
    )
    pipeline.prepare(family.tiny())
    assert pipeline.empty_text() == {} and family.encoded_texts == 0


@pytest.mark.parametrize("cached", [True, False])
def test_the_first_latents_are_those_of_the_first_samples_of_the_run(options: DatasetOptions, root: Path, cached: bool) -> None:
    family = SmallFamily()
    pipeline = pipeline_for(changed(options, cache_latents=cached), root, family)
    pipeline.prepare(family.tiny())
    found = pipeline.first_latents(5)
    shown = [x0 for step in range(3) for x0 in pipeline.micro_batch(step, 0, 0).x0]
    assert len(found) == 5 and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, shown))
    pipeline.close()
