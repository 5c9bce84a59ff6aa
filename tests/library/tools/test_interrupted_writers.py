"""Whoever cancels a tool at any moment finds nothing of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from sd_scripts.library.tools.tensor_files import Spool
from sd_scripts.schema.files import TEMPORARY_MARK, folder_aside, written_aside


def file(path: Path) -> None:
    with written_aside(path) as aside:
        aside.write_text("new")


def folder(path: Path) -> None:
    with folder_aside(path) as aside:
        (aside / "file").write_text("new")


def spool(path: Path) -> None:
    with Spool(path) as kept:
        kept.add({"lora_down.weight": torch.ones(2, 3)})
        kept.finish({"ss_network_dim": "2"})


def ended_at(number: int, write: Callable[[Path], None], path: Path) -> bool:
    """Lets a signal's exception come before a line of our code, the one of this number; whether there was one."""
    seen = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal seen
        # Whoever cleans up is past helping.
        if "sd_scripts" not in frame.f_code.co_filename or frame.f_code.co_name == "__exit__":
            return None
        if event == "line":
            seen += 1
            if seen == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            write(path)
    finally:
        sys.settrace(before)
    return seen >= number


# An exception between open() and the block that closes it is what a signal is.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("write", [file, folder, spool])
def test_nothing_unfinished_stays_wherever_a_signal_comes(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "warm")
    number = 1
    while ended_at(number, write, tmp_path / f"new{number}"):
        assert not [left.name for left in tmp_path.iterdir() if TEMPORARY_MARK in left.name], f"line {number}"
        number += 1
    assert number > 10 and (tmp_path / f"new{number}").exists()
