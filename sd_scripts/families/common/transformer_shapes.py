"""What the shapes of a transformer's tensors tell of its configuration. Knows names and shapes, not files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from sd_scripts.library.loading.layouts import Layout


def count(names: Iterable[str], block: str) -> int:
    """Number of blocks: one more than the highest that occurs."""
    return max((int(match[1]) for name in names if (match := re.match(block, name))), default=-1) + 1


def sides_in(shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> Callable[..., int]:
    """Rows (side 0) or columns (side 1) of a layer's weight by its name in diffusers, from shapes in either layout."""
    published = layout({})

    def side_of(name: str, side: int = 0) -> int:
        return (shapes.get(f"{name}.weight") or shapes[published(f"{name}.weight").name])[side]

    return side_of


def rotary_axes(head: int, share: float = 7 / 16) -> list[int]:
    """How many numbers of a head stand for time or text, for rows and for columns. No tensor tells it: share is that of rows, and of
    columns, in the published model, and smaller models are taken to have the same, in even numbers."""
    side = 2 * int(head * share / 2)
    return [head - 2 * side, side, side]
