"""What an import found: the kind of run, the values that fit it, and one row for every key of the file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .runs import RunOptions

Verdict = Literal["taken", "renamed", "not needed", "not supported", "unknown"]
"""taken: the same option with the same value. renamed: another option, or the value written differently. not needed: nothing is lost,
and the row says why. not supported: something that the file asks for will not happen, and the row says what to do. unknown: this
version does not know the setting, so it cannot say what is lost."""


@dataclass(frozen=True)
class Row:
    """What became of one key of the file."""

    key: str
    value: object
    """As the file has it; three dots for secrets, which are shown nowhere."""
    verdict: Verdict
    text: str
    """What the key became, or why it became nothing."""


@dataclass(frozen=True)
class Imported:
    """One imported file. `flat.build(run, values)` succeeds once the options named in `missing` are given."""

    run: type[RunOptions]
    values: dict[str, object]
    """Flat values for the form; what is not in it stays at its default."""
    rows: list[Row]
    """Every key of the file in its order, each exactly once."""
    missing: list[str] = field(default_factory=list)
    """What the file cannot give and a run needs, as `option: sentence`."""
    conflicts: list[str] = field(default_factory=list)
    """Values of the file that do not go together here, one sentence for each that gave way: more than a row among eighty."""
    origin: str = ""
    """What kind of file it was, such as `kohya_ss configuration (JSON)`."""
    adds: bool = False
    """Whether it is a description of data, whose values are put beside those that a form has already."""

    def count(self, verdict: Verdict) -> int:
        """Rows with this verdict."""
        return sum(row.verdict == verdict for row in self.rows)


@dataclass(frozen=True)
class Importer:
    """Reads the configurations of a program that a family comes from."""

    accepted: str
    """What it reads, in words."""
    endings: tuple[str, ...]
    """Endings of such files, in small letters."""
    looks_like: Callable[[Mapping[str, Any]], bool]
    """Whether a file's tables are those of the program."""
    read: Callable[[str, Mapping[str, Any]], Imported]
    """The settings in them; the name is for messages. Raises OptionError."""
