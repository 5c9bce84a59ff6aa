"""Buckets against a brute-force reading of kohya's rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sd_scripts.dataset.buckets import BucketRules, bucket_sizes, cut_for, distribution, nearest_bucket, notes_of, problems_of, rules_of
from sd_scripts.families.ddpm.options import Ddpm
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.flat import build

sides = st.integers(1, 9000)
grids = st.sampled_from([8, 16, 32, 64])


@st.composite
def rules(draw: st.DrawFn, no_upscale: bool) -> BucketRules:
    step = draw(grids)
    side = draw(st.integers(4, 24)) * step + draw(st.integers(0, step - 1))
    low = draw(st.integers(1, side // step * step))
    low = min(low, (side // step) * step)
    return BucketRules(
        (side, side), True, low if -(-low // step) * step <= side else step, side + draw(st.integers(0, 2 * side)), step, no_upscale
    )


def brute_force_sizes(rules: BucketRules) -> set[tuple[int, int]]:
    """Every pair on the grid within the limits whose area fits, where the other side could not be one step longer; and the square."""
    area, step = rules.resolution[0] * rules.resolution[1], rules.step
    grid = [side for side in range(step, rules.max_side + 1, step) if rules.min_side <= side]
    fits = {(w, h) for w in grid for h in grid if w * h <= area}
    longest = {(w, h) for w, h in fits if (w, h + step) not in fits} | {(w, h) for w, h in fits if (w + step, h) not in fits}
    square = max(side for side in range(step, int(area**0.5) + step, step) if side * side <= area)
    return longest | {(square, square)}


@given(rules(no_upscale=False))
def test_the_list_of_buckets_is_that_of_a_brute_force_search(rules: BucketRules) -> None:
    assert set(bucket_sizes(rules)) == brute_force_sizes(rules)


def test_the_list_for_sdxl_is_the_known_one() -> None:
    sizes = bucket_sizes(BucketRules((1024, 1024), max_side=2048))
    assert {(1024, 1024), (832, 1216), (1216, 832), (896, 1152), (1152, 896), (768, 1344), (640, 1536), (512, 2048)} <= set(sizes)
    assert all(256 <= side <= 2048 and side % 64 == 0 for size in sizes for side in size)


def test_limits_off_the_grid_are_kept_and_not_crossed() -> None:
    sizes = bucket_sizes(BucketRules((512, 512), min_side=300, max_side=800, step=64))
    assert min(min(size) for size in sizes) == 320
    assert max(max(size) for size in sizes) == 768


@given(rules(no_upscale=False), sides, sides)
def test_an_image_takes_its_own_size_or_the_nearest_aspect(rules: BucketRules, width: int, height: int) -> None:
    chosen = nearest_bucket((width, height), rules)
    sizes = bucket_sizes(rules)
    if (width, height) in sizes:
        assert chosen == (width, height)
    else:
        assert abs(chosen[0] / chosen[1] - width / height) == min(abs(w / h - width / height) for w, h in sizes)


@given(rules(no_upscale=False), sides, sides)
def test_the_resized_image_covers_its_bucket_with_one_side_exactly(rules: BucketRules, width: int, height: int) -> None:
    cut = cut_for((width, height), rules)
    assert cut.resized[0] == cut.bucket[0] or cut.resized[1] == cut.bucket[1]
    assert min(cut.excess) >= 0
    # One pixel of rounding is all the aspect may change.
    scale = max(cut.bucket[0] / width, cut.bucket[1] / height)
    assert abs(cut.resized[0] - width * scale) <= 1 and abs(cut.resized[1] - height * scale) <= 1


@given(rules(no_upscale=True), sides, sides)
def test_without_enlarging_no_image_grows_and_no_limit_is_crossed(rules: BucketRules, width: int, height: int) -> None:
    cut = cut_for((width, height), rules)
    assert min(cut.excess) >= 0
    assert all(side > 0 and side % rules.step == 0 for side in cut.bucket)
    assert max(cut.bucket) <= max(rules.step, rules.max_side)
    if min(width, height) >= rules.step:
        assert cut.resized[0] <= width + 1 and cut.resized[1] <= height + 1
    # Rounding to the grid may pass the area by one step, as in kohya.
    area = rules.resolution[0] * rules.resolution[1]
    assert cut.bucket[0] * cut.bucket[1] <= area + rules.step * max(cut.bucket)


@pytest.mark.parametrize(
    ("size", "resized", "bucket"),
    [
        ((500, 333), (500, 333), (448, 320)),  # small: keeps its size, bucket rounded down
        ((1024, 1024), (1024, 1024), (1024, 1024)),
        ((2000, 2000), (1024, 1024), (1024, 1024)),
        ((4000, 3000), (1109, 832), (1088, 832)),  # 832 high gives 1.31, 1152 wide gives 1.38: the first is nearer to 1.33
        ((3000, 4000), (832, 1109), (832, 1088)),
        ((40, 50), (64, 80), (64, 64)),  # smaller than one step: the only case that is enlarged
    ],
)
def test_without_enlarging_images_are_cut_as_kohya_cuts_them(
    size: tuple[int, int], resized: tuple[int, int], bucket: tuple[int, int]
) -> None:
    cut = cut_for(size, BucketRules((1024, 1024)))
    assert (cut.resized, cut.bucket) == (resized, bucket)


def test_a_panorama_is_cut_at_the_longest_side_instead_of_becoming_a_strip() -> None:
    cut = cut_for((10_000, 500), BucketRules((1024, 1024), min_side=256, max_side=2048))
    assert cut.bucket == (2048, 512) or cut.bucket[0] == 2048
    assert min(cut.bucket) >= 256
    assert cut.resized[1] <= 500


def test_without_buckets_every_image_is_cut_to_the_resolution() -> None:
    rules = BucketRules((768, 512), enabled=False)
    assert {cut_for(size, rules).bucket for size in [(100, 100), (5000, 20), (20, 5000), (768, 512)]} == {(768, 512)}


def test_additional_resolutions_get_rules_of_their_own() -> None:
    options = DatasetOptions(train_data_dir="x", resolution=(1024, 1024), additional_resolutions=(512, 768))
    assert [rule.resolution for rule in rules_of(options)] == [(1024, 1024), (512, 512), (768, 768)]


@pytest.mark.parametrize(
    ("options", "grid", "sentence"),
    [
        ({"bucket_reso_steps": 24}, 16, "bucket_reso_steps: 24 is not a multiple of 16, which this model needs; the nearest are 16 and 32"),
        (
            {"enable_bucket": False, "resolution": (500, 512)},
            16,
            "resolution: 500 is not a multiple of 16, which this model needs; the nearest are 496 and 512",
        ),
        ({"resolution": (128, 128)}, 8, "min_bucket_reso: 256 is larger than the side of resolution 128x128; set it to at most 128"),
        ({"max_bucket_reso": 512}, 8, "max_bucket_reso: 512 is smaller than the side of resolution 1024x1024; set it to at least 1024"),
        (
            {"additional_resolutions": (192,)},
            8,
            "min_bucket_reso: 256 is larger than the side of additional_resolutions 192x192; set it to at most 192",
        ),
        (
            {"resolution": (33, 33), "min_bucket_reso": 16},
            8,
            "bucket_reso_steps: 1 is not a multiple of 8, which this model needs; the nearest are 8 and 16",
        ),
    ],
)
def test_sizes_a_model_cannot_take_give_a_sentence(options: dict[str, object], grid: int, sentence: str) -> None:
    problems = problems_of(DatasetOptions(train_data_dir="x", **options), grid)
    assert [problem.message for problem in problems] == [sentence]


def test_sizes_below_the_step_take_a_smaller_one_and_say_so() -> None:
    """A DDPM at 32 pixels failed until bucket_reso_steps was set by hand."""
    small = build(Ddpm, {"train_data_dir": "x", "resolution": "32", "additional_resolutions": ["64", "48"]}).dataset
    assert problems_of(small, 8) == []
    assert [rule.step for rule in rules_of(small)] == [32, 64, 16]
    assert cut_for((40, 40), rules_of(small)[0]).bucket == (32, 32)
    assert notes_of(small) == [
        "bucket_reso_steps: 64 is larger than the side of 32x32; 32 is taken there",
        "bucket_reso_steps: 64 is larger than the side of 48x48; 16 is taken there",
    ]
    assert notes_of(DatasetOptions(train_data_dir="x")) == []


@given(st.lists(st.tuples(sides, sides), max_size=50))
def test_the_distribution_counts_every_image_once(sizes: list[tuple[int, int]]) -> None:
    counts = distribution(sizes, BucketRules((512, 512)))
    assert sum(counts.values()) == len(sizes)
    assert list(counts) == sorted(counts)
