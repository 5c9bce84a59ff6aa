"""Batches and caches of edit pairs, with the real classes: cached is live bit for bit, and nothing is encoded twice or mistaken."""

from __future__ import annotations

import hashlib
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import interpolate

from sd_scripts.dataset.masks import normalised, with_outside
from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.qwen_edit.options import QwenImageDatasetOptions
from sd_scripts.library.core.protocols import Batch, Parts
from sd_scripts.library.data.cache import fingerprint, processor_settings
from sd_scripts.library.data.views import cached_view, control_views, see, see_control
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.model import Controls
from tests.forked import forked
from tests.library.data.dying import fill_edit_pairs
from tests.library.data.pairs_in_small import LIVE, CountingEdit, batches, draw, options_for, pair, pairs, pipeline_for, ready, tiny

RANDOM = {"shuffle_caption": True, "caption_dropout_rate": 0.3, "caption_variants": 2}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    pairs(tmp_path / "data")
    return tmp_path


@pytest.fixture
def options(root: Path) -> QwenImageDatasetOptions:
    return options_for(root / "data")


def changed(options: QwenImageDatasetOptions, **values: object) -> QwenImageDatasetOptions:
    return QwenImageDatasetOptions.model_validate({**options.model_dump(), **values})


def assert_same_bits(ours: list[Batch], theirs: list[Batch]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.x0, b.x0) and a.names == b.names and a.captions == b.captions
        assert (a.masks is None) == (b.masks is None) and (a.masks is None or torch.equal(a.masks, b.masks))  # type: ignore[arg-type]
        for one, other in zip(a.conditions, b.conditions, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one), [
                name for name in one if not torch.equal(one[name], other[name])
            ]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({}, marks=pytest.mark.long),
        {**RANDOM, "flip_aug": True, "random_crop": True, "resolution": (48, 64), "enable_bucket": False},
        {"additional_resolutions": (48,), "validation_split": 0.3, "resize_interpolation": "lanczos"},
    ],
)
def test_whatever_is_cached_the_batches_are_the_same_bit_for_bit(
    options: QwenImageDatasetOptions, root: Path, values: dict[str, object]
) -> None:
    options = changed(options, **values)
    # Random crops of pixels that are cached nowhere differ from sample to sample, so everything live is compared without them.
    states = [
        {},
        {"cache_latents": False},
        {"cache_text_encoder_outputs": False},
        *([LIVE] if not options.random_crop else []),
        {"cache_latents_to_disk": False, "cache_text_encoder_outputs_to_disk": False},
    ]
    made = [ready(changed(options, **state), root) for state in states]
    wanted = batches(made[0], 6)
    for other in made[1:]:
        assert_same_bits(batches(other, 6), wanted)
    for pipeline in made:
        pipeline.close()


def test_kept_texts_saw_untinted_images_and_so_do_live_ones(options: QwenImageDatasetOptions, root: Path) -> None:
    options = changed(options, color_aug=True, cache_latents=False)
    cached, live = ready(options, root), ready(changed(options, **LIVE), root)
    assert_same_bits(batches(cached, 6), batches(live, 6))
    shown: dict[str, set[bytes]] = {}
    for batch in batches(live):
        for name, condition in zip(batch.names, batch.conditions):
            shown.setdefault(name, set()).add(condition["control_0"].numpy().tobytes())
    assert max(map(len, shown.values())) > 1, "control images are tinted with their targets"


def test_a_batch_has_the_control_images_and_the_whole_text_of_each_sample(options: QwenImageDatasetOptions, root: Path) -> None:
    family, pipeline = QwenEdit(), ready(options, root)
    for step in range(6):
        batch, refs = pipeline.micro_batch(step, 0, 0), pipeline.plan.micro_batch(step, 0, 0)
        for row, (ref, condition, caption) in enumerate(zip(refs, batch.conditions, batch.captions, strict=True)):
            item, view = pipeline.plan.images[ref.image], cached_view(pipeline.plan, 5, ref.image, ref.resolution)
            assert set(condition) == {"text", *(f"control_{index}" for index in range(len(item.controls)))}
            views = control_views(pipeline.plan, view)
            pixels = [see_control(pipeline.plan, 5, one) for one in views]
            for index, image in enumerate(pixels):
                wanted = family.encode_images(tiny(), image[None])[0]
                torch.testing.assert_close(condition[f"control_{index}"], wanted, atol=1e-5, rtol=0)
            prefix, (suffix,) = family.encode_instructions(tiny(), pixels, [caption])
            torch.testing.assert_close(condition["text"], torch.cat([prefix, suffix]), atol=1e-5, rtol=0)
            assert batch.x0[row].shape[-2:] == condition["control_0"].shape[-2:]
    assert {len(condition) for batch in batches(pipeline) for condition in batch.conditions} == {2, 3}


