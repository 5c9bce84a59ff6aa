"""Which of two images is better, asked without saying what made them; and what the answers tell about the columns of a grid."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

Z = 1.959963984540054
"""Of an interval that holds with 95 %."""

Winner = Literal["left", "right", "none"]


@dataclass(frozen=True)
class Vote:
    """One answer: two columns of a row, and which was better."""

    row: int
    left: int
    right: int
    winner: Winner


@dataclass(frozen=True)
class Standing:
    """What the votes say of a column: the share of its votes that it won, a tie as half, with Wilson's bounds."""

    column: int
    share: float
    low: float
    high: float
    votes: int


def wilson(share: float, votes: int) -> tuple[float, float]:
    """Bounds of a share that was found in so many votes (Wilson 1927): all p with |share - p| <= Z sqrt(p (1 - p) / votes)."""
    if votes == 0:
        return 0.0, 1.0
    centre = (share + Z**2 / (2 * votes)) / (1 + Z**2 / votes)
    half = Z * math.sqrt(share * (1 - share) / votes + Z**2 / (4 * votes**2)) / (1 + Z**2 / votes)
    # Rounding may not put a bound on the wrong side of its share.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def next_pair(there: Sequence[Sequence[bool]], votes: Sequence[Vote], name: str) -> tuple[int, int, int] | None:
    """(row, left, right) of the next question: of the columns that were compared least, in the row where they were compared least, in a
    drawn order. The same until a vote is given. None where no row has two images. name: of the grid."""
    rng = random.Random(f"{name} {len(votes)}")
    asked: Counter[tuple[int, int]] = Counter()
    rows: Counter[tuple[int, int, int]] = Counter()
    for vote in votes:
        pair = min(vote.left, vote.right), max(vote.left, vote.right)
        asked[pair] += 1
        rows[vote.row, *pair] += 1
    open_to = [
        (row, a, b)
        for row, drawn in enumerate(there)
        for a, b in combinations((place for place, is_there in enumerate(drawn) if is_there), 2)
    ]
    if not open_to:
        return None
    fewest = min((asked[a, b], rows[row, a, b]) for row, a, b in open_to)
    row, a, b = rng.choice([each for each in open_to if (asked[each[1:]], rows[each]) == fewest])
    return (row, a, b) if rng.random() < 0.5 else (row, b, a)


def ranking(columns: int, votes: Sequence[Vote]) -> list[Standing]:
    """The columns, the best first."""
    won, total = [0.0] * columns, [0] * columns
    for vote in votes:
        for column, side in ((vote.left, "left"), (vote.right, "right")):
            total[column] += 1
            won[column] += 0.5 if vote.winner == "none" else float(vote.winner == side)
    found = []
    for column, (wins, count) in enumerate(zip(won, total, strict=True)):
        share = wins / count if count else 0.5
        found.append(Standing(column, share, *wilson(share, count), count))
    return sorted(found, key=lambda one: (-one.share, one.column))


def is_clear(standings: Sequence[Standing]) -> bool:
    """Whether the best column is better than every other one: its interval lies above theirs."""
    return len(standings) > 1 and all(standings[0].low > other.high for other in standings[1:])


def told(value: Mapping[str, Any]) -> Vote | None:
    """A vote as a file has it; None for what is none."""
    row, left, right, winner = (value.get(key) for key in ("row", "left", "right", "winner"))
    if not (isinstance(row, int) and isinstance(left, int) and isinstance(right, int) and min(row, left, right) >= 0):
        return None
    return Vote(row, left, right, winner) if left != right and winner in ("left", "right", "none") else None
