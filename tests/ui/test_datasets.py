"""Images that are added by HTTP, as the page sends them: what lands in a data set, what is left out, and that nothing is half."""

from __future__ import annotations

import io
import json
import socket
import struct
import time
import urllib.parse
import zipfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kohya_like import datasets
from kohya_like.datasets import Added, Datasets
from sd_scripts.dataset import scan
from sd_scripts.dataset.config import subsets_of
from sd_scripts.dataset.images import decode
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.model import Controls
from tests.full_disk import no_larger_than
from tests.ui.test_guard import ask, token_of


def jpeg(seed: int, comment: bytes = b"") -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, format="JPEG", comment=comment)
    return stream.getvalue()


def zipped(entries: Iterable[tuple[str, bytes]], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return stream.getvalue()


def asked(studio: Any, path: str, body: bytes) -> list[dict[str, Any]]:
    """What the studio answers, line by line."""
    status, _, answer = ask(studio, f"/kl/datasets/{path}", "POST", body, X_KL_Token=token_of(studio))
    assert status == 200, answer
    return [json.loads(line) for line in answer.splitlines()]


def begin(studio: Any, name: str) -> str:
    return str(asked(studio, "begin", json.dumps({"name": name}).encode())[0]["upload"])


def sent(studio: Any, upload: str, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        answer = asked(studio, f"upload?upload={upload}&file={urllib.parse.quote(name)}", data)
        assert "problem" not in answer[0], answer


def added(studio: Any, name: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    """The report of an upload."""
    upload = begin(studio, name)
    sent(studio, upload, files)
    return asked(studio, "finish", json.dumps({"upload": upload}).encode())[-1]


def names(studio: Any, name: str) -> set[str]:
    return {path.name for path in (studio.output_dir / "datasets" / name).iterdir()}


def test_images_captions_and_zips_land_flat_and_whatever_is_left_out_is_named(studio: Any) -> None:
    archive = zipped(
        [
            ("one/a.jpg", jpeg(1, b"Ada")),
            ("one/a.txt", b"first"),
            ("two/deep/a.jpg", jpeg(2)),
            ("two/deep/a.txt", b"second"),
            ("../../../etc/b.JPG", jpeg(3)),
            ("C:\\windows\\c?.jpg", jpeg(4)),
            ("__MACOSX/._a.jpg", b"x"),
            ("one/.hidden.jpg", jpeg(5)),
            ("inner.zip", zipped([("z.jpg", jpeg(6))])),
            ("run.sh", b"rm -rf /"),
            ("one/alone.txt", b"nobody's"),
        ]
    )
    report = added(
        studio,
        "mixed",
        {
            "photos/d.jpg": jpeg(7),
            "photos/d.txt": b"a dog",
            "e.heic": b"\0\0\0\x18ftypheic" + bytes(60),
            "broken.jpg": jpeg(8)[:200],
            "text.png": b"not an image",
            "notes.pdf": b"%PDF",
            "all.zip": archive,
            "torn.zip": archive[: len(archive) // 2],
        },
    )
    assert names(studio, "mixed") == {"d.jpg", "d.txt", "a.jpg", "a.txt", "a-2.jpg", "a-2.txt", "b.jpg", "c.jpg"}
    folder = studio.output_dir / "datasets" / "mixed"
    assert report["folder"] == str(folder)
    for name, seed, text in (("a", 1, "first"), ("a-2", 2, "second"), ("d", 7, "a dog")):
        (folder / "expected").write_bytes(jpeg(seed))
        assert np.array_equal(decode(folder / f"{name}.jpg").rgb, decode(folder / "expected").rgb)
        assert (folder / f"{name}.txt").read_text() == text
    (folder / "expected").unlink()
    assert b"Ada" not in (folder / "a.jpg").read_bytes()
    assert (report["images"], report["captions"], report["there"], report["renamed"]) == (5, 3, 0, 1)
    left = {name: why for why, given in report["left_out"].items() for name in given}
    assert set(left) == {
        *("e.heic", "broken.jpg", "text.png", "notes.pdf", "torn.zip", "all.zip: __MACOSX/._a.jpg", "all.zip: one/.hidden.jpg"),
        *("all.zip: inner.zip", "all.zip: run.sh", "all.zip: one/alone.txt"),
    }
    assert "pillow-heif" in left["e.heic"] and "damaged" in left["broken.jpg"] and "not an image" in left["text.png"]
    assert (
        "no zip" in left["torn.zip"] and "inside" in left["all.zip: inner.zip"] and "no image of its name" in left["all.zip: one/alone.txt"]
    )


def test_a_second_upload_adds_and_never_writes_over_anything(studio: Any) -> None:
    added(studio, "twice", {"a.jpg": jpeg(1), "a.txt": b"one", "b.jpg": jpeg(2)})
    (studio.output_dir / "datasets" / "twice" / "a.txt").write_text("edited by hand")
    before = {name: (studio.output_dir / "datasets" / "twice" / name).read_bytes() for name in names(studio, "twice")}
    report = added(studio, "twice", {"a.jpg": jpeg(1), "a.txt": b"one", "b.jpg": jpeg(3), "b.txt": b"another", "B.png": jpeg(4)})
    assert names(studio, "twice") == {"a.jpg", "a.txt", "b.jpg", "b-2.jpg", "b-2.txt", "B-3.png"}
    assert (report["images"], report["captions"], report["there"], report["renamed"]) == (2, 1, 1, 2)
    assert [why for why in report["left_out"] if "another caption" in why]
    assert all((studio.output_dir / "datasets" / "twice" / name).read_bytes() == data for name, data in before.items())
    again = added(studio, "twice", {"b.jpg": jpeg(3), "b.txt": b"another"})
    assert (again["images"], again["there"]) == (0, 2), "found under the number it got"
    assert added(studio, "twice", {"b.txt": b"late"})["captions"] == 1
    assert (studio.output_dir / "datasets" / "twice" / "b.txt").read_text() == "late", "beside the image that has none"


LAYOUTS = {
    "target and control": {"e/target/a.jpg": 1, "e/target/a.txt": 0, "e/control/a.jpg": 2},
    "after and before": {"edits/After/a.jpg": 1, "edits/After/a.txt": 0, "edits/Before/a.jpg": 2},
    "an instruction beside the image before": {"output/a.jpg": 1, "input/a.jpg": 2, "input/a.txt": 0},
    "words at the end": {"e/a_after.jpg": 1, "e/a.txt": 0, "e/a_before.jpg": 2},
    "marks": {"a.jpg": 1, "a.txt": 0, "a_control.jpg": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_edit_pairs_stay_pairs_in_every_layout(layout: str, studio: Any) -> None:
    def files(first: int) -> dict[str, bytes]:
        return {name: jpeg(first + seed) if seed else b"make it red" for name, seed in LAYOUTS[layout].items()}

    name = f"pairs {layout}"
    report = added(studio, name, files(0))
    assert names(studio, name) == {"a.jpg", "a.txt", "a_control.jpg"}
    assert (report["images"], report["captions"], report["pairs"], report["left_out"]) == (2, 1, 1, {})
    # Another pair of this name keeps its two images together, and the same one is not taken again.
    report = added(studio, name, files(10))
    assert names(studio, name) == {"a.jpg", "a.txt", "a_control.jpg", "a-2.jpg", "a-2.txt", "a-2_control.jpg"}
    assert (report["pairs"], report["renamed"]) == (1, 1)
    assert added(studio, name, files(10)) | {"folder": ""} == {**vars(Added(there=3)), "folder": ""}
    folder = studio.output_dir / "datasets" / name
    found = scan.scan(subsets_of(DatasetOptions(train_data_dir=str(folder)), folder), folder / "cache", controls=Controls(1, 1, "it"))
    assert [(image.name, image.caption, *[Path(control.path).name for control in image.controls]) for image in found.images] == [
        ("a-2.jpg", "make it red", "a-2_control.jpg"),
        ("a.jpg", "make it red", "a_control.jpg"),
    ]


def test_images_before_an_edit_without_a_partner_are_named_and_what_comes_later_joins_its_image(studio: Any) -> None:
    report = added(
        studio, "parts", {"x/after/a.jpg": jpeg(1), "x/before/a.jpg": jpeg(2), "x/before/b.jpg": jpeg(3), "x/masks/a.png": jpeg(4)}
    )
    assert names(studio, "parts") == {"a.jpg", "a_control.jpg", "a-masklabel.png"}
    ((why, left),) = report["left_out"].items()
    assert left == ["x/before/b.jpg"] and "no image of its name" in why
    assert added(studio, "parts", {"a.jpg": jpeg(1), "a_control_2.jpg": jpeg(5), "a_control.jpg": jpeg(2)})["there"] == 2
    assert names(studio, "parts") == {"a.jpg", "a_control.jpg", "a_control_2.jpg", "a-masklabel.png"}
    # Folders of these names in which nothing belongs together, and an image with a caption of its own, are images as others.
    assert (
        added(studio, "others", {"before/a.jpg": jpeg(1), "after/b.jpg": jpeg(2), "b_mask.jpg": jpeg(3), "b_mask.txt": b"a mask"})["images"]
        == 3
    )
    assert names(studio, "others") == {"a.jpg", "b.jpg", "b_mask.jpg", "b_mask.txt"}


@pytest.mark.parametrize(
    ("archive_of", "why"),
    [
        (lambda: zipped([("a.bmp", bytes(80 << 20))]), "times its size"),
        (lambda: zipped([("a.jpg", bytes(300 << 20))]), "MiB is the most"),
        (lambda: b"PK\3\4 nothing", "no zip that can be read"),
        (lambda: zipped([(f"{number}.jpg", b"") for number in range(20_001)], zipfile.ZIP_STORED), "20001 entries"),
        (lambda: zipped([("n" * 400 + f"{number}.jpg", b"") for number in range(20_000)], zipfile.ZIP_STORED), "list of entries is larger"),
    ],
    ids=["bomb", "large", "damaged", "entries", "list"],
)
def test_a_zip_that_would_fill_the_disk_or_the_memory_is_refused_in_a_sentence(
    studio: Any, archive_of: Callable[[], bytes], why: str
) -> None:
    report = added(studio, "bomb", {"all.zip": archive_of()})
    assert any(why in reason for reason in report["left_out"]), report
    assert report["folder"] == "" and not (studio.output_dir / "datasets" / "bomb").exists()


def test_entries_that_lie_are_damaged_or_locked_are_left_out_alone(studio: Any) -> None:
    whole = zipped([("a.jpg", jpeg(1)), ("b.jpg", jpeg(2)), ("c.jpg", jpeg(3))], zipfile.ZIP_STORED)
    # In the list: another checksum for a, a password for b.
    places = [place for place in range(len(whole)) if whole.startswith(b"PK\1\2", place)]
    torn = bytearray(whole)
    torn[places[0] + 16] ^= 1
    torn[places[1] + 8] |= 1
    report = added(studio, "partly", {"all.zip": bytes(torn)})
    assert names(studio, "partly") == {"c.jpg"}
    # In words of the page's, which are translated; zipfile's own are not.
    assert report["left_out"] == {"is damaged in the zip": ["all.zip: a.jpg"], "is protected by a password": ["all.zip: b.jpg"]}
    lying = bytearray(zipped([("a.jpg", jpeg(1))]))
    place = lying.index(b"PK\1\2")
    struct.pack_into("<I", lying, place + 24, 10)
    assert added(studio, "lying", {"all.zip": bytes(lying)})["images"] == 0


def test_a_zip_of_a_kind_that_cannot_be_read_is_left_out_in_the_words_of_the_page(studio: Any) -> None:
    whole = zipped([("a.jpg", jpeg(1)), ("b.jpg", jpeg(2))], zipfile.ZIP_STORED)
    entry = whole.index(b"PK\1\2")
    deflate64, newer = bytearray(whole), bytearray(whole)
    # How a is packed, as its header and the list say it; the version of the format that is needed to read a.
    for place in (8, entry + 10):
        struct.pack_into("<H", deflate64, place, 9)
    struct.pack_into("<H", newer, entry + 6, 99)
    report = added(
        studio, "kinds", {"deflate64.zip": bytes(deflate64), "newer.zip": bytes(newer), "torn.zip": whole[:-9], "no.zip": b"none"}
    )
    assert names(studio, "kinds") == {"b.jpg"}
    method = "is packed by a method that cannot be read here; pack it as zip with Deflate"
    assert report["left_out"] == {method: ["deflate64.zip: a.jpg"], "is no zip that can be read": ["newer.zip", "torn.zip", "no.zip"]}


@pytest.mark.long
def test_thousands_of_entries_come_with_progress(studio: Any) -> None:
    archive = zipped(((f"{number % 7}/{number // 7}.jpg", jpeg(number % 50)) for number in range(5000)), zipfile.ZIP_STORED)
    upload = begin(studio, "many")
    sent(studio, upload, {"all.zip": archive})
    lines = asked(studio, "finish", json.dumps({"upload": upload}).encode())
    assert lines[-1]["images"] == len(names(studio, "many")) == 5000 and lines[-1]["left_out"] == {}
    told = [line["done"] for line in lines[:-1]]
    assert len(told) > 100 and told == sorted(told) and {line["of"] for line in lines[:-1]} == {5001}


def test_an_upload_that_is_cancelled_or_breaks_off_leaves_nothing(studio: Any) -> None:
    waiting = studio.output_dir / "datasets" / ".adding"
    upload = begin(studio, "gone")
    sent(studio, upload, {"a.jpg": jpeg(1)})
    body = b"POST /kl/datasets/upload?upload=%s&file=b.jpg HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nX-KL-Token: %s\r\n"
    body += b"Content-Length: 1000\r\n\r\nhalf"
    with socket.create_connection(("127.0.0.1", studio.port)) as line:
        line.sendall(body % (upload.encode(), studio.port, token_of(studio).encode()))
        while len(list((waiting / upload).iterdir())) < 2:
            time.sleep(0.02)
    while len(list((waiting / upload).iterdir())) > 1:
        time.sleep(0.02)
    asked(studio, "cancel", json.dumps({"upload": upload}).encode())
    assert not (waiting / upload).exists() and not (studio.output_dir / "datasets" / "gone").exists()
    assert "add the images again" in asked(studio, "finish", json.dumps({"upload": upload}).encode())[0]["problem"]
    assert "add the images again" in asked(studio, f"upload?upload={upload}&file=c.jpg", b"x")[0]["problem"]


def test_two_pages_at_once_add_to_one_data_set_and_no_caption_changes_its_image(studio: Any) -> None:
    def one(page: int) -> dict[str, Any]:
        files = {f"{number}.jpg": jpeg(1000 * page + number) for number in range(20)}
        return added(studio, "both", {**files, **{f"{number}.txt": f"{page} {number}".encode() for number in range(20)}})

    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(one, range(4)))
    assert [report["images"] for report in reports] == [20] * 4 and len(names(studio, "both")) == 160
    folder = studio.output_dir / "datasets" / "both"
    for path in folder.glob("*.txt"):
        page, number = map(int, path.read_text().split())
        (folder.parent / "expected.jpg").write_bytes(jpeg(1000 * page + number))
        assert np.array_equal(decode(path.with_suffix(".jpg")).rgb, decode(folder.parent / "expected.jpg").rgb)


@pytest.mark.parametrize(("name", "sentence"), [("", "Give the data set a name"), ("..", "choose another name"), ("link", "is a link")])
def test_names_of_data_sets_stay_in_their_folder(name: str, sentence: str, tmp_path: Path) -> None:
    kept = Datasets(tmp_path)
    kept.root.mkdir()
    (kept.root / "link").symlink_to(tmp_path)
    with pytest.raises(OptionError, match=sentence):
        kept.begin(name)
    assert kept.begin("../../out") and kept.names() == []
    assert {path.name for path in tmp_path.iterdir()} == {"datasets"}


def test_a_full_disk_is_said_and_leaves_the_data_set_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Datasets(tmp_path)
    ident = kept.begin("cat")
    upload = kept.find(ident)
    for number in range(3):
        path = upload.folder / f"given{number}"
        path.write_bytes(jpeg(number))
        upload.arrived.append((f"{number}.jpg", path))
    (upload.folder / "zip").write_bytes(zipped([("large.bmp", np.random.default_rng(0).bytes(60_000))]))
    upload.arrived.append(("a.zip", upload.folder / "zip"))
    with no_larger_than(20_000):
        last = list(kept.finish(ident))[-1]
    assert "is full" in last["problem"] and "Images of this upload that were added: 0." in last["problem"]
    assert not (kept.root / "cat").exists() and list((kept.root / ".adding").iterdir()) == []
    monkeypatch.setattr(datasets, "FREE_BYTES", 1 << 60)
    with pytest.raises(OptionError, match=r"GiB free; .* stays free for trainings. Make room"):
        kept.check_room(kept.find(kept.begin("cat")), 5)


def test_what_was_left_behind_a_day_ago_is_swept_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Datasets(tmp_path)
    kept.begin("old")
    monkeypatch.setattr(datasets, "KEEP_WAITING_SECONDS", -1.0)
    ident = kept.begin("new")
    assert [path.name for path in (kept.root / ".adding").iterdir()] == [ident]


def test_folders_with_repeats_are_kept_and_read_as_such_and_others_are_made_flat(studio: Any, tmp_path: Path) -> None:
    files = {
        "project/img/10_ohwx, man/a.jpg": jpeg(1),
        "project/img/10_ohwx, man/deep/a.jpg": jpeg(2),
        "project/img/010_ohwx, man/b.jpg": jpeg(3),
        "project/img/2_cat/a.jpg": jpeg(4),
        "project/img/2_cat/a.txt": b"a cat",
        "project/reg/1_man/a.jpg": jpeg(5),
        "2024_summer/c.jpg": jpeg(6),
        "0_off/d.jpg": jpeg(7),
    }
    report = added(studio, "kohya", files)
    folder = studio.output_dir / "datasets" / "kohya"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.*")} == {
        *("10_ohwx, man/a.jpg", "10_ohwx, man/a-2.jpg", "10_ohwx, man/b.jpg", "2_cat/a.jpg", "2_cat/a.txt", "c.jpg", "d.jpg")
    }
    assert (report["images"], report["captions"], report["renamed"]) == (6, 1, 1)
    assert report["left_out"] == {
        "is a regularisation image; add the folder of those as a data set of its own": ["project/reg/1_man/a.jpg"]
    }
    assert [note.startswith("2 of its images lie in no folder with repeats") for note in report["notes"]] == [True]
    assert added(studio, "kohya", {"x/10_ohwx, man/b.jpg": jpeg(3)})["there"] == 1
    options = DatasetOptions(train_data_dir=str(folder))
    found = scan.scan(subsets_of(options, tmp_path), tmp_path)
    shown = {
        (item.repeats, item.class_tokens, sum(image.subset == number for image in found.images))
        for number, item in enumerate(found.subsets)
    }
    assert shown == {(10, "ohwx, man", 3), (2, "cat", 1)}
    # Regularisation images alone are what somebody wants to add.
    assert added(studio, "regular", {"reg/1_man/a.jpg": jpeg(5)})["left_out"] == {} and names(studio, "regular") == {"1_man"}
    (folder / "3_out").symlink_to(tmp_path)
    upload = begin(studio, "kohya")
    sent(studio, upload, {"3_out/a.jpg": jpeg(1)})
    assert "is a link or a file" in asked(studio, "finish", json.dumps({"upload": upload}).encode())[-1]["problem"]
    assert not list(tmp_path.glob("*.jpg"))
