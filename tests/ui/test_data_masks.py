"""Masks in the Data tab: written where training reads them, weighed as training weighs them, and nobody's work is lost."""

from __future__ import annotations

import base64
import io
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kohya_like import app, tools
from kohya_like.context import Context
from kohya_like.data_room import jobs, masks
from kohya_like.data_room import room as rooms
from kohya_like.tabs.train import TrainTab
from sd_scripts.dataset.masks import normalised, with_outside
from sd_scripts.dataset.scan import read_dataset
from sd_scripts.library.data.views import cached_view, mask_at, see
from sd_scripts.schema.errors import OptionError
from tests.ui.standin_runs import until

STEMS = ("a", "b", "deep/a")


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    context = app.make_context(tmp_path / "output", [], is_private=True)
    yield context
    bench = tools.ToolBench(context.output_dir, context.roots)
    for each in bench._all():
        bench.cancel(each)
    context.supervisor.close()
    context.predictions.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images of random shapes, one of them deeper under a name that is there twice."""
    rng = np.random.default_rng(random.getrandbits(64))
    folder = tmp_path / "mine"
    for stem in STEMS:
        (folder / stem).parent.mkdir(parents=True, exist_ok=True)
        width, height = map(int, rng.integers(70, 200, 2))
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{stem}.png")
        (folder / f"{stem}.txt").write_text("a thing")
    return folder


def opened(context: Context, folder: Path, kept: rooms.Rooms | None = None, **values: Any) -> rooms.Room:
    texts = {"pretrained_model_name_or_path": "toy", "train_data_dir": str(folder), "resolution": "64", "min_bucket_reso": "32", **values}
    kept = kept or rooms.Rooms(context.output_dir)
    page = list(kept.open(TrainTab(context).options([{"run": "sdxl/network", "values": texts}])))[-1]
    return kept.find(page["room"])


def index_of(room: rooms.Room, stem: str) -> int:
    return [path.relative_to(room.root).with_suffix("").as_posix() for path in room.paths].index(stem)


def picture(mask: Any) -> str:
    stream = io.BytesIO()
    Image.fromarray(mask).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def random_mask(rng: np.random.Generator) -> Any:
    height, width = map(int, rng.integers(5, 60, 2))
    return np.clip(rng.normal(128, 160, (height, width)), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("where", ["beside", "folder"])
def test_a_mask_is_written_where_training_reads_it_and_weighs_as_training_weighs_it(where: str, context: Context, folder: Path) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    values: dict[str, Any] = {
        "masked_loss": True,
        "masked_loss_outside_weight": str(rng.choice([0.0, 0.3])),
        "normalize_masked_loss": bool(rng.random() < 0.5),
    }
    if where == "folder":
        (folder.parent / "masks").mkdir()
        values["conditioning_data_dir"] = str(folder.parent / "masks")
    room = opened(context, folder, **values)
    drawn = {}
    for stem in ("a", "deep/a"):
        index, mask = index_of(room, stem), random_mask(rng)
        assert rooms.image_of(room, index)["mask"]["there"] is False and masks.drawn(room, index) is None
        state = masks.write(room, index, picture(mask), "none")["mask"]
        assert state["there"] and state["isRead"]
        drawn[stem] = np.array(Image.open(io.BytesIO(masks.drawn(room, index) or b"")))
        np.testing.assert_array_equal(drawn[stem], mask)
    # What training reads now, by itself.
    options = room.options.dataset
    found = read_dataset(options, context.output_dir / ".cache")
    assert {image.name: bool(image.mask) for image in found.images} == {"a.png": True, "b.png": False, "deep/a.png": True}
    again = opened(context, folder, **values)
    for stem in STEMS:
        index = index_of(again, stem)
        seen = see(again.view.plan, 0, cached_view(again.view.plan, 0, index, 0, False)).mask
        weights = masks.weights_of(room, index)
        np.testing.assert_array_equal(weights, masks.weights_of(again, index))
        size = (weights.shape[0] // 8, weights.shape[1] // 8)
        # As pipeline.py makes a batch's masks from what encoding.py keeps of an image.
        whole = torch.ones(1, *size) if seen is None else mask_at(seen, size)
        trained = with_outside(whole, options.masked_loss_outside_weight)
        trained = normalised(trained) if options.normalize_masked_loss else trained
        means = mask_at(torch.from_numpy(weights)[None].float(), size)
        torch.testing.assert_close(means, trained, rtol=1e-4, atol=1e-5)
        told = masks.overlay(again, index)
        assert told["mean"] == pytest.approx(weights.mean()) and told["isRead"]
        cells = np.array(Image.open(io.BytesIO(base64.b64decode(told["picture"]))).convert("RGBA"))[..., 3]
        # The page shows what each latent weighs, in so many steps of its tint.
        wanted = 170 * (1 - trained[0].numpy() / float(trained.max())) if trained.max() > 0 else np.full(size, 170.0)
        assert told["side"] == 8 and cells.shape == size
        np.testing.assert_allclose(cells, wanted, atol=0.6)


def test_of_two_pages_one_writes_and_undo_brings_each_mask_back_to_the_byte(context: Context, folder: Path) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    kept = rooms.Rooms(context.output_dir)
    one, other = opened(context, folder, kept), opened(context, folder, kept)
    index = index_of(one, "b")
    foreign = folder / "b-masklabel.png"
    Image.fromarray(random_mask(rng)).save(foreign, compress_level=0)
    before = foreign.read_bytes()
    version = masks.state_of(one, index)["version"]
    first = masks.write(one, index, picture(random_mask(rng)), version)["mask"]
    mine = foreign.read_bytes()
    lost = masks.write(other, index, picture(random_mask(rng)), version)
    assert lost["conflict"]["version"] == first["version"] and foreign.read_bytes() == mine
    masks.write(other, index, None, first["version"])
    assert not foreign.exists()
    offsets = [0] * len(one.mask_books)
    assert masks.news(one, offsets)[0] == {index: False}
    # A caption that was changed later is taken back first.
    words = rooms.image_of(one, index)
    rooms.write(one, index, "a new thing", words["version"])
    assert rooms.undo(one)["of"] == "captions" and (folder / "b.txt").read_text() == "a thing"
    taken = rooms.undo(other)
    assert (taken["of"], taken["count"], taken["masks"]) == ("masks", 1, {index: True}) and foreign.read_bytes() == mine
    assert rooms.undo(one)["count"] == 1 and foreign.read_bytes() == before
    assert rooms.undo(one)["count"] == 0


def test_what_is_left_out_takes_its_mask_along_and_leaves_no_new_image(context: Context, folder: Path) -> None:
    room = opened(context, folder)
    masks.write(room, index_of(room, "a"), picture(np.full((8, 8), 200, np.uint8)), "none")
    assert rooms.leave_out(room, [index_of(room, "a")]) == 1
    left = opened(context, folder)
    assert sorted(path.name for path in left.paths) == ["a.png", "b.png"] and not (folder / "a-masklabel.png").exists()
    assert rooms.bring_back(left) == 1 and (folder / "a-masklabel.png").is_file() and len(opened(context, folder).paths) == 3


def test_an_edit_that_is_left_out_takes_its_control_image_along(tmp_path: Path, context: Context) -> None:
    folder = tmp_path / "pairs"
    folder.mkdir()
    for name in ("a", "b", "a_control_1", "b_control_1"):
        Image.fromarray(np.full((64, 64, 3), len(name), np.uint8)).save(folder / f"{name}.png")
    for name in "ab":
        (folder / f"{name}.txt").write_text("make it so")
    texts = {"pretrained_model_name_or_path": "toy", "train_data_dir": str(folder), "resolution": "64", "min_bucket_reso": "32"}
    kept = rooms.Rooms(context.output_dir)

    def pairs() -> rooms.Room:
        page = list(kept.open(TrainTab(context).options([{"run": "kontext/network", "values": texts}])))[-1]
        return kept.find(page["room"])

    room = pairs()
    assert len(room.paths) == 2 and rooms.leave_out(room, [0]) == 1
    assert [path.name for path in pairs().paths] == ["b.png"] and not (folder / "a_control_1.png").exists()
    assert rooms.bring_back(pairs()) == 1 and len(pairs().paths) == 2


def test_a_mask_that_several_images_share_is_not_changed_for_the_others(context: Context, folder: Path) -> None:
    there = folder.parent / "masks"
    there.mkdir()
    Image.fromarray(np.full((4, 4), 90, np.uint8)).save(there / "a.png")
    values = {"masked_loss": True, "conditioning_data_dir": str(there)}
    room = opened(context, folder, **values)
    deep = index_of(room, "deep/a")
    assert room.view.plan.images[deep].mask == room.view.plan.images[index_of(room, "a")].mask == str(there / "a.png")
    masks.write(room, deep, picture(np.full((6, 6), 255, np.uint8)), masks.state_of(room, deep)["version"])
    again = opened(context, folder, **values)
    assert masks.weights_of(again, index_of(again, "a")).max() == pytest.approx(90 / 255)
    assert masks.weights_of(again, deep).min() == 1


def test_what_cannot_have_a_mask_is_said_in_a_sentence(context: Context, folder: Path) -> None:
    toy = opened(context, folder, train_data_dir="toy:star")
    assert "add images of your own" in masks.state_of(toy, 0)["why"]
    room = opened(context, folder)
    index = index_of(room, "a")
    for given in ("no base64 at all", base64.b64encode(b"no picture").decode(), picture(np.zeros((1, 3000), np.uint8))):
        with pytest.raises(OptionError, match="no mask of the page"):
            masks.write(room, index, given, "none")
    shutil.copy(folder / "a.png", folder / "a-masklabel.png")
    Image.open(folder / "a.png").save(folder / "b-masklabel.jpg")
    assert "is no PNG" in masks.state_of(room, index_of(room, "b"))["why"]
    kept = room.mask_books[0]
    masks.write(room, index, picture(np.full((5, 5), 7, np.uint8)), masks.state_of(room, index)["version"])
    shutil.rmtree(kept.root / ".masks")
    with pytest.raises(OptionError, match="is gone or was changed"):
        rooms.undo(room)


def test_masks_from_alpha_channels_are_made_as_a_work_that_undo_takes_back(context: Context, folder: Path) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    alpha = rng.integers(0, 256, (40, 30), dtype=np.uint8)
    Image.fromarray(np.dstack([np.zeros((40, 30, 3), np.uint8), alpha])).save(folder / "b.png")
    room = opened(context, folder, masked_loss=True, alpha_mask=True)
    desk = jobs.Desk(tools.ToolBench(context.output_dir, context.roots), room, context)
    masks.write(room, index_of(room, "a"), picture(np.full((5, 5), 99, np.uint8)), "none")
    offsets = masks.news(room, [0])[1]
    started = jobs.start(desk, {"tool": "mask", "texts": {"mask_model": "alpha"}})["run"]
    until(lambda: desk.bench.find(started["name"]).state in tools.ENDED, 120.0)
    assert desk.bench.find(started["name"]).state == "finished"
    assert rooms.news(room, 0, offsets)["masks"] == {index_of(room, "b"): True}
    np.testing.assert_array_equal(np.array(Image.open(folder / "b-masklabel.png")), alpha)
    report = tools.detail(desk.bench.find(started["name"]), -1)["report"]
    assert (report["written"], report["kept"], report["empty"]) == (1, 1, ["deep/a.png"])
    assert rooms.undo(room)["count"] == 1 and not (folder / "b-masklabel.png").exists() and (folder / "a-masklabel.png").exists()
