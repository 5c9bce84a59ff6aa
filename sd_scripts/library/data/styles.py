"""Which style each sample takes on, and real images of that style to compare it with: draws of the sample's number alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from sd_scripts.dataset.buckets import Size
from sd_scripts.dataset.draws import fraction_for
from sd_scripts.dataset.plan import Plan

from .views import View, cached_view

T = TypeVar("T")
Cuts = list[tuple[int, int]]
"""(image, resolution) pairs."""


class StyleOptions(Protocol):
    """What options of a data set of styles have besides."""

    num_references: int
    same_style_rate: float


class StyleDraws:
    """The goals and references of a run's samples. A style is the caption of its images; the empty one stands for all of them."""

    def __init__(self, plan: Plan, options: StyleOptions, seed: int) -> None:
        self._plan, self._options, self._seed = plan, options, seed
        self._cuts: dict[str, Cuts] = {}
        self._in_bucket: dict[Size, dict[str, Cuts]] = {}
        for image, resolution in sorted(plan.trained_cuts()):
            style, bucket = plan.images[image].caption, plan.cut(image, resolution).bucket
            self._cuts.setdefault(style, []).append((image, resolution))
            self._in_bucket.setdefault(bucket, {}).setdefault(style, []).append((image, resolution))
        self.styles: tuple[str, ...] = tuple(sorted(self._cuts))

    def goal(self, number: int, own: str, caption: str) -> str:
        """The style that a sample of style `own` takes on; empty for a sample whose caption was dropped."""
        if not caption:
            return ""
        others = [style for style in self.styles if style != own]
        if not others or fraction_for(self._seed, number, "same style") < self._options.same_style_rate:
            return own
        return self._one(others, number, "style")

    def references(self, number: int, goal: str) -> list[View]:
        """num_references looks at training images of the goal, of one size and perhaps the same image twice; for the empty goal each is
        of a style drawn for it."""
        first = self._one(self._cuts[self._style(self.styles, goal, number, 0)], number, "reference/0")
        there = self._in_bucket[self._plan.cut(*first).bucket]
        rest = [
            self._one(there[self._style(sorted(there), goal, number, place)], number, f"reference/{place}")
            for place in range(1, self._options.num_references)
        ]
        return [cached_view(self._plan, self._seed, image, resolution) for image, resolution in (first, *rest)]

    def examples(self, style: str, most: int) -> list[View]:
        """At most so many looks at training images of a style, drawn once for the run, no cut twice."""
        cuts = sorted(self._cuts[style], key=lambda cut: fraction_for(self._seed, 0, f"example/{self._plan.key_of(cut[0])}/{cut[1]}"))
        return [cached_view(self._plan, self._seed, image, resolution) for image, resolution in cuts[:most]]

    def _style(self, styles: Sequence[str], goal: str, number: int, place: int) -> str:
        return goal or self._one(styles, number, f"reference style/{place}")

    def _one(self, choices: Sequence[T], number: int, stream: str) -> T:
        return choices[int(fraction_for(self._seed, number, stream) * len(choices))]
