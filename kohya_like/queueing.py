"""What people say of runs that wait: their order, and what each waits for besides a free device. It stands in `queue.json` in a run's
folder, and is gone when the run starts. Knows files, not processes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import write_atomically
from sd_scripts.schema.outside import read_as

FILE = "queue.json"
MOST_SECONDS = 366 * 86400.0
"""A start may be planned this far ahead."""


@dataclass(frozen=True)
class Waiting:
    """What a run waits for.

    place: in the queue, from 0; None for one that nobody has moved, which comes after those. not_before: Unix time. after: the folder
    of a run that has to end first, in whatever way; empty for none.
    """

    place: int | None = None
    held: bool = False
    not_before: float = 0.0
    after: str = ""

    def is_due(self, under_way: Sequence[str]) -> bool:
        """Whether nothing but a device is missing. under_way: names of the runs that have not ended."""
        return not self.held and self.not_before <= time.time() and self.after not in under_way


def read(folder: Path) -> Waiting:
    """What a run waits for; nothing where nobody has said anything that can be read."""
    try:
        return read_as(Waiting, (folder / FILE).read_bytes())
    except (OSError, ValueError):
        return Waiting()


def write(folder: Path, waiting: Waiting) -> None:
    """Raises OptionError where the disk takes no more."""
    try:
        write_atomically(folder / FILE, json.dumps(asdict(waiting), indent=1))
    except OSError as err:
        raise OptionError(f"{folder / FILE} could not be written: {err.strerror or err}.") from err


def forget(folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)


def moved(queue: Sequence[Path], run: Path, place: int) -> None:
    """Puts a run at a place of the queue, whose other runs keep their order. queue: the folders of all that wait, in their order."""
    others = [path for path in queue if path != run]
    place = max(0, min(place, len(others)))
    for number, path in enumerate([*others[:place], run, *others[place:]]):
        waiting = read(path)
        if waiting.place != number:
            write(path, replace(waiting, place=number))


def planned(name: str, waiting: Waiting, order: Mapping[str, object], others: Mapping[str, Waiting]) -> Waiting:
    """What a run waits for after an order: {"held": bool}, {"not_before": Unix time or None}, {"after": a run's name or None}.

    others: the runs that have not ended. Raises OptionError for a time that is past, and for runs that would wait for one another.
    """
    if isinstance(order.get("held"), bool):
        return replace(waiting, held=order["held"] is True)
    if "not_before" in order:
        until = order["not_before"]
        if until is None:
            return replace(waiting, not_before=0.0)
        if not isinstance(until, int | float) or not 0 < until - time.time() < MOST_SECONDS:
            raise OptionError("start at: choose a time that is still to come, within a year")
        return replace(waiting, not_before=float(until))
    after = order.get("after")
    if after is None:
        return replace(waiting, after="")
    if not isinstance(after, str) or after not in others:
        raise OptionError(f"start after {after}: this run has ended, or is not there; choose one that has not ended")
    chain = [name]
    following = after
    while following in others and following not in chain:
        chain.append(following)
        following = others[following].after
    if following in chain:
        raise OptionError(f"start after {after}: that one waits for this run, and neither would ever start; choose another")
    return replace(waiting, after=after)
