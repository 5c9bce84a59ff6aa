"""Write files so that a reader, or a power cut, never meets half of one."""

import argparse
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

TEMPORARY_MARK = ".writing-"
"""Part of the name of every file and folder that is not finished yet; what carries it may be deleted."""
NOT_UTF_8 = "has bytes that are not UTF-8, which neither settings nor a log can hold; write it, or name the file or folder, in UTF-8"

PIPELINE_FILES = ("model_index.json", "modular_model_index.json")
"""The files of a diffusers folder that say which networks it has: of a pipeline, and of one that is put together from blocks."""


def pipeline_file(folder: Path) -> Path | None:
    """The file by which this is the diffusers folder of a whole model; None for others."""
    return next((folder / name for name in PIPELINE_FILES if (folder / name).is_file()), None)


_DEVICES = {"CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$", *(f"{name}{digit}" for name in ("COM", "LPT") for digit in "0123456789¹²³")}


def names_device(part: str) -> bool:
    """Whether Windows takes a file of this name, with whatever ending, for a device."""
    return part.split(".")[0].rstrip(" ").upper() in _DEVICES


def is_text(name: str) -> bool:
    """Whether a file's name is UTF-8; those in old archives may be none, and no list, log or settings file can hold them."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def given_path(text: str) -> Path | None:
    """The path that a command line gives; an empty one is none, never the present folder."""
    if not is_text(text):
        raise argparse.ArgumentTypeError(f"{text!r} {NOT_UTF_8}")
    return Path(text) if text.strip() else None


def is_json(text: str) -> bool:
    """Whether an option that takes the path of a JSON file was given the text of one in its place."""
    return text.lstrip().startswith("{")


def fsync_directory(folder: Path) -> None:
    """Makes a rename in this folder durable; does nothing where folders cannot be opened (Windows)."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unfinished(path: Path) -> Path:
    """A free name beside path for what will take its place. Nothing is there yet: who makes it inside of a `try` leaves nothing behind,
    wherever a signal ends the program."""
    return path.with_name(f".{path.name}{TEMPORARY_MARK}{secrets.token_hex(4)}")


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Gives a temporary path beside `path`; when the block ends well, the file written there is fsynced and takes the place of `path`.

    On an error the temporary file is removed and the old content of `path` stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = unfinished(path)
    try:
        aside.touch(0o600, exist_ok=False)
        yield aside
        with aside.open("rb+") as file:
            os.fsync(file.fileno())
        aside.chmod(0o666 & ~_umask())
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
    fsync_directory(path.parent)


@contextmanager
def folder_aside(path: Path) -> Iterator[Path]:
    """A new folder beside path; when the block ends well it is made durable and takes the place of path, which may be there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside, old = unfinished(path), unfinished(path)
    try:
        aside.mkdir()
        yield aside
        for file in (*sorted(aside.rglob("*")), aside):
            if file.is_dir():
                fsync_directory(file)
            else:
                with file.open("rb+") as opened:
                    os.fsync(opened.fileno())
        if path.exists():
            path.rename(old)
        aside.rename(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    fsync_directory(path.parent)
    if old.exists():
        shutil.rmtree(old)


def write_atomically(path: Path, data: bytes | str) -> None:
    """Writes a whole file; text as UTF-8."""
    with written_aside(path) as aside:
        aside.write_bytes(data.encode() if isinstance(data, str) else data)


def free_path(folder: Path, stem: str) -> Path:
    """A path for a new PNG, with an empty file there that keeps it: two processes never get the same one."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = folder / f"{stem}{'' if number == 1 else f'-{number}'}.png"
        try:
            path.open("x").close()
        except FileExistsError:
            number += 1
            continue
        return path


@contextmanager
def new_image(out: str, stem: str, addition: str = "") -> Iterator[Path]:
    """A path for a new PNG: `stem` in the folder `out`; or, where `out` is the name of a file, that one with the addition. It is free again
    when the block fails."""
    place = Path(out).expanduser().absolute()
    in_file = place.suffix.lower() == ".png" and not place.is_dir()
    path = free_path(place.parent, place.stem + addition) if in_file else free_path(place, stem)
    try:
        yield path
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def out_problems(out: str) -> list[str]:
    """What is wrong with a place for new images."""
    if Path(out).suffix.lower() not in (".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff") or Path(out).is_dir():
        return []
    return [f"out: images are written as PNG, which keeps what made them; take {Path(out).with_suffix('.png')}, or a folder"]


def _umask() -> int:
    """The process's umask: libraries such as safetensors make private files, but what we write is meant to be read like any other file."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def one_at_a_time(folder: Path, name: str = ".starting") -> Iterator[None]:
    """Within the block no other process chooses or makes a run in this output folder; waits for one that does.

    name: of the file that is locked; another one is for something else that is done in a folder by one at a time.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / name).open("a")
    except OSError:
        # Whoever makes the run folder says in words why it cannot be made.
        yield
        return
    with file:
        # A disk without locks is found out by the lock of the run itself, with a sentence.
        with suppress(OSError):
            lock(file, waits=True)
        yield


def lock(file: IO[Any], waits: bool = False) -> None:
    """An exclusive lock that the system takes back when the process ends. Raises OSError when somebody has it and nobody waits."""
    if os.name == "nt":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if waits else msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
