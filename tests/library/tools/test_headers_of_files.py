"""Metadata shown and edited; tensors stay byte for byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sd_scripts.library.tools.headers import decoded, edit
from sd_scripts.library.tools.tensor_files import Spool, open_file
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.tools import MetadataSection

TEXTS = {
    "ss_tag_frequency": '{"1": {"cat": 3}}',
    "ss_seed": "None",
    "ss_dataset_dirs": "{}",
    "modelspec.title": "old",
    "sshs_model_hash": "ab",
}


def data(path: Path) -> str:
    """SHA-256 of everything after the header."""
    raw = path.read_bytes()
    return hashlib.sha256(raw[8 + int.from_bytes(raw[:8], "little") :]).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    save_file({"b": torch.randn(3, 5), "a": torch.randn(7).half(), "c": torch.tensor(2)}, path, metadata=TEXTS)
    return path


def test_keys_are_set_and_removed_and_nothing_else_changes(file: Path) -> None:
    before, names = data(file), list(open_file(file, "model").slots)
    edit(MetadataSection(model=str(file), set_keys=("modelspec.title=Звёзды = stars", "new="), remove_keys=("ss_dataset*",)))
    with safe_open(file, framework="pt") as opened:
        texts = opened.metadata()
        assert opened.get_tensor("c") == 2
    wanted = {key: text for key, text in TEXTS.items() if key != "ss_dataset_dirs"}
    assert texts == wanted | {"modelspec.title": "Звёзды = stars", "new": ""}
    assert data(file) == before and list(open_file(file, "model").slots) == names


def test_a_copy_leaves_the_original_as_it_is(file: Path, tmp_path: Path) -> None:
    raw = file.read_bytes()
    edit(MetadataSection(model=str(file), remove_keys=("*",), save_to=str(tmp_path / "b.safetensors")))
    assert file.read_bytes() == raw and data(tmp_path / "b.safetensors") == data(file)
    assert open_file(tmp_path / "b.safetensors", "model").metadata == {}


def test_showing_decodes_and_writes_nothing(file: Path) -> None:
    raw = file.read_bytes()
    report = edit(MetadataSection(model=str(file)))
    assert report.values["metadata"]["ss_tag_frequency"] == {"1": {"cat": 3}} and report.values["metadata"]["ss_seed"] is None
    assert "training (kohya's keys):" in report.lines and file.read_bytes() == raw
    assert decoded("True") is True and decoded("[1, 2") == "[1, 2" and decoded("1e-4") == "1e-4"


def test_a_key_that_is_not_there_cannot_be_removed(file: Path) -> None:
    raw = file.read_bytes()
    with pytest.raises(OptionError, match=r"no key ss_nothing.*ss_seed"):
        edit(MetadataSection(model=str(file), set_keys=("a=b",), remove_keys=("ss_nothing",)))
    assert file.read_bytes() == raw


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda raw: raw[:-1], "damaged"),
        (lambda raw: b"x" * 100, "not a safetensors file"),
        (lambda raw: raw[:6], "not a safetensors file"),
    ],
)
def test_damaged_files_are_sentences(damage, sentence: str, file: Path) -> None:
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(OptionError, match=sentence):
        edit(MetadataSection(model=str(file)))


def test_a_spooled_file_is_gone_when_its_writing_ends_badly(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Spool(tmp_path / "a.safetensors") as spool:
        spool.add({"a": torch.ones(3)})
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
