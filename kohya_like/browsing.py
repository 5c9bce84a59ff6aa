"""Folders and files of the studio's computer, for the page's "Browse": what lies in a folder, where to begin, and models found here.

Nothing outside of the folders that the page may use is listed, and no link that leads out of them. Hidden names are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sd_scripts.dataset.images import EXTENSIONS
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import PIPELINE_FILES

from . import datasets, files
from .answers import JsonAnswer, order_of, said
from .context import Context

MAX_ENTRIES = 10_000
MAX_MODELS = 200
MAX_DEPTH = 3
"""Folders inside a folder of models that are looked through."""
WEIGHTS = (".safetensors",)
ENDINGS = {
    "dataset_config": (".toml",),
    "in_json": (".json", ".jsonl", ".csv"),
    "image": EXTENSIONS,
    "images": EXTENSIONS,
    "tokenizer": (".json", ".txt"),
    "settings": (".toml", ".json", ".yaml", ".yml", ".safetensors", ".sh", ".bat", ".cmd", ".ps1", ".txt"),
}
"""Endings of the files that an option takes; every other one takes weights."""
PROGRAMS = ("ComfyUI", "stable-diffusion-webui", "stable-diffusion-webui-forge", "kohya_ss", "sd-scripts")
"""Folders of other programs, which keep models in a folder `models`."""
MOUNTS = ("/mnt", "/media", "/run/media", "/Volumes")
_DIGITS = re.compile(r"(\d+)")


def listing(path: Path, kind: str, option: str, roots: Sequence[Path]) -> dict[str, Any]:
    """The folders in a folder, its files that the option takes, and how many images it has. Raises OptionError with a sentence."""
    folder = files.confine(path, roots)
    if folder.is_file():
        folder = folder.parent
    endings = ENDINGS.get(option, WEIGHTS)
    folders, found, num_images, seen = [], [], 0, 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or not _stays(entry, roots):
                    continue
                seen += 1
                if seen > MAX_ENTRIES:
                    break
                ending = os.path.splitext(entry.name)[1].lower()
                if entry.is_dir():
                    folders.append(entry.name)
                elif entry.is_file():
                    num_images += ending in EXTENSIONS
                    if kind == "file" and ending in endings:
                        found.append(entry.name)
    except FileNotFoundError:
        raise OptionError(f"{path} is not there; choose another folder") from None
    except OSError as err:
        raise OptionError(f"{path} cannot be read: {err.strerror or err}; choose another folder") from err
    return {
        "path": str(folder),
        "above": str(folder.parent) if _is_inside(folder.parent, roots) and folder.parent != folder else "",
        "folders": sorted(folders, key=_order),
        "files": sorted(found, key=_order),
        "images": num_images,
        "cut": seen > MAX_ENTRIES,
        "endings": list(endings) if kind == "file" else [],
    }


def places(output_dir: Path, roots: Sequence[Path]) -> list[dict[str, str]]:
    """Where one may begin, each that is there and allowed: label and path."""
    home = Path.home()
    mounted = [path for mount in MOUNTS for path in _folders(Path(mount))]
    offered = [
        ("Data sets", output_dir / datasets.FOLDER),
        ("Runs", output_dir),
        ("Home", home),
        ("Working folder", Path.cwd()),
        ("Hub cache", hub_cache()),
        *((f"{path.parent.name}/{path.name}", path) for path in _model_folders(roots)),
        *((path.name, path) for path in mounted),
        *((root.name or str(root), root) for root in roots),
    ]
    shown: dict[Path, str] = {}
    for label, path in offered:
        with suppress(OSError, RuntimeError):
            real = path.resolve()
            if real.is_dir() and _is_inside(real, roots):
                shown.setdefault(real, label)
    return [{"label": label, "path": str(path)} for path, label in shown.items()]


def models(roots: Sequence[Path]) -> list[dict[str, str]]:
    """Models on this computer: their name, where they lie, and what to type for them; at most MAX_MODELS."""
    found = []
    for folder in _model_folders(roots):
        for path in _weights(folder, MAX_DEPTH, roots):
            where = f"{folder.parent.name} · {path.parent.relative_to(folder.parent)}"
            found.append({"label": path.name, "where": where, "value": str(path)})
    for folder in _folders(hub_cache()):
        owner, slash, name = folder.name.removeprefix("models--").partition("--")
        if folder.name.startswith("models--") and slash and _is_inside(folder, roots) and _holds_model(folder):
            found.append({"label": f"{owner}/{name}", "where": "Hub cache", "value": f"{owner}/{name}"})
    return sorted(found, key=lambda model: (model["where"], _order(model["label"])))[:MAX_MODELS]


def hub_cache() -> Path:
    """The folder of what came from the hub, as its own package finds it (environment variables of huggingface_hub)."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub").expanduser()


