"""The plan with edit pairs: batches of one shape, control images cut as their targets, and the instructions of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sd_scripts.dataset.buckets import area_size
from sd_scripts.dataset.config import Subset
from sd_scripts.dataset.draws import numpy_for
from sd_scripts.dataset.instructions import instructions_of_run
from sd_scripts.dataset.plan import Plan, caption_of, make_plan, texts_of_run
from sd_scripts.dataset.records import ControlImage, Dataset, ImageInfo
from sd_scripts.families.qwen_edit.options import QwenImageDatasetOptions

Size = tuple[int, int]


def options_of(**values: object) -> QwenImageDatasetOptions:
    return QwenImageDatasetOptions(**{"train_data_dir": "x", "resolution": (512, 512), **values})


def control(size: Size, identity: str) -> ControlImage:
    return ControlImage(f"control/{identity}.png", *size, 10, 0, identity)


def pair(number: int, target: Size, controls: list[Size], caption: str | None = None) -> ImageInfo:
    return ImageInfo(
        f"target/{number}.png",
        f"{number}.png",
        0,
        *target,
        f"change {number}" if caption is None else caption,
        10,
        0,
        "",
        f"target{number}",
        controls=tuple(control(size, f"c{number}-{index}") for index, size in enumerate(controls)),
    )


def plan_of(images: list[ImageInfo], options: QwenImageDatasetOptions | None = None, seed: int = 3, **values: object) -> Plan:
    options = options or options_of()
    return make_plan(Dataset((Subset(Path("target"), options),), tuple(images)), options, seed=seed, grid=16, **values)  # type: ignore[arg-type]


sides = st.integers(64, 3000)
sizes = st.tuples(sides, sides)
pairs = st.lists(st.tuples(sizes, st.lists(sizes, max_size=3)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(pairs, st.integers(1, 4), st.integers(0, 200), st.sampled_from([None, 256 * 256]))
def test_all_samples_of_a_batch_have_the_same_target_and_control_sizes(
    found: list[tuple[Size, list[Size]]], group: int, step: int, area: int | None
) -> None:
    size = None if area is None else lambda size: area_size(size, area)
    plan = plan_of([pair(index, *one) for index, one in enumerate(found)], batch_size=group, control_size=size)
    refs = plan.global_batch(step)
    (shape,) = {plan.shape_of(ref.image, ref.resolution) for ref in refs}
    assert {ref.bucket for ref in refs} == {shape[0]}
    assert all(side % 16 == 0 for one in shape for side in one)
    assert {len(plan.images[ref.image].controls) for ref in refs} == {len(shape) - 1}


@settings(max_examples=200, deadline=None)
@given(sizes, sizes)
def test_a_control_image_of_the_targets_shape_is_cut_as_the_target_and_any_other_is_whole(target: Size, size: Size) -> None:
    plan = plan_of([pair(0, target, [size])])
    cut = plan.control_cut(0, 0, 0)
    ratio = (size[0] / size[1]) / (target[0] / target[1])
    if plan.shares_cut(0, 0):
        assert cut == plan.cut(0, 0) and 0.99 < ratio < 1.0101
    else:
        assert cut.resized == cut.bucket == area_size(size) and cut.excess == (0, 0) and not 0.9902 < ratio < 1.0099


@pytest.mark.parametrize(("size", "shared"), [((1500, 1000), True), ((750, 500), True), ((1510, 1000), True), ((1520, 1000), False)])
def test_one_percent_decides_whether_the_cut_is_shared(size: Size, shared: bool) -> None:
    assert plan_of([pair(0, (3000, 2000), [size])]).shares_cut(0, 0) is shared


@pytest.mark.parametrize(
    ("ratio", "wide", "small"),
    [
        # Figures of the area rule of Qwen-Image-Edit at 1024 x 1024 and 384 x 384 pixels, measured in diffusers' pipeline.
        ((1, 1), (1024, 1024), (384, 384)),
        ((4, 3), (1184, 896), (448, 320)),
        ((3, 2), (1248, 832), (480, 320)),
        ((16, 9), (1376, 768), (512, 288)),
        ((2, 1), (1440, 736), (544, 256)),
    ],
)
def test_the_area_rule_is_that_of_the_published_pipeline(ratio: Size, wide: Size, small: Size) -> None:
    size = (ratio[0] * 100, ratio[1] * 100)
    assert (area_size(size), area_size(size, 384 * 384)) == (wide, small)


def test_pairs_with_different_numbers_of_control_images_are_in_buckets_of_their_own() -> None:
    square = (512, 512)
    plan = plan_of([pair(0, square, [square]), pair(1, square, [square, square]), pair(2, square, [(600, 300)]), pair(3, square, [square])])
    rows = [(row.width, row.height, row.images, row.controls) for row in plan.table()]
    assert rows == [
        (512, 512, 2, (square,)),
        (512, 512, 1, (square, square)),
        (512, 512, 1, (area_size((600, 300)),)),
    ]
    told = plan.describe()["buckets"]
    assert told[1]["controls"] == [{"width": 512, "height": 512}] * 2


def test_images_without_control_images_are_drawn_and_told_as_ever() -> None:
    alone = [pair(index, (512, 512), []) for index in range(5)]
    plan = plan_of(alone, batch_size=5)
    # The stream of a bucket is named by its size alone, as it was before there were control images.
    turns = [numpy_for(3, turn, "bucket/512x512").permutation(5).tolist() for turn in range(2)]
    assert [ref.image for ref in plan.samples(2)] == turns[0] + turns[1]
    assert all("controls" not in row for row in plan.describe()["buckets"])
    mixed = plan_of([*alone, pair(9, (512, 512), [(512, 512)])], batch_size=5)
    own = [ref.image for ref in mixed.samples(20) if not mixed.images[ref.image].controls]
    assert own[:10] == turns[0] + turns[1]


def test_the_hash_changes_with_a_control_image() -> None:
    base = pair(0, (512, 512), [(512, 512)])
    first = plan_of([base]).dataset_hash
    other = replace(base, controls=(replace(base.controls[0], identity="other"),))
    moved = replace(base, controls=(replace(base.controls[0], path="/elsewhere/c.png", mtime_ns=9),))
    assert plan_of([other]).dataset_hash != first
    assert plan_of([replace(base, controls=())]).dataset_hash != first
    assert plan_of([replace(base, controls=base.controls * 2)]).dataset_hash != first
    assert plan_of([moved], options_of(control_data_dir=("/elsewhere",))).dataset_hash == first


def test_held_out_pairs_come_in_batches_of_one_shape() -> None:
    square = (512, 512)
    images = [pair(index, square, [square] * (1 + index % 3)) for index in range(30)]
    plan = plan_of(images, options_of(validation_split=0.5), batch_size=4)
    batches = plan.validation_batches()
    assert sum(map(len, batches)) == len(plan.held_out) == 15
    assert all(len({plan.shape_of(ref.image, 0) for ref in batch}) == 1 for batch in batches)
    assert [ref.number for batch in batches for ref in batch] == list(range(15))


def test_what_is_odd_about_pairs_is_said_by_name() -> None:
    square = (512, 512)
    same = replace(pair(0, square, [square]), identity="c0-0")
    twice = [replace(pair(1, square, [square]), name=name) for name in ("first.png", "again.png")]
    odd = pair(3, square, [(900, 300)])
    sided = pair(4, square, [square], caption="move it to the Left")
    text = "\n".join(plan_of([same, *twice, odd, sided], options_of(flip_aug=True)).warnings)
    assert "1 of 5 pairs have a control image that is the target itself" in text and "0.png" in text
    assert "1 pairs are there already" in text and "again.png" in text and "first.png" not in text
    assert "very different shape than the target" in text and "3.png" in text
    assert "flip_aug mirrors images but not words such as left and right" in text and "4.png" in text
    still = "\n".join(plan_of([sided]).warnings) + "\n".join(plan_of([replace(sided, controls=())], options_of(flip_aug=True)).warnings)
    assert "flip_aug" not in still


# Instructions.


def shown(plan: Plan, num_steps: int) -> dict[object, set[str]]:
    """Control set -> texts, by walking over every sample."""
    rules = plan.caption_rules(num_steps)
    found: dict[object, set[str]] = {}
    for ref in [*plan.samples(num_steps), *(ref for batch in plan.validation_batches() for ref in batch)]:
        found.setdefault(plan.control_set(ref.image, ref.resolution, plan.is_mirrored(ref)), set()).add(caption_of(plan, rules, ref))
    return found


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"flip_aug": True},
        {"caption_dropout_rate": 0.3, "additional_resolutions": (256,)},
        {"shuffle_caption": True, "caption_variants": 3, "caption_dropout_every_n_epochs": 2, "flip_aug": True},
        {"shuffle_caption": True, "caption_variants": 0, "flip_aug": True},
        {"validation_split": 0.3, "random_crop": True, "flip_aug": True},
    ],
)
def test_the_instructions_of_a_run_are_known_in_advance(values: dict[str, object]) -> None:
    square = (512, 512)
    images = [pair(index, (700, 512), [(700, 512), square][: 1 + index % 2], f"a {index}, b, c") for index in range(6)]
    images.append(replace(images[0], path="target/x.png", name="x.png", identity="x", caption="another, b"))
    plan = plan_of(images, options_of(**values), batch_size=2)
    known = instructions_of_run(plan, 60)
    keys = [plan.control_set(item.image, item.resolution, item.mirrored) for item in known]
    assert len(set(keys)) == len(keys)
    assert all(item.texts == tuple(sorted(set(item.texts))) for item in known)
    texts = {key: set(item.texts) for key, item in zip(keys, known)}
    walked = shown(plan, 60)
    assert all(found <= texts[key] for key, found in walked.items())
    assert {text for found in texts.values() for text in found} <= set(texts_of_run(plan, 60)) | {""}
    assert instructions_of_run(plan, 60) == known


def test_one_look_at_the_control_images_serves_all_of_their_instructions() -> None:
    square = (512, 512)
    first = pair(0, square, [square], "make it red")
    edits = [replace(first, name=f"{text}.png", identity=text, caption=text) for text in ("make it red", "make it blue", "turn it")]
    (item,) = instructions_of_run(plan_of(edits, options_of(caption_dropout_rate=0.1)), 100)
    assert item.texts == ("", "make it blue", "make it red", "turn it") and (item.image, item.mirrored) == (0, False)
    both = instructions_of_run(plan_of(edits, options_of(flip_aug=True)), 100)
    assert [one.mirrored for one in both] == [False, True]
    # A random crop is cut at a place of each target's own, so nothing can be shared.
    cropped = [replace(item, width=700, controls=(replace(item.controls[0], width=700),)) for item in edits]
    options = options_of(random_crop=True, bucket_no_upscale=False, enable_bucket=False)
    assert len(instructions_of_run(plan_of(cropped, options), 100)) == 3


def test_the_same_instruction_on_different_control_images_is_kept_apart() -> None:
    square = (512, 512)
    known = instructions_of_run(plan_of([pair(index, square, [square], "make it red") for index in range(3)]), 50)
    assert [(item.image, item.texts) for item in known] == [(index, ("make it red",)) for index in range(3)]


def test_the_hashes_of_control_images_come_in_their_order() -> None:
    assert plan_of([pair(0, (512, 512), [(512, 512)] * 3)]).controls_identity(0) == ("c0-0", "c0-1", "c0-2")
