"""What a tool tells when it is done: lines for people, values for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sd_scripts.schema.files import write_atomically


@dataclass(frozen=True)
class Report:
    """lines are shown; values go into the JSON file together with them. broken: the tool found what it was asked to look for."""

    lines: Sequence[str]
    values: Mapping[str, Any] = field(default_factory=dict)
    broken: bool = False

    @property
    def text(self) -> str:
        """The lines as they are shown."""
        return "\n".join(self.lines)

    def write(self, path: Path) -> None:
        """Writes everything as JSON."""
        content = {"broken": self.broken, "lines": list(self.lines), **self.values}
        write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def size_text(num_bytes: int) -> str:
    """A size in a unit that people use."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
