"""The Data tab's side of the studio: what training will see, and captions that nobody loses, whoever writes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kohya_like import app
from kohya_like.data_room import room as rooms
from kohya_like.data_room.captions import rewritten
from kohya_like.tabs.train import TrainTab
from sd_scripts.dataset.caption_files import HISTORY, Book, CaptionChange, Words, read
from sd_scripts.library.data import views
from sd_scripts.schema.errors import OptionError

RUN = "sdxl/network"
EDIT_RUN = "qwen_edit/network"


class Opened:
    """A folder that the Data tab has open."""

    def __init__(self, root: Path, folder: Path, **values: Any) -> None:
        context = app.make_context(root / "output", [], is_private=True)
        texts = {"pretrained_model_name_or_path": "toy", "train_data_dir": str(folder), "resolution": "64", "min_bucket_reso": "32"}
        payload = {"run": RUN, "values": {**texts, "bucket_reso_steps": "16", **values}}
        self.options = TrainTab(context).options([payload])
        self.rooms = rooms.Rooms(context.output_dir)
        *told, self.page = list(self.rooms.open(self.options))
        self.room = self.rooms.find(self.page["room"])
        self.items = [item for line in told for item in line.get("items", ())]

    def texts(self) -> list[str | None]:
        return [read(file).text for file in self.room.files]

    def trained(self) -> list[str]:
        """Captions as training reads them now."""
        return [item["caption"] for line in self.rooms.open(self.options) for item in line.get("items", ())]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    (folder / "deep").mkdir(parents=True)
    for number in range(4):
        path = folder / ("deep" if number == 3 else "") / f"{number}.png"
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (70 + 9 * number, 100, 3), dtype=np.uint8)).save(path)
        if number:
            path.with_suffix(".txt").write_text(f"a cat, number {number}")
    return folder


def test_the_grid_has_what_training_cuts_and_tells(folder: Path, tmp_path: Path) -> None:
    opened = Opened(tmp_path, folder, instance_prompt="zwx")
    plan = opened.room.view.plan
    assert [item["name"] for item in opened.items] == ["0.png", "1.png", "2.png", "deep/3.png"]
    for index, item in enumerate(opened.items):
        cut = plan.cut(index, 0)
        left, top = views._place(plan, index, 0, 0, 0, "")
        shares = [left / cut.resized[0], top / cut.resized[1], cut.bucket[0] / cut.resized[0], cut.bucket[1] / cut.resized[1]]
        assert item["frame"] == shares and item["bucket"] == list(cut.bucket) and item["caption"] == plan.images[index].caption
    assert opened.items[0]["caption"] == "zwx" and rooms.image_of(opened.room, 0)["text"] is None
    assert opened.page["length"] == 75 and opened.page["fixed"] == ""


def test_texts_are_shown_as_training_shows_them(folder: Path, tmp_path: Path) -> None:
    opened = Opened(tmp_path, folder, shuffle_caption=True, keep_tokens="1", caption_prefix="photo of")
    (folder / "1.txt").write_text("zwx, a, b, c, d")
    shown = rooms.image_of(opened.room, 1)["shown"]
    assert len(shown) == 3 and all(sorted(text.split(", ")) == sorted(shown[0].split(", ")) for text in shown)
    assert all(text.startswith("photo of zwx") for text in shown)


def test_a_caption_is_written_beside_its_image_unless_somebody_else_was_there_before(folder: Path, tmp_path: Path) -> None:
    one, other = Opened(tmp_path, folder), Opened(tmp_path, folder)
    known = rooms.image_of(one.room, 1)["version"]
    assert rooms.write(one.room, 1, " a dog ", known)["text"] == "a dog"
    answer = rooms.write(other.room, 1, "a bird", known)
    assert answer["conflict"]["text"] == "a dog" and read(folder / "1.txt").text == "a dog"
    rooms.write(other.room, 1, "a bird", answer["conflict"]["version"])
    # Where there is none yet, and where one has become none.
    rooms.write(one.room, 0, "first", "none")
    assert rooms.write(other.room, 0, "second", "none")["conflict"]["text"] == "first"
    (folder / "2.txt").unlink()
    assert rooms.write(one.room, 2, "new", Words("a cat, number 2").version)["conflict"]["text"] is None
    assert one.trained() == ["first", "a bird", "", "a cat, number 3"]
    lines = [json.loads(line) for line in (folder / HISTORY).read_text().splitlines()]
    assert [(line["file"], line["before"], line["after"]) for line in lines] == [
        *(("1.txt", "a cat, number 1", "a dog"), ("1.txt", "a dog", "a bird"), ("0.txt", None, "first"))
    ]
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_of_many_who_write_at_once_one_wins_and_nothing_is_lost(folder: Path) -> None:
    book = Book(folder)
    file = folder / "1.txt"

    def add(number: int) -> None:
        while True:
            now = read(file)
            done, _ = book.write("edited", [CaptionChange(file, now.version, f"{now.text} {number}")])
            if done:
                return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(40)))
    assert sorted(map(int, str(read(file).text).split()[4:])) == list(range(40))


def test_orders_are_seen_before_they_are_done_and_can_be_taken_back(folder: Path, tmp_path: Path) -> None:
    opened = Opened(tmp_path, folder)
    everything = range(4)
    order = {"find": "CAT", "replace": "dog", "prefix": "zwx, "}
    seen = rooms.change(opened.room, everything, order, None)
    assert seen["count"] == 4 and seen["rows"][1] == {"index": 1, "before": "a cat, number 1", "after": "zwx, a dog, number 1"}
    assert read(folder / "1.txt").text == "a cat, number 1"
    (folder / "2.txt").write_text("written meanwhile")
    with pytest.raises(OptionError, match="since the preview"):
        rooms.change(opened.room, everything, order, seen["digest"])
    seen = rooms.change(opened.room, everything, order, None)
    done = rooms.change(opened.room, everything, order, seen["digest"])
    after = ["zwx,", "zwx, a dog, number 1", "zwx, written meanwhile", "zwx, a dog, number 3"]
    assert opened.texts() == after and done["texts"] == dict(enumerate(after))
    second = rooms.change(opened.room, [3], {"find": r"number (\d)", "replace": r"\1 of", "regex": True}, None)
    rooms.change(opened.room, [3], {"find": r"number (\d)", "replace": r"\1 of", "regex": True}, second["digest"])
    assert opened.texts()[3] == "zwx, a dog, 3 of"
    (folder / "1.txt").write_text("somebody else's")
    assert rooms.undo(opened.room)["texts"] == {3: "zwx, a dog, number 3"}
    back = rooms.undo(opened.room)
    assert (back["count"], back["others"]) == (3, 1)
    assert opened.texts() == [None, "somebody else's", "written meanwhile", "a cat, number 3"]
    assert rooms.undo(opened.room)["what"] == ""


@pytest.mark.parametrize("order", [{}, {"find": "(", "regex": True}, {"find": "a", "replace": r"\9", "regex": True}])
def test_an_order_that_cannot_be_understood_is_refused(order: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"regular expression|Say what to find"):
        rewritten(order)


def test_what_is_left_out_is_not_trained_and_comes_back_with_its_caption(folder: Path, tmp_path: Path) -> None:
    opened = Opened(tmp_path, folder)
    before = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    assert rooms.leave_out(opened.room, [1, 3]) == 2
    assert opened.trained() == ["", "a cat, number 2"] and not (folder / "1.txt").exists()
    again = Opened(tmp_path, folder)
    assert rooms.bring_back(again.room) == 2
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert opened.trained() == ["", *(f"a cat, number {number}" for number in (1, 2, 3))]


def test_copies_are_made_once_and_anew_for_a_file_that_has_changed(folder: Path, tmp_path: Path) -> None:
    opened = Opened(tmp_path, folder)
    made = opened.rooms.thumbnails
    first = made.small(folder / "0.png")
    (kept,) = made.folder.rglob("*.jpg")
    kept.write_bytes(b"kept")
    assert made.small(folder / "0.png") == b"kept" and first.startswith(b"\xff\xd8")
    Image.new("RGB", (600, 300), "red").save(folder / "0.png")
    with Image.open(next(path for path in made.folder.rglob("*.jpg") if path != kept) if made.small(folder / "0.png") else kept) as image:
        assert image.size == (256, 128)
    found = list(rooms.look_through(opened.room, made))[-1]
    assert found["same"] == found["near"] == [] and made.signs(folder / "1.png").hash == made.signs(folder / "1.png").hash


def test_an_image_that_is_trained_and_held_out_alike_is_named(folder: Path, tmp_path: Path) -> None:
    first = Image.open(folder / "0.png").convert("RGB")
    for number in range(6):
        # Each of these is there twice, so that a held-out one has a twin that is trained.
        first.rotate(60 * number, expand=True).save(folder / f"a{number}.png")
        first.rotate(60 * number, expand=True).save(folder / f"b{number}.png")
    opened = Opened(tmp_path, folder, validation_split="0.3")
    found = list(rooms.look_through(opened.room, opened.rooms.thumbnails))[-1]
    kinds = {index: item["kind"] for index, item in enumerate(opened.items)}
    wanted = [group for group in found["same"] if len({kinds[index] for index in group}) > 1]
    assert wanted and found["leaks"] == wanted and len(found["same"]) > len(wanted)
    assert list(rooms.look_through(Opened(tmp_path, folder).room, opened.rooms.thumbnails))[-1]["leaks"] == []


def test_an_edit_is_shown_beside_what_it_is_an_edit_of_and_a_missing_partner_is_named(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs"
    for part, names in (("target", ("a", "b", "lonely")), ("control", ("a", "b", "idle")), ("control_1", ("b",))):
        (pairs / part).mkdir(parents=True)
        for name in names:
            side = 64 if part == "target" else 80
            Image.new("RGB", (side, 64), "teal").save(pairs / part / f"{name}.png")
    (pairs / "target" / "a.txt").write_text("make it red")
    context = app.make_context(tmp_path / "output", [], is_private=True)
    values = {"pretrained_model_name_or_path": "toy", "train_data_dir": str(pairs), "resolution": "64", "min_bucket_reso": "32"}
    kept = rooms.Rooms(context.output_dir)
    page = list(kept.open(TrainTab(context).options([{"run": EDIT_RUN, "values": values}])))[-1]
    room = kept.find(page["room"])
    shown = {Path(item["name"]).stem: (index, item["controls"]) for index, item in enumerate(rooms.items_of(room))}
    assert {name: controls for name, (_, controls) in shown.items()} == {"a": [[80, 64]], "b": [[80, 64], [80, 64]]}
    index = shown["b"][0]
    assert room.shown(index) == pairs / "target" / "b.png"
    assert [room.shown(index, number) for number in ("0", "1")] == [pairs / "control" / "b.png", pairs / "control_1" / "b.png"]
    assert [room.shown(index, wrong) for wrong in ("2", "-1", "x", "٣")] + [room.shown(99)] == [None] * 5
    told = "\n".join(page["bad"] + page["notes"])
    assert "lonely" in told and "idle" in told, told


def test_captions_that_come_from_elsewhere_are_shown_and_not_written(tmp_path: Path, folder: Path) -> None:
    listed = tmp_path / "captions.json"
    listed.write_text(json.dumps({"1": {"caption": "listed"}}))
    opened = Opened(tmp_path, folder, in_json=str(listed))
    assert "captions.json" in opened.page["fixed"]
    with pytest.raises(OptionError, match=r"captions\.json"):
        rooms.write(opened.room, 0, "x", "none")


def test_beside_regularisation_images_in_a_folder_of_their_own_captions_are_written(tmp_path: Path) -> None:
    for folder in ("img/10_cat", "reg/1_pet"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (64, 64), (90 * number, 9, 9)).save(tmp_path / folder / f"{number}.png")
            (tmp_path / folder / f"{number}.txt").write_text(f"a cat, number {number}")
    opened = Opened(tmp_path, tmp_path / "img", reg_data_dir=str(tmp_path / "reg"))
    room = opened.room
    assert opened.page["fixed"] == opened.page["noMasks"] == ""
    places = {item["name"]: index for index, item in enumerate(opened.items)}
    assert {name: opened.items[index]["outside"] for name, index in places.items()} == {
        **{f"10_cat/{number}.png": False for number in range(2)},
        **{f"../reg/1_pet/{number}.png": True for number in range(2)},
    }
    inside, outside = places["10_cat/0.png"], places["../reg/1_pet/0.png"]
    assert rooms.write(room, inside, "a dog", Words("a cat, number 0").version)["text"] == "a dog"
    with pytest.raises(OptionError, match=r"lies outside of .*img; open the folder"):
        rooms.write(room, outside, "a dog", Words("a cat, number 0").version)
    # An order for all of them is for those that can be written.
    order = {"find": "a", "replace": "one"}
    seen = rooms.change(room, list(places.values()), order, None)
    assert seen["count"] == 2 and rooms.change(room, list(places.values()), order, seen["digest"])["count"] == 2
    assert rooms.leave_out(room, [inside, outside]) == 1
    assert (tmp_path / "reg/1_pet/0.png").is_file() and not (tmp_path / "img/10_cat/0.png").exists()
    assert (tmp_path / "reg/1_pet/0.txt").read_text() == "a cat, number 0"
