"""Encodes what a cache lacks: readers prepare the next groups and a writer stores the last ones while the encoder works.

Numbers that come out of an encoder may depend, in their last bits, on what else is in the same batch. So batches are not made of
whatever is missing: the groups are fixed by the plan, and one of which anything is missing is encoded whole. A cache that was
interrupted anywhere ends with the same bits as one that was not.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from sd_scripts.dataset.scan import Progress

from .cache import Cache, Entry, Notes, What, tell

Member = TypeVar("Member")
Material = TypeVar("Material")
Tensors = dict[str, Tensor]
logger = logging.getLogger(__name__)

_NOTES_EVERY = 256
_WRITES_WAITING = 4


@dataclass(frozen=True)
class Job(Generic[Member, Material]):
    """What is encoded and how: entry_of names a member, read prepares a group (in a thread), encode makes its tensors, in order."""

    what: What
    groups: Sequence[Sequence[Member]]
    entry_of: Callable[[Member], Entry]
    read: Callable[[Sequence[Member]], Material]
    encode: Callable[[Material], Sequence[Tensors]]


def fill(job: Job[Member, Material], cache: Cache, notes: Notes, warn: Callable[[str], None], progress: Progress, num_readers: int) -> int:
    """Encodes all groups of which an entry is missing; returns how many entries were made.

    warn gets a sentence for each reason why something known is encoded again. progress is called with (what, done, total).
    """
    total = sum(map(len, job.groups))
    entries = (job.entry_of(member) for group in job.groups for member in group)
    missing = cache.missing(job.entry_of(member).key for group in job.groups for member in group)
    # What is there is noted as well: a reason compares with what was used last, not with what was made last.
    notes.write(job.what, (entry for entry in entries if entry.key not in missing))
    todo = [group for group in job.groups if any(job.entry_of(member).key in missing for member in group)]
    if not todo:
        progress(job.what, total, total)
        return 0
    _explain(job, todo, missing, notes, warn)
    started, made = time.monotonic(), 0
    to_make = len(missing)
    with ThreadPoolExecutor(max(1, num_readers), "read") as readers, ThreadPoolExecutor(1, "write") as writer:
        coming: deque[Future[Material]] = deque()
        writing: deque[Future[None]] = deque()
        waiting = iter(todo)
        noted: list[Entry] = []
        try:
            for group in todo:
                while len(coming) <= num_readers + 1 and (following := next(waiting, None)) is not None:
                    coming.append(readers.submit(job.read, following))
                tensors = job.encode(coming.popleft().result())
                # A picture may be in the data set twice: its one entry is written by the first that comes along.
                new = {(entry := job.entry_of(member)).key: (entry, kept) for member, kept in zip(group, tensors, strict=True)}
                new = {key: value for key, value in new.items() if key in missing}
                missing -= new.keys()
                writing.append(writer.submit(_write, cache, list(new.values())))
                while len(writing) > _WRITES_WAITING:
                    writing.popleft().result()
                noted += [entry for entry, _ in new.values()]
                made += len(new)
                if len(noted) >= _NOTES_EVERY:
                    notes.write(job.what, noted)
                    noted = []
                progress(job.what, made, to_make)
            for future in writing:
                future.result()
        finally:
            for read in coming:
                read.cancel()
        notes.write(job.what, noted)
    logger.info("encoded %d %s in %.1f s (%d were there)", made, job.what, time.monotonic() - started, total - made)
    return made


def _explain(
    job: Job[Member, Material], todo: Sequence[Sequence[Member]], missing: set[str], notes: Notes, warn: Callable[[str], None]
) -> None:
    entries = (job.entry_of(member) for group in todo for member in group)
    for sentence in tell(job.what, notes.reasons(job.what, [entry for entry in entries if entry.key in missing])):
        warn(sentence)


def _write(cache: Cache, entries: Sequence[tuple[Entry, Tensors]]) -> None:
    for entry, tensors in entries:
        cache.put(entry.key, tensors)


def in_groups(members: Sequence[Member], size: int, kind: Callable[[Member], object] = lambda member: None) -> list[list[Member]]:
    """Members in order, in groups of at most `size` neighbours of one kind."""
    groups: list[list[Member]] = []
    for member in members:
        if not groups or len(groups[-1]) >= size or kind(groups[-1][-1]) != kind(member):
            groups.append([])
        groups[-1].append(member)
    return groups
