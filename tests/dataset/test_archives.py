"""Images in webdataset and parquet files: what their rows become on the disk, and what is said where their reader is missing."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from PIL import Image

from sd_scripts.dataset import archives
from sd_scripts.dataset.config import subsets_of
from sd_scripts.dataset.scan import scan
from sd_scripts.families import RUNS
from sd_scripts.runs.early_checks import check_early
from sd_scripts.schema import flat
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError


def encoded(kind: str, colour: str = "red") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (64, 48), colour).save(stream, kind)
    return stream.getvalue()


def test_rows_become_images_with_captions_whose_names_lead_nowhere_else(tmp_path: Path) -> None:
    rows = [
        {"__key__": "../../out", "png": {"bytes": encoded("PNG"), "path": None}, "txt": "from txt ", "json": {"caption": "not this"}},
        {"image": {"bytes": encoded("JPEG"), "path": "/etc/x.jpg"}, "prompt": "from prompt"},
        {"id": 7, "text": "no image"},
        {"jpg": encoded("JPEG"), "json": {"caption": "from json"}},
        {"image": {"bytes": encoded("WEBP"), "path": None}, "tags": ["a", "b"]},
    ]
    folder = tmp_path / "data"
    folder.mkdir()
    assert archives.write_rows(rows, folder) == 4
    found = scan(subsets_of(DatasetOptions(train_data_dir=str(folder)), tmp_path / "cache"), tmp_path / "cache")
    assert {image.name: image.caption for image in found.images} == {
        "00000000.png": "from txt",
        "00000001.jpg": "from prompt",
        "00000003.jpg": "from json",
        "00000004.webp": "a, b",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "data"]


def test_an_archive_without_its_reader_is_answered_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A None there is how Python says that a package cannot be imported, on a machine that has it, too.
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "data").mkdir()
    for name in ("one.tar", "data/train-0.parquet", "data/test-0.parquet"):
        (tmp_path / name).write_bytes(b"x")
    assert [path.name for path in archives.archives_in(tmp_path)] == ["train-0.parquet"]
    for place in (tmp_path, tmp_path / "one.tar"):
        values = {"pretrained_model_name_or_path": "toy", "train_data_dir": str(place)}
        options = flat.build(RUNS["sd", "network"], values)
        check_early(options)
        with pytest.raises(OptionError, match="pip install datasets"):
            subsets_of(options.dataset, tmp_path / "cache")
    Image.new("RGB", (64, 64)).save(tmp_path / "own.png")
    found = scan(subsets_of(DatasetOptions(train_data_dir=str(tmp_path)), tmp_path / "cache"), tmp_path / "cache")
    assert [image.name for image in found.images] == ["own.png"]
