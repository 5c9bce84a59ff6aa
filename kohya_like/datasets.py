"""Data sets that people put together on the page: images, captions and zips arrive, and come to lie in `datasets/<name>` beside the runs.

What arrives waits in `datasets/.adding/<id>` until all of it is there; an upload that is cancelled or breaks off leaves nothing in the
data set. Files keep their pixels and lose what they tell about place and camera (sd_scripts/dataset/stripping.py). No file is ever
written over: another one of the same name gets a number, and so does its caption. Folders are made flat, but for kohya's
`<repeats>_<class>`.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import secrets
import shutil
import stat
import threading
import time
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from sd_scripts.dataset import images, stripping
from sd_scripts.dataset.config import KOHYA_FOLDER
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import fsync_directory

from . import files
from .answers import JsonAnswer, as_lines, order_of, said
from .arrivals import CAPTIONS, CONTROL, EXTRA, Group, joined
from .context import Context

FOLDER = "datasets"
WAITING = ".adding"
MAX_FILES = 20_000
MAX_BYTES = 16 << 30
"""Of one upload, and of what its zips hold."""
MAX_IMAGE_BYTES = 256 << 20
MAX_CAPTION_BYTES = 1 << 20
MAX_RATIO = 200
"""A zip that holds more than MIN_BOMB_BYTES may be this many times as large unpacked; deflate reaches 1032 for zeros."""
MIN_BOMB_BYTES = 64 << 20
MAX_LIST_BYTES = 8 << 20
"""Of the list of entries at the end of a zip, which is read at once."""
MOST_REPEATS = 999
"""Of a folder `<repeats>_<class>`. A larger number is a year or a date, and its folder is made flat as any other."""
FREE_BYTES = 1 << 30
"""What stays free on the disk, for the trainings that write to it."""
KEEP_WAITING_SECONDS = 86_400.0
_IDENT = re.compile(r"[0-9a-f]{32}")
_BUFFER_BYTES = 1 << 20
_SHOWN_NAME = 200
_TELL_EVERY = 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NEEDLESS = "is a hidden file or one of the system"
_REGULAR = ("reg", "regularization", "regularisation")
_NOT_OF_A_CLASS = re.compile(r"[^\w .,()'+&-]")


@dataclass
class Upload:
    """What one page has sent so far."""

    folder: Path
    target: Path
    arrived: list[tuple[str, Path]] = field(default_factory=list)
    """Names as the page gives them, with folders, and where the bytes are."""
    num_bytes: int = 0


@dataclass
class Added:
    """What became of an upload. left_out: reason -> names."""

    images: int = 0
    captions: int = 0
    pairs: int = 0
    """Of the images, those that came with what they are an edit of."""
    there: int = 0
    renamed: int = 0
    left_out: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Sentences about the data set as it is now."""

    def leave(self, name: str, why: str) -> None:
        """Notes a file that is not taken."""
        self.left_out.setdefault(why, []).append(name[-_SHOWN_NAME:])


class _RefusedZip(Exception):
    """Why a zip that can be read is not unpacked. What zipfile says of others is English, and of its own parts."""


