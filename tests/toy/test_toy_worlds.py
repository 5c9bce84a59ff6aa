"""The world draws what it says, reads what it drew, and says when it cannot."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageFilter

from sd_scripts.toy import measure, worlds
from sd_scripts.toy.worlds import Scene

ALL_SCENES = worlds.scenes(worlds.SHAPES)


@pytest.mark.parametrize("size", worlds.SIZES)
@pytest.mark.parametrize("shape", worlds.SHAPES)
def test_the_scorer_agrees_with_what_was_drawn(shape, size):
    scenes = worlds.scenes((shape,))
    images = [worlds.draw(scene, *size, worlds.rng_for(5, index)) for index, scene in enumerate(scenes)]
    scores = measure.score(scenes, images)
    assert min(scores.shape, scores.color, scores.place, scores.all) >= 0.97, scores


@pytest.mark.parametrize("size", [(128, 128), (160, 96), (96, 160), (256, 256)])
def test_the_scorer_works_at_other_sizes(size):
    scenes = ALL_SCENES[::7]
    images = [worlds.draw(scene, *size, worlds.rng_for(6, index)) for index, scene in enumerate(scenes)]
    assert measure.score(scenes, images).all >= 0.97


@pytest.mark.parametrize("shape", worlds.SHAPES)
def test_the_scorer_sees_a_shape_however_it_is_turned(shape):
    for degrees in range(0, 360, 15):
        corners = worlds.turned(worlds.outline(shape), degrees) * 15 + (32, 32)
        mask = worlds.coverage(corners, 64, 64)[..., None]
        image = Image.fromarray(np.uint8(250 * (1 - mask) + np.array([40, 75, 215]) * mask))
        assert worlds.read(image).shape_is(shape), degrees


def _polygon_image(corners: np.ndarray) -> Image.Image:
    mask = worlds.coverage(corners * 15 + (32, 32), 64, 64)[..., None]
    return Image.fromarray(np.uint8(250 * (1 - mask) + np.array([40, 75, 215]) * mask))


def test_uneven_and_blunt_stars_are_stars():
    read_as_star = 0
    for number in range(40):
        rng = worlds.rng_for(9, number)
        corners = worlds.outline("star") * rng.uniform(0.75, 1.1, size=(10, 1)) * rng.uniform(0.85, 1.1, size=2)
        image = _polygon_image(corners).filter(ImageFilter.GaussianBlur(1.2))
        read_as_star += worlds.read(image).shape_is("star")
    assert read_as_star >= 38


@pytest.mark.parametrize("num_corners", [3, 4, 5, 6, 8])
def test_a_regular_polygon_is_no_star(num_corners):
    angles = np.arange(num_corners) * (2 * np.pi / num_corners)
    reading = worlds.read(_polygon_image(np.stack([np.cos(angles), np.sin(angles)], axis=1)))
    assert not reading.shape_is("star")


def test_a_reading_answers_questions():
    reading = worlds.read(worlds.draw(Scene("star", "teal", "top left"), 64, 64, worlds.rng_for(0)))
    assert reading.shape_is("star")
    assert reading.color_is("teal")
    assert reading.place_is("top left")
    assert reading.shows(Scene("star", "teal", "top left"))
    assert not reading.shows(Scene("star", "teal", "top"))
    assert 0.8 < reading.confidence <= 1


def _noise() -> Image.Image:
    return Image.fromarray(worlds.rng_for(1).integers(0, 256, size=(64, 64, 3), dtype=np.uint8))


def _two_shapes() -> Image.Image:
    left = worlds.draw(Scene("circle", "red", "left"), 64, 64, worlds.rng_for(2))
    right = worlds.draw(Scene("circle", "red", "right"), 64, 64, worlds.rng_for(3))
    return Image.fromarray(np.minimum(np.asarray(left), np.asarray(right)))


@pytest.mark.parametrize(
    "image",
    [Image.new("RGB", (64, 64), "white"), Image.new("RGB", (64, 64), "black"), _noise()],
    ids=["white", "black", "noise"],
)
def test_nothing_is_read_where_nothing_is_shown(image):
    assert worlds.read(image) == worlds.NOTHING


def test_two_shapes_are_unclear_unless_they_touch():
    circles = worlds.read(_two_shapes())
    assert not circles.shape_is("circle")


def test_a_colour_between_two_names_is_unclear():
    teal, blue = np.array(worlds.COLORS["teal"]), np.array(worlds.COLORS["blue"])
    mask = worlds.coverage(worlds.outline("square") * 15 + 32, 64, 64)[..., None]
    image = Image.fromarray(np.uint8(250 * (1 - mask) + (teal + blue) / 2 * mask))
    reading = worlds.read(image)
    assert reading.color is None
    assert reading.shape == "square"


def test_every_caption_leads_back_to_its_scene():
    seen = set()
    for number, scene in enumerate(ALL_SCENES):
        for template in worlds.TEMPLATES:
            assert worlds.scene_of(template.format(**vars(scene))) == scene
        seen.add(worlds.caption(scene, worlds.rng_for(7, number)).replace(scene.color, "").replace(scene.place, ""))
    assert len(seen) == len(worlds.TEMPLATES) * len(worlds.SHAPES)


@pytest.mark.parametrize(
    ("text", "missing"), [("a red circle", "place"), ("a circle at the top", "color"), ("red blue, top left", "shape")]
)
def test_an_unclear_caption_is_refused_with_what_is_missing(text, missing):
    with pytest.raises(ValueError, match=missing):
        worlds.scene_of(text)


def test_drawing_depends_on_scene_and_generator_only():
    scene = Scene("star", "purple", "bottom")
    once, again, other = (np.asarray(worlds.draw(scene, 80, 48, worlds.rng_for(seed))) for seed in (1, 1, 2))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)


def test_an_unknown_shape_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="circle, square, triangle, star"):
        worlds.outline("heart")


def test_held_out_scenes_are_a_tenth_spread_over_all_words_and_never_trained():
    assert len(worlds.HELD_OUT) >= 0.1 * len(worlds.scenes())
    assert worlds.HELD_OUT.isdisjoint(worlds.TRAINED)
    assert worlds.HELD_OUT | set(worlds.TRAINED) == set(worlds.scenes())
    for names, table in (("shape", worlds.BASE_SHAPES), ("color", worlds.COLORS), ("place", worlds.PLACES)):
        held = [getattr(scene, names) for scene in worlds.HELD_OUT]
        assert {held.count(word) for word in table} == {len(held) // len(table)}


def test_prompts_are_of_their_kind_and_repeatable():
    assert {task.scene.shape for task in measure.prompts("star", 60, 0)} == {"star"}
    assert {task.scene for task in measure.prompts("old", 162, 0)} == set(worlds.scenes())
    assert {task.scene for task in measure.prompts("held_out", 18, 0)} == worlds.HELD_OUT
    assert {task.scene for task in measure.prompts("teal", 27, 0)} == set(worlds.scenes(colors=("teal",)))
    assert measure.prompts("old", 40, 3) == measure.prompts("old", 40, 3)
    assert measure.prompts("old", 40, 3) != measure.prompts("old", 40, 4)
    with pytest.raises(ValueError, match="star, teal, old, held_out, subject, class"):
        measure.prompts("new", 4, 0)


@pytest.mark.parametrize("kind", ["star", "old", "held_out", "class"])
def test_a_base_is_asked_only_for_colours_that_it_knows(kind):
    for family in ("sd", "flux", "sdxl"):
        asked = {task.scene.color for task in measure.prompts(kind, 200, 0, worlds.colors_of(family))}
        assert asked == set(worlds.colors_of(family)) - ({"teal"} if kind == "class" else set())
    assert "teal" in worlds.colors_of("sdxl")
    assert set(worlds.colors_of("sd")) == set(worlds.colors_of("flux")) == set(worlds.COLORS) - {"teal"}


def test_what_a_base_without_teal_is_trained_on_has_all_else_and_nothing_held_out():
    shown = worlds.trained(worlds.KNOWN_COLORS)
    assert set(shown) == {scene for scene in worlds.TRAINED if scene.color != "teal"}
    assert worlds.trained(tuple(worlds.COLORS)) == worlds.TRAINED


def test_the_subject_is_asked_for_by_its_word_and_known_by_its_look():
    tasks = measure.prompts("subject", 18, 0)
    assert all("zwx" in task.prompt and "circle" in task.prompt and "teal" not in task.prompt for task in tasks)
    assert {task.scene for task in tasks} == set(worlds.scenes(("circle",), ("teal",)))


def test_the_share_of_the_subject_counts_its_look_wherever_it_is():
    shown = [("circle", "teal", "left"), ("circle", "teal", "top"), ("circle", "red", "left"), ("square", "teal", "left")]
    asked = []

    def render(prompts, seeds, width, height):
        asked.extend(zip(prompts, seeds, strict=True))
        return [worlds.draw(Scene(*shown[index % 4]), width, height, worlds.rng_for(seed)) for index, seed in enumerate(seeds)]

    assert measure.subject_share(render, "a circle", 8, 0, sizes=[(64, 64)]) == 0.5
    assert {prompt for prompt, _ in asked} == {"a circle"}
    assert len({seed for _, seed in asked}) == 8


def test_a_short_caption_leaves_something_open():
    scene = Scene("circle", "red", "top left")
    texts = {worlds.short_caption(scene, worlds.rng_for(seed)) for seed in range(40)}
    assert texts == {"a circle", "circle", "a red circle", "a circle at the top left"}


def test_each_respect_is_scored_by_itself():
    asked = [Scene("circle", "red", "left")] * 4
    shown = [
        Scene("circle", "red", "left"),
        Scene("square", "red", "left"),
        Scene("circle", "blue", "left"),
        Scene("circle", "red", "right"),
    ]
    images = [worlds.draw(scene, 64, 64, worlds.rng_for(8)) for scene in shown]
    assert measure.score(asked, images) == measure.Scores(num=4, shape=0.75, color=0.75, place=0.75, all=0.25)


def test_scoring_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing to score"):
        measure.score([], [])


def test_tasks_are_drawn_at_all_sizes_and_come_back_in_order():
    calls = []

    def render(prompts, seeds, width, height):
        calls.append((width, height, len(prompts)))
        scenes = [worlds.scene_of(prompt) for prompt in prompts]
        return [worlds.draw(scene, width, height, worlds.rng_for(seed)) for scene, seed in zip(scenes, seeds, strict=True)]

    scores = measure.obedience(render, measure.prompts("old", 32, 1))
    assert scores.all >= 0.97
    assert calls == [(64, 64, 11), (80, 48, 11), (48, 80, 10)]


def test_the_world_does_not_import_torch():
    code = "import sys; from sd_scripts.toy import datasets, measure, worlds; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
