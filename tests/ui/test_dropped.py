"""Files that are dropped on the Generate tab: kept whole and for a while, or refused with a sentence and nothing left."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from safetensors.numpy import save

from kohya_like import dropped
from kohya_like.dropped import Dropped
from sd_scripts.schema.errors import OptionError

LORA = save(
    {"lora_unet_down_blocks_0_attn1_to_q.lora_down.weight": np.zeros((2, 8), np.float32)}, {"ss_base_model_version": "sdxl_base_v1-0"}
)


def given(place: Dropped, name: str, content: bytes, announced: int | None = None) -> Path:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 64):
            yield content[start : start + 64]

    # In a thread of its own: playwright keeps a loop running in this one.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(anyio.run, place.take, name, len(content) if announced is None else announced, chunks()).result()


def left(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_a_file_is_kept_under_its_name_and_the_same_one_once(tmp_path: Path) -> None:
    place = Dropped(tmp_path)
    kept = given(place, "../a star.safetensors", LORA)
    assert kept.read_bytes() == LORA and kept.name == "a star.safetensors" and kept.is_relative_to(tmp_path / dropped.FOLDER)
    assert given(place, "C:\\files\\a star.safetensors", LORA) == kept and left(tmp_path) == [kept]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("star.ckpt", LORA, "star.ckpt is not a .safetensors file"),
        ("star.safetensors", LORA[:-5], "star.safetensors is damaged or was not downloaded whole"),
        ("star.safetensors", b"", "not a safetensors file"),
        ("star.safetensors", b"PK\x03\x04 and more", "pickle or zip"),
        ("star.safetensors", LORA.replace(b"sdxl_base_v1-0", b"wan_2.1_______"), "a model family that is not trained here"),
    ],
)
def test_what_cannot_be_drawn_with_is_a_sentence_and_leaves_nothing(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        given(Dropped(tmp_path), name, content)
    assert left(tmp_path) == []


def test_what_is_too_large_is_refused_before_and_while_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropped, "MAX_BYTES", 100)
    for announced in (101, 1):
        with pytest.raises(OptionError, match="which is the most; copy it to the studio's computer"):
            given(Dropped(tmp_path), "star.safetensors", LORA, announced)
        assert left(tmp_path) == []


def test_a_disk_that_is_full_or_will_be_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(dropped, "_on_disk", full)
        with pytest.raises(OptionError, match=r"is full: star\.safetensors was not kept; free some space"):
            given(Dropped(tmp_path), "star.safetensors", LORA)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=len(LORA)))
    with pytest.raises(OptionError, match=r"GiB left, too little for star\.safetensors"):
        given(Dropped(tmp_path), "star.safetensors", LORA)
    assert left(tmp_path) == []


def test_what_was_dropped_goes_after_a_week(tmp_path: Path) -> None:
    place = Dropped(tmp_path)
    old, new = given(place, "old.safetensors", LORA), given(place, "new.safetensors", LORA.replace(b"v1-0", b"v0-9"))
    before = time.time() - dropped.KEEP_SECONDS - 1
    os.utime(old.parent, (before, before))
    place.sweep()
    assert left(tmp_path) == [new]