class _ListedZip(io.BufferedReader):
    """A file whose list of entries, which zipfile reads at once, cannot fill the memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_LIST_BYTES:
            raise _RefusedZip(f"its list of entries is larger than {MAX_LIST_BYTES >> 20} MiB")
        return super().read(size)


class Datasets:
    """The data sets in one folder of runs, and what is on its way to them."""

    def __init__(self, output_dir: Path) -> None:
        self.root = output_dir / FOLDER
        self._uploads: dict[str, Upload] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """The data sets that are there."""
        with suppress(OSError):
            return sorted((path.name for path in self.root.iterdir() if _is_set(path)), key=str.casefold)
        return []

    def begin(self, name: str) -> str:
        """A new upload for the data set of a name; what others left behind a day ago or longer is removed. Raises OptionError."""
        if not name.strip():
            raise OptionError("Give the data set a name, such as my-cat.")
        target = _no_link(self.root / files.safe_name(name))
        ident = secrets.token_hex(16)
        waiting = self.root / WAITING
        try:
            for old in waiting.iterdir() if waiting.is_dir() else ():
                if old.stat().st_mtime < time.time() - KEEP_WAITING_SECONDS:
                    shutil.rmtree(old, ignore_errors=True)
            (waiting / ident).mkdir(parents=True)
        except OSError as err:
            raise _unwritable(self.root, err) from err
        self._uploads[ident] = Upload(waiting / ident, target)
        return ident

    def find(self, ident: str) -> Upload:
        """Raises OptionError for one that is over."""
        if not _IDENT.fullmatch(ident) or ident not in self._uploads:
            raise OptionError("This upload is over, or the studio was started again meanwhile; add the images again.")
        return self._uploads[ident]

    def check_room(self, upload: Upload, num_bytes: int) -> None:
        """Raises OptionError when so many more bytes are too many for an upload or for the disk."""
        if len(upload.arrived) >= MAX_FILES:
            raise OptionError(f"An upload may have {MAX_FILES} files; add the others in a second one, under the same name.")
        if upload.num_bytes + num_bytes > MAX_BYTES:
            raise OptionError(f"An upload may have {MAX_BYTES >> 30} GiB; add the others in a second one, under the same name.")
        free = shutil.disk_usage(upload.folder).free
        if free < num_bytes + FREE_BYTES:
            raise OptionError(
                f"The disk of {self.root} has {free / 2**30:.1f} GiB free; {num_bytes / 2**30:.1f} GiB are needed, and "
                f"{FREE_BYTES >> 30} GiB stays free for trainings. Make room, or start the studio with another --output_dir."
            )

    def end(self, ident: str) -> None:
        """Forgets an upload, with all that has arrived of it."""
        upload = self._uploads.pop(ident, None)
        if upload is not None:
            shutil.rmtree(upload.folder, ignore_errors=True)

    def finish(self, ident: str) -> Iterator[dict[str, Any]]:
        """Puts what has arrived into its data set: lines of progress (done, of), then what became of it, or a problem.

        Nothing lies in the data set before everything is unpacked and checked.
        """
        try:
            upload = self.find(ident)
        except OptionError as err:
            yield {"problem": said(err)}
            return
        # From here on nobody else finds it.
        if self._uploads.pop(ident, None) is None:
            return
        report = Added()
        groups: dict[tuple[str, str], Group] = {}
        try:
            for done, of in self._prepare(upload, groups, report):
                if done % _TELL_EVERY == 0:
                    yield {"done": done, "of": of}
            folder = self._place(groups.values(), upload.target, report)
            yield {"folder": str(folder or ""), **vars(report)}
        except OptionError as err:
            yield {"problem": said(err)}
        except OSError as err:
            yield {"problem": f"{said(_unwritable(self.root, err))} Images of this upload that were added: {report.images}."}
        finally:
            shutil.rmtree(upload.folder, ignore_errors=True)

    def _prepare(self, upload: Upload, groups: dict[tuple[str, str], Group], report: Added) -> Iterator[tuple[int, int]]:
        """Unpacks, checks and strips what has arrived; (done, of) after each file."""
        done, of = 0, len(upload.arrived)
        for place, (name, path) in enumerate(upload.arrived):
            if _path(name).suffix.lower() != ".zip":
                self._take("", name, path, upload.folder / f"r{place}", groups, report)
                done += 1
                yield done, of
                continue
            try:
                with _ListedZip(path.open("rb", buffering=0)) as stream, zipfile.ZipFile(stream) as archive:
                    entries = _entries(archive, path.stat().st_size, name, report)
                    self.check_room(upload, sum(entry.file_size for entry in entries))
                    of += len(entries)
                    for number, entry in enumerate(entries):
                        raw = upload.folder / f"z{place}-{number}"
                        if _unpack(archive, entry, raw, f"{name}: {entry.filename}", report):
                            self._take(name, entry.filename, raw, upload.folder / f"r{place}-{number}", groups, report)
                        done += 1
                        yield done, of
            except _RefusedZip as err:
                report.leave(name, f"is no zip that can be read ({err})")
            except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError):
                report.leave(name, "is no zip that can be read")
            done += 1
            path.unlink()

    def _take(self, source: str, name: str, path: Path, ready: Path, groups: dict[tuple[str, str], Group], report: Added) -> None:
        """Strips one file that has arrived and puts it to those of its name."""
        shown = f"{source}: {name}" if source else name
        clean = _path(name)
        ending = clean.suffix.lower()
        try:
            if any(_is_hidden(part) for part in clean.parts):
                report.leave(shown, _NEEDLESS)
                return
            if ending in CAPTIONS:
                if path.stat().st_size > MAX_CAPTION_BYTES:
                    report.leave(shown, f"is a caption of more than {MAX_CAPTION_BYTES >> 20} MiB")
                    return
                data = path.read_bytes()
            elif ending not in images.EXTENSIONS:
                report.leave(shown, "is no image, caption or zip")
                return
            elif path.stat().st_size > MAX_IMAGE_BYTES:
                report.leave(shown, f"is an image of more than {MAX_IMAGE_BYTES >> 20} MiB")
                return
            else:
                path = path.rename(path.with_name(path.name + ending))
                data, ending = stripping.stripped(path)
        except images.BadImage as err:
            report.leave(shown, str(err))
            return
        finally:
            path.unlink()
        _write(ready, data)
        key = (f"{source}/{clean.parent}", clean.stem)
        folder, above = _kept_folder(clean.parts[:-1])
        is_reg = any(part.casefold() in _REGULAR for part in above)
        while ending in groups.setdefault(key, Group(shown, clean.stem, key[0], folder, is_reg)).ready:
            key = (key[0] + "/", key[1])
        groups[key].ready[ending] = (ready, hashlib.sha256(data).hexdigest())

    def _place(self, arrived: Collection[Group], target: Path, report: Added) -> Path | None:
        """Moves what is ready into the data set, in one go; its folder, or None when there was nothing to move and it is not there."""
        groups, alone = joined(arrived)
        for group in alone:
            report.leave(group.shown, "is a mask or the image before an edit, and no image of its name is in the folder beside its own")
        is_mixed = any(group.folder and not group.is_reg for group in groups)
        there: dict[str, _There] = {}
        with self._lock:
            for group in groups:
                if group.is_reg and is_mixed:
                    report.leave(group.shown, "is a regularisation image; add the folder of those as a data set of its own")
                    continue
                # Numbered names are as good as others: those that came first keep theirs.
                while group.folder not in there or not there[group.folder].take(group, report):
                    there[group.folder] = _There(_no_link(target / group.folder))
            for folder in (target / name for name in there if (target / name).is_dir()):
                fsync_directory(folder)
            if not target.is_dir():
                return None
            fsync_directory(target)
            fsync_directory(self.root)
        report.notes += _unused(target)
        return target


class _There:
    """A data set as it is, and what is being added to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stems: dict[str, dict[str, Path]] = {}
        self._extras: dict[str, dict[str, Path]] = {}
        """Of these the ones that belong to an image: its name -> what follows it, as in a group -> file."""
        self._digests: dict[Path, str] = {}
        for path in folder.iterdir() if folder.is_dir() else ():
            self._note(path)

    def _note(self, path: Path) -> None:
        self._stems.setdefault(path.stem.casefold(), {})[path.suffix.lower()] = path
        match = EXTRA.fullmatch(path.stem)
        if match:
            self._extras.setdefault(match[1].casefold(), {})[f"{match[2]}{path.suffix.lower()}"] = path

    def _is_same(self, path: Path, digest: str) -> bool:
        if path not in self._digests:
            self._digests[path] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        return self._digests[path] == digest

    def take(self, group: Group, report: Added) -> bool:
        """Adds a group under a free name, or to the same images; False when somebody else has just taken the name."""
        stem = _stem(group.stem)
        for number in count(1):
            tried = stem if number == 1 else f"{stem}-{number}"
            there = self._stems.get(tried.casefold(), {})
            if group.images and self._stems.keys().isdisjoint(f"{tried}{extra}".casefold() for extra in group.extras | {""}):
                if not self._put({self.folder / f"{tried}{ending}": file for ending, (file, _) in group.ready.items()}):
                    return False
                report.images += len(group.images)
                report.captions += len(group.ready) - len(group.images)
                report.pairs += group.is_pair
                report.renamed += number > 1
                return True
            if not there and not group.images:
                break
            if there and self._has(group, there | self._extras.get(tried.casefold(), {})):
                return self._extend(group, tried, there, report)
        report.leave(group.shown, "is a caption, and no image of its name came with it or is there")
        return True

    def _has(self, group: Group, there: dict[str, Path]) -> bool:
        """Whether the image of a group is there, and nothing else of the group in another form."""
        return all(
            self._is_same(there[ending], group.ready[ending][1]) if ending in there else ending not in images.EXTENSIONS
            for ending in group.images
        )

    def _extend(self, group: Group, name: str, there: dict[str, Path], report: Added) -> bool:
        """Adds the captions, controls and masks of images that are there already."""
        image = next((path for ending, path in there.items() if ending in images.EXTENSIONS), None)
        if image is None:
            report.leave(group.shown, "is a caption, and no image of its name came with it or is there")
            return True
        known = there | self._extras.get(name.casefold(), {})
        new = [ending for ending in group.images if ending not in known]
        if not self._put({self.folder / f"{image.stem}{ending}": group.ready[ending][0] for ending in new}):
            return False
        report.images += len(new)
        report.pairs += any(ending.startswith(CONTROL) for ending in new)
        report.there += len(group.images) - len(new)
        for ending in [ending for ending in group.ready if ending in CAPTIONS]:
            file, digest = group.ready[ending]
            if ending not in there:
                if not self._put({image.with_suffix(ending): file}):
                    return False
                report.captions += 1
            elif self._is_same(there[ending], digest):
                report.there += 1
            else:
                report.leave(group.shown, "is another caption for an image that has one; the one that is there stays")
        return True

    def _put(self, moves: dict[Path, Path]) -> bool:
        """Moves files to new names, an image after its caption and controls: it is never there without them. False when a name is taken."""
        self.folder.mkdir(parents=True, exist_ok=True)
        done: list[Path] = []
        for final, ready in sorted(moves.items(), key=lambda move: (move[0].suffix.lower() not in CAPTIONS, -len(move[0].stem))):
            try:
                _move(ready, final)
            except FileExistsError:
                for path in done:
                    path.replace(moves[path])
                return False
            done.append(final)
        for path in done:
            self._note(path)
        return True


