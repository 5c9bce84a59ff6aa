"""Whether every image, control image and mask can be decoded, and the hash of each; knows nothing of folders."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from .images import BadImage, Unreachable, decode
from .index import Index, Stat, index_file, stat_of
from .records import Dataset, ImageInfo, Progress, UnusableImage

_REPORT_EVERY = 500


def verify(dataset: Dataset, cache_dir: Path, progress: Progress | None = None, num_threads: int | None = None) -> Dataset:
    """Decodes every image, control image and mask that was not decoded before, and gives each its identity; broken ones move to bad.

    What was found out is kept in the index by path, size and time of change.
    """
    stats = {image.path: (image.num_bytes, image.mtime_ns) for image in dataset.images}
    masks = [image.mask for image in dataset.images if image.mask]
    controls = {control.path: (control.num_bytes, control.mtime_ns) for image in dataset.images for control in image.controls}
    files = list(dict.fromkeys([*stats, *masks, *controls]))
    stats = {**controls, **stats}
    identities: dict[str, str] = {}
    reasons: dict[str, str] = {}
    threads = num_threads or min(8, os.cpu_count() or 1)
    with Index(index_file(cache_dir)) as index:
        todo = _settle(index, files, stats, identities, reasons)
        with ThreadPoolExecutor(threads) as pool:
            # In parts, so that the results of 100,000 images never wait in memory together.
            for start in range(0, len(todo), _REPORT_EVERY):
                part = todo[start : start + _REPORT_EVERY]
                for done, (path, outcome) in enumerate(zip(part, pool.map(_examine, part)), start + 1):
                    _record(index, path, stats.get(path), outcome, identities, reasons)
                    if progress is not None and (done % 20 == 0 or done == len(todo)):
                        progress("verify", done, len(todo))
    good, bad = [], list(dataset.bad)
    for image in dataset.images:
        reason = _reason(image, reasons)
        if reason:
            bad.append(UnusableImage(image.path, reason))
        else:
            seen = tuple(replace(control, identity=identities[control.path]) for control in image.controls)
            known = replace(image, identity=identities[image.path], mask_identity=identities.get(image.mask, ""), controls=seen)
            good.append(known)
    return replace(dataset, images=tuple(good), bad=tuple(bad))


def _reason(image: ImageInfo, reasons: Mapping[str, str]) -> str:
    """Why an image cannot be used, or ""."""
    if image.path in reasons:
        return reasons[image.path]
    for control in image.controls:
        if control.path in reasons:
            return f"has a control image {control.path} which {reasons[control.path]}"
    return f"has a mask {image.mask} which {reasons[image.mask]}" if image.mask in reasons else ""


@dataclass(frozen=True)
class _Outcome:
    stat: Stat
    size: tuple[int, int] = (0, 0)
    identity: str = ""
    reason: str = ""
    lasting: bool = True
    """Whether the reason lies in the file's content, so that only another file can be better."""


def _settle(index: Index, files: list[str], stats: dict[str, Stat], identities: dict[str, str], reasons: dict[str, str]) -> list[str]:
    """Takes from the index what is known; returns the files that must be decoded."""
    todo = []
    for start in range(0, len(files), 5000):
        part = files[start : start + 5000]
        known = index.known(part)
        for path in part:
            row = known.get(path)
            stat = stats.get(path) or _stat_or_none(path)
            if row is not None and row[:2] == stat and row[5]:
                identities[path] = row[5]
            elif row is not None and row[:2] == stat and row[6]:
                reasons[path] = row[6]
            else:
                todo.append(path)
    return todo


def _stat_or_none(path: str) -> Stat | None:
    try:
        return stat_of(path)
    except OSError:
        return None


def identity_of(path: str | Path) -> str:
    """blake2b of a file's bytes, 32 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()


def _examine(path: str) -> _Outcome:
    stat = _stat_or_none(path) or (0, 0)
    try:
        identity = identity_of(path)
        height, width = decode(path).rgb.shape[:2]
    except BadImage as err:
        return _Outcome(stat, reason=str(err), lasting=not isinstance(err, Unreachable))
    except OSError as err:
        return _Outcome(stat, reason=f"cannot be read ({err.strerror or err})", lasting=False)
    return _Outcome(stat, (width, height), identity)


def _record(index: Index, path: str, scanned: Stat | None, outcome: _Outcome, identities: dict[str, str], reasons: dict[str, str]) -> None:
    if scanned is not None and scanned != outcome.stat and not outcome.reason:
        reasons[path] = "was changed while it was being read; start again"
    elif outcome.reason:
        reasons[path] = outcome.reason
        if outcome.lasting:
            index.put(path, outcome.stat, reason=outcome.reason)
    else:
        identities[path] = outcome.identity
        index.put(path, outcome.stat, width=outcome.size[0], height=outcome.size[1], identity=outcome.identity)
