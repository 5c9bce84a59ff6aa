"""Batches: cached equals live, killed equals uninterrupted, damaged is repaired, and every process gets its part."""

from __future__ import annotations

import hashlib
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from sd_scripts.dataset import images
from sd_scripts.library.core.errors import TrainingError
from sd_scripts.library.core.protocols import Batch
from sd_scripts.library.data.fill import in_groups
from sd_scripts.library.data.pipeline import DataPipeline
from sd_scripts.library.data.prefetch import Prefetcher
from sd_scripts.library.data.views import cached_view, geometry_of, see
from sd_scripts.schema.dataset import DatasetOptions
from tests.forked import forked
from tests.library.data.dying import fill_images
from tests.library.data.standin_family import SmallFamily, pipeline_for

RANDOM_CAPTIONS = {"shuffle_caption": True, "caption_tag_dropout_rate": 0.2, "caption_dropout_rate": 0.3, "caption_variants": 3}
LIVE = {"cache_latents": False, "cache_text_encoder_outputs": False}


def changed(options: DatasetOptions, **values: object) -> DatasetOptions:
    return DatasetOptions.model_validate({**options.model_dump(), **values})


def ready(options: DatasetOptions, root: Path, family: SmallFamily | None = None, **values: object) -> DataPipeline:
    family = family or SmallFamily()
    pipeline = pipeline_for(options, root, family, **values)
    pipeline.prepare(family.tiny())
    return pipeline


def assert_equal(a: Batch, b: Batch, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(a.x0, b.x0, atol=tolerance, rtol=0)
    assert a.numbers.tolist() == b.numbers.tolist() and a.weights.tolist() == b.weights.tolist()
    assert a.names == b.names and a.captions == b.captions
    assert (a.masks is None) == (b.masks is None)
    if a.masks is not None and b.masks is not None:
        torch.testing.assert_close(a.masks, b.masks, atol=tolerance, rtol=0)
    for one, other in zip(a.conditions, b.conditions, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {**RANDOM_CAPTIONS, "flip_aug": True},
        {"additional_resolutions": (32, 48), "resize_interpolation": "lanczos"},
        {"bucket_no_upscale": False, "enable_bucket": False},
        {"token_warmup_step": 12.0, "enable_wildcard": True, "validation_split": 0.2},
    ],
)
def test_cached_batches_equal_live_ones(options: DatasetOptions, root: Path, values: dict[str, object]) -> None:
    cached = ready(changed(options, **values), root)
    live = ready(changed(options, **values, **LIVE), root)
    for step in range(30):
        assert_equal(cached.micro_batch(step, 0, 0), live.micro_batch(step, 0, 0), 1e-5)
    for one, other in zip(cached.validation_batches(), live.validation_batches(), strict=True):
        assert_equal(one(), other(), 1e-5)


def test_all_latents_are_there_before_the_text_encoders_are_called(options: DatasetOptions, root: Path) -> None:
    family, order = SmallFamily(), []
    parts = family.tiny()
    parts.vae.register_forward_pre_hook(lambda *_: order.append("VAE"))
    for encoder in parts.text_encoders.values():
        encoder.register_forward_pre_hook(lambda *_: order.append("text encoder"))
    pipeline_for(options, root, family).prepare(parts, before_texts=lambda: order.append("turn"))
    turn = order.index("turn")
    assert set(order[:turn]) == {"VAE"} and set(order[turn:]) == {"turn", "text encoder"}, order


def test_caches_in_memory_equal_those_on_disk(options: DatasetOptions, root: Path) -> None:
    on_disk = ready(options, root)
    in_memory = ready(changed(options, cache_latents_to_disk=False, cache_text_encoder_outputs_to_disk=False), root / "b" / "..")
    for step in range(10):
        assert_equal(on_disk.micro_batch(step, 0, 0), in_memory.micro_batch(step, 0, 0))


