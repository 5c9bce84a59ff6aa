"""Scanning real files on disk: what is found, what is remembered, what is refused, and how much it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import skimage
from PIL import Image

from sd_scripts.dataset import scan as scanning
from sd_scripts.dataset import verify as verifying
from sd_scripts.dataset.config import Subset, Subsets, subsets_of
from sd_scripts.dataset.plan import make_plan
from sd_scripts.dataset.progress import Bars
from sd_scripts.dataset.scan import Dataset, identity_of, read_dataset, scan, verify
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError


def image(path: Path, size: tuple[int, int] = (40, 30), caption: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(len(path.name)).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def scanned(tmp_path: Path, **options: object) -> Dataset:
    wanted = DatasetOptions(**{"train_data_dir": str(tmp_path / "data"), **options})
    return scan(subsets_of(wanted, tmp_path / "cache"), tmp_path / "cache")


def captions(dataset: Dataset) -> dict[str, str]:
    return {item.name: item.caption for item in dataset.images}


def test_a_plain_folder_is_read_with_its_folders_but_not_hidden_ones(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPG", "sub/c.webp", "sub/deeper/d.bmp", ".hidden/e.png", "note.txt"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x") if name.endswith("txt") else image(path)
    assert [item.name for item in scanned(tmp_path).images] == ["a.JPG", "b.png", "sub/c.webp", "sub/deeper/d.bmp"]


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_metadata_at_the_root_names_images_in_the_folders_below(tmp_path: Path, name: str) -> None:
    plain, kohya, above = tmp_path / "data", tmp_path / "kohya", {"a.png": "top", "x/b.png": "below", "x/y/c.png": "deep", "x/e.png": "far"}
    for image_name in (*above, "x/d.png"):
        image(plain / image_name)
    image(kohya / "2_sks dog" / "a.png")
    image(kohya / "2_sks dog" / "b.png")

    def write(folder: Path, entries: dict[str, str]) -> None:
        lines = [json.dumps({"file_name": key, "text": text}) for key, text in entries.items()]
        rows = ["file_name,text", *(f'{key},"{text}"' for key, text in entries.items())]
        (folder / name).write_text("\n".join(lines if name.endswith("jsonl") else rows) + "\n", encoding="utf-8")

    write(plain, above)
    write(plain / "x", {"e.png": "near"})
    write(kohya, {"2_sks dog/a.png": "named"})
    texts = {"a.png": "top", "x/b.png": "below", "x/y/c.png": "deep", "x/d.png": "", "x/e.png": "near"}
    assert captions(scanned(tmp_path)) == texts
    assert captions(scanned(tmp_path, train_data_dir=str(kohya))) == {"a.png": "named", "b.png": "sks dog"}
    (plain / "metadata.csv").write_text("id;score\n1;2\n")
    odd = scanned(tmp_path)
    assert len(odd.images) == 5 and any("metadata.csv is not read" in text for text in odd.warnings)


def test_captions_made_for_ai_toolkit_are_read(tmp_path: Path) -> None:
    for folder in ("data", "own/3_zwx cat"):
        root = tmp_path / folder
        image(root / "a.png", caption="a photo of [trigger], [trigger] sleeps")
        image(root / "b.png").with_suffix(".json").write_text('{"caption": "[trigger] in a box", "caption_short": "box"}')
        image(root / "c.png").with_suffix(".json").write_text('{"likes": 7}')
        image(root / "d.png", caption="from txt").with_suffix(".json").write_text('"from json"')
        image(root / "e.png").with_suffix(".json").write_text('{"tags": ["one", "two"]}')
    own = scanned(tmp_path, train_data_dir=str(tmp_path / "own"))
    assert captions(own) == {
        "a.png": "a photo of zwx cat, zwx cat sleeps",
        "b.png": "zwx cat in a box",
        "c.png": "zwx cat",
        "d.png": "from txt",
        "e.png": "one, two",
    }
    nameless = scanned(tmp_path)
    assert captions(nameless)["b.png"] == "in a box" and captions(nameless)["c.png"] == ""
    assert any("2 images" in text and "[trigger]" in text for text in nameless.warnings)
    assert captions(scanned(tmp_path, instance_prompt="ohwx"))["b.png"] == "ohwx in a box"
    named = scanned(tmp_path, caption_extension=".json")
    assert [Path(bad.path).name for bad in named.bad] == ["c.png"] and captions(named)["d.png"] == "from json"


def test_captions_come_from_the_nearest_source(tmp_path: Path) -> None:
    root = tmp_path / "data" / "3_sks dog"
    image(root / "a.png", caption="  from txt\n")
    image(root / "b.png").with_suffix(".caption").write_text("from caption")
    image(root / "c.png")
    image(root / "d.png")
    image(root / "e.png", caption="")
    (root / "metadata.jsonl").write_text('{"file_name": "c.png", "text": "from jsonl"}\n{"file_name": "a.png", "text": "not this"}\n')
    dataset = scanned(tmp_path)
    assert captions(dataset) == {"a.png": "from txt", "b.png": "from caption", "c.png": "from jsonl", "d.png": "sks dog", "e.png": ""}
    assert dataset.subsets[0].repeats == 3


def test_another_caption_extension_with_or_without_its_dot(tmp_path: Path) -> None:
    image(tmp_path / "data" / "a.png").with_suffix(".tags").write_text("tags")
    assert captions(scanned(tmp_path, caption_extension="tags")) == {"a.png": "tags"}
    assert captions(scanned(tmp_path, caption_extension=".tags")) == {"a.png": "tags"}


def test_a_caption_in_another_encoding_is_named(tmp_path: Path) -> None:
    image(tmp_path / "data" / "a.png").with_suffix(".txt").write_bytes("größe".encode("latin-1"))
    image(tmp_path / "data" / "b.png").with_suffix(".txt").write_bytes("\ufeffwith mark".encode())
    dataset = scanned(tmp_path)
    assert captions(dataset) == {"b.png": "with mark"}
    assert "caption file that cannot be read as UTF-8" in dataset.bad[0].reason


def test_metadata_files_choose_the_images_and_join_caption_and_tags(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "sub/c.png", "unused.png"):
        image(tmp_path / "data" / name, caption="sidecar")
    lines = [
        {"file_name": "a.png", "caption": "cap", "tags": "x, y"},
        {"file_name": "./sub/c.png", "tags": ["p", "q"]},
        {"file_name": "b.png", "text": "text"},
        {"file_name": "lost.png", "text": "gone"},
    ]
    jsonl = tmp_path / "meta.jsonl"
    jsonl.write_text("\n".join(map(json.dumps, lines)))
    dataset = scanned(tmp_path, in_json=str(jsonl))
    assert captions(dataset) == {"a.png": "cap, x, y", "b.png": "text", "sub/c.png": "p, q"}
    assert [Path(bad.path).name for bad in dataset.bad] == ["lost.png"]
    kohya = tmp_path / "meta.json"
    kohya.write_text(json.dumps({"a": {"caption": "by stem"}, "b.png": {"caption": "by name"}}))
    assert captions(scanned(tmp_path, in_json=str(kohya))) == {"a.png": "by stem", "b.png": "by name"}


def test_broken_metadata_gives_every_line_a_sentence(tmp_path: Path) -> None:
    image(tmp_path / "data" / "a.png")
    jsonl = tmp_path / "meta.jsonl"
    jsonl.write_text('{"file_name": "a.png", "text": 5}\nnot json\n{"text": "no name"}\n[1]\n')
    with pytest.raises(OptionError) as caught:
        scanned(tmp_path, in_json=str(jsonl))
    assert len(caught.value.problems) == 4
    assert "line 2 is not valid JSON" in str(caught.value)


def test_masks_are_found_by_name(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "sub/c.png"):
        image(tmp_path / "data" / name)
    image(tmp_path / "masks" / "a.jpg")
    image(tmp_path / "masks" / "c.png")
    dataset = scanned(tmp_path, masked_loss=True, conditioning_data_dir=str(tmp_path / "masks"))
    assert {item.name: Path(item.mask).name if item.mask else "" for item in dataset.images} == {
        "a.png": "a.jpg",
        "b.png": "",
        "sub/c.png": "c.png",
    }
    assert any("1 image in" in warning and "have no mask" in warning for warning in dataset.warnings)


def test_sizes_are_those_of_the_upright_image(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6
    (tmp_path / "data").mkdir()
    Image.new("RGB", (50, 20)).save(tmp_path / "data" / "a.jpg", exif=exif)
    assert [(item.width, item.height) for item in scanned(tmp_path).images] == [(20, 50)]


def make_bad(folder: Path) -> set[str]:
    image(folder / "good.png")
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.png").write_text("not an image")
    whole = image(folder / "cut.png", (200, 200)).read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    whole = image(folder / "cut.jpg", (200, 200)).read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    return {"empty.jpg", "text.png", "cut.png", "cut.jpg"}


def test_reasons_in_an_index_that_quote_decoders_are_found_anew(tmp_path: Path) -> None:
    make_bad(tmp_path / "data")
    path = tmp_path / "data" / "text.png"
    index = scanning.Index(scanning.index_file(tmp_path / "cache"))
    index.put(str(path), scanning.stat_of(str(path)), reason="is truncated or damaged (Truncated File Read)")
    index.close()
    options = DatasetOptions(train_data_dir=str(path.parent))
    reasons = {bad.path: bad.reason for bad in scan(subsets_of(options, tmp_path / "cache"), tmp_path / "cache").bad}
    assert reasons[str(path)].startswith("is not an image")


def test_all_broken_images_are_listed_before_stopping(tmp_path: Path) -> None:
    bad = make_bad(tmp_path / "data")
    options = DatasetOptions(train_data_dir=str(tmp_path / "data"))
    for _ in range(2):  # the second time from the index
        with pytest.raises(OptionError) as caught:
            read_dataset(options, tmp_path / "cache")
        text = str(caught.value)
        assert "4 images cannot be read" in text and "on_bad_image = skip" in text
        assert all(name in text for name in bad)
        assert "good.png" not in text


def test_broken_images_are_skipped_with_a_warning_when_asked(tmp_path: Path) -> None:
    bad = make_bad(tmp_path / "data")
    dataset = read_dataset(DatasetOptions(train_data_dir=str(tmp_path / "data"), on_bad_image="skip"), tmp_path / "cache")
    assert [item.name for item in dataset.images] == ["good.png"]
    assert {Path(item.path).name for item in dataset.bad} == bad
    assert all(any(name in warning for warning in dataset.warnings) for name in bad)


def test_a_split_that_holds_out_all_that_can_be_read_is_a_sentence(tmp_path: Path) -> None:
    make_bad(tmp_path / "data")
    options = DatasetOptions(train_data_dir=str(tmp_path / "data"), on_bad_image="skip", validation_split=0.5)
    with pytest.raises(OptionError, match=r"no image is left to train on \(held out: 1, cannot be read: 4\)"):
        make_plan(read_dataset(options, tmp_path / "cache"), options, seed=0, grid=8)


def test_when_nothing_can_be_read_skipping_does_not_help(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_text("no")
    with pytest.raises(OptionError, match="none of the images can be read"):
        read_dataset(DatasetOptions(train_data_dir=str(tmp_path / "data"), on_bad_image="skip"), tmp_path / "cache")


def test_a_replaced_broken_image_is_good_again(tmp_path: Path) -> None:
    path = tmp_path / "data" / "a.png"
    path.parent.mkdir()
    path.write_bytes(b"")
    options = DatasetOptions(train_data_dir=str(tmp_path / "data"))
    with pytest.raises(OptionError):
        read_dataset(options, tmp_path / "cache")
    image(path)
    assert read_dataset(options, tmp_path / "cache").images[0].identity == identity_of(path)


def test_a_folder_without_images_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(OptionError, match="no images in"):
        scanned(tmp_path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts how often files are opened for their header and decoded whole."""
    counts = {"header": 0, "decoded": 0}

    def counting(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            counts[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(scanning, "read_size", counting("header", scanning.read_size))
    monkeypatch.setattr(verifying, "decode", counting("decoded", verifying.decode))
    return counts


def test_a_second_scan_opens_nothing_and_finds_changes(tmp_path: Path, calls: dict[str, int]) -> None:
    for index in range(6):
        image(tmp_path / "data" / f"{index}.png", caption=f"caption {index}")
    options = DatasetOptions(train_data_dir=str(tmp_path / "data"))
    first = read_dataset(options, tmp_path / "cache")
    assert calls == {"header": 6, "decoded": 6}
    assert read_dataset(options, tmp_path / "cache") == first
    assert calls == {"header": 6, "decoded": 6}
    image(tmp_path / "data" / "3.png", (64, 48), caption="new caption")
    second = read_dataset(options, tmp_path / "cache")
    assert calls == {"header": 7, "decoded": 7}
    changed = [new for old, new in zip(first.images, second.images) if old != new]
    assert [(item.name, item.width, item.caption) for item in changed] == [("3.png", 64, "new caption")]


def test_a_damaged_index_only_costs_a_new_scan(tmp_path: Path, caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests) -> None:
    for number in range(40):
        image(tmp_path / "data" / f"{number}.png", caption=f"a caption of image {number}")
    options = DatasetOptions(train_data_dir=str(tmp_path / "data"))
    first = read_dataset(options, tmp_path / "cache")
    index = scanning.index_file(tmp_path / "cache")
    whole = index.read_bytes()
    assert len(whole) > 8192, "the damage must meet a page of rows"
    for name, harmed in damaged(whole).items():
        with subtests.test(msg=name):
            caplog.clear()
            index.write_bytes(harmed)
            assert read_dataset(options, tmp_path / "cache") == first
            # Damage to nothing but the content of a row is found by its checksum: that row alone is read again.
            assert name == "a caption" or "index.sqlite is damaged" in caplog.text
            assert read_dataset(options, tmp_path / "cache") == first


def damaged(whole: bytes) -> dict[str, bytes]:
    """A file of sqlite with damage of several kinds."""
    found = {
        f"{name} from {start}": whole[:start] + content + whole[start + len(content) :]
        for start in (0, 4096)
        for name, content in {"zeros": bytes(200), "ones": b"\xff" * 200}.items()
    }
    return found | {
        "something else": b"not a database at all" * 100,
        "half": whole[: len(whole) // 2],
        "other tables": whole.replace(b"mtime_ns", b"mtime_mx"),
        "a caption": whole.replace(b"caption of image 7", b"Caption of image 7"),
        "no text": whole.replace(b"caption of image 7", b"\xff" * 20),
    }


def test_an_unusable_cache_folder_is_a_sentence(tmp_path: Path) -> None:
    image(tmp_path / "data" / "a.png")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OptionError, match="cache_dir"):
        read_dataset(DatasetOptions(train_data_dir=str(tmp_path / "data")), tmp_path / "file")


def test_equal_images_have_one_identity_and_a_broken_mask_names_its_image(tmp_path: Path) -> None:
    one = image(tmp_path / "data" / "a.png")
    (tmp_path / "data" / "b.png").write_bytes(one.read_bytes())
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "b.png").write_bytes(b"")
    options = DatasetOptions(train_data_dir=str(tmp_path / "data"))
    dataset = read_dataset(options, tmp_path / "cache")
    assert dataset.images[0].identity == dataset.images[1].identity != ""
    masked = options.model_copy(update={"masked_loss": True, "conditioning_data_dir": str(tmp_path / "masks")})
    found = verify(scan(Subsets((Subset(tmp_path / "data", masked),)), tmp_path / "cache"), tmp_path / "cache")
    assert [Path(bad.path).name for bad in found.bad] == ["b.png"] and "mask" in found.bad[0].reason


def test_progress_ends_with_everything_done(tmp_path: Path) -> None:
    for index in range(45):
        image(tmp_path / "data" / f"{index}.png")
    seen: list[tuple[str, int, int]] = []
    with Bars(lambda *call: seen.append(call), shown=False) as bars:
        read_dataset(DatasetOptions(train_data_dir=str(tmp_path / "data")), tmp_path / "cache", bars)
    assert ("scan", 45, 45) in seen and seen[-1] == ("verify", 45, 45)


def test_the_photographs_of_scikit_image_are_read(tmp_path: Path) -> None:
    source = Path(skimage.__file__).parent / "data"
    folder = tmp_path / "data" / "1_photo"
    folder.mkdir(parents=True)
    names = [path.name for path in source.iterdir() if path.suffix in (".png", ".jpg", ".gif")]
    for name in names:
        (folder / name).write_bytes((source / name).read_bytes())
    dataset = read_dataset(DatasetOptions(train_data_dir=str(tmp_path / "data")), tmp_path / "cache")
    assert len(dataset.images) == len(names) >= 20
    assert {item.name: (item.width, item.height) for item in dataset.images}["astronaut.png"] == (512, 512)


SCAN_IN_A_PROCESS = """
import json, sys
from pathlib import Path
from sd_scripts.dataset.config import subsets_of
from sd_scripts.dataset.plan import make_plan
from sd_scripts.dataset.scan import scan
from sd_scripts.schema.dataset import DatasetOptions
def peak_mib():
    # ru_maxrss would count the process that started us, from before exec.
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 1024
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
options = DatasetOptions(train_data_dir=sys.argv[1], enable_bucket=True)
def read_bytes():
    account = Path("/proc/self/io")
    return int(account.read_text().split()[1]) if account.exists() else 0
before = read_bytes()
dataset = scan(subsets_of(options, Path(sys.argv[2])), Path(sys.argv[2]))
read = read_bytes() - before
plan = make_plan(dataset, options, seed=1, grid=8, batch_size=4)
for step in range(0, 20000, 7):
    plan.global_batch(step)
print(json.dumps({"images": len(dataset.images), "read": read, "mib": peak_mib()}))
"""


def generate(folder: Path, count: int) -> None:
    """Images of five kinds with captions; only headers matter here, so the pixels are few."""
    folder.mkdir(parents=True)
    exif = Image.Exif()
    exif[274] = 6
    kinds = []
    for index, (name, ending) in enumerate([("JPEG", "jpg"), ("PNG", "png"), ("JPEG", "jpg"), ("WEBP", "webp"), ("BMP", "bmp")]):
        path = folder / "kind"
        Image.new("RGB", (96 + 32 * index, 64 + 8 * index), (index, 2, 3)).save(path, name, exif=exif)
        kinds.append((ending, path.read_bytes()))
        path.unlink()
    for index in range(count):
        ending, content = kinds[index % 5]
        (folder / f"image_{index:06d}.{ending}").write_bytes(content)
        (folder / f"image_{index:06d}.txt").write_text(
            f"a photo of subject number {index}, outdoors, standing, looking at viewer, detailed\n"
        )


def measure(folder: Path, cache: Path) -> dict[str, float]:
    command = [sys.executable, "-c", SCAN_IN_A_PROCESS, str(folder), str(cache)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    return json.loads(done.stdout)


def check_cost(tmp_path: Path, count: int, mib: float) -> None:
    generate(tmp_path / "data", count)
    first = measure(tmp_path / "data", tmp_path / "cache")
    second = measure(tmp_path / "data", tmp_path / "cache")
    print(json.dumps({"first": first, "second": second}))
    assert first["images"] == second["images"] == count
    assert max(first["mib"], second["mib"]) < mib
    # How many a second that is, tests/bench/scan.py says. What is known is not read again, but looked up in one file.
    if Path("/proc/self/io").exists():
        assert first["read"] < 2048 * count and second["read"] < first["read"] / 3


def test_scanning_2_000_images_stays_small(tmp_path: Path) -> None:
    check_cost(tmp_path, 2_000, 90)


@pytest.mark.long
def test_scanning_20_000_images_stays_small(tmp_path: Path) -> None:
    check_cost(tmp_path, 20_000, 150)


@pytest.mark.long
def test_scanning_100_000_images_stays_small(tmp_path: Path) -> None:
    check_cost(tmp_path, 100_000, 300)
