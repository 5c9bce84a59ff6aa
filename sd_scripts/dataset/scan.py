"""What lies in the folders: pictures with their sizes and captions, found without decoding a pixel, and which of them are broken.

Sizes, captions and content hashes are kept in an sqlite index, so a later scan only asks the file system for times and sizes.
A scan holds about half a kilobyte for each picture and reads one folder at a time.

Where a picture's caption comes from, first found first: the metadata file of its subset; the file beside it with
caption_extension; with `.caption`; a metadata.jsonl in its own folder; the class tokens of its folder.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from sd_scripts.dataset.config import Subset, Subsets, subsets_of
from sd_scripts.dataset.images import EXTENSIONS, BadImage, Unreachable, decode, read_size
from sd_scripts.dataset.metadata import read_metadata
from sd_scripts.dataset.pictures import BadPicture, Dataset, Picture, Progress
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError, Problem

__all__ = ["BadPicture", "Dataset", "Index", "Picture", "Progress", "identity_of", "index_file", "read_dataset", "scan", "verify"]

_COMMIT_EVERY = 2000
_REPORT_EVERY = 500
_SHOWN_WARNINGS = 5


class Index:
    """What is known about files from earlier scans, by path, size and time of change. Safe to share between processes, not threads."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._open()
            except sqlite3.DatabaseError as err:
                if isinstance(err, sqlite3.OperationalError):
                    raise
                # A damaged index only costs a new scan.
                file.unlink()
                self._open()
        except (OSError, sqlite3.Error) as err:
            raise OptionError(
                Problem("cache_dir", f"cache_dir: the index {file} cannot be written ({err}); choose another cache_dir")
            ) from err

    def _open(self) -> None:
        self._db = sqlite3.connect(self.file, timeout=120)
        # What a power cut loses is found again by looking at the files, so the index need not wait for the disk.
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, width INTEGER, height INTEGER,"
            " text TEXT, identity TEXT, reason TEXT) WITHOUT ROWID"
        )
        self._db.commit()
        self._pending = 0

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes what is pending."""
        self._db.commit()
        self._db.close()

    def known(self, paths: list[str]) -> dict[str, tuple[Any, ...]]:
        """Path -> (size, mtime_ns, width, height, text, identity, reason) for those that are in the index."""
        found: dict[str, tuple[Any, ...]] = {}
        for start in range(0, len(paths), 500):
            part = paths[start : start + 500]
            marks = ",".join("?" * len(part))
            for row in self._db.execute(
                f"SELECT path, size, mtime_ns, width, height, text, identity, reason FROM files WHERE path IN ({marks})", part
            ):
                found[row[0]] = row[1:]
        return found

    def put(self, path: str, stat: tuple[int, int], **fields: str | int) -> None:
        """Replaces what is known about a file; stat is (size, mtime_ns)."""
        self._db.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (path, *stat, *(fields.get(name) for name in ("width", "height", "text", "identity", "reason"))),
        )
        self._pending += 1
        if self._pending >= _COMMIT_EVERY:
            self._db.commit()
            self._pending = 0


def index_file(cache_dir: Path) -> Path:
    """Where the index of a cache folder lies."""
    return cache_dir / "index.sqlite"


def read_dataset(options: DatasetOptions, cache_dir: Path, progress: Progress | None = None, num_threads: int | None = None) -> Dataset:
    """Finds, scans and verifies all pictures of a run; every broken one is found.

    Raises OptionError that lists all broken pictures when on_bad_image is stop; with skip they are left out and warned about.
    On several processes run it on one first: the others then find everything in the index.
    """
    dataset = scan(subsets_of(options, cache_dir), cache_dir, progress)
    dataset = verify(dataset, cache_dir, progress, num_threads)
    if dataset.bad and options.on_bad_image == "stop":
        raise bad_pictures_error(dataset.bad)
    if dataset.bad:
        text = f"{_pictures(len(dataset.bad))} cannot be read and {'is' if len(dataset.bad) == 1 else 'are'} left out: "
        dataset = replace(dataset, warnings=(*dataset.warnings, text + "; ".join(map(str, dataset.bad))))
    if not any(not dataset.subsets[picture.subset].is_reg for picture in dataset.pictures):
        raise OptionError(Problem("train_data_dir", f"none of the pictures can be read:\n{_listing(dataset.bad)}"))
    return dataset


def bad_pictures_error(bad: Iterable[BadPicture]) -> OptionError:
    """The error that names every broken picture with its reason."""
    bad = tuple(bad)
    return OptionError(
        Problem(
            "on_bad_image",
            f"{_pictures(len(bad))} cannot be read. Replace or remove {'it' if len(bad) == 1 else 'them'}, or set on_bad_image = skip:\n"
            + _listing(bad),
        )
    )


def _pictures(count: int) -> str:
    return "1 picture" if count == 1 else f"{count} pictures"


def _listing(bad: Iterable[BadPicture]) -> str:
    return "\n".join(f"  {picture}" for picture in bad)


def scan(subsets: Subsets, cache_dir: Path, progress: Progress | None = None) -> Dataset:
    """Lists the pictures of all subsets, sorted by name within each; reads only headers and captions.

    Raises OptionError when there are none.
    """
    pictures: list[Picture] = []
    bad: list[BadPicture] = []
    warnings = list(subsets.warnings)
    with Index(index_file(cache_dir)) as index:
        for number, subset in enumerate(subsets.items):
            walker = _SubsetScan(index, number, subset, progress, len(pictures))
            found = sorted(walker.run(), key=lambda picture: picture.name)
            bad += sorted(walker.bad, key=lambda picture: picture.path)
            warnings += walker.warnings
            if not found and not walker.bad:
                warnings.append(f"{subset.folder} has no pictures ({', '.join(ending[1:] for ending in EXTENSIONS)}); it adds nothing")
            pictures += found
    if not any(not subsets.items[picture.subset].is_reg for picture in pictures) and not bad:
        folders = ", ".join(str(item.folder) for item in subsets.items if not item.is_reg)
        raise OptionError(
            Problem(
                "train_data_dir",
                f"train_data_dir: no pictures in {folders}; wanted are {', '.join(ending[1:] for ending in EXTENSIONS)} files",
            )
        )
    if progress is not None:
        progress("scan", len(pictures), len(pictures))
    return Dataset(subsets.items, tuple(pictures), tuple(bad), tuple(warnings))


class _SubsetScan:
    """Walks the folder of one subset."""

    def __init__(self, index: Index, number: int, subset: Subset, progress: Progress | None, done: int) -> None:
        self.index, self.number, self.subset, self.progress, self.done = index, number, subset, progress, done
        self.bad: list[BadPicture] = []
        self.warnings: list[str] = []
        self.masks = _masks(subset)
        self.listed = read_metadata(subset.metadata_file, subset.options.caption_separator) if subset.metadata_file else None
        self.unmasked = 0

    def run(self) -> list[Picture]:
        """All usable pictures; bad and warnings are complete afterwards."""
        pictures: list[Picture] = []
        used: set[str] = set()
        for folder in _walk(str(self.subset.folder), self.subset.recursive):
            pictures += self._folder(folder, used)
        if self.listed is not None:
            self.bad += [
                BadPicture(str(self.subset.folder / name), f"is named in {self.subset.metadata_file} but is not there")
                for name in sorted(self.listed.keys() - used)
            ]
        if self.unmasked and self.subset.options.conditioning_data_dir:
            self.warnings.append(
                f"{_pictures(self.unmasked)} in {self.subset.folder} have no mask in {self.subset.options.conditioning_data_dir}; "
                "all of each counts in the loss"
            )
        return pictures

    def _folder(self, folder: str, used: set[str]) -> Iterator[Picture]:
        # Names only: the entries themselves keep what stat() said, a kilobyte each.
        with os.scandir(folder) as entries:
            files = {entry.name for entry in entries if not entry.name.startswith(".") and entry.is_file()}
        names = iter(sorted(name for name in files if os.path.splitext(name)[1].lower() in EXTENSIONS))
        own_metadata = Path(folder, "metadata.jsonl")
        beside = read_metadata(own_metadata, self.subset.options.caption_separator) if "metadata.jsonl" in files and not self.listed else {}
        prefix = os.path.relpath(folder, self.subset.folder).replace(os.sep, "/")
        prefix = "" if prefix == "." else prefix + "/"
        while part := list(islice(names, _REPORT_EVERY)):
            yield from self._part(folder, prefix, part, files, beside, used)
            self.done += len(part)
            if self.progress is not None:
                self.progress("scan", self.done, 0)

    def _part(
        self, folder: str, prefix: str, names: list[str], files: set[str], beside: dict[str, str], used: set[str]
    ) -> Iterator[Picture]:
        wanted = []
        for name in names:
            key = self._listed_as(prefix + name)
            if self.listed is None or key is not None:
                sidecar = self._sidecar(name, files) if self.listed is None else None
                wanted.append((name, key, sidecar))
                used.add(key or "")
        paths = [os.path.join(folder, name) for name, _, _ in wanted]
        known = self.index.known(paths + [os.path.join(folder, sidecar) for _, _, sidecar in wanted if sidecar])
        for (name, key, sidecar), path in zip(wanted, paths):
            try:
                stat = _stat(path)
                size = self._size(path, stat, known)
            except FileNotFoundError:
                continue  # removed while we were looking
            if isinstance(size, BadPicture):
                self.bad.append(size)
                continue
            if self.listed is not None and key is not None:
                caption: str | None = self.listed[key]
            elif sidecar is not None:
                caption = self._caption(os.path.join(folder, sidecar), known, path)
            else:
                caption = beside.get(name, beside.get(os.path.splitext(name)[0], self.subset.class_tokens))
            if caption is None:
                continue
            yield Picture(path, prefix + name, self.number, *size, caption, *stat, self._mask(prefix + name))

    def _listed_as(self, name: str) -> str | None:
        if self.listed is None:
            return None
        stem = os.path.splitext(name)[0]
        return name if name in self.listed else stem if stem in self.listed else None

    def _sidecar(self, name: str, files: set[str]) -> str | None:
        stem = os.path.splitext(name)[0]
        for ending in (self.subset.options.caption_extension, ".caption"):
            ending = ending if ending.startswith(".") else f".{ending}"
            if stem + ending in files:
                return stem + ending
        return None

    def _mask(self, name: str) -> str:
        if not self.masks:
            return ""
        mask = self.masks.get(os.path.splitext(name)[0]) or self.masks.get(os.path.splitext(os.path.basename(name))[0], "")
        self.unmasked += not mask
        return mask

    def _size(self, path: str, stat: tuple[int, int], known: dict[str, tuple[Any, ...]]) -> tuple[int, int] | BadPicture:
        row = known.get(path)
        if row is not None and row[:2] == stat:
            if row[6]:
                return BadPicture(path, row[6])
            if row[2]:
                return row[2], row[3]
        try:
            width, height = read_size(path)
        except BadImage as err:
            if not isinstance(err, Unreachable):
                self.index.put(path, stat, reason=str(err))
            return BadPicture(path, str(err))
        self.index.put(path, stat, width=width, height=height)
        return width, height

    def _caption(self, path: str, known: dict[str, tuple[Any, ...]], picture: str) -> str | None:
        row = known.get(path)
        try:
            stat = _stat(path)
            if row is not None and row[:2] == stat and row[4] is not None:
                return str(row[4])
            with open(path, encoding="utf-8-sig") as file:
                text = file.read(1 << 20).strip()
        except (OSError, UnicodeDecodeError) as err:
            self.bad.append(BadPicture(picture, f"has a caption file that cannot be read as UTF-8 text ({err})"))
            return None
        self.index.put(path, stat, text=text)
        return text


def _stat(path: str) -> tuple[int, int]:
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


def _walk(root: str, recursive: bool) -> Iterator[str]:
    yield root
    if recursive:
        for folder, inside, _ in os.walk(root):
            inside[:] = sorted(name for name in inside if not name.startswith("."))
            for name in inside:
                yield os.path.join(folder, name)


def _masks(subset: Subset) -> dict[str, str]:
    """Name of a picture without ending, within the mask folder -> path of its mask."""
    if subset.is_reg or subset.options.conditioning_data_dir is None:
        return {}
    root = subset.options.conditioning_data_dir
    masks = {}
    for folder in _walk(root, True):
        with os.scandir(folder) as entries:
            for entry in entries:
                stem, ending = os.path.splitext(entry.name)
                if ending.lower() in EXTENSIONS and entry.is_file():
                    masks[os.path.relpath(os.path.join(folder, stem), root).replace(os.sep, "/")] = entry.path
    return masks


def verify(dataset: Dataset, cache_dir: Path, progress: Progress | None = None, num_threads: int | None = None) -> Dataset:
    """Decodes every picture and mask that has not been decoded before, and gives each its identity; broken ones move to bad.

    What was found out is kept in the index by path, size and time of change.
    """
    files = list(
        dict.fromkeys([picture.path for picture in dataset.pictures] + [picture.mask for picture in dataset.pictures if picture.mask])
    )
    stats = {picture.path: (picture.num_bytes, picture.mtime_ns) for picture in dataset.pictures}
    identities: dict[str, str] = {}
    reasons: dict[str, str] = {}
    threads = num_threads or min(8, os.cpu_count() or 1)
    with Index(index_file(cache_dir)) as index:
        todo = _settle(index, files, stats, identities, reasons)
        with ThreadPoolExecutor(threads) as pool:
            # In parts, so that the results of 100,000 pictures never wait in memory together.
            for start in range(0, len(todo), _REPORT_EVERY):
                part = todo[start : start + _REPORT_EVERY]
                for done, (path, outcome) in enumerate(zip(part, pool.map(_examine, part)), start + 1):
                    _record(index, path, stats.get(path), outcome, identities, reasons)
                    if progress is not None and (done % 20 == 0 or done == len(todo)):
                        progress("verify", done, len(todo))
    good, bad = [], list(dataset.bad)
    for picture in dataset.pictures:
        reason = reasons.get(picture.path) or (
            f"has a mask {picture.mask} which {reasons[picture.mask]}" if picture.mask in reasons else ""
        )
        if reason:
            bad.append(BadPicture(picture.path, reason))
        else:
            good.append(replace(picture, identity=identities[picture.path], mask_identity=identities.get(picture.mask, "")))
    return replace(dataset, pictures=tuple(good), bad=tuple(bad))


@dataclass(frozen=True)
class _Outcome:
    stat: tuple[int, int]
    size: tuple[int, int] = (0, 0)
    identity: str = ""
    reason: str = ""
    lasting: bool = True
    """Whether the reason lies in the file's content, so that only another file can be better."""


def _settle(
    index: Index, files: list[str], stats: dict[str, tuple[int, int]], identities: dict[str, str], reasons: dict[str, str]
) -> list[str]:
    """Takes from the index what is known; returns the files that must be decoded."""
    todo = []
    for start in range(0, len(files), 5000):
        part = files[start : start + 5000]
        known = index.known(part)
        for path in part:
            row = known.get(path)
            stat = stats.get(path) or _stat_of(path)
            if row is not None and row[:2] == stat and row[5]:
                identities[path] = row[5]
            elif row is not None and row[:2] == stat and row[6]:
                reasons[path] = row[6]
            else:
                todo.append(path)
    return todo


def _stat_of(path: str) -> tuple[int, int] | None:
    try:
        return _stat(path)
    except OSError:
        return None


def identity_of(path: str | Path) -> str:
    """blake2b of a file's bytes, 32 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()


def _examine(path: str) -> _Outcome:
    stat = _stat_of(path) or (0, 0)
    try:
        identity = identity_of(path)
        height, width = decode(path).rgb.shape[:2]
    except BadImage as err:
        return _Outcome(stat, reason=str(err), lasting=not isinstance(err, Unreachable))
    except OSError as err:
        return _Outcome(stat, reason=f"cannot be read ({err.strerror or err})", lasting=False)
    return _Outcome(stat, (width, height), identity)


def _record(
    index: Index, path: str, scanned: tuple[int, int] | None, outcome: _Outcome, identities: dict[str, str], reasons: dict[str, str]
) -> None:
    if scanned is not None and scanned != outcome.stat and not outcome.reason:
        reasons[path] = "was changed while it was being read; start again"
    elif outcome.reason:
        reasons[path] = outcome.reason
        if outcome.lasting:
            index.put(path, outcome.stat, reason=outcome.reason)
    else:
        identities[path] = outcome.identity
        index.put(path, outcome.stat, width=outcome.size[0], height=outcome.size[1], identity=outcome.identity)