def test_the_batch_holds_what_the_plan_says(options: DatasetOptions, root: Path) -> None:
    pipeline = ready(options, root)
    for step in range(11):
        batch, refs = pipeline.micro_batch(step, 0, 0), pipeline.plan.micro_batch(step, 0, 0)
        assert batch.numbers.tolist() == [ref.number for ref in refs] and batch.x0.dtype == torch.float32
        assert batch.x0.shape == (2, 4, refs[0].bucket[1] // 8, refs[0].bucket[0] // 8)
        for ref, name, caption, condition in zip(refs, batch.names, batch.captions, batch.conditions):
            item = pipeline.plan.images[ref.image]
            assert name == item.path and caption == item.caption
            cut = pipeline.plan.cut(ref.image, ref.resolution)
            assert condition["size"].tolist() == [item.width, item.height, cut.excess[0] // 2, cut.excess[1] // 2, *cut.bucket]


@pytest.mark.parametrize("workers", [0, 1, 5])
def test_threads_change_nothing(options: DatasetOptions, root: Path, workers: int) -> None:
    base = ready(changed(options, **RANDOM_CAPTIONS), root)
    other = ready(changed(options, **RANDOM_CAPTIONS, max_data_loader_n_workers=workers), root)
    for step in [0, 1, 2, 9, 3, 4, 29, 5]:
        assert_equal(base.micro_batch(step, 0, 0), other.micro_batch(step, 0, 0))
    base.close()
    other.close()


def test_processes_and_accumulation_share_one_global_batch(options: DatasetOptions, root: Path) -> None:
    options = changed(options, train_batch_size=4, **RANDOM_CAPTIONS, flip_aug=True)
    whole = ready(options, root)
    split = ready(changed(options, train_batch_size=1), root, processes=2, accumulation=2)
    for step in range(6):
        batch = whole.micro_batch(step, 0, 0)
        parts = [split.micro_batch(step, micro, rank) for micro in (0, 1) for rank in (0, 1)]
        assert batch.numbers.tolist() == [number for part in parts for number in part.numbers.tolist()]
        assert batch.captions == [caption for part in parts for caption in part.captions]
        assert torch.equal(batch.x0, torch.cat([part.x0 for part in parts]))


def test_mirrored_images_are_about_half_and_truly_mirrored(options: DatasetOptions, root: Path) -> None:
    pipeline = ready(changed(options, flip_aug=True, random_crop=True, vae_batch_size=4), root)
    plan = pipeline.plan
    off_centre = 0
    for image, item in enumerate(plan.images):
        views = [cached_view(plan, 5, image, 0, flag) for flag in (False, True)]
        straight, mirrored = (see(plan, 5, view) for view in views)
        assert torch.equal(straight.pixels.flip(-1), mirrored.pixels)
        cut = plan.cut(image, 0)
        whole = images.resize(images.decode(item.path).rgb, cut.resized, plan.subset_of(image).options.resize_interpolation)
        for view, shown in zip(views, (straight, mirrored), strict=True):
            left, top = geometry_of(plan, view).crop
            seen_there = (whole[:, ::-1] if view.mirrored else whole)[top : top + cut.bucket[1], left : left + cut.bucket[0]]
            assert torch.allclose(torch.tensor(seen_there / 127.5 - 1).permute(2, 0, 1).float(), shown.pixels, atol=1e-5), item.path
        off_centre += cut.excess[0] != 2 * views[0].place[0]
    assert off_centre, "a crop that is not in the middle tells left from right"
    seen = [pipeline.micro_batch(step, 0, 0) for step in range(30)]
    kept = {
        name: {row.x0[index].numpy().tobytes() for row in seen for index, at in enumerate(row.names) if at == name}
        for name in seen[0].names
    }
    assert all(len(versions) == 2 for versions in kept.values())


def test_a_random_crop_is_drawn_once_when_cached_and_each_time_when_live(options: DatasetOptions, root: Path) -> None:
    options = changed(options, random_crop=True, train_batch_size=1, enable_bucket=False, resolution=(48, 64))
    places: dict[bool, dict[str, set[tuple[float, ...]]]] = {True: {}, False: {}}
    for cached in (True, False):
        pipeline = ready(changed(options, **({} if cached else LIVE)), root, num_steps=60)
        for step in range(60):
            batch = pipeline.micro_batch(step, 0, 0)
            places[cached].setdefault(batch.names[0], set()).add(tuple(batch.conditions[0]["size"].tolist()))
    assert all(len(found) == 1 for found in places[True].values())
    assert len({place for found in places[True].values() for place in found}) > 3
    assert max(len(found) for found in places[False].values()) > 2


def test_color_aug_changes_live_images_from_sample_to_sample(options: DatasetOptions, root: Path) -> None:
    options = changed(options, color_aug=True, train_batch_size=1, **LIVE)
    pipeline = ready(options, root)
    shown = {}
    for step in range(22):
        batch = pipeline.micro_batch(step, 0, 0)
        shown.setdefault(batch.names[0], []).append(batch.x0)
    assert all(not torch.equal(*pair) and (pair[0] - pair[1]).abs().max() < 1 for pair in shown.values())


def test_regularisation_images_carry_their_weight(options: DatasetOptions, root: Path) -> None:
    (root / "reg").mkdir()
    Image.new("RGB", (80, 80), "gray").save(root / "reg" / "r.png")
    pipeline = ready(changed(options, reg_data_dir=str(root / "reg"), prior_loss_weight=0.5), root)
    for step in range(20):
        batch = pipeline.micro_batch(step, 0, 0)
        assert batch.weights.tolist() == [0.5 if name.endswith("r.png") else 1.0 for name in batch.names]


def test_with_trained_text_encoders_the_text_is_left_to_the_trainer(options: DatasetOptions, root: Path) -> None:
    family = SmallFamily()
    pipeline = ready(changed(options, cache_text_encoder_outputs=False), root, family, trained_encoders=("te1", "te2"))
    batch = pipeline.micro_batch(0, 0, 0)
    assert [condition.keys() for condition in batch.conditions] == [{"size"}, {"size"}] and all(batch.captions)
    assert family.encoded_texts == 0


# Masks.


@pytest.fixture
def masks(root: Path) -> Path:
    rng = np.random.default_rng(1)
    (root / "masks").mkdir()
    for index in range(10):  # the eleventh image has none
        Image.fromarray(rng.integers(0, 2, (8, 8), dtype=np.uint8) * 255).resize((96, 96), 0).save(root / "masks" / f"{index:02d}.png")
    return root / "masks"


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_masks_follow_their_images_to_latent_size(options: DatasetOptions, root: Path, masks: Path, live: bool, normalise: bool) -> None:
    values = {"masked_loss": True, "conditioning_data_dir": str(masks), "normalize_masked_loss": normalise, "flip_aug": True}
    pipeline = ready(changed(options, **values, **(LIVE if live else {})), root)
    whole = 0
    for step in range(11):
        batch = pipeline.micro_batch(step, 0, 0)
        assert batch.masks is not None and batch.masks.shape == (2, 1, *batch.x0.shape[-2:])
        whole += sum(bool((mask == 1).all()) for mask in batch.masks)
        if normalise:
            torch.testing.assert_close(batch.masks.mean((1, 2, 3)), torch.ones(2))
        else:
            assert batch.masks.min() >= 0 and batch.masks.max() <= 1
    assert whole == 2  # the one without a mask, twice in two epochs


def test_a_mask_is_cut_like_its_image(options: DatasetOptions, root: Path) -> None:
    # The image is its own mask, so both must show the same places.
    grey = Image.fromarray(np.random.default_rng(2).integers(0, 256, (12, 10), dtype=np.uint8)).resize((130, 100), Image.Resampling.BICUBIC)
    for folder in ("one", "own"):
        (root / folder).mkdir()
        grey.save(root / folder / "a.png")
    values = {
        "train_data_dir": str(root / "one"),
        "masked_loss": True,
        "conditioning_data_dir": str(root / "own"),
        "random_crop": True,
        "flip_aug": True,
    }
    pipeline = ready(changed(options, **values, **LIVE, resize_interpolation="bilinear", train_batch_size=1), root)
    for step in range(6):
        ref = pipeline.plan.micro_batch(step, 0, 0)[0]
        ready_batch = pipeline._load([ref])
        pixels = (ready_batch.seen[0].pixels[:1] + 1) / 2
        batch = pipeline.micro_batch(step, 0, 0)
        assert batch.masks is not None
        torch.testing.assert_close(
            batch.masks[0], interpolate(pixels[None], size=batch.masks.shape[-2:], mode="area")[0], atol=1e-5, rtol=0
        )


def test_the_alpha_channel_is_a_mask_and_the_colours_under_it_stay(options: DatasetOptions, root: Path) -> None:
    (root / "alpha").mkdir()
    rgba = np.zeros((64, 64, 4), np.uint8)
    rgba[..., 0] = 200
    rgba[:, :32, 3] = 255
    Image.fromarray(rgba).save(root / "alpha" / "a.png")
    base = changed(options, train_data_dir=str(root / "alpha"), train_batch_size=1)
    masked = ready(changed(base, masked_loss=True, alpha_mask=True), root)
    batch = masked.micro_batch(0, 0, 0)
    assert batch.masks is not None and (batch.masks[0, 0, :, :4] == 1).all() and (batch.masks[0, 0, :, 4:] == 0).all()
    plain = see(masked.plan, 5, cached_view(masked.plan, 5, 0, 0)).pixels
    assert torch.allclose(plain[:, 0, 0], plain[:, 0, -1])
    on_white = ready(base, root)
    assert (see(on_white.plan, 5, cached_view(on_white.plan, 5, 0, 0)).pixels[:, :, 32:] == 1).all()


# Caching that is interrupted, damaged or out of date.


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize("calls_to_live", [1, *(pytest.param(calls, marks=pytest.mark.long) for calls in (3, 6)), 9])
def test_a_killed_cache_is_finished_with_the_same_bits(options: DatasetOptions, root: Path, calls_to_live: int) -> None:
    options = changed(options, **RANDOM_CAPTIONS, flip_aug=True, vae_batch_size=3, text_encoder_batch_size=8)
    whole = ready(changed(options, cache_dir=str(root / "whole")), root / "whole", SmallFamily(batch_effect=0.01))
    killed = forked(fill_images, root, calls_to_live, options)
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    before = contents(root / "cache")
    assert len(before) < len(contents(root / "whole" / "cache"))
    family = SmallFamily(batch_effect=0.01)
    finished = ready(options, root, family)
    assert contents(root / "cache") == contents(root / "whole" / "cache")
    assert before.items() <= contents(root / "cache").items()
    for step in range(30):
        assert_equal(finished.micro_batch(step, 0, 0), whole.micro_batch(step, 0, 0))


def test_only_what_is_missing_is_encoded(options: DatasetOptions, root: Path) -> None:
    ready(options, root)
    files = sorted((root / "cache" / "latents").rglob("*.safetensors"))
    for path in files[:3]:
        path.unlink()
    family, told = SmallFamily(), []
    again = pipeline_for(options, root, family, warn=told.append)
    again.prepare(family.tiny())
    assert (family.encoded_images, family.encoded_texts) == (3, 0)
    assert told == ["3 images are encoded again: its cache file is gone"]
    again.prepare(family.tiny())
    assert family.encoded_images == 3


def told_after(options: DatasetOptions, root: Path, change: object = None, **values: object) -> list[str]:
    told: list[str] = []
    family = SmallFamily()
    pipeline = pipeline_for(changed(options, **values), root, family, warn=told.append)
    parts = family.tiny()
    if callable(change):
        change(parts)
    pipeline.prepare(parts)
    return told


def test_the_reason_for_encoding_again_is_told(options: DatasetOptions, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told_after(options, root) == []
    assert told_after(options, root) == []
    Image.new("RGB", (96, 96), "teal").save(root / "data" / "00.png")
    assert told_after(options, root) == ["1 image is encoded again: the image changed"]

    def another(name: str) -> object:
        def change(parts: object) -> None:
            module = parts.vae if name == "vae" else parts.text_encoders["te1"]  # type: ignore[attr-defined]
            with torch.no_grad():
                next(module.parameters()).mul_(1.5)

        return change

    assert told_after(options, root, another("vae")) == ["11 images are encoded again: the VAE changed"]
    assert told_after(options, root, another("text")) == ["11 captions are encoded again: the text encoder changed"]
    assert told_after(options, root) == []
    assert told_after(options, root, resolution=(32, 32)) == ["11 images are encoded again: the resolution changed"]
    monkeypatch.setattr("sd_scripts.library.data.encoding.CODE_REVISION", 10**6)
    assert told_after(options, root, resolution=(32, 32)) == [
        "11 images are encoded again: the code revision changed",
        "11 captions are encoded again: the code revision changed",
    ]


def test_changed_captions_are_encoded_and_nothing_else(options: DatasetOptions, root: Path) -> None:
    ready(options, root)
    (root / "data" / "04.txt").write_text("something new")
    family = SmallFamily()
    pipeline = ready(changed(options, text_encoder_batch_size=1), root, family)
    assert (family.encoded_images, family.encoded_texts) == (0, 1)
    assert any("something new" in pipeline.micro_batch(step, 0, 0).captions for step in range(15))


@pytest.mark.parametrize("kind", ["latents", "text"])
@pytest.mark.parametrize("damage", ["bit", "torn", "gone"])
def test_a_damaged_entry_is_repaired_with_the_same_bits_and_told(options: DatasetOptions, root: Path, kind: str, damage: str) -> None:
    options = changed(options, vae_batch_size=3, text_encoder_batch_size=4)
    family = SmallFamily(batch_effect=0.01)
    whole = ready(options, root, family)
    wanted = [whole.micro_batch(step, 0, 0) for step in range(11)]
    before = contents(root / "cache")
    told: list[str] = []
    pipeline = pipeline_for(options, root, family, warn=told.append)
    pipeline.prepare(family.tiny())
    path = sorted((root / "cache" / kind).rglob("*.safetensors"))[2]
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(data) if damage == "bit" else bytes(data[:100]))
    for step in range(11):
        assert_equal(pipeline.micro_batch(step, 0, 0), wanted[step])
    assert len(told) == 1 and "it is encoded again" in told[0]
    assert contents(root / "cache") == before


def test_several_processes_share_the_work(options: DatasetOptions, root: Path) -> None:
    families = [SmallFamily(), SmallFamily(), SmallFamily()]
    barrier = threading.Barrier(3)
    pipelines = [
        pipeline_for(options, root, family, rank=rank, world=3, barrier=lambda: barrier.wait() and None, processes=3)
        for rank, family in enumerate(families)
    ]
    threads = [threading.Thread(target=pipeline.prepare, args=(family.tiny(),)) for pipeline, family in zip(pipelines, families)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(family.encoded_images for family in families) == 11 and max(family.encoded_images for family in families) == 4
    assert sum(family.encoded_texts for family in families) == 11
    family = SmallFamily()
    alone = ready(options, root, family)
    assert family.encoded_images == 0
    assert alone.micro_batch(0, 0, 0).names


def test_progress_of_both_caches_reaches_the_callback(options: DatasetOptions, root: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    family = SmallFamily()
    pipeline_for(options, root, family).prepare(family.tiny(), lambda *call: seen.append(call))
    assert ("latents", 11, 11) in seen and ("text", 11, 11) in seen


def test_an_image_that_changes_during_the_run_is_named(options: DatasetOptions, root: Path) -> None:
    pipeline = ready(changed(options, **LIVE, max_data_loader_n_workers=0), root)
    for path in (root / "data").glob("*.png"):
        path.write_bytes(b"gone bad")
    with pytest.raises(TrainingError, match=r"\.png is not an image"):
        pipeline.micro_batch(0, 0, 0)


def test_an_image_that_cannot_be_encoded_stops_with_its_name(options: DatasetOptions, root: Path) -> None:
    family = SmallFamily()
    pipeline = pipeline_for(options, root, family)
    (root / "data" / "03.png").unlink()
    with pytest.raises(TrainingError, match=r"03\.png is not there"):
        pipeline.prepare(family.tiny())


# Prefetching.


def test_following_items_are_made_while_one_is_used() -> None:
    made: list[int] = []
    done = threading.Semaphore(0)

    def make(number: int) -> int:
        made.append(number)
        done.release()
        return number * number

    prefetcher = Prefetcher(make, lambda number: number + 1 if number < 9 else None, 2, 4)
    assert prefetcher.get(0) == 0
    assert all(done.acquire(timeout=30) for _ in range(5))  # without anybody asking for more
    assert sorted(made) == [0, 1, 2, 3, 4]
    assert [prefetcher.get(number) for number in (1, 2, 3)] == [1, 4, 9]
    assert prefetcher.get(9) == 81
    prefetcher.close()
    assert len(made) == len(set(made))


def test_an_error_belongs_to_its_own_item() -> None:
    def make(number: int) -> int:
        return 1 // number

    prefetcher = Prefetcher(make, lambda number: number + 1 if number < 3 else None, 2, 4)
    assert prefetcher.get(-1) == -1
    with pytest.raises(ZeroDivisionError):
        prefetcher.get(0)
    assert prefetcher.get(1) == 1
    prefetcher.close()


def test_groups_are_neighbours_of_one_kind() -> None:
    assert in_groups([1, 3, 5, 2, 4, 7], 2, lambda number: number % 2) == [[1, 3], [5], [2, 4], [7]]
    assert in_groups([], 3) == []
