"""The tree as it lies here now, a short name of what is in it, and results that are kept under that name so that a long run can go on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / ".results"
MEMORY = Path("/dev/shm")
NEEDED_GIB = 4
"""Many times what lies there at once: up to 230 MiB in the folders of runs and tools."""


def in_memory() -> dict[str, str]:
    """Where pytest makes its folders: in memory if there is plenty. States are written safely, and a disk is waited for each time."""
    if "PYTEST_DEBUG_TEMPROOT" in os.environ or not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return {}
    return {"PYTEST_DEBUG_TEMPROOT": str(MEMORY)} if shutil.disk_usage(MEMORY).free >= NEEDED_GIB * 2**30 else {}


ENVIRONMENT = {
    # What a process has compiled the next one need not: tests start some hundred of them.
    **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
    **in_memory(),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
}
"""Of tests."""


def tracked() -> list[Path]:
    """Files that belong to the tree: those git knows, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return [Path(name) for name in said.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def fingerprint(files: Sequence[Path]) -> str:
    """A short name for the content of these files."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file}\0".encode() + hashlib.sha256((ROOT / file).read_bytes()).digest())
    return digest.hexdigest()[:16]


class Results:
    """Rows of one kind of run on the present tree, one JSON object a line; what is there already need not be done again."""

    def __init__(self, kind: str, files: Sequence[Path]) -> None:
        self.file = KEPT / f"{kind}-{fingerprint(files)}.jsonl"

    def rows(self) -> dict[str, dict[str, Any]]:
        """By name."""
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.is_file() else []
        return {row["name"]: row for row in map(json.loads, lines)}

    def add(self, row: dict[str, Any]) -> None:
        self.file.parent.mkdir(exist_ok=True)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
