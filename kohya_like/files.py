"""Which paths the page may touch, and which names it may give to files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PureWindowsPath

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import names_device

_UNSAFE = re.compile(r"[^\w .()+-]")


def everything() -> tuple[Path, ...]:
    """Roots for a page that only the person at this computer can open: every drive."""
    if os.name == "nt":
        return tuple(Path(f"{letter}:\\") for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if Path(f"{letter}:\\").exists())
    return (Path("/"),)


def confine(path: str | Path, roots: Sequence[Path]) -> Path:
    """The canonical form of a path, links and `..` resolved, that lies inside one of the roots.

    A path that is not absolute starts in the current folder. Raises OptionError for anything else: network names (`\\\\server\\share`,
    which would send the user's Windows credentials there), device names, characters that no path has, and places outside the roots.
    """
    text = str(path)
    if not text.strip():
        raise OptionError("the path is empty; give a file or folder")
    if "\0" in text or "\n" in text or "\r" in text:
        raise OptionError(f"{text!r} is not a path: it has characters that no file name has")
    if text.startswith(("\\\\", "//")):
        raise OptionError(f"{text}: network paths (\\\\server\\share) are not opened; mount the share and give its folder")
    if "://" in text:
        raise OptionError(f"{text}: addresses are not opened; give a file or folder on the computer that runs the studio")
    for part in PureWindowsPath(text).parts:
        if names_device(part):
            raise OptionError(f"{text}: {part} is the name of a device, not of a file; rename it")
    try:
        real = Path(text).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as err:
        raise OptionError(f"{text} is not a path that can be followed: {err}") from err
    if not any(real.is_relative_to(root) for root in roots):
        allowed = ", ".join(map(str, roots)) or "none"
        raise OptionError(f"{text} is outside the folders that this studio may use ({allowed}); start it with --allowed_dir for more")
    return real


def safe_name(text: str) -> str:
    """A file name without ending, made from what a person typed. Raises OptionError when nothing usable is left."""
    name = _UNSAFE.sub("-", text.strip()).strip(" .-")[:80]
    if not name:
        raise OptionError(f'"{text}" has no letter or digit that a file name could be made of; choose another name')
    if names_device(name):
        raise OptionError(f'"{text}" is the name of a device on Windows; choose another name')
    return name


def modified(path: Path) -> float:
    """When a file or folder was changed last, Unix time; 0 for one that is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def entries(folder: Path) -> list[Path]:
    """What lies in a folder, hidden files apart; nothing where there is none yet."""
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []
