"""Cache entries: by content, whole or not at all, verified on read, and with a reason when they are made again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sd_scripts.library.data.cache import (
    Cache,
    CorruptEntry,
    Notes,
    entry_of,
    fingerprint,
    key_of,
    pack,
    tell,
    tokenizer_fingerprint,
    unpack,
)
from sd_scripts.schema.errors import OptionError

FACTS = {"picture": "p", "encoder": "e", "bucket": [64, 64], "resized": [64, 80], "crop": [0, 8], "family": "small", "revision": 1}


def tensors() -> dict[str, torch.Tensor]:
    return {"latents": torch.randn(4, 8, 8), "mask": torch.rand(1, 8, 8).half(), "empty": torch.zeros(0), "one": torch.tensor(7)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("folder", [True, False])
def test_what_is_put_comes_back(tmp_path: Path, folder: bool) -> None:
    cache, key, kept = Cache(tmp_path if folder else None), key_of(FACTS), tensors()
    assert cache.missing([key, "other"]) == {key, "other"}
    cache.put(key, kept)
    assert cache.missing([key, "other"]) == {"other"} and same(cache.get(key), kept)
    cache.discard(key)
    assert cache.missing([key]) == {key}
    with pytest.raises(KeyError):
        cache.get(key)


def test_another_process_finds_what_was_put(tmp_path: Path) -> None:
    key, kept = key_of(FACTS), tensors()
    Cache(tmp_path).put(key, kept)
    assert Cache(tmp_path).missing([key]) == set() and same(Cache(tmp_path).get(key), kept)
    assert [path.parent.name for path in tmp_path.rglob("*.safetensors")] == [key[:2]]


@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    packed = bytearray(pack({"a": torch.arange(20.0), "b": torch.ones(3)}))
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptEntry):
        unpack(bytes(packed))


@pytest.mark.parametrize("length", [0, 5, 8, 40, -1])
def test_a_torn_file_is_noticed(length: int) -> None:
    with pytest.raises(CorruptEntry):
        unpack(pack(tensors())[:length])


def test_other_programs_files_are_not_taken_for_ours() -> None:
    from safetensors.torch import save

    with pytest.raises(CorruptEntry, match="checksum"):
        unpack(save({"latents": torch.zeros(3)}))


def test_a_new_entry_replaces_what_was_read_before(tmp_path: Path) -> None:
    cache, key = Cache(tmp_path), key_of(FACTS)
    cache.put(key, {"a": torch.zeros(3)})
    cache.get(key)
    cache.put(key, {"a": torch.ones(3)})
    assert torch.equal(cache.get(key)["a"], torch.ones(3))


def test_recent_entries_stay_within_their_bytes(tmp_path: Path) -> None:
    cache = Cache(tmp_path, recent_bytes=1000)
    keys = [key_of({"n": number}) for number in range(20)]
    for key in keys:
        cache.put(key, {"a": torch.zeros(100)})  # 400 bytes
    for key in keys + keys[::-1]:
        cache.get(key)
        assert cache._held_bytes <= 1000 and len(cache._recent) <= 2


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OptionError, match="cannot be written"):
        Cache(tmp_path / "file").put("abcd", {"a": torch.zeros(1)})


def test_nothing_unfinished_stays_after_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sd_scripts.library.data.cache.os.replace", full)
    with pytest.raises(OptionError, match="No space left on device"):
        Cache(tmp_path).put("abcd", {"a": torch.zeros(1)})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_keys_follow_from_every_fact() -> None:
    keys = {key_of(FACTS)} | {key_of({**FACTS, name: "other"}) for name in FACTS}
    assert len(keys) == len(FACTS) + 1
    assert key_of(dict(reversed(FACTS.items()))) == key_of(FACTS)
    with pytest.raises(TypeError):
        key_of({"a": torch.float32})


def test_fingerprints_tell_weights_types_names_and_configuration_apart() -> None:
    def network() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))

    base = fingerprint(network())
    assert fingerprint(network()) == base
    assert fingerprint(network().half()) != base
    assert fingerprint(nn.Sequential(*network(), nn.Identity(), nn.Linear(1, 1))) != base
    tuned = network()
    with torch.no_grad():
        tuned[0].weight.mul_(1.0001)
    assert fingerprint(tuned) != base
    configured = network()
    configured.config = {"scaling_factor": 0.5, "_name_or_path": "x"}  # type: ignore[assignment]
    first = fingerprint(configured)
    configured.config = {"scaling_factor": 0.5, "_name_or_path": "elsewhere"}  # type: ignore[assignment]
    assert fingerprint(configured) == first != base
    configured.config = {"scaling_factor": 0.25}  # type: ignore[assignment]
    assert fingerprint(configured) != first


def test_tokenizers_are_told_apart_by_their_words() -> None:
    class Words:
        def __init__(self, *words: str) -> None:
            self.words = words

        def get_vocab(self) -> dict[str, int]:
            return {word: index for index, word in enumerate(self.words)}

    assert tokenizer_fingerprint(Words("a", "b")) == tokenizer_fingerprint(Words("a", "b")) != tokenizer_fingerprint(Words("b", "a"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"picture": "q"}, "the image changed"),
        ({"encoder": "f"}, "the VAE changed"),
        ({"bucket": [32, 32], "resized": [32, 40], "crop": [0, 4]}, "the resolution changed"),
        ({"crop": [0, 0]}, "the crop changed"),
        ({"revision": 2}, "the code revision changed"),
        ({"family": "other"}, "the model family changed"),
        ({}, "its cache file is gone"),
    ],
)
def test_notes_say_why_something_is_encoded_again(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    notes = Notes(tmp_path / "notes.sqlite")
    notes.write("latents", [entry_of(FACTS, "a.png"), entry_of(FACTS, "b.png")])
    notes.close()
    again = Notes(tmp_path / "notes.sqlite")
    found = again.reasons("latents", [entry_of({**FACTS, **change}, name) for name in ("a.png", "b.png", "new.png")])
    assert found == Counter({reason: 2, "": 1})
    assert tell("latents", found) == [f"2 images are encoded again: {reason}"]
    assert again.reasons("text", [entry_of(FACTS, "a.png")]) == Counter({"": 1})


def test_damaged_notes_only_cost_the_reasons(tmp_path: Path, caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests) -> None:
    file = tmp_path / "notes.sqlite"
    entries = [entry_of(FACTS, f"image {number}.png") for number in range(100)]
    notes = Notes(file)
    notes.write("latents", entries)
    notes.close()
    whole = file.read_bytes()
    assert len(whole) > 8192, "the damage must meet a page of rows"
    harmed = {
        "a page": whole[:4096] + bytes(range(200)) + whole[4296:],
        "the header": bytes(200) + whole[200:],
        "something else": b"no database" * 1000,
        "the facts": whole.replace(b'{"', b'["'),
    }
    for name, content in harmed.items():
        with subtests.test(msg=name):
            caplog.clear()
            file.write_bytes(content)
            notes = Notes(file)
            notes.reasons("latents", entries)
            notes.write("latents", entries)
            assert notes.reasons("latents", entries) == Counter({"its cache file is gone": 100})
            notes.close()
            assert "notes.sqlite is damaged" in caplog.text