def _no_link(folder: Path) -> Path:
    """Raises OptionError for what cannot be a folder of images here."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise OptionError(f"{folder} is a link or a file, not a data set; choose another name.")
    return folder


def _kept_folder(parts: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The innermost folder `<repeats>_<class>` of a file's, with a name that every disk takes, and the ones above it; ("", ()) for none."""
    for place in reversed(range(len(parts))):
        match = KOHYA_FOLDER.match(parts[place])
        if match and 0 < int(match[1]) <= MOST_REPEATS:
            return f"{int(match[1])}_{_NOT_OF_A_CLASS.sub('-', match[2])[:80]}".rstrip(" ."), parts[:place]
    return "", ()


def _unused(target: Path) -> list[str]:
    """A sentence where images lie beside folders with repeats, which training then takes alone."""
    entries = list(target.iterdir())
    kept = sorted(path.name for path in entries if path.is_dir() and KOHYA_FOLDER.match(path.name))
    loose = sum(path.suffix.lower() in images.EXTENSIONS for path in entries)
    if not kept or not loose:
        return []
    return [
        f"{loose} of its images lie in no folder with repeats, and training takes only what lies in one ({', '.join(kept)}): put them into "
        "another data set, or into a folder such as 1_cat and add that."
    ]


def _is_set(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not path.name.startswith(".")


def _move(ready: Path, final: Path) -> None:
    """Raises FileExistsError rather than taking the place of a file."""
    try:
        os.link(ready, final)
    except FileExistsError:
        raise
    except OSError:
        # A disk without hard links: the name is kept first, and then taken by the whole file.
        final.open("xb").close()
        ready.replace(final)
    else:
        ready.unlink()


def _entries(archive: zipfile.ZipFile, num_bytes: int, name: str, report: Added) -> list[zipfile.ZipInfo]:
    """The entries worth unpacking, the others left out by name. Raises _RefusedZip for a bomb."""
    listed = archive.infolist()
    if len(listed) > MAX_FILES:
        raise _RefusedZip(f"it has {len(listed)} entries, and {MAX_FILES} are the most")
    kept = []
    for entry in listed:
        shown = f"{name}: {entry.filename}"
        path = _path(entry.filename)
        ending = path.suffix.lower()
        most = MAX_CAPTION_BYTES if ending in CAPTIONS else MAX_IMAGE_BYTES
        if entry.is_dir():
            continue
        if any(_is_hidden(part) for part in path.parts):
            report.leave(shown, _NEEDLESS)
        elif stat.S_ISLNK(entry.external_attr >> 16):
            report.leave(shown, "is a link")
        elif ending not in (*images.EXTENSIONS, *CAPTIONS):
            report.leave(shown, "is a zip inside of a zip" if ending == ".zip" else "is no image or caption")
        elif entry.flag_bits & 1:
            report.leave(shown, "is protected by a password")
        elif entry.file_size > most:
            report.leave(shown, f"has {entry.file_size / 2**20:.0f} MiB, and {most >> 20} MiB is the most")
        else:
            kept.append(entry)
    whole = sum(entry.file_size for entry in kept)
    if whole > MAX_BYTES or (whole > MIN_BOMB_BYTES and whole > MAX_RATIO * num_bytes):
        raise _RefusedZip(
            f"unpacked it would have {whole / 2**20:.0f} MiB, {whole / num_bytes:.0f} times its size; "
            f"{MAX_BYTES >> 30} GiB and {MAX_RATIO} times are the most"
        )
    return kept


def _unpack(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path, shown: str, report: Added) -> bool:
    """One entry as a file; False, and left out by name, when it is damaged. No more is read than its size says."""
    try:
        with archive.open(entry) as stream:
            data = b"".join(iter(lambda: stream.read(_BUFFER_BYTES), b""))
            if len(data) != entry.file_size:
                raise zipfile.BadZipFile("its size is another")
    except NotImplementedError:
        report.leave(shown, "is packed by a method that cannot be read here; pack it as zip with Deflate")
        return False
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, OSError):
        report.leave(shown, "is damaged in the zip")
        return False
    path.write_bytes(data)
    return True


