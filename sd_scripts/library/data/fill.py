"""Encodes what a cache lacks: readers prepare the next groups and a writer stores the last ones while the encoder works.

Numbers that come out of an encoder may depend, in their last bits, on what else is in the same batch. So batches are not made of
whatever is missing: the groups are fixed by the plan, and one of which anything is missing is encoded whole. A cache that was
interrupted anywhere ends with the same bits as one that was not, and so does one that several processes fill: each takes whole groups.
"""

from __future__ import annotations

import hashlib
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
from .leases import Leases, leases_in

Member = TypeVar("Member")
Material = TypeVar("Material")
Tensors = dict[str, Tensor]
logger = logging.getLogger(__name__)

_NOTES_EVERY = 256
_WRITES_WAITING = 4
_OTHERS_SECONDS = 0.2
"""How often to look whether another process is done with what it has begun."""


@dataclass(frozen=True)
class Job(Generic[Member, Material]):
    """What is encoded and how: entry_of names a member, read prepares a group (in a thread), encode makes its tensors, in order."""

    what: What
    groups: Sequence[Sequence[Member]]
    entry_of: Callable[[Member], Entry]
    read: Callable[[Sequence[Member]], Material]
    encode: Callable[[Material], Sequence[Tensors]]


def fill(job: Job[Member, Material], cache: Cache, notes: Notes, warn: Callable[[str], None], progress: Progress, num_readers: int) -> int:
    """Encodes all groups of which an entry is missing; returns how many entries were made here.

    Another process that fills the same folder at the same time takes other groups; at the end this one waits for those that the other has
    begun. warn gets a sentence for each reason why something known is encoded again. progress is called with (what, done, total).
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
    with (
        leases_in(cache.folder) as leases,
        ThreadPoolExecutor(max(1, num_readers), "read") as readers,
        ThreadPoolExecutor(1, "write") as writer,
    ):
        coming: deque[tuple[Sequence[Member], Future[Material]]] = deque()
        writing: deque[Future[None]] = deque()
        share = _Share(job, cache, leases, deque(todo), missing)
        noted: list[Entry] = []
        try:
            while True:
                while len(coming) <= num_readers + 1 and (following := share.next()) is not None:
                    coming.append((following, readers.submit(job.read, following)))
                if not coming:
                    if not share.waiting:
                        break
                    progress(job.what, to_make - len(missing), to_make)
                    time.sleep(_OTHERS_SECONDS)
                    continue
                group, material = coming.popleft()
                tensors = job.encode(material.result())
                # An image may be in the data set twice: its one entry is written by the first that comes along.
                new = {(entry := job.entry_of(member)).key: (entry, kept) for member, kept in zip(group, tensors, strict=True)}
                new = {key: value for key, value in new.items() if key in missing}
                missing -= new.keys()
                writing.append(writer.submit(share.write, group, list(new.values())))
                while len(writing) > _WRITES_WAITING:
                    writing.popleft().result()
                noted += [entry for entry, _ in new.values()]
                made += len(new)
                if len(noted) >= _NOTES_EVERY:
                    notes.write(job.what, noted)
                    noted = []
                progress(job.what, to_make - len(missing), to_make)
            for future in writing:
                future.result()
        finally:
            for _, read in coming:
                read.cancel()
        notes.write(job.what, noted)
    progress(job.what, to_make, to_make)
    others = f", {to_make - made} came from another process" if to_make > made else ""
    logger.info("encoded %d %s in %.1f s (%d were there%s)", made, job.what, time.monotonic() - started, total - to_make, others)
    return made


@dataclass
class _Share(Generic[Member, Material]):
    """The groups that this process may encode: those that no other process has begun."""

    job: Job[Member, Material]
    cache: Cache
    leases: Leases
    waiting: deque[Sequence[Member]]
    missing: set[str]

    def next(self) -> Sequence[Member] | None:
        """A group that is ours now; None when there is none at the moment. What others have made meanwhile is missing no more."""
        for _ in range(len(self.waiting)):
            group = self.waiting.popleft()
            if not self.leases.take(self._name(group)):
                self.waiting.append(group)
                continue
            keys = self.missing.intersection(self._keys(group))
            made = {key for key in keys if self.cache.has(key)}
            if made != keys:
                return group
            self.leases.release(self._name(group))
            self.missing -= made
        return None

    def write(self, group: Sequence[Member], entries: Sequence[tuple[Entry, Tensors]]) -> None:
        """Stores what was made of a group, and gives its lease back."""
        for entry, tensors in entries:
            self.cache.put(entry.key, tensors)
        self.leases.release(self._name(group))

    def _keys(self, group: Sequence[Member]) -> list[str]:
        return [self.job.entry_of(member).key for member in group]

    def _name(self, group: Sequence[Member]) -> str:
        """Of a lease: the same for the same group, in any process."""
        return hashlib.blake2b(" ".join(self._keys(group)).encode(), digest_size=20).hexdigest()


def _explain(
    job: Job[Member, Material], todo: Sequence[Sequence[Member]], missing: set[str], notes: Notes, warn: Callable[[str], None]
) -> None:
    entries = (job.entry_of(member) for group in todo for member in group)
    for sentence in tell(job.what, notes.reasons(job.what, [entry for entry in entries if entry.key in missing])):
        warn(sentence)


def in_groups(members: Sequence[Member], size: int, kind: Callable[[Member], object] = lambda member: None) -> list[list[Member]]:
    """Members in order, in groups of at most `size` neighbours of one kind."""
    groups: list[list[Member]] = []
    for member in members:
        if not groups or len(groups[-1]) >= size or kind(groups[-1][-1]) != kind(member):
            groups.append([])
        groups[-1].append(member)
    return groups
