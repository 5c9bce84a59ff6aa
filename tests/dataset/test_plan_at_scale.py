"""The plan on 1, 8, 64 and 1024 processes: every sample as often as every other, no process asks another, and no step is far away."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from sd_scripts.dataset import plan as plans
from sd_scripts.dataset.findings import findings_of_length
from sd_scripts.dataset.plan import Plan
from tests.dataset.test_plan import dataset_of, plan_of

RANKS = (1, 8, 64, 1024)
IMAGES = [1900, 1030, 517, 64]
"""Of each size; the last bucket is smaller than a step of 1024."""


def of_ranks(plan: Plan, step: int) -> list[list[plans.SampleRef]]:
    """What each process sees of a step."""
    return [[ref for micro in range(plan.accumulation) for ref in plan.micro_batch(step, micro, rank)] for rank in range(plan.processes)]


@pytest.fixture(scope="module")
def mixed() -> plans.Dataset:
    """A few thousand images in buckets of several sizes, shown twice, with regularisation images of a size of their own."""
    return dataset_of(IMAGES, reg=700, repeats=2)


@pytest.mark.parametrize("ranks", RANKS)
def test_after_any_epoch_no_sample_is_a_turn_ahead_of_another(mixed: plans.Dataset, ranks: int) -> None:
    seed = random.getrandbits(40)
    plan, one_by_one = plan_of(mixed, seed=seed, processes=ranks), plan_of(mixed, seed=seed)
    times = Counter(ref.image for ref in one_by_one.samples(one_by_one.samples_per_epoch))
    assert all(times[index] == 2 for index in range(sum(IMAGES)))
    buckets = {index: plan.cut(index, 0).bucket for index in times}
    images = [ref.image for ref in plan.samples(plan.steps_of_epochs(3))]
    for epochs in (1, 2, 3):
        shown = Counter(images[: plan.steps_of_epochs(epochs) * plan.global_batch_size])
        for row in plan.table():
            members = [index for index, bucket in buckets.items() if bucket == (row.width, row.height)]
            given = sum(shown[index] for index in members)
            # Whole batches only: the bucket is behind by less than one.
            assert given == epochs * row.samples // ranks * ranks
            turns, rest = divmod(given, row.samples)
            for index in members:
                assert turns * times[index] <= shown[index] <= (turns + (rest > 0)) * times[index]


@pytest.mark.parametrize("ranks", RANKS)
def test_where_buckets_are_whole_steps_each_epoch_has_every_sample_once(ranks: int) -> None:
    plan = plan_of(dataset_of([2048, 1024, 3072]), seed=random.getrandbits(40), processes=ranks)
    orders = []
    for epoch in (0, 1):
        steps = range(plan.steps_of_epochs(epoch), plan.steps_of_epochs(epoch + 1))
        images = [ref.image for step in steps for ref in plan.global_batch(step)]
        assert sorted(images) == list(range(6144))
        orders.append(images)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("ranks", RANKS)
def test_processes_share_a_step_without_asking_each_other(mixed: plans.Dataset, ranks: int) -> None:
    seed = random.getrandbits(40)
    plan = plan_of(mixed, seed=seed, processes=ranks, batch_size=2, accumulation=3)
    steps = [0, plan.steps_of_epochs(1), *random.sample(range(10**6), 2)]
    for step in steps:
        shares = of_ranks(plan, step)
        numbers = [ref.number for share in shares for ref in share]
        first = step * plan.global_batch_size
        assert sorted(numbers) == list(range(first, first + plan.global_batch_size)), "no sample twice, none left out"
        assert len({ref.bucket for share in shares for ref in share}) == 1, "no process waits for one with larger images"
        # A process of its own, which has nothing but the data set and the seed.
        rank = random.randrange(ranks)
        alone = plan_of(mixed, seed=seed, processes=ranks, batch_size=2, accumulation=3)
        assert of_ranks(alone, step)[rank] == shares[rank]


def test_a_step_is_the_same_on_any_number_of_processes(mixed: plans.Dataset) -> None:
    seed = random.getrandbits(40)
    shapes = [(1, 32, 32), (8, 16, 8), (64, 4, 4), (1024, 1, 1)]
    for step in (0, 7, 10**5 + 3):
        seen = []
        for ranks, batch, accumulation in shapes:
            plan = plan_of(mixed, seed=seed, processes=ranks, batch_size=batch, accumulation=accumulation)
            seen.append(sorted((ref for share in of_ranks(plan, step) for ref in share), key=lambda ref: ref.number))
        assert all(one == seen[0] for one in seen)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_far_step_takes_no_more_work_than_the_first(mixed: plans.Dataset, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work: Counter[str] = Counter()
    draw, count = plans.numpy_for, Plan.steps_of_epochs

    def counted_draw(seed: int, number: int, stream: str) -> np.random.Generator:
        work["permutations"] += 1
        return draw(seed, number, stream)

    def counted_steps(self: Plan, epochs: int) -> int:
        work["counts"] += 1
        return count(self, epochs)

    monkeypatch.setattr(plans, "numpy_for", counted_draw)
    monkeypatch.setattr(Plan, "steps_of_epochs", counted_steps)
    for step in (0, 1, 10**3, 10**6, 10**9, 10**12):
        plan = plan_of(mixed, seed=random.getrandbits(40), processes=ranks)
        work.clear()
        plan.micro_batch(step, 0, ranks - 1)
        # The order of one epoch, and one turn of one bucket; the epoch is found by halving between two that are a few apart.
        assert work["permutations"] <= 2 and work["counts"] <= 20, (step, work)


@pytest.mark.parametrize("ranks", [64, 1024])
def test_buckets_that_a_run_never_shows_are_known_before_it_begins(mixed: plans.Dataset, ranks: int) -> None:
    plan = plan_of(mixed, seed=random.getrandbits(40), processes=ranks)
    buckets = [plan.global_batch(step)[0].bucket for step in range(plan.steps_of_epochs(8))]
    for steps in (0, 1, 2, plan.steps_of_epochs(1), plan.steps_of_epochs(7), plan.steps_of_epochs(8)):
        shown = set(buckets[:steps])
        assert {(row.width, row.height) for row in plan.unshown(steps)} == {(row.width, row.height) for row in plan.table()} - shown
    # 64 images, twice an epoch, fill a step of 1024 after eight epochs.
    if ranks == 1024:
        assert [row.images for row in plan.unshown(plan.steps_of_epochs(7))] == [64]
        assert plan.unshown(plan.steps_of_epochs(8)) == []
        (sentence,) = findings_of_length(plan, plan.steps_of_epochs(7))
        assert "1 buckets with 64 images (832x256) do not fill one step of 1024 samples" in sentence
        assert findings_of_length(plan, plan.steps_of_epochs(8)) == []
        assert plan.unshown(1) and findings_of_length(plan, 1) == [], "of less than an epoch nobody expects everything"