def _model_folders(roots: Sequence[Path]) -> list[Path]:
    """Folders `models` of other programs: beside the working folder, in it, at home and in the folders given to the studio."""
    around = dict.fromkeys([Path.cwd(), Path.cwd().parent, Path.home(), *(root for root in roots if root.parent != root)])
    inside = [folder / program / "models" for folder in around for program in PROGRAMS]
    themselves = [root / "models" for root in roots if root.name in PROGRAMS]
    return [path for path in dict.fromkeys((*inside, *themselves)) if path.is_dir() and _is_inside(path.resolve(), roots)]


def _weights(folder: Path, depth: int, roots: Sequence[Path]) -> Iterator[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: _order(entry.name)):
            if entry.name.startswith(".") or not _stays(entry, roots):
                continue
            if entry.is_dir(follow_symlinks=False):
                if depth:
                    yield from _weights(Path(entry.path), depth - 1, roots)
            elif entry.name.lower().endswith(WEIGHTS):
                yield Path(entry.path)


def _holds_model(folder: Path) -> bool:
    """Whether a repository in the cache has weights: a pipeline, or a file of its own."""
    snapshots = _folders(folder / "snapshots")
    return any(next(snapshot.glob(name), None) for snapshot in snapshots for name in (*PIPELINE_FILES, "*.safetensors"))


def _folders(place: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(path for path in place.iterdir() if path.is_dir())
    return []


def _stays(entry: os.DirEntry[str], roots: Sequence[Path]) -> bool:
    """Whether an entry is what it seems, or a link inside of the roots."""
    try:
        return not entry.is_symlink() or _is_inside(Path(entry.path).resolve(), roots)
    except (OSError, RuntimeError):
        return False


def _is_inside(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


def _order(name: str) -> list[tuple[int, int, str]]:
    """Sorts as people count: image 2 before image 10."""
    return [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece.casefold()) for piece in _DIGITS.split(name) if piece]


def routes(context: Context) -> list[Route]:
    """The route behind "Browse"; the guard asks it for the token of the page."""

    def look(order: dict[str, Any]) -> dict[str, Any]:
        kind, option = str(order.get("kind", "")), str(order.get("option", ""))
        takes_model = kind == "file" and option not in ENDINGS
        begins = order.get("begins") is True
        begun: dict[str, Any] = {}
        if begins:
            begun = {"places": places(context.output_dir, context.roots), "models": models(context.roots) if takes_model else []}
        begun["takesFolder"] = kind == "folder" or takes_model
        try:
            return begun | listing(Path(str(order.get("path") or "").strip() or context.output_dir), kind, option, context.roots)
        except OptionError as err:
            if not begins:
                return {"problem": said(err)}
        # What stands in the field may be a name on the hub or a typing error.
        return begun | listing(context.output_dir, kind, option, context.roots)

    async def browse(request: Request) -> Response:
        return JsonAnswer(await run_in_threadpool(look, await order_of(request)))

    return [Route("/kl/browse", browse, methods=["POST"])]
