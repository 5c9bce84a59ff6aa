"""Fills a cache with slow stand-ins for encodings and notes each one it makes; a process of its own for tests of leases."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from sd_scripts.library.data.cache import Cache, Entry, Notes, entry_of
from sd_scripts.library.data.fill import Job, Tensors, fill

SECONDS = 0.02


def job(num_groups: int, log: Path) -> Job[int, list[int]]:
    """Groups of three members; every encoding is a line of the log: process, group."""

    def entry(member: int) -> Entry:
        return entry_of({"picture": f"p{member}"}, f"p{member}")

    def encode(members: Sequence[int]) -> list[Tensors]:
        time.sleep(SECONDS)
        with log.open("a") as file:
            file.write(f"{os.getpid()} {members[0] // 3}\n")
        return [{"latents": torch.full((2,), float(member))} for member in members]

    return Job("latents", [range(3 * group, 3 * group + 3) for group in range(num_groups)], entry, list, encode)


def fill_cache(folder: Path, num_groups: int) -> None:
    """Fills the cache in a folder, together with another who does and is waited for, and leaves a file with how many things this process
    made."""
    (folder / f"begun-{os.getpid()}").touch()
    while len(list(folder.glob("begun-*"))) < 2:
        time.sleep(0.005)
    made = fill(job(num_groups, folder / "log"), Cache(folder / "cache"), Notes(None), print, lambda what, done, total: None, 2)
    (folder / f"made-{os.getpid()}").write_text(str(made))
