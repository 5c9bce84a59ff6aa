"""Which size each image is trained at: kohya's aspect-ratio buckets, as pure functions.

Sizes are (width, height) in pixels. Two of kohya's rounding slips are not repeated: the shortest side is rounded up to the
step and the longest down, so no bucket leaves the limits that were asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, isqrt, sqrt

from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import Problem

Size = tuple[int, int]


@dataclass(frozen=True)
class BucketRules:
    """How sizes are chosen for one resolution; step is the grid of sides."""

    resolution: Size
    enabled: bool = True
    min_side: int = 256
    max_side: int = 2048
    step: int = 64
    no_upscale: bool = True


@dataclass(frozen=True)
class Cut:
    """What happens to one image: it is resized to `resized`, then `bucket` is cut out of that."""

    resized: Size
    bucket: Size

    @property
    def excess(self) -> Size:
        """Pixels that the bucket leaves over in each direction; a crop's left and top lie in 0 ... excess."""
        return self.resized[0] - self.bucket[0], self.resized[1] - self.bucket[1]


def rules_of(options: DatasetOptions) -> tuple[BucketRules, ...]:
    """One set of rules for each training size: resolution first, then additional_resolutions."""
    first = BucketRules(
        resolution=options.resolution,
        enabled=options.enable_bucket,
        min_side=options.min_bucket_reso,
        max_side=options.max_bucket_reso,
        no_upscale=options.bucket_no_upscale,
    )
    return tuple(replace(first, resolution=size, step=step_of(options, size)) for _, size in _sizes(options))


def _sizes(options: DatasetOptions) -> list[tuple[str, Size]]:
    """Every training size, with the option that names it."""
    return [("resolution", options.resolution), *(("additional_resolutions", (side, side)) for side in options.additional_resolutions)]


def step_of(options: DatasetOptions, size: Size) -> int:
    """bucket_reso_steps, or for a size that is smaller its greatest common divisor with the sides."""
    step = options.bucket_reso_steps
    return step if step <= isqrt(size[0] * size[1]) else gcd(step, *size)


def notes_of(options: DatasetOptions) -> list[str]:
    """Sentences about sizes that have another step than bucket_reso_steps."""
    steps = {step_of(options, size): size for _, size in _sizes(options)} if options.enable_bucket else {}
    return [
        f"bucket_reso_steps: {options.bucket_reso_steps} is larger than the side of {'x'.join(map(str, size))}; {step} is taken there"
        for step, size in steps.items()
        if step != options.bucket_reso_steps
    ]


def problems_of(options: DatasetOptions, grid: int) -> list[Problem]:
    """What is wrong with the sizes for a model whose image sides are multiples of grid (>= 1)."""
    sizes, problems = _sizes(options), []
    if options.enable_bucket:
        for step in dict.fromkeys(step_of(options, size) for _, size in sizes):
            if step % grid:
                low, high = _nearest(step, grid)
                problems.append(
                    Problem(
                        "bucket_reso_steps",
                        f"bucket_reso_steps: {step} is not a multiple of {grid}, which this model needs; the nearest are {low} and {high}",
                    )
                )
        for name, size in sizes:
            problems += _limit_problems(name, size, options)
        return problems
    for name, size in sizes:
        for side in dict.fromkeys(size):
            if side % grid:
                low, high = _nearest(side, grid)
                problems.append(
                    Problem(name, f"{name}: {side} is not a multiple of {grid}, which this model needs; the nearest are {low} and {high}")
                )
    return problems


def _limit_problems(name: str, size: Size, options: DatasetOptions) -> list[Problem]:
    step = step_of(options, size)
    low, high, side = _up(options.min_bucket_reso, step), _down(options.max_bucket_reso, step), _down(isqrt(size[0] * size[1]), step)
    shown = "x".join(map(str, size))
    if low > side:
        return [
            Problem(
                "min_bucket_reso",
                f"min_bucket_reso: {options.min_bucket_reso} is larger than the side of {name} {shown}; set it to at most {side}",
            )
        ]
    if high < side:
        return [
            Problem(
                "max_bucket_reso",
                f"max_bucket_reso: {options.max_bucket_reso} is smaller than the side of {name} {shown}; set it to at least {side}",
            )
        ]
    return []


def _nearest(value: int, grid: int) -> Size:
    low = max(grid, _down(value, grid))
    return low, low + grid if value > grid else 2 * grid


def _down(value: int, step: int) -> int:
    return value - value % step


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


