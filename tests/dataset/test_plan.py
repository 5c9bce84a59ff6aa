"""The plan: every image equally often, the same on any number of processes, any step without walking there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sd_scripts.dataset.config import Subset
from sd_scripts.dataset.plan import Plan, SampleRef, caption_of, make_plan, texts_of_run
from sd_scripts.dataset.scan import Dataset, ImageInfo
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError

SIZES = [(1024, 1024), (1400, 800), (800, 1400), (3000, 900)]


def options_of(**values: object) -> DatasetOptions:
    return DatasetOptions(**{"train_data_dir": "x", "resolution": (512, 512), **values})


def dataset_of(
    counts: list[int], *, reg: int = 0, repeats: int = 1, reg_repeats: int = 1, options: DatasetOptions | None = None
) -> Dataset:
    """counts[i] images of SIZES[i], and reg regularisation images."""
    options = options or options_of()
    subsets = [Subset(Path("train"), options, repeats)] + ([Subset(Path("reg"), options, reg_repeats, is_reg=True)] if reg else [])
    images = [
        ImageInfo(
            f"train/{side}_{index}.png",
            f"{side}_{index}.png",
            0,
            *SIZES[side],
            f"tag {side}, tag {index}, third",
            10,
            0,
            "",
            f"id{side}-{index}",
        )
        for side, count in enumerate(counts)
        for index in range(count)
    ]
    images += [ImageInfo(f"reg/{index}.png", f"{index}.png", 1, 700, 700, "class", 10, 0, "", f"reg{index}") for index in range(reg)]
    return Dataset(tuple(subsets), tuple(images))


def plan_of(dataset: Dataset, seed: int = 3, **values: int) -> Plan:
    return make_plan(dataset, dataset.subsets[0].options, seed=seed, grid=8, **values)


counts = st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any)


@settings(max_examples=40, deadline=None)
@given(counts, st.integers(1, 9), st.integers(0, 2**62))
def test_every_image_is_used_equally_often(counts: list[int], group: int, seed: int) -> None:
    plan = plan_of(dataset_of(counts), seed, batch_size=group)
    epochs = group * 2  # after G epochs every bucket has given n_b whole batches
    steps = plan.steps_of_epochs(epochs)
    used = Counter(ref.image for ref in plan.samples(steps))
    assert used == dict.fromkeys(range(sum(counts)), epochs)
    # At the end of any epoch, two images of one bucket are never further apart than one.
    part = Counter(ref.image for ref in plan.samples(plan.steps_of_epochs(epochs // 3)))
    for row in {plan.cut(index, 0).bucket for index in range(sum(counts))}:
        members = [part[index] for index in range(sum(counts)) if plan.cut(index, 0).bucket == row]
        assert max(members) - min(members) <= 1


@settings(max_examples=40, deadline=None)
@given(counts, st.integers(1, 9), st.integers(0, 300))
def test_a_batch_has_one_bucket_and_numbers_in_order(counts: list[int], group: int, step: int) -> None:
    plan = plan_of(dataset_of(counts), batch_size=group)
    batch = plan.global_batch(step)
    assert [ref.number for ref in batch] == list(range(step * group, (step + 1) * group))
    assert {plan.cut(ref.image, ref.resolution).bucket for ref in batch} == {batch[0].bucket}


@settings(max_examples=30, deadline=None)
@given(counts, st.sampled_from([(1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2)]), st.integers(0, 100))
def test_processes_batches_and_accumulation_share_the_same_samples(counts: list[int], shape: tuple[int, int, int], step: int) -> None:
    dataset = dataset_of(counts)
    processes, batch, accumulation = shape
    whole = plan_of(dataset, batch_size=4).global_batch(step)
    plan = plan_of(dataset, batch_size=batch, processes=processes, accumulation=accumulation)
    shared = [ref for micro in range(accumulation) for rank in range(processes) for ref in plan.micro_batch(step, micro, rank)]
    assert shared == whole


@settings(max_examples=30, deadline=None)
@given(counts, st.integers(1, 5), st.randoms())
def test_any_step_can_be_asked_for_in_any_order(counts: list[int], group: int, rng: object) -> None:
    dataset = dataset_of(counts)
    straight = [plan_of(dataset, batch_size=group).global_batch(step) for step in range(40)]
    steps = list(range(40))
    rng.shuffle(steps)  # type: ignore[attr-defined]
    plan = plan_of(dataset, batch_size=group)
    assert all(plan.global_batch(step) == straight[step] for step in steps)


@settings(max_examples=60, deadline=None)
@given(counts, st.integers(1, 40))
def test_epochs_and_steps_agree_with_counting(counts: list[int], group: int) -> None:
    plan = plan_of(dataset_of(counts), batch_size=group)
    rows = [row.samples for row in plan.table()]
    starts = [sum(n * epoch // group for n in rows) for epoch in range(200)]
    assert [plan.steps_of_epochs(epoch) for epoch in range(200)] == starts
    for step in range(min(60, starts[-1])):
        assert starts[plan.epoch_of(step)] <= step < starts[plan.epoch_of(step) + 1]
        assert plan.global_batch(step)[0].epoch == plan.epoch_of(step)


def test_far_steps_cost_no_more_than_near_ones() -> None:
    plan = plan_of(dataset_of([12, 5, 7]), batch_size=4)
    step = 10**12
    assert plan.global_batch(step) == plan_of(dataset_of([12, 5, 7]), batch_size=4).global_batch(step)
    assert plan.epoch_of(step) == pytest.approx(step * 4 / 24, abs=2)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    dataset = dataset_of([30])
    first, second = ([ref.image for ref in plan_of(dataset).samples(60)][part] for part in (slice(30), slice(30, 60)))
    assert sorted(first) == sorted(second) == list(range(30)) and first != second
    assert [ref.image for ref in plan_of(dataset, seed=4).samples(30)] != first


def test_repeats_multiply_how_often_images_are_shown() -> None:
    plan = plan_of(dataset_of([5], repeats=4))
    assert Counter(ref.image for ref in plan.samples(20)) == dict.fromkeys(range(5), 4)


def test_further_training_sizes_are_further_repeats() -> None:
    options = options_of(additional_resolutions=(256, 384))
    plan = plan_of(dataset_of([6], options=options))
    assert plan.samples_per_epoch == 18
    assert Counter((ref.image, ref.bucket) for ref in plan.samples(18)) == {
        (index, size): 1 for index in range(6) for size in [(512, 512), (256, 256), (384, 384)]
    }


@pytest.mark.parametrize(("train", "reg", "reg_repeats"), [(10, 3, 1), (10, 3, 2), (3, 10, 1), (7, 7, 1), (4, 1, 3)])
def test_there_are_as_many_regularisation_samples_as_training_samples(train: int, reg: int, reg_repeats: int) -> None:
    plan = plan_of(dataset_of([train], reg=reg, reg_repeats=reg_repeats, options=options_of(prior_loss_weight=0.25)))
    used = Counter(ref.image for ref in plan.samples(2 * train))
    assert sum(used[index] for index in range(train)) == train
    shown = [used[train + index] for index in range(reg)]
    assert sum(shown) == train and max(shown) - min(shown) <= 1
    assert {ref.weight for ref in plan.samples(2 * train) if ref.image >= train} == {0.25}
    assert {ref.weight for ref in plan.samples(2 * train) if ref.image < train} == {1.0}
    assert any("regularisation images are not used" in warning for warning in plan.warnings) == (reg > train)


def test_held_out_images_leave_training_and_come_once_each() -> None:
    options = options_of(validation_split=0.25)
    plan = plan_of(dataset_of([12, 8], reg=5, repeats=3, options=options), batch_size=3)
    held_out = [ref.image for batch in plan.validation_batches() for ref in batch]
    assert sorted(held_out) == list(plan.held_out) and len(held_out) == 5
    assert not set(held_out) & set(plan.trained_images())
    assert not any(plan.subset_of(index).is_reg for index in held_out)
    assert [ref.number for batch in plan.validation_batches() for ref in batch] == list(range(5))
    assert all(len(batch) <= 3 and len({ref.bucket for ref in batch}) == 1 for batch in plan.validation_batches())


def test_the_held_out_part_depends_on_its_seed_and_not_on_new_images() -> None:
    options = options_of(validation_split=0.25, validation_seed=9)
    held_out = {
        "".join(plan.images[index].name for index in plan.held_out)
        for plan in (plan_of(dataset_of([20], options=options), s) for s in (1, 2))
    }
    assert len(held_out) == 1
    small = {dataset_of([20]).images[index].name for index in plan_of(dataset_of([20], options=options)).held_out}
    large = {dataset_of([24]).images[index].name for index in plan_of(dataset_of([24], options=options)).held_out}
    assert len(small - large) <= 2  # newcomers may push some out, the rest stays
    other = plan_of(dataset_of([20], options=options_of(validation_split=0.25, validation_seed=10)))
    assert {other.images[index].name for index in other.held_out} != small


def test_holding_everything_out_is_a_sentence() -> None:
    with pytest.raises(OptionError, match=r"no image is left to train on \(held out: 1, cannot be read: 0\)"):
        plan_of(dataset_of([1], options=options_of(validation_split=0.9)))


def test_sizes_off_the_grid_are_a_sentence() -> None:
    dataset = dataset_of([2], options=options_of(bucket_reso_steps=8))
    with pytest.raises(OptionError, match="bucket_reso_steps: 8 is not a multiple of 16"):
        make_plan(dataset, dataset.subsets[0].options, seed=0, grid=16)


def test_the_hash_changes_with_content_and_not_with_place() -> None:
    dataset = dataset_of([3, 2])
    base = plan_of(dataset).dataset_hash
    assert len(base) == 32, "128 bits: no two data sets meet"
    moved = Dataset(
        (replace(dataset.subsets[0], folder=Path("/elsewhere"), options=options_of(train_data_dir="y", cache_dir="z", vae_batch_size=4)),),
        tuple(replace(item, path=f"/elsewhere/{item.name}", mtime_ns=5) for item in dataset.images),
    )
    assert plan_of(moved).dataset_hash == base
    for change in ({"caption": "other"}, {"identity": "other"}, {"width": 999}):
        images = (replace(dataset.images[0], **change), *dataset.images[1:])
        assert plan_of(replace(dataset, images=images)).dataset_hash != base
    assert plan_of(dataset_of([3, 2], repeats=2)).dataset_hash != base
    assert plan_of(dataset_of([3, 2], options=options_of(flip_aug=True))).dataset_hash != base


def test_the_description_counts_and_warns() -> None:
    dataset = dataset_of([4, 1], reg=2)
    silent = replace(dataset.images[0], caption=" ")
    small = replace(dataset.images[1], width=40, height=40)
    told = plan_of(replace(dataset, images=(silent, small, *dataset.images[2:])), batch_size=3).describe()
    assert (told["images"], told["regularisation"], told["validation"]) == (5, 2, 0)
    assert sum(row["samples"] for row in told["buckets"]) == told["samples_per_epoch"] == 10
    text = "\n".join(told["warnings"])
    assert "1 of 5 training images have no caption" in text and "0_0.png" in text
    assert "buckets with a single image: " in text and "and enlarged: 1 (0_1.png)" in text and "fewer samples an epoch" in text


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"caption_dropout_rate": 0.3},
        {"shuffle_caption": True, "caption_variants": 3, "caption_dropout_every_n_epochs": 2},
        {"shuffle_caption": True, "caption_variants": 0},
        {"shuffle_caption": True, "token_warmup_step": 7.0, "validation_split": 0.2},
        {"caption_tag_dropout_rate": 0.5, "enable_wildcard": True, "caption_variants": 200},
    ],
)
def test_the_texts_of_a_run_are_known_in_advance(values: dict[str, object]) -> None:
    plan = plan_of(dataset_of([6, 3], reg=2, options=options_of(**values)), batch_size=2)
    steps = 40
    rules = plan.caption_rules(steps)
    shown = {caption_of(plan, rules, ref) for ref in plan.samples(steps)}
    shown |= {caption_of(plan, rules, ref) for batch in plan.validation_batches() for ref in batch}
    known = texts_of_run(plan, steps)
    assert shown <= set(known) and known == sorted(set(known))
    assert len(known) <= max(len(shown), 9 * 3 + 3)


def test_a_long_run_walks_variants_and_not_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(dataset_of([4], options=options_of(shuffle_caption=True, caption_variants=4)))
    monkeypatch.setattr(plan, "samples", lambda steps: pytest.fail(f"walked over {steps} steps"))
    assert 4 < len(texts_of_run(plan, 10**9)) <= 16


def test_a_sample_of_a_dropped_epoch_has_an_empty_caption() -> None:
    plan = plan_of(dataset_of([4], options=options_of(caption_dropout_every_n_epochs=2)))
    rules = plan.caption_rules(100)
    texts = [caption_of(plan, rules, ref) for ref in plan.samples(8)]
    assert all(texts[:4]) and not any(texts[4:])


def test_refs_are_plain_values() -> None:
    assert plan_of(dataset_of([1])).global_batch(0) == [SampleRef(0, 0, 0, 0, 0, (512, 512), 1.0)]
