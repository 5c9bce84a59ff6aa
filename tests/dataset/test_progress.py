"""Progress bars: drawn over themselves in a terminal, a line now and then in a file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from sd_scripts.dataset import progress
from sd_scripts.dataset.progress import Bar, Bars

ROOT = Path(__file__).parents[2]


def test_a_file_is_not_flooded_and_its_lines_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "console.log").open("w") as file:
        for leave in (True, False):
            for _ in Bar(range(3000), desc="outer", file=file, mininterval=0, leave=leave):
                pass
        with Bar(total=10, desc="bytes", file=file, unit="B") as bar:
            bar.update(10)
            bar.refresh()
        monkeypatch.setattr("sys.stderr", file)
        with Bars() as bars:
            for done in range(2000):
                bars("scan", done, 2000)
        assert (tmp_path / "console.log").read_text() == "", "nothing here took long"
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
        for _ in Bar(range(3), desc="train", file=file, mininterval=0):
            pass
    text = (tmp_path / "console.log").read_text()
    assert "\r" not in text and len(text.splitlines()) >= 3
    assert all(line.startswith("train:") for line in text.splitlines())


def test_a_terminal_gets_a_bar_that_is_drawn_over_itself() -> None:
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal:
        for _ in Bar(range(3), desc="train", file=terminal, mininterval=0):
            pass
    shown = b""
    while b"3/3" not in shown:
        shown += os.read(reader, 4096)
    os.close(reader)
    assert shown.count(b"\rtrain:") >= 3


def test_every_bar_is_of_this_kind() -> None:
    # huggingface_hub asks for a class of tqdm's; downloads.py gives it one that writes lines.
    known = (Path(progress.__file__), ROOT / "sd_scripts/runs/downloads.py")
    other = [
        str(path.relative_to(ROOT))
        for folder in ("sd_scripts", "kohya_like")
        for path in (ROOT / folder).rglob("*.py")
        if path not in known and re.search(r"^(from|import) tqdm", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert other == []
