"""Which training states are on disk, and which are whole. Knows files, no tensors and no torch; checkpoint.py writes them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from sd_scripts.schema.outside import json_of

FORMAT = 1


class BrokenState(ValueError):
    """A state folder that is not whole; the message says what is wrong with it."""


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state_folders(folder: Path) -> list[Path]:
    """State folders inside `state/`, oldest first, whole or not."""
    return sorted((path for path in folder.glob("[0-9]*") if path.is_dir() and path.name.isdigit()), key=lambda path: int(path.name))


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a state folder whose files are all there, with their sizes; what is in them is not read, so this takes no time.

    Raises BrokenState with the reason for any other folder.
    """
    try:
        manifest = json_of((path / "manifest.json").read_text(encoding="utf-8"))
        files = dict(manifest["files"])
        manifest["step"] = int(manifest["step"])
    except FileNotFoundError as err:
        raise BrokenState("manifest.json is missing") from err
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise BrokenState(f"manifest.json cannot be read ({err})") from err
    if manifest.get("format") != FORMAT:
        raise BrokenState(f"it has format {manifest.get('format')}, this version reads {FORMAT}")
    for name, wanted in files.items():
        file = path / name
        if not file.is_file():
            raise BrokenState(f"{name} is missing")
        if file.stat().st_size != wanted["size"]:
            raise BrokenState(f"{name} has {file.stat().st_size} bytes instead of {wanted['size']}")
    return dict(manifest)


def check_state(path: Path) -> dict[str, Any]:
    """The manifest of a whole state folder, every byte of it checked. Raises BrokenState with the reason for any other."""
    manifest = read_manifest(path)
    for name, wanted in manifest["files"].items():
        if sha256(path / name) != wanted["sha256"]:
            raise BrokenState(f"{name} has changed since it was written (SHA-256 differs)")
    return manifest


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole state inside `state/`, and a sentence for each newer one that is broken."""
    broken = []
    for path in reversed(state_folders(folder)):
        try:
            check_state(path)
        except BrokenState as err:
            broken.append(f"the state of step {int(path.name)} is broken and is not used: {err}")
            continue
        return path, broken
    return None, broken