def test_a_control_image_of_the_targets_aspect_shows_the_same_place_mirrored_with_it(tmp_path: Path) -> None:
    draw(tmp_path / "data" / "target" / "a.png", (150, 80), 3)
    (tmp_path / "data" / "control").mkdir()
    (tmp_path / "data" / "control" / "a.png").write_bytes((tmp_path / "data" / "target" / "a.png").read_bytes())
    options = options_for(tmp_path / "data", enable_bucket=False, random_crop=True, flip_aug=True, train_batch_size=1, **LIVE)
    pipeline = ready(options, tmp_path)
    seen = set()
    for step in range(12):
        ready_batch = pipeline._load(pipeline.plan.micro_batch(step, 0, 0))
        view = ready_batch.views[0]
        seen.add((view.place, view.mirrored))
        assert torch.equal(ready_batch.control_pixels[0][0], see(pipeline.plan, 5, view).pixels)
    assert len(seen) > 4 and {mirrored for _, mirrored in seen} == {True, False}


def test_batches_with_everything_cached_touch_no_encoder(options: QwenImageDatasetOptions, root: Path) -> None:
    parts = QwenEdit().tiny()
    pipeline = ready(changed(options, **RANDOM), root, parts=parts)
    wanted = batches(ready(changed(options, **RANDOM), root))
    for module in (parts.vae, parts.text_encoders["te1"]):
        module.to("meta")
    assert_same_bits(batches(pipeline), wanted)


def test_kept_texts_have_the_encoders_precision(options: QwenImageDatasetOptions, root: Path) -> None:
    parts = QwenEdit().tiny()
    parts.text_encoders["te1"].bfloat16()
    condition = ready(options, root, parts=parts).micro_batch(0, 0, 0).conditions[0]
    assert condition["text"].dtype == torch.bfloat16 and condition["control_0"].dtype == torch.float32


# What is an entry of its own, and what is not.