def _path(name: str) -> PurePosixPath:
    """A name with folders, none of which leads up or to a root."""
    return PurePosixPath(*[part for part in name.replace("\\", "/").replace("\0", "").split("/") if part not in ("", ".", "..")])


def _is_hidden(part: str) -> bool:
    return part.startswith(".") or part.casefold() in ("__macosx", "thumbs.db", "desktop.ini")


def _stem(text: str) -> str:
    try:
        return files.safe_name(text)
    except OptionError:
        return "image"


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _unwritable(root: Path, err: OSError) -> OptionError:
    if err.errno in _FULL:
        return OptionError(f"The disk of {root} is full. Make room, then add the images again.")
    return OptionError(f"{root} cannot be written: {err.strerror or err}.")


def routes(context: Context) -> list[Route]:
    """The routes behind "Add images"; the guard asks all of them for the token of the page."""
    kept = Datasets(context.output_dir)

    def look(_request: Request) -> Response:
        endings = [*images.EXTENSIONS, *CAPTIONS, ".zip"]
        return JsonAnswer({"names": kept.names(), "folder": str(kept.root), "endings": endings})

    async def begin(request: Request) -> Response:
        order = await order_of(request)
        try:
            return JsonAnswer({"upload": await run_in_threadpool(kept.begin, str(order.get("name", "")))})
        except OptionError as err:
            return JsonAnswer({"problem": said(err)})

    async def upload(request: Request) -> Response:
        """One file, as the body; its name, with folders, in the address."""
        ident, name = request.query_params.get("upload", ""), request.query_params.get("file", "")
        try:
            one = kept.find(ident)
            length = request.headers.get("content-length", "")
            await run_in_threadpool(kept.check_room, one, int(length) if length.isdecimal() else 0)
            await _receive(request, kept, one, name)
        except OptionError as err:
            return JsonAnswer({"problem": said(err)})
        except OSError as err:
            return JsonAnswer({"problem": said(_unwritable(kept.root, err))})
        except ClientDisconnect:
            return JsonAnswer({"problem": "The page has gone."}, 400)
        return JsonAnswer({"files": len(one.arrived)})

    async def finish(request: Request) -> Response:
        order = await order_of(request)
        return as_lines(kept.finish(str(order.get("upload", ""))))

    async def cancel(request: Request) -> Response:
        order = await order_of(request)
        await run_in_threadpool(kept.end, str(order.get("upload", "")))
        return JsonAnswer({})

    return [
        Route("/kl/datasets", look),
        Route("/kl/datasets/begin", begin, methods=["POST"]),
        Route("/kl/datasets/upload", upload, methods=["POST"]),
        Route("/kl/datasets/finish", finish, methods=["POST"]),
        Route("/kl/datasets/cancel", cancel, methods=["POST"]),
    ]


async def _receive(request: Request, kept: Datasets, upload: Upload, name: str) -> None:
    """Writes the body to a file that waits. One that breaks off is removed. Raises OptionError, OSError and ClientDisconnect."""
    path = upload.folder / f"a{secrets.token_hex(8)}"
    held = bytearray()
    size = 0
    try:
        with path.open("xb") as file:
            async for chunk in request.stream():
                held += chunk
                size += len(chunk)
                if len(held) >= _BUFFER_BYTES:
                    await run_in_threadpool(kept.check_room, upload, size)
                    await run_in_threadpool(file.write, bytes(held))
                    held.clear()
            await run_in_threadpool(file.write, bytes(held))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    upload.num_bytes += size
    upload.arrived.append((name, path))
