"""A disk that is full, without filling one of the machine's."""

from __future__ import annotations

import contextlib
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def no_larger_than(num_bytes: int) -> Iterator[None]:
    """A disk that takes no more: every file ends there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def small_disk(folder: Path, num_mib: int) -> Iterator[bool]:
    """A disk of this size in a folder; whether this machine lets one be mounted."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_mib}m", "tmpfs", str(folder)], check=False, capture_output=True)
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            # Processes of the studio may still be ending there.
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
