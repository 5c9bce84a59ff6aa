"""What tools share that write a file beside each image: which images, what became of them, and the report of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sd_scripts.dataset import images
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.outside import json_of

from .report import Report

SHOWN = 20
"""Names that a report lists of one kind."""


def named(names: Sequence[str]) -> str:
    """How many, and the first of them."""
    return f"{len(names)} ({', '.join(names[:SHOWN])}{' …' if len(names) > SHOWN else ''})"


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

    def report(self, order: str, count: int, of_masks: bool) -> Report:
        """The report on so many images, of masks or of captions. Each line is a sentence of its own, which the page translates."""
        lines = [f"{'masks' if of_masks else 'captions'} written: {self.written}, of {count} images"]
        lines += [f"written before this work was stopped: {self.done_before}"] if self.done_before else []
        lines += [f"left as they are, because they have one: {self.kept}"] if self.kept else []
        lines += [f"had the same {'mask' if of_masks else 'words'} already: {self.same}"] if self.same else []
        if self.nothing:
            lines.append(f"{'nothing found, and no mask written' if of_masks else 'the model said nothing'}: {named(self.nothing)}")
        if self.others:
            lines.append(f"somebody else wrote meanwhile, and their {'masks' if of_masks else 'words'} stay: {named(self.others)}")
        lines += [f"cannot be read: {named(self.bad)}"] if self.bad else []
        values = {
            "written": self.written,
            "kept": self.kept,
            "same": self.same,
            "done_before": self.done_before,
            "order": order,
            "empty" if of_masks else "silent": self.nothing,
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
