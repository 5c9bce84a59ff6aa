"""Measure how well a model obeys prompts, from pixels alone. Knows pictures, not models; never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from PIL import Image

from sd_scripts.toy import worlds
from sd_scripts.toy.worlds import Reading, Scene

Kind = Literal["star", "teal", "old", "held_out"]
"""star: the new shape; teal: base shapes in the new colour; old: base shapes, held-out scenes among them;
held_out: only scenes that no base has seen."""

ALL_COLORS = tuple(worlds.COLORS)

Render = Callable[[list[str], list[int], int, int], list[Image.Image]]
"""(prompts, seeds, width, height) -> one picture each."""


@dataclass(frozen=True)
class Task:
    """A prompt, the scene it asks for, and the seed of the noise to draw it from."""

    prompt: str
    scene: Scene
    seed: int


@dataclass(frozen=True)
class Scores:
    """Fractions in [0, 1] of num pictures that are as asked: in one respect each, and in all three."""

    num: int
    shape: float
    color: float
    place: float
    all: float

    def __str__(self) -> str:
        return f"{self.all:.1%} of {self.num} all right (shape {self.shape:.1%}, colour {self.color:.1%}, place {self.place:.1%})"


def prompts(kind: Kind, n: int, seed: int, colors: tuple[str, ...] = ALL_COLORS) -> list[Task]:
    """n tasks of a kind, spread evenly over its scenes in these colours; the same arguments always give the same tasks.

    Give worlds.colors_of(family) as colors, or a base is asked for a colour that it never saw. "teal" needs none.
    """
    old = worlds.scenes(colors=colors)
    pools: dict[Kind, Sequence[Scene]] = {
        "star": worlds.scenes(("star",), colors),
        "teal": worlds.scenes(colors=worlds.NEW_COLORS),
        "old": old,
        "held_out": [scene for scene in old if scene in worlds.HELD_OUT],
    }
    if kind not in pools:
        raise ValueError(f"kind {kind!r} is unknown; the kinds are {', '.join(pools)}")
    pool = pools[kind]
    tasks = []
    for index in range(n):
        # Each round is one shuffle of the whole pool.
        order = worlds.rng_for(seed, 0, index // len(pool)).permutation(len(pool))
        scene = pool[int(order[index % len(pool)])]
        rng = worlds.rng_for(seed, 1, index)
        tasks.append(Task(worlds.caption(scene, rng), scene, int(rng.integers(2**31))))
    return tasks


def render_tasks(render: Render, tasks: Sequence[Task], sizes: Sequence[tuple[int, int]] = worlds.SIZES) -> list[Image.Image]:
    """One picture per task, the (width, height) of sizes taking turns; render is called once per size."""
    pictures: dict[int, Image.Image] = {}
    for turn, (width, height) in enumerate(sizes):
        numbers = range(turn, len(tasks), len(sizes))
        if numbers:
            chosen = [tasks[number] for number in numbers]
            drawn = render([task.prompt for task in chosen], [task.seed for task in chosen], width, height)
            pictures.update(zip(numbers, drawn, strict=True))
    return [pictures[number] for number in range(len(tasks))]


def score(scenes: Sequence[Scene], pictures: Sequence[Image.Image]) -> Scores:
    """How far the pictures show their scenes. Raises ValueError for different or zero lengths."""
    if not scenes:
        raise ValueError("there is nothing to score; give at least one scene and its picture")
    readings = [worlds.read(picture) for picture in pictures]
    pairs = list(zip(scenes, readings, strict=True))

    def fraction(right: Callable[[Reading, Scene], bool]) -> float:
        return sum(right(reading, scene) for scene, reading in pairs) / len(pairs)

    return Scores(
        num=len(pairs),
        shape=fraction(lambda reading, scene: reading.shape_is(scene.shape)),
        color=fraction(lambda reading, scene: reading.color_is(scene.color)),
        place=fraction(lambda reading, scene: reading.place_is(scene.place)),
        all=fraction(Reading.shows),
    )


def obedience(render: Render, tasks: Sequence[Task], sizes: Sequence[tuple[int, int]] = worlds.SIZES) -> Scores:
    """Draws the tasks with the model behind render, and scores the pictures."""
    return score([task.scene for task in tasks], render_tasks(render, tasks, sizes))