def test_one_instruction_on_two_images_gives_two_entries_and_one_image_in_two_pairs_one(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pair(data, name, (64, 64), [((64, 64), 50 + seed)], "make the circle red", ord(name))
    family = CountingEdit()
    pipeline = ready(options_for(data, train_batch_size=1), tmp_path, family)
    assert (family.images, family.sets, family.texts) == (3 + 2, 2, 2)
    texts = {Path(batch.names[0]).stem: batch.conditions[0]["text"] for batch in batches(pipeline)}
    assert torch.equal(texts["a"], texts["b"]) and not torch.equal(texts["a"], texts["c"])
    counts = {kept.what: kept.num_entries for kept in pipeline.kept()}
    assert counts == {"images": 5, "instructions": 4}
    assert all(kept.on_disk and kept.num_bytes > 0 for kept in pipeline.kept())


def test_an_image_that_is_a_target_and_a_control_image_is_kept_once(tmp_path: Path) -> None:
    data = tmp_path / "data"
    pair(data, "a", (64, 64), [((64, 64), 7)], "one", 8)
    pair(data, "b", (64, 64), [((64, 64), 8)], "two", 7)
    family = CountingEdit()
    ready(options_for(data), tmp_path, family)
    assert family.images == 2


def test_all_texts_of_a_set_of_control_images_take_one_look_at_them(options: QwenImageDatasetOptions, root: Path) -> None:
    family = CountingEdit()
    ready(changed(options, **RANDOM, flip_aug=True), root, family)
    # Mirrored images are other images: two sets for each pair. Variants and the empty text are in the same calls.
    assert family.sets == 12 and family.texts > 24


@pytest.mark.parametrize(
    "change",
    ["control", "order", "caption", "mirror", "size", "settings", "processor", "weights", "tokenizer"],
)
def test_everything_that_decides_a_text_is_in_its_key(tmp_path: Path, change: str) -> None:
    data = tmp_path / "data"
    pair(data, "a", (64, 64), [((64, 64), 1), ((64, 64), 2)], "make it red", 3)
    options = options_for(data, train_batch_size=1)
    before = ready(options, tmp_path)
    parts, more = QwenEdit().tiny(), {}
    if change == "control":
        draw(data / "control" / "a.png", (64, 64), 9)
    elif change == "order":
        first, second = (data / name / "a.png" for name in ("control", "control_1"))
        kept = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(kept)
    elif change == "caption":
        (data / "target" / "a.txt").write_text("make it blue")
    elif change == "size":
        more = {"resolution": (48, 48)}
    elif change == "settings":
        parts.settings["max_token_length"] = 20
    elif change == "processor":
        parts.processor.image_processor.do_normalize = False
    elif change == "weights":
        with torch.no_grad():
            parts.text_encoders["te1"].model.visual.patch_embed.proj.weight.mul_(1.1)
    elif change == "tokenizer":
        parts.tokenizers["te1"].add_tokens(["zwx"])
    after = ready(changed(options, **more), tmp_path, parts=parts)

    def keys(pipeline: object, mirrored: bool = False) -> set[str]:
        groups = [[replace(rows, view=replace(rows.view, mirrored=mirrored)) for rows in group] for group in pipeline._row_groups]  # type: ignore[attr-defined]
        return {pipeline._encoding.rows_entry(rows).key for group in groups for rows in group}  # type: ignore[attr-defined]

    shared = keys(before) & keys(after, change == "mirror")
    # Another caption shares the rows of the control images, and nothing else shares anything.
    assert len(shared) == (1 if change == "caption" else 0)


# Caching that is interrupted, damaged or out of date.


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize("calls_to_live", [2, pytest.param(12, marks=pytest.mark.long)])
def test_a_killed_cache_is_finished_with_the_same_bits(options: QwenImageDatasetOptions, root: Path, calls_to_live: int) -> None:
    options = changed(options, vae_batch_size=2, **RANDOM)
    whole = ready(changed(options, cache_dir=str(root / "whole")), root / "whole")
    killed = forked(fill_edit_pairs, root, calls_to_live, options)
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    before, wanted = contents(root / "cache"), contents(root / "whole" / "cache")
    assert len(before) < len(wanted)
    finished = ready(options, root)
    assert contents(root / "cache") == wanted and before.items() <= wanted.items()
    assert_same_bits(batches(finished), batches(whole))


def test_several_processes_share_the_work(options: QwenImageDatasetOptions, root: Path) -> None:
    families = [CountingEdit(), CountingEdit()]
    barrier = threading.Barrier(2)
    pipelines = [
        pipeline_for(options, root, family, rank=rank, world=2, barrier=lambda: barrier.wait() and None, processes=2, batch_size=1)
        for rank, family in enumerate(families)
    ]
    threads = [threading.Thread(target=pipeline.prepare, args=(tiny(),)) for pipeline in pipelines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [family.images for family in families] == [7, 7] and [family.sets for family in families] == [3, 3]
    alone = CountingEdit()
    both = [part.micro_batch(step, 0, rank) for step in range(6) for rank, part in enumerate(pipelines)]
    whole = [ready(options, root, alone).micro_batch(step, 0, 0) for step in range(6)]
    assert (alone.images, alone.sets) == (0, 0)
    texts = [[condition["text"] for batch in made for condition in batch.conditions] for made in (both, whole)]
    assert len(texts[0]) == 12 and all(torch.equal(one, other) for one, other in zip(*texts, strict=True))


def told_after(options: QwenImageDatasetOptions, root: Path, parts: Parts | None = None) -> list[str]:
    told: list[str] = []
    pipeline_for(options, root, warn=told.append).prepare(parts or tiny())
    return told


def test_the_reason_for_encoding_again_is_told(options: QwenImageDatasetOptions, root: Path) -> None:
    assert told_after(options, root) == []
    draw(root / "data" / "control" / "p0.png", (160, 160), 77)
    assert told_after(options, root) == [
        "1 image is encoded again: the image changed",
        "1 instruction is encoded again: a control image changed",
    ]
    parts = QwenEdit().tiny()
    with torch.no_grad():
        parts.text_encoders["te1"].model.language_model.norm.weight.mul_(1.5)
    assert told_after(options, root, parts) == ["6 instructions are encoded again: the text encoder changed"]
    assert told_after(options, root) == []
    parts = QwenEdit().tiny()
    parts.processor.image_processor.do_normalize = False
    assert told_after(options, root, parts) == ["6 instructions are encoded again: the settings of the model's image processor changed"]
    assert told_after(options, root) == []
    parts = QwenEdit().tiny()
    parts.settings["max_token_length"] = 32
    assert told_after(options, root, parts) == [
        "6 instructions are encoded again: an option of the text encoding changed, such as the number of tokens"
    ]
    assert told_after(options, root) == []
    assert told_after(changed(options, resolution=(48, 48)), root)[-1] == (
        "6 instructions are encoded again: the size or the cut of a control image changed"
    )


@pytest.mark.parametrize("damage", ["bit", "torn", "gone"])
def test_damaged_entries_are_repaired_with_the_same_bits_and_told(options: QwenImageDatasetOptions, root: Path, damage: str) -> None:
    options = changed(options, vae_batch_size=2)
    wanted, before = batches(ready(options, root)), contents(root / "cache")
    told: list[str] = []
    pipeline = pipeline_for(options, root, warn=told.append)
    pipeline.prepare(tiny())
    for path in (root / "cache").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-3] ^= 16
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(bytes(data) if damage == "bit" else bytes(data[:100]))
    assert_same_bits(batches(pipeline), wanted)
    assert contents(root / "cache") == before
    assert len(told) == len(before) and all("it is encoded again" in text for text in told)
    control = str(root / "data" / "control" / "p3.png")
    assert any(text.startswith(f"{control}: the encoded image is ") for text in told)
    assert any("p3.png: the text encoder's reading of its control images is " in text for text in told)


# Numbers of control images, and models without.


def refusal(options: QwenImageDatasetOptions, root: Path, version: str, most: int = 3) -> str:
    with pytest.raises(OptionError) as caught:
        ready(options, root, parts=tiny(version), controls=Controls(0, most))
    return str(caught.value)


def test_images_with_too_many_or_no_control_images_are_named(options: QwenImageDatasetOptions, root: Path, tmp_path: Path) -> None:
    words = refusal(options, root, "edit")
    assert "2 of 6 images have more than 1 control image, which is what edit takes" in words and "p1.png" in words and "p2.png" in words
    draw(root / "plain" / "x.png", (64, 64), 1)
    words = refusal(changed(options, train_data_dir=str(root / "plain")), root, "edit-2509")
    assert "1 of 1 images have no control image, and edit-2509 edits images" in words and "x.png" in words
    words = refusal(options, root, "image")
    assert "6 of 6 images have control images, and image makes images from text alone" in words and "model_version = image" in words


def test_text_to_image_keeps_whole_texts_as_other_families_do(options: QwenImageDatasetOptions, root: Path) -> None:
    parts = tiny("image")
    cached = ready(options, root, parts=parts, controls=Controls(0, 0))
    live = ready(changed(options, **LIVE), root, parts=parts, controls=Controls(0, 0))
    assert_same_bits(batches(cached), batches(live))
    batch = cached.micro_batch(0, 0, 0)
    for condition, caption in zip(batch.conditions, batch.captions):
        assert set(condition) == {"text"}
        assert torch.equal(condition["text"], QwenEdit().encode_prompts(parts, [caption])[0]["text"])
    assert {kept.what for kept in cached.kept()} == {"images", "captions"}


# Masks and fingerprints.


@pytest.mark.parametrize("normalise", [False, True])
def test_what_a_mask_leaves_black_counts_as_much_as_asked(options: QwenImageDatasetOptions, root: Path, normalise: bool) -> None:
    for index in range(6):
        draw(root / "masks" / f"p{index}.png", (40, 40), 300 + index)
    values = {"masked_loss": True, "conditioning_data_dir": str(root / "masks"), "normalize_masked_loss": normalise}
    plain = ready(changed(options, masked_loss=True, conditioning_data_dir=str(root / "masks")), root)
    weighted = ready(changed(options, **values, masked_loss_outside_weight=0.3), root)
    for step in range(6):
        mask, weight = plain.micro_batch(step, 0, 0).masks, weighted.micro_batch(step, 0, 0).masks
        assert mask is not None and weight is not None
        wanted = 0.3 + 0.7 * mask.double()
        if normalise:
            wanted = wanted / wanted.mean((1, 2, 3), keepdim=True)
        torch.testing.assert_close(weight.double(), wanted, atol=1e-6, rtol=0)


def test_the_weight_outside_a_mask_is_a_line_from_it_to_one() -> None:
    mask = torch.rand(1, 8, 6)
    assert torch.equal(with_outside(mask, 0.0), mask) and torch.equal(with_outside(mask, 1.0), torch.ones(1, 8, 6))
    assert torch.allclose(with_outside(torch.zeros(1, 2, 2), 0.25), torch.full((1, 2, 2), 0.25))
    small = interpolate(mask[None], scale_factor=0.5, mode="area")[0]
    torch.testing.assert_close(normalised(with_outside(small, 0.5)).mean(), torch.tensor(1.0))


def test_the_fingerprint_reads_eight_bit_weights() -> None:
    layer = torch.nn.Module()
    values = torch.randn(300, 7)
    layer.register_buffer("floats", values.to(torch.float8_e4m3fn))
    layer.register_buffer("whole", (values * 20).to(torch.int8))
    before = fingerprint(layer)
    layer.whole[0, 0] += 1
    assert fingerprint(layer) != before


def test_the_settings_of_a_processor_are_plain_values() -> None:
    settings = processor_settings(tiny().processor)
    assert settings["patch_size"] == 14 and processor_settings(None) == {}
