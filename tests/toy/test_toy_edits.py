"""The world of edits draws what it says, leaves the rest alone, and tells an obeyed instruction from an ignored one."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageFilter

from sd_scripts.toy import edits, measure, worlds
from sd_scripts.toy.edits import Edit
from sd_scripts.toy.worlds import Scene

CHANGING = [*edits.OLD_KINDS, "border"]


def _tasks(kind, num=30, seed=21):
    return [task for held_out in (False, True) for task in measure.edit_tasks(kind, num, seed, held_out)]


@pytest.mark.parametrize("kind", edits.KINDS)
def test_perfect_results_are_obeyed_and_untouched_sources_are_not(kind):
    tasks = _tasks(kind)
    assert all(edits.obeyed(task.edit, task.source, task.target) for task in tasks)
    ignored = [edits.obeyed(task.edit, task.source, task.source) for task in tasks]
    assert all(ignored) if kind == "keep" else not any(ignored)


@pytest.mark.long
@pytest.mark.parametrize("kind", CHANGING)
def test_no_perfect_result_is_misread_over_many_fresh_images(kind):
    for seed in range(10):
        for task in _tasks(kind, 60, 100 + seed):
            assert edits.obeyed(task.edit, task.source, task.target), task.edit
            assert not edits.obeyed(task.edit, task.source, task.source), task.edit


@pytest.mark.parametrize("kind", CHANGING)
def test_a_little_blur_is_forgiven(kind):
    results = [(task, task.target.filter(ImageFilter.GaussianBlur(0.8))) for task in _tasks(kind, 15)]
    assert sum(edits.obeyed(task.edit, task.source, result) for task, result in results) >= 29


@pytest.mark.parametrize("kind", CHANGING)
@pytest.mark.parametrize("size", [(128, 128), (160, 96), (96, 160)])
def test_larger_images_are_read_too(kind, size):
    for number in range(4):
        rng = worlds.rng_for(22, number)
        edit = edits.edit_of(kind, rng)
        source, target = edits.draw(edit, *size, rng)
        assert edits.obeyed(edit, source, target)
        assert not edits.obeyed(edit, source, source)


@pytest.mark.parametrize("kind", edits.KINDS)
def test_what_an_edit_does_not_change_is_the_same_to_the_pixel(kind):
    for task in _tasks(kind, 10):
        before, after = np.asarray(task.source), np.asarray(task.target)
        changed = np.any(before != after, axis=2)
        assert changed.any() == (kind != "keep")
        things = {*task.edit.source, *filter(None, task.edit.target)}
        kept = [thing for thing, become in zip(task.edit.source, task.edit.target, strict=True) if thing == become]
        assert kind in ("keep", "border") or len(kept) == len(task.edit.source) - 1
        assert things == task.edit.things()
        for thing in kept if kind != "border" else ():
            x, y = (int(value * side) for value, side in zip(edits.PLACES[thing.place], task.source.size, strict=True))
            assert not changed[y - 8 : y + 8, x - 8 : x + 8].any()


def _damaged(task, damage):
    result = np.array(task.target)
    other = next(index for index, (a, b) in enumerate(zip(task.edit.source, task.edit.target, strict=True)) if a == b)
    x, y = (int(v * side) for v, side in zip(edits.PLACES[task.edit.source[other].place], task.source.size, strict=True))
    box = np.s_[max(0, y - 13) : y + 13, max(0, x - 13) : x + 13]
    if damage == "gone":
        result[box] = np.asarray(task.source)[0, 0]
    elif damage == "recoloured":
        result[box] = result[box][..., ::-1]
    else:
        result = np.clip(result.astype(int) - 40, 0, 255).astype(np.uint8)
    return Image.fromarray(result)


@pytest.mark.parametrize("damage", ["gone", "recoloured", "darkened"])
def test_an_edit_that_also_changes_something_else_is_not_obeyed(damage):
    tasks = measure.edit_tasks("remove", 40, 23)
    # Green and purple have red and blue alike, so that swapping these two is no other colour.
    keepers = {"red", "yellow", "blue"}
    tasks = [task for task in tasks if all(a != b or a.color in keepers for a, b in zip(task.edit.source, task.edit.target, strict=True))]
    assert len(tasks) > 10
    assert not any(edits.obeyed(task.edit, task.source, _damaged(task, damage)) for task in tasks)


def test_a_border_needs_all_four_sides():
    for task in measure.edit_tasks("border", 6, 24):
        pixels = np.array(task.target)
        assert edits.has_border(task.target)
        for side in (np.s_[:6], np.s_[-6:], np.s_[:, :6], np.s_[:, -6:]):
            open_side = pixels.copy()
            open_side[side] = 250
            assert not edits.has_border(Image.fromarray(open_side))
        assert not edits.has_border(Image.new("RGB", task.source.size, edits.FRAME_COLOR)), "a dark image has no border"


def test_instructions_name_what_they_change_and_come_in_several_templates():
    edit = Edit(
        "recolour",
        "",
        (Scene("circle", "red", "left"), Scene("square", "blue", "right")),
        (Scene("circle", "green", "left"), Scene("square", "blue", "right")),
    )
    texts = {edits.instruction(edit, worlds.rng_for(25, number)) for number in range(80)}
    ways = ("make {} green", "turn {} green", "paint {} green", "change {} to green")
    assert texts == {way.format(it) for way in ways for it in ("the circle", "the red circle")}
    alone = Edit("move", "", (Scene("circle", "red", "left"),), (Scene("circle", "red", "top right"),))
    texts = {edits.instruction(alone, worlds.rng_for(26, number)) for number in range(90)}
    assert {"move it to the top right", "put the circle at the top right"} <= texts
    assert len(texts) == 3 * len(edits.TEMPLATES["move"])
    for kind in edits.KINDS:
        assert {task.edit.instruction for task in _tasks(kind, 40)} != set()
        assert all("{" not in task.edit.instruction for task in _tasks(kind, 5))


def test_held_out_edits_show_a_held_out_scene_and_the_others_show_none():
    for kind in edits.KINDS:
        for held_out in (False, True):
            for task in measure.edit_tasks(kind, 20, 27, held_out):
                assert task.edit.is_held_out() == held_out
                assert worlds.HELD_OUT.isdisjoint(task.edit.things()) != held_out


def test_two_shapes_stand_apart_and_are_of_two_kinds():
    for task in (task for kind in CHANGING for task in _tasks(kind, 20)):
        readings = worlds.read_all(task.source)
        assert len(readings) == len(task.edit.source)
        assert all(any(reading.shows(thing) for reading in readings) for thing in task.edit.source)
        assert len({thing.shape for thing in task.edit.source}) == len(task.edit.source)
        assert len({thing.color for thing in task.edit.source}) == len(task.edit.source)
        assert task.edit.kind == "border" or len(task.edit.source) == (2 if task.edit.kind == "remove" else 1)


def test_several_shapes_are_read_one_by_one_and_one_shape_as_before():
    scenes = worlds.scenes(worlds.SHAPES)[::7]
    for index, scene in enumerate(scenes):
        image = worlds.draw(scene, 64, 64, worlds.rng_for(28, index))
        (reading,) = worlds.read_all(image)
        single = worlds.read(image)
        assert (reading.shape, reading.color, reading.place) == (single.shape, single.color, single.place)
    assert worlds.read_all(Image.new("RGB", (64, 64), "white")) == ()
    specks = np.full((64, 64, 3), 250, np.uint8)
    specks[10:18, 10:18] = specks[40:48, 40:48] = 0
    assert worlds.read_all(Image.fromarray(specks)) == (worlds.NOTHING, worlds.NOTHING)


def test_the_same_arguments_give_the_same_tasks_and_kinds_differ():
    one, two = measure.edit_tasks("move", 6, 29), measure.edit_tasks("move", 6, 29)
    assert [(task.edit, task.seed, task.source.tobytes(), task.target.tobytes()) for task in one] == [
        (task.edit, task.seed, task.source.tobytes(), task.target.tobytes()) for task in two
    ]
    assert [task.edit for task in one] != [task.edit for task in measure.edit_tasks("move", 6, 30)]
    assert {task.source.size for task in one} == set(worlds.SIZES)


def test_obedience_is_the_fraction_of_obeyed_edits_and_results_come_back_in_order():
    tasks = measure.edit_tasks("recolour", 8, 31)
    targets = {(task.edit.instruction, task.seed): task.target for task in tasks}
    calls = []

    def render(instructions, sources, seeds):
        calls.append({source.size for source in sources})
        done = [targets[key] for key in zip(instructions, seeds, strict=True)]
        return [target if index else source for index, (target, source) in enumerate(zip(done, sources, strict=True))]

    assert measure.edit_obedience(render, tasks) == pytest.approx(5 / 8)  # the first of each of three sizes is left as it was
    assert calls == [{size} for size in worlds.SIZES]
    with pytest.raises(ValueError, match="nothing to score"):
        measure.edit_obedience(render, [])


def test_the_world_of_edits_does_not_import_torch():
    code = "import sys; from sd_scripts.toy import datasets, edits, measure; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