@lru_cache(maxsize=256)
def bucket_sizes(rules: BucketRules) -> tuple[Size, ...]:
    """All buckets of these rules, sorted.

    For every width from the shortest to the longest side in steps: the largest height on the grid that keeps the area within
    that of the resolution, in both orientations; and the square.
    """
    if not rules.enabled:
        return (rules.resolution,)
    area = rules.resolution[0] * rules.resolution[1]
    low, high = max(rules.step, _up(rules.min_side, rules.step)), _down(rules.max_side, rules.step)
    side = _down(isqrt(area), rules.step)
    sizes = {(side, side)}
    for width in range(low, high + 1, rules.step):
        height = min(high, _down(area // width, rules.step))
        if height >= low:
            sizes |= {(width, height), (height, width)}
    return tuple(sorted(sizes))


@lru_cache(maxsize=256)
def _by_aspect(rules: BucketRules) -> tuple[list[float], list[Size]]:
    # Of buckets with the same aspect ratio the largest is kept.
    best: dict[float, Size] = {}
    for width, height in bucket_sizes(rules):
        aspect = width / height
        if aspect not in best or best[aspect][0] < width:
            best[aspect] = (width, height)
    aspects = sorted(best)
    return aspects, [best[aspect] for aspect in aspects]


def nearest_bucket(size: Size, rules: BucketRules) -> Size:
    """The bucket of exactly this size, or else the one with the smallest difference of aspect ratio width / height."""
    if size in bucket_sizes(rules):
        return size
    aspects, sizes = _by_aspect(rules)
    aspect = size[0] / size[1]
    place = bisect_left(aspects, aspect)
    # A tie goes to the narrower bucket, as in kohya's sorted list.
    candidates = range(max(0, place - 1), min(len(aspects), place + 1))
    return sizes[min(candidates, key=lambda index: abs(aspects[index] - aspect))]


def cut_for(size: Size, rules: BucketRules) -> Cut:
    """How an image of this size is resized and cut."""
    if rules.enabled and rules.no_upscale:
        return _cut_without_enlarging(size, rules)
    return _covering(size, nearest_bucket(size, rules))


def _covering(size: Size, bucket: Size) -> Cut:
    # The smallest size of the same aspect that covers the bucket, to the nearest pixel.
    width, height = size
    if width * bucket[1] > height * bucket[0]:
        return Cut((max(bucket[0], int(width * bucket[1] / height + 0.5)), bucket[1]), bucket)
    return Cut((bucket[0], max(bucket[1], int(height * bucket[0] / width + 0.5))), bucket)


def _cut_without_enlarging(size: Size, rules: BucketRules) -> Cut:
    """kohya's bucket_no_upscale, with the limits kept where it ignores them.

    An image larger than the resolution's area is brought to that area with its aspect, one side on the grid (the one that
    keeps the aspect better); smaller ones keep their size. The bucket is that size rounded down to the grid. Where this leaves
    the shortest or longest side, the bucket is taken from the list as long as that needs no enlarging; else what is longer than
    the longest side is cut off. Only images smaller than one step are enlarged, to that step.
    """
    step, area = rules.step, rules.resolution[0] * rules.resolution[1]
    width, height = size
    if min(size) < step:
        return _thin(size, rules)
    resized = _to_area(size, area, step) if width * height > area else size
    bucket = (_down(resized[0], step), _down(resized[1], step))
    low, high = _up(rules.min_side, step), _down(rules.max_side, step)
    if min(bucket) < low or max(bucket) > high:
        listed = _covering(size, nearest_bucket(size, rules))
        if listed.resized[0] <= width and listed.resized[1] <= height:
            return listed
        bucket = (min(bucket[0], high), min(bucket[1], high))
    if min(bucket) < step:
        return _thin(size, rules)
    return Cut(resized, bucket)


def _thin(size: Size, rules: BucketRules) -> Cut:
    # A strip thinner than one step at its size: the thin side becomes one step and the long one is cut at the limits.
    step, area = rules.step, rules.resolution[0] * rules.resolution[1]
    longest = max(step, min(_down(rules.max_side, step), _down(area // step, step)))
    scale = step / min(size)
    long = max(step, min(longest, _down(int(max(size) * scale + 0.5), step)))
    return _covering(size, (long, step) if size[0] >= size[1] else (step, long))


def _to_area(size: Size, area: int, step: int) -> Size:
    aspect = size[0] / size[1]
    width = sqrt(area * aspect)
    by_width = _down(int(width + 0.5), step)
    by_height = _down(int(area / width + 0.5), step)
    if min(by_width, by_height) < step:
        return int(width + 0.5), max(1, int(area / width + 0.5))
    of_width = by_width / max(step, _down(int(by_width / aspect + 0.5), step))
    of_height = max(step, _down(int(by_height * aspect + 0.5), step)) / by_height
    if abs(of_width - aspect) < abs(of_height - aspect):
        return by_width, int(by_width / aspect + 0.5)
    return int(by_height * aspect + 0.5), by_height


def area_size(size: Size, area: int = 1024 * 1024) -> Size:
    """The size of about this area at which a control image of `size` is taken: multiples of 32, at least one.

    width = sqrt(area * r), height = width / r for the aspect ratio r, each to the nearest multiple (as diffusers' pipelines for editing).
    Below 256 x 256, where no published model works, the multiples are of 16, or images would be squeezed out of shape.
    """
    aspect, step = size[0] / size[1], 32 if area >= 256 * 256 else 16
    width = sqrt(area * aspect)
    return max(step, round(width / step) * step), max(step, round(width / aspect / step) * step)


def distribution(sizes: Sequence[Size], rules: BucketRules) -> dict[Size, int]:
    """How many images of these sizes fall into each bucket, sorted by bucket."""
    counts: dict[Size, int] = {}
    for size in sizes:
        bucket = cut_for(size, rules).bucket
        counts[bucket] = counts.get(bucket, 0) + 1
    return dict(sorted(counts.items()))
