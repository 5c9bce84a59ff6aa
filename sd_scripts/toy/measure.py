"""Measure how well a model obeys prompts, from pixels alone. Knows images, not models; never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from PIL import Image

from . import edits, worlds
from .edits import Edit, EditKind
from .worlds import Reading, Scene

Kind = Literal["star", "teal", "old", "held_out", "subject", "class"]
"""star: the new shape; teal: base shapes in the new colour; old: base shapes, held-out scenes among them;
held_out: only scenes that no base has seen; subject: the subject of DreamBooth by its word; class: known circles."""

ALL_COLORS = tuple(worlds.COLORS)

Render = Callable[[list[str], list[int], int, int], list[Image.Image]]
"""(prompts, seeds, width, height) -> one image each."""


@dataclass(frozen=True)
class Task:
    """A prompt, the scene it asks for, and the seed of the noise to draw it from."""

    prompt: str
    scene: Scene
    seed: int


@dataclass(frozen=True)
class Scores:
    """Fractions in [0, 1] of num images that are as asked: in one respect each, and in all three."""

    num: int
    shape: float
    color: float
    place: float
    all: float

    def __str__(self) -> str:
        return f"{self.all:.1%} of {self.num} all right (shape {self.shape:.1%}, colour {self.color:.1%}, place {self.place:.1%})"


def prompts(kind: Kind, n: int, seed: int, colors: tuple[str, ...] = ALL_COLORS) -> list[Task]:
    """n tasks of a kind, spread evenly over its scenes in these colours; the same arguments always give the same tasks.

    Give worlds.colors_of(family) as colors, or a base is asked for a colour that it never saw. The new colour and the
    subject need none, and the class is only ever asked for in colours other than the subject's.
    """
    old = worlds.scenes(colors=colors)
    pools: dict[Kind, Sequence[Scene]] = {
        "star": worlds.scenes(("star",), colors),
        "teal": worlds.scenes(colors=worlds.NEW_COLORS),
        "old": old,
        "held_out": [scene for scene in old if scene in worlds.HELD_OUT],
        "subject": worlds.scenes((worlds.SUBJECT_SHAPE,), (worlds.SUBJECT_COLOR,)),
        "class": [scene for scene in old if scene.shape == worlds.SUBJECT_SHAPE and scene.color != worlds.SUBJECT_COLOR],
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
        text = worlds.caption(_named(scene) if kind == "subject" else scene, rng)
        tasks.append(Task(text, scene, int(rng.integers(2**31))))
    return tasks


def _named(scene: Scene) -> Scene:
    # The subject's word stands where other prompts have the colour.
    return replace(scene, color=worlds.SUBJECT_WORD)


def render_tasks(render: Render, tasks: Sequence[Task], sizes: Sequence[tuple[int, int]] = worlds.SIZES) -> list[Image.Image]:
    """One image per task, the (width, height) of sizes taking turns; render is called once per size."""
    images: dict[int, Image.Image] = {}
    for turn, (width, height) in enumerate(sizes):
        numbers = range(turn, len(tasks), len(sizes))
        if numbers:
            chosen = [tasks[number] for number in numbers]
            drawn = render([task.prompt for task in chosen], [task.seed for task in chosen], width, height)
            images.update(zip(numbers, drawn, strict=True))
    return [images[number] for number in range(len(tasks))]


def score(scenes: Sequence[Scene], images: Sequence[Image.Image]) -> Scores:
    """How far the images show their scenes. Raises ValueError for different or zero lengths."""
    if not scenes:
        raise ValueError("there is nothing to score; give at least one scene and its image")
    readings = [worlds.read(image) for image in images]
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
    """Draws the tasks with the model behind render, and scores the images."""
    return score([task.scene for task in tasks], render_tasks(render, tasks, sizes))


def subject_share(render: Render, prompt: str, n: int, seed: int, sizes: Sequence[tuple[int, int]] = worlds.SIZES) -> float:
    """Fraction of n images of this prompt that show the subject of DreamBooth, wherever it is.

    Of "a zwx circle" it should be high after DreamBooth, and of "a circle", the class, no higher than before.
    """
    anywhere = Scene(worlds.SUBJECT_SHAPE, worlds.SUBJECT_COLOR, "center")
    tasks = [Task(prompt, anywhere, int(worlds.rng_for(seed, 2, index).integers(2**31))) for index in range(n)]
    readings = [worlds.read(image) for image in render_tasks(render, tasks, sizes)]
    return sum(reading.shape_is(anywhere.shape) and reading.color_is(anywhere.color) for reading in readings) / n


EditRender = Callable[[list[str], list[Image.Image], list[int]], list[Image.Image]]
"""(instructions, sources of one size, seeds) -> one image of that size each."""


@dataclass(frozen=True)
class EditTask:
    """An edit, the image to edit, what a perfect result looks like, and the seed of the noise to draw it from."""

    edit: Edit
    source: Image.Image
    target: Image.Image
    seed: int


def edit_tasks(
    kind: EditKind, n: int, seed: int, held_out: bool = False, sizes: Sequence[tuple[int, int]] = worlds.SIZES
) -> list[EditTask]:
    """n edits of a kind, sizes taking turns, of combinations that the base was trained on, or of those it never saw.

    The same arguments always give the same tasks; images are none that a base or a data set has.
    """
    tasks = []
    for index in range(n):
        rng = worlds.rng_for(seed, 8, edits.KINDS.index(kind), int(held_out), index)
        edit = edits.keep_apart(rng, held_out) if kind == "keep" else edits.edit_of(kind, rng, held_out)
        source, target = edits.draw(edit, *sizes[index % len(sizes)], rng)
        tasks.append(EditTask(edit, source, target, int(rng.integers(2**31))))
    return tasks


def render_edits(render: EditRender, tasks: Sequence[EditTask]) -> list[Image.Image]:
    """One result per task; render is called once per size."""
    results: dict[int, Image.Image] = {}
    for size in dict.fromkeys(task.source.size for task in tasks):
        numbers = [number for number, task in enumerate(tasks) if task.source.size == size]
        chosen = [tasks[number] for number in numbers]
        drawn = render([task.edit.instruction for task in chosen], [task.source for task in chosen], [task.seed for task in chosen])
        results.update(zip(numbers, drawn, strict=True))
    return [results[number] for number in range(len(tasks))]


def edit_obedience(render: EditRender, tasks: Sequence[EditTask]) -> float:
    """Fraction of the tasks in which the result is as asked and has all else as it was, by edits.obeyed."""
    if not tasks:
        raise ValueError("there is nothing to score; give at least one edit")
    results = render_edits(render, tasks)
    return sum(edits.obeyed(task.edit, task.source, result) for task, result in zip(tasks, results, strict=True)) / len(tasks)
