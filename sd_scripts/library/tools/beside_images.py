"""What tools share that write a file beside each image: which images, what became of them, and the report of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sd_scripts.dataset import images
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.outside import json_of

from .report import Report

SHOWN = 20
"""Names that a report lists of one kind."""


@dataclass
class Outcome:
    """What became of the images."""

    written: int = 0
    same: int = 0
    kept: int = 0
    """Had a file already, and were left as they are."""
    done_before: int = 0
    """By this work, before it was stopped."""
    nothing: list[str] = field(default_factory=list)
    """The model had nothing for them."""
    others: list[str] = field(default_factory=list)
    """Somebody else has written meanwhile."""
    bad: list[str] = field(default_factory=list)

    def report(self, order: str, count: int, nouns: str, same: str, nothing: tuple[str, str], theirs: str) -> Report:
        """The report on so many images. nouns: what was written; same: what those had already that stayed the same; nothing: how it is
        called in the values, and said; theirs: what somebody else has written."""
        lines = [f"{nouns} written: {self.written}, of {count} images"]
        for number, words in (
            (self.done_before, "written before this work was stopped"),
            (self.kept, "left as they are, because they have one"),
            (self.same, f"had the same {same} already"),
        ):
            lines += [f"{words}: {number}"] if number else []
        for names, words in (
            (self.nothing, nothing[1]),
            (self.others, f"somebody else wrote meanwhile, and their {theirs} stay"),
            (self.bad, "cannot be read"),
        ):
            lines += [f"{words}: {len(names)} ({', '.join(names[:SHOWN])}{' …' if len(names) > SHOWN else ''})"] if names else []
        values = {
            "written": self.written,
            "kept": self.kept,
            "same": self.same,
            "done_before": self.done_before,
            "order": order,
            nothing[0]: self.nothing,
            "others": self.others,
            "unreadable": self.bad,
        }
        return Report(lines, values)


def images_below(root: Path) -> Iterator[Path]:
    """The images in a folder and those inside, by name; hidden folders are left out."""
    found = (path for path in sorted(root.rglob("*")) if path.suffix.lower() in images.EXTENSIONS and path.is_file())
    return (path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts))


def images_listed(image_list: str, root: Path, key: str) -> list[tuple[Path, Path | None]]:
    """The images that a file of JSON lines names, with the file that `key` names for each, both seen from root. Raises OptionError."""
    try:
        lines = Path(image_list).expanduser().read_text(encoding="utf-8").splitlines()
        rows: list[dict[str, Any]] = [json_of(line) for line in lines if line.strip()]
        return [(root / row["file_name"], root / row[key] if row.get(key) else None) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise OptionError(Problem("image_list", f"image_list: {image_list} is not JSON lines with file_name ({err})")) from err
