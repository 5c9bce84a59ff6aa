"""Work on the images of a data set that takes long: captions and masks by a model. Each is a tool's process (tools.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from sd_scripts.dataset.caption_files import Words
from sd_scripts.families import TOOLS
from sd_scripts.schema.captioning import DESCRIBE, KEY_VARIABLE, CaptionImages, CaptionSection
from sd_scripts.schema.duplicates import FindDuplicates
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.faces import FindFaces
from sd_scripts.schema.masking import MaskImages
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.tools import ToolOptions

from .. import tools
from ..context import Context
from ..notices import check_host
from . import masks
from .room import Room
from .thumbnails import FOLDER as KEPT

Answer = dict[str, Any]
LOOKS = (FindFaces, FindDuplicates)
"""Those that change nothing, so that any data set may be looked at."""
DATA_TOOLS = {name: tool for name, tool in TOOLS.items() if tool.tab == "data"}


@dataclass(frozen=True)
class Desk:
    """The data set that is open, and who starts tools."""

    bench: tools.ToolBench
    room: Room
    context: Context

    def find(self, order: Mapping[str, Any]) -> tools.Started:
        """A start for this data set. Raises OptionError."""
        found = (each for each in self.bench.recent(about=str(self.room.root.absolute())) if each.name == order.get("name"))
        started = next(found, None)
        if started is None:
            raise OptionError("This is not on disk any more; open the data set again.")
        return started


def forms(desk: Desk, _order: Mapping[str, Any]) -> Answer:
    """The forms of the tools, what was started for this data set, newest first, what is wrong with faces in images that were looked at as
    they are cut now, and the near duplicates that a model has found: groups of (index, cosine distance from the first)."""
    starts = desk.bench.recent(about=str(desk.room.root.absolute()))
    known = {"tools": [tools.form_of(tool) for tool in DATA_TOOLS.values()], "runs": [tools.row(each) for each in starts]}
    faces, duplicates = ([each for each in starts if each.order.tool == tool.name and each.state == "finished"] for tool in LOOKS)
    return {**known, "faces": _faces(desk.room, faces), "alike": _alike(desk.room, duplicates[0]) if duplicates else []}


def _faces(room: Room, looks: list[tools.Started]) -> dict[int, str]:
    """What the newest look at each image has found; nothing of images that have changed since, or are cut in another way now."""
    left = dict(zip(_cuts(room, list(range(len(room.paths)))).text.splitlines(), range(len(room.paths)), strict=True)) if looks else {}
    found = {}
    for look in looks:
        with suppress(OSError, ValueError, KeyError, TypeError):
            listed = (look.path / tools.IMAGE_LIST).read_text(encoding="utf-8").splitlines()
            told = {row["file"]: str(row["why"]) for row in reversed(tools.report(look)["cut"])}
            for line in listed:
                index = left.get(line)
                if index is None or room.paths[index].stat().st_mtime > look.order.started:
                    continue
                del left[line]
                why = told.get(Path(json_of(line)["file_name"]).as_posix())
                if why:
                    found[index] = why
    return found


def _alike(room: Room, look: tools.Started) -> list[list[tuple[int, float]]]:
    """The groups that a look has found, without images that are gone or have changed since, and groups of which one is left."""
    places = {Path(os.path.relpath(path, room.root)).as_posix(): index for index, path in enumerate(room.paths)}
    found = []
    with suppress(OSError, ValueError, KeyError, TypeError):
        for group in tools.report(look)["groups"]:
            named = [(places[row["file"]], float(row["distance"])) for row in group if row["file"] in places]
            left = [(index, distance) for index, distance in named if room.paths[index].stat().st_mtime <= look.order.started]
            found += [left] if len(left) > 1 else []
    return found


def start(desk: Desk, order: Mapping[str, Any]) -> Answer:
    """Starts a tool for some images. Where it would send something away, first says what; with the digest of that (known) it starts."""
    tool, texts = DATA_TOOLS.get(str(order.get("tool"))), order.get("texts")
    if tool is None or not isinstance(texts, dict):
        raise OptionError("This is not an order of the page; reload it.")
    makes_masks = tool is MaskImages
    if makes_masks and desk.room.why_no_masks:
        raise OptionError(desk.room.why_no_masks)
    indices = _indices(desk.room, order)
    if not makes_masks and tool not in LOOKS:
        indices = desk.room.editable(indices)
    key = str(order.get("key") or "").strip()
    leaving = _leaving(desk, tool, texts, indices, bool(key))
    if leaving:
        digest = Words("\n".join(leaving)).version
        if order.get("known") != digest:
            return {"leaving": leaving, "known": digest}
    listed = _masks_listed(desk.room, indices) if makes_masks else (_cuts if tool is FindFaces else _listed)(desk.room, indices)
    folder = desk.room.options.dataset.conditioning_data_dir if makes_masks else None
    settled = {"mask_dir": str(Path(folder).absolute())} if folder else {}
    if tool is FindDuplicates:
        # Beside the small copies, which are tidied together with what nobody has used for long.
        settled = {"vector_dir": str((desk.context.output_dir / KEPT).absolute())}
    started = desk.bench.work_on_images(tool, texts, listed, settled, {KEY_VARIABLE: key})
    desk.context.supervisor.watch()
    return {"run": tools.row(started)}


def resume(desk: Desk, order: Mapping[str, Any]) -> Answer:
    """Goes on with a start that was stopped."""
    started = desk.bench.resume(desk.find(order), {KEY_VARIABLE: str(order.get("key") or "").strip()})
    desk.context.supervisor.watch()
    return {"run": tools.row(started)}


def stop(desk: Desk, order: Mapping[str, Any]) -> Answer:
    """Ends a start; what it has done stays."""
    try:
        desk.bench.cancel(desk.find(order))
    except TimeoutError as err:
        raise OptionError(f"Stopping: {err}") from err
    return {}


WORK: dict[str, Callable[[Desk, Mapping[str, Any]], Answer]] = {"forms": forms, "start": start, "resume": resume, "stop": stop}
"""What a page may order for the data set that it has open."""


def _indices(room: Room, order: Mapping[str, Any]) -> list[int]:
    given = order.get("indices")
    indices = given if isinstance(given, list) else list(range(len(room.paths)))
    if not indices or not all(isinstance(index, int) and 0 <= index < len(room.paths) for index in indices):
        raise OptionError("No image is shown; show those that this is for.")
    return indices


def _listed(room: Room, indices: list[int]) -> tools.ImageList:
    rows = (
        {"file_name": os.path.relpath(room.paths[index], room.root), "caption_file": os.path.relpath(room.files[index], room.root)}
        for index in indices
    )
    return tools.ImageList(room.root.absolute(), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _cuts(room: Room, indices: list[int]) -> tools.ImageList:
    """The images, with what training shows of each as shares of it."""
    rows = []
    for index in indices:
        cut = room.view.plan.cut(index, 0)
        sides = zip(cut.excess, cut.resized, cut.bucket, strict=True)
        places, lengths = zip(*((excess // 2 / whole, side / whole) for excess, whole, side in sides), strict=True)
        rows.append({"file_name": os.path.relpath(room.paths[index], room.root), "frame": [*places, *lengths]})
    return tools.ImageList(room.root.absolute(), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _masks_listed(room: Room, indices: list[int]) -> tools.ImageList:
    """The images that can have masks, with their files. Raises OptionError where none can."""
    rows = []
    why = None
    for index in indices:
        try:
            place = masks.place_of(room, index)
            masks.book_of(room, place)
        except OptionError as err:
            why = err
            continue
        rows.append({"file_name": os.path.relpath(room.paths[index], room.root), "mask_file": str(place)})
    if why is not None and not rows:
        raise why
    return tools.ImageList(room.root.absolute(), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _leaving(desk: Desk, tool: type[ToolOptions], texts: Mapping[str, Any], indices: list[int], has_key: bool) -> list[str]:
    """What a tool would send away, and to whom, a sentence each; nothing for one that stays on this machine. Raises OptionError."""
    if tool is not CaptionImages:
        return []
    asked = cast(CaptionSection, desk.bench.options(tool, texts, {"image_dir": str(desk.room.root.absolute())}).captions)  # type: ignore[attr-defined]
    if asked.endpoint is None:
        return []
    parts = urlsplit(asked.endpoint)
    check_host(str(parts.hostname), parts.port or parts.scheme, desk.context.is_private, "endpoint")
    files = {desk.room.files[index]: words for index, words in desk.room.texts(indices).items()}
    count = sum(asked.overwrite or not words.text for words in files.values())
    is_open = parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1")
    return [
        f"To {asked.endpoint}.{' The connection is not encrypted.' if is_open else ''}",
        f"{count} images, each shrunk to at most {asked.max_image_side} pixels and without what its file tells of place, time and camera.",
        f"The instruction: {asked.instruction or DESCRIBE}",
        f"The model's name: {asked.caption_model}.",
        "The key that you have typed; it is kept in no file." if has_key else "No key.",
        "Not sent: names of files and folders, captions, and everything else.",
    ]
