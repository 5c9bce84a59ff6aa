"""What stands in README.md and docs/, taken apart: fenced blocks, commands, flags and names."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "options.md")]
"""Pages that people wrote; options.md is made by the schema and has its own test."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NAME = re.compile(r"# ([\w.-]+)\n")


@dataclass(frozen=True)
class Block:
    """A fenced block. name is the file name in the comment of its first line, or empty."""

    page: str
    language: str
    text: str

    @property
    def name(self) -> str:
        found = _NAME.match(self.text)
        return found[1] if found else ""


def page_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(language: str | None = None) -> list[Block]:
    """The fenced blocks of all pages; language "" are those without one."""
    found = [Block(path.name, kind, text) for path in PAGES for kind, text in _FENCE.findall(page_text(path))]
    return [block for block in found if language is None or block.language == language]


def named(name: str, page: str = "README.md") -> str:
    """The content of a file that a page tells to write."""
    (found,) = [block.text for block in blocks() if block.name == name and block.page == page]
    return found


def commands(text: str) -> list[list[str]]:
    """The commands in a block, continued lines joined, as lists of words without what follows a #."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            found.append(words)
    return found


PROGRAMS = ("bash", "ssh", "powershell", ".venv/bin/python", ".venv/bin/accelerate", "python")


def command_blocks() -> list[tuple[str, list[str]]]:
    """(page, words) of every command in a block without a language; blocks that show something else are left out."""
    return [(block.page, words) for block in blocks("") if block.text.split(maxsplit=1)[0] in PROGRAMS for words in commands(block.text)]


def prose(path: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page_text(path))


def ticked(path: Path) -> list[str]:
    """What stands between backticks in the prose of a page."""
    return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose(path))]
