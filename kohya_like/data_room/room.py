"""One data set that a page looks at: its images as training cuts them, with their captions, and what stands beside the folder for both."""

from __future__ import annotations

import io
import os
import secrets
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sd_scripts.dataset import captions as rules_of_captions
from sd_scripts.dataset import images, triage, watermarks
from sd_scripts.dataset.caption_files import Book, CaptionChange, Words, read
from sd_scripts.dataset.images import BadImage
from sd_scripts.dataset.mask_files import MaskBook
from sd_scripts.dataset.pairs import CONTROL_FOLDERS, MASK_FOLDERS, beside
from sd_scripts.dataset.scan import caption_endings
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.runs import RunOptions

from .. import dataset_view
from . import masks
from .captions import rewritten
from .thumbnails import Thumbnails

LEFT_OUT = ".left_out"
"""Folder in a data set for images that somebody has taken out of it; training does not see hidden folders."""
MOST_ROOMS = 8
SHOWN_ROWS = 200
SHOWN_VARIANTS = 3
SMALL_SHARE = 0.5
"""An image with less than this share of the training size's pixels is called small."""
_LENGTHS = ("max_token_length", "t5xxl_max_token_length", "text_max_len")
_TELL_EVERY = 10
_ITEMS_AT_ONCE = 200


@dataclass
class Room:
    """A data set that was opened with the settings of the form."""

    view: dataset_view.View
    options: RunOptions
    root: Path
    book: Book
    mask_books: list[MaskBook]
    """Of the folder of masks that the form names, and of root."""
    num_steps: int
    begun: int
    """Bytes of the history of captions before they were read."""
    paths: list[Path] = field(default_factory=list)
    """Of the images, in the order of the plan."""
    files: list[Path] = field(default_factory=list)
    """Of their captions, there or not."""

    @property
    def why_fixed(self) -> str:
        """Why captions cannot be edited here; empty where they can."""
        data = self.options.dataset
        if (data.train_data_dir or "").startswith("toy:"):
            return "A built-in data set is drawn anew when it is changed; add images of your own to write captions."
        if data.in_json is not None:
            return f"The captions come from {data.in_json}; edit that file, or empty the field in_json to use files beside the images."
        if not self._holds_what_is_trained():
            return f"Some of the images lie outside of {self.root}, such as those of archives; unpack them into a folder to write captions."
        if self.view.plan.options.by_style:
            return "The folder of an image is its style; there are no captions."
        return ""

    @property
    def why_no_masks(self) -> str:
        """Why masks cannot be written here; empty where they can."""
        if (self.options.dataset.train_data_dir or "").startswith("toy:"):
            return "A built-in data set is drawn anew when it is changed; add images of your own to draw masks."
        if not self._holds_what_is_trained():
            return f"Some of the images lie outside of {self.root}, such as those of archives; unpack them into a folder to draw masks."
        return ""

    def holds(self, index: int) -> bool:
        """Whether an image lies in root. Those for regularisation may have a folder of their own, in which nothing is written from here."""
        return self.paths[index].is_relative_to(self.root)

    def _holds_what_is_trained(self) -> bool:
        plan = self.view.plan
        return all(self.holds(index) for index, image in enumerate(plan.images) if not plan.subsets[image.subset].is_reg)

    def editable(self, indices: Iterable[int]) -> list[int]:
        """Those images whose captions can be edited here. Raises OptionError where there is none."""
        if self.why_fixed:
            raise OptionError(self.why_fixed)
        inside = [index for index in indices if self.holds(index)]
        if not inside:
            raise OptionError(f"This lies outside of {self.root}; open the folder in which it is to change it.")
        return inside

    def shown(self, index: int, control: str = "") -> Path | None:
        """The file of an image, or of the control image with this number that it is an edit of; None for one that there is not."""
        if not 0 <= index < len(self.paths):
            return None
        if not control:
            return self.paths[index]
        controls = self.view.plan.images[index].controls
        return Path(controls[int(control)].path) if control.isdecimal() and int(control) < len(controls) else None

    def texts(self, indices: Sequence[int]) -> dict[int, Words]:
        """What the caption files of some images hold now. Raises OptionError."""
        return {index: read(self.files[index]) for index in indices}


class Rooms:
    """The data sets that pages have open, the newest ones."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.thumbnails = Thumbnails(output_dir)
        self._is_tidy = False
        self._rooms: OrderedDict[str, Room] = OrderedDict()
        self._books: dict[Path, Book] = {}
        self._mask_books: dict[Path, MaskBook] = {}
        self._lock = threading.Lock()

    def open(self, options: RunOptions) -> Iterator[dict[str, Any]]:
        """Sentences while it looks ({"say"}), then the images, some at a time ({"items"}), and the data set. Raises OptionError."""
        view = None
        given = options.dataset.train_data_dir
        above = Path(given) if given and Path(given).is_dir() else None
        begun = Book(above).size() if above is not None else 0
        for seen in dataset_view.look_at(options, self.output_dir, needs_masks=False):
            if isinstance(seen, str):
                yield {"say": seen}
            else:
                view = seen
        assert view is not None
        subsets = view.plan.subsets
        folders = [str(subset.folder) for subset in subsets] or [""]
        root = above or Path(os.path.commonpath(folders))
        with self._lock:
            book = self._books.setdefault(root, Book(root))
            roots = [Path(each).absolute() for each in (options.dataset.conditioning_data_dir, root) if each]
            mask_books = [self._mask_books.setdefault(each, MaskBook(each)) for each in dict.fromkeys(roots)]
        room = Room(view, options, root, book, mask_books, view.num_steps, begun)
        for image in view.plan.images:
            path = Path(image.path)
            endings = caption_endings(subsets[image.subset].options)
            there = (path.with_suffix(ending) for ending in endings if path.with_suffix(ending).is_file())
            room.paths.append(path)
            room.files.append(next(there, path.with_suffix(endings[0])))
        name = secrets.token_hex(8)
        with self._lock:
            self._rooms[name] = room
            while len(self._rooms) > MOST_ROOMS:
                self._rooms.popitem(last=False)
        if not self._is_tidy:
            self.thumbnails.tidy()
            self._is_tidy = True
        # All of 10,000 at once would take 16 MiB, which the process then keeps.
        items = items_of(room)
        while some := list(islice(items, _ITEMS_AT_ONCE)):
            yield {"items": some}
        yield {"room": name, **as_page(room)}

    def find(self, name: object) -> Room:
        """Raises OptionError for one that is forgotten."""
        with self._lock:
            room = self._rooms.get(str(name))
            if room is None:
                raise OptionError("The studio was started again, or many data sets were opened since; open this one again.")
            self._rooms.move_to_end(str(name))
            return room


def items_of(room: Room) -> Iterator[dict[str, Any]]:
    """The images as web/data draws them. Sizes in pixels; frame: left, top, width and height of the crop as shares of the image."""
    plan = room.view.plan
    held_out = set(plan.held_out)
    for index, image in enumerate(plan.images):
        subset = plan.subsets[image.subset]
        cut = plan.cut(index, 0)
        (across, down), (width, height) = cut.excess, cut.resized
        place = (across // 2, down // 2)
        yield {
            "name": os.path.relpath(image.path, room.root) if room.paths[index].is_relative_to(room.root.parent) else image.path,
            "outside": not room.holds(index),
            "size": [image.width, image.height],
            "bucket": list(cut.bucket),
            "frame": [place[0] / width, place[1] / height, cut.bucket[0] / width, cut.bucket[1] / height],
            "enlarged": cut.resized[0] > image.width,
            "small": image.width * image.height < SMALL_SHARE * plan.options.resolution[0] * plan.options.resolution[1],
            "repeats": subset.repeats,
            "kind": "regularisation" if subset.is_reg else "held out" if index in held_out else "",
            "caption": image.caption,
            "class": subset.class_tokens,
            "controls": [[control.width, control.height] for control in image.controls],
            "mask": masks.has_mask(room, index),
        }


def as_page(room: Room) -> dict[str, Any]:
    """The data set as web/data draws it, but for its images."""
    plan = room.view.plan
    model = room.options.model
    length = next((getattr(model, name) for name in _LENGTHS if getattr(model, name, None)), None)
    return {
        "folder": str(room.root),
        "bad": list(room.view.bad),
        "notes": list(plan.warnings),
        "separator": plan.options.caption_separator,
        "random": plan.options.random_crop,
        "fixed": room.why_fixed,
        "length": length,
        "leftOut": len(_left_out(room)),
        "news": room.begun,
        "maskNews": [0] * len(room.mask_books),
        "masksAreRead": room.options.dataset.masked_loss,
        "noMasks": room.why_no_masks,
    }


def image_of(room: Room, index: int) -> dict[str, Any]:
    """One image: its caption file as it is now, and texts as training will show them. Raises OptionError."""
    _check(room, [index])
    plan = room.view.plan
    words = read(room.files[index])
    image = plan.images[index]
    rules = plan.caption_rules(room.num_steps)[image.subset]
    raw = image.caption if words.text is None else words.text
    variants = range(SHOWN_VARIANTS if rules.random else 1)
    key = plan.key_of(index)
    shown = dict.fromkeys(rules_of_captions.render(rules, raw, plan.seed, key, variant) for variant in variants)
    return {
        "text": words.text,
        "version": words.version,
        "shown": list(shown),
        "file": room.files[index].name,
        "mask": masks.state_of(room, index),
    }


def write(room: Room, index: int, text: str, version: str) -> dict[str, Any]:
    """Writes one caption, unless somebody else has since the version that the page knows. Raises OptionError."""
    _check(room, [index])
    room.editable([index])
    file = room.files[index]
    _, others = room.book.write("edited", [CaptionChange(file, version, text.strip())])
    if file in others:
        return {"conflict": {"text": others[file].text, "version": others[file].version}}
    return image_of(room, index)


def change(room: Room, indices: Sequence[int], order: Mapping[str, Any], known: str | None) -> dict[str, Any]:
    """What an order would make of captions; with the digest of a preview that was seen (known) it is done.

    Images without a caption file begin with what training reads for them. Raises OptionError.
    """
    _check(room, indices)
    indices = room.editable(indices)
    make = rewritten(order)
    plan = room.view.plan
    rows = []
    seen: set[Path] = set()
    for index, words in room.texts(indices).items():
        if room.files[index] in seen:
            continue  # two images of one name share a caption
        seen.add(room.files[index])
        text = plan.images[index].caption if words.text is None else words.text
        after = make(text)
        if after != text:
            rows.append((index, text, after, words.version))
    digest = Words("\n".join(f"{index} {version} {after}" for index, _, after, version in rows)).version
    shown = [{"index": index, "before": before, "after": after} for index, before, after, _ in rows[:SHOWN_ROWS]]
    if known is None:
        return {"count": len(rows), "rows": shown, "digest": digest}
    if known != digest:
        raise OptionError("Captions have changed since the preview; look at it again.")
    what = ", ".join(f"{name} {str(order[name])[:60]!r}" for name in ("find", "replace", "prefix", "suffix") if order.get(name))
    done, others = room.book.write(what, [CaptionChange(room.files[index], version, after) for index, _, after, version in rows])
    return {"count": len(done), "others": len(others), "texts": _texts(room, done)}


def news(room: Room, offset: int, of_masks: Sequence[int] = ()) -> dict[str, Any]:
    """What training reads now where captions were written, by whomever, since the history had so many bytes; and which images have masks,
    where masks were written since their histories had so many. Raises OptionError."""
    words, now = room.book.news(offset, room.files)
    there, sizes = masks.news(room, of_masks)
    return {"news": now, "texts": _texts(room, words), "maskNews": sizes, "masks": there}


def undo(room: Room) -> dict[str, Any]:
    """Takes the newest change back, of captions or of masks. Raises OptionError."""
    books: list[Book] = [*([] if room.why_fixed else [room.book]), *([] if room.why_no_masks else room.mask_books)]
    if not books:
        raise OptionError(room.why_fixed)
    before = [book.size() for book in room.mask_books]
    newest = max(books, key=_newest)
    what, done, others = newest.undo()
    there, sizes = masks.news(room, before)
    texts = _texts(room, done) if newest is room.book else {}
    return {
        "what": what,
        "of": newest.noun,
        "count": len(done),
        "others": len(others),
        "texts": texts,
        "masks": there,
        "maskNews": sizes,
    }


def _newest(book: Book) -> float:
    """When the newest change was made that can be taken back; 0 without one."""
    try:
        return max((float(line["time"]) for line in book.last()[1]), default=0.0)
    except OSError as err:
        raise OptionError(f"{book.history} cannot be read: {err.strerror or err}; nothing can be taken back.") from err


def _texts(room: Room, done: Mapping[Path, Words]) -> dict[int, str]:
    """What training reads now for the images of some caption files."""
    plan = room.view.plan
    return {
        index: (plan.subset_of(index).class_tokens if done[file].text is None else str(done[file].text))
        for index, file in enumerate(room.files)
        if file in done
    }


def look_through(room: Room, thumbnails: Thumbnails) -> Iterator[dict[str, Any]]:
    """Progress (done, of), then proposals: groups of images that are the same or nearly so, best first, of these the ones that are held out
    and trained as well, blurred and framed ones, and those that share a mark."""
    signs: list[triage.Signs] = []
    places = []
    trained = [index for index, image in enumerate(room.view.plan.images) if not room.view.plan.subsets[image.subset].is_reg]
    unreadable = []
    for done, index in enumerate(trained):
        if done % _TELL_EVERY == 0:
            yield {"done": done, "of": len(trained)}
        try:
            signs.append(thumbnails.signs(room.paths[index]))
            places.append(index)
        except (BadImage, OSError) as err:
            unreadable.append({"index": index, "why": str(err)})
    yield {"done": len(trained), "of": len(trained)}
    same, near = ([[places[place] for place in group] for group in groups] for groups in triage.groups_of(signs))
    held_out = set(room.view.plan.held_out)
    yield {
        "same": same,
        "near": near,
        "leaks": [group for group in (*same, *near) if held_out & set(group) and set(group) - held_out],
        "watermarks": _watermarks(room, thumbnails, places, signs, near),
        "framed": [place for place, sign in zip(places, signs, strict=True) if sign.border >= triage.FRAMED],
        "blurred": [place for place, sign in zip(places, signs, strict=True) if sign.blur >= triage.BLURRED],
        "unreadable": unreadable,
    }


def _watermarks(
    room: Room, thumbnails: Thumbnails, places: Sequence[int], signs: Sequence[triage.Signs], near: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Groups of images with one mark at one place. Frames are no marks, and of near duplicates one is asked: they share all their edges."""
    copies = {place for group in near for place in group[1:]}
    asked = [
        (place, (sign.width, sign.height))
        for place, sign in zip(places, signs, strict=True)
        if sign.border < triage.FRAMED and place not in copies
    ]

    def frames(number: int) -> dict[str, Any]:
        place, size = asked[number]
        return watermarks.frames_of(np.asarray(Image.open(io.BytesIO(thumbnails.small(room.paths[place]))).convert("RGB")), size)

    try:
        marks = watermarks.find(frames, [size for _, size in asked])
    except (BadImage, OSError):
        return []  # one that went away while we were looking
    return [{"where": mark.frame, "images": [asked[number][0] for number in mark.places]} for mark in marks]


def leave_out(room: Room, indices: Sequence[int]) -> int:
    """Moves images, with their captions, masks and control images, to a hidden folder of the data set, from which they can be brought back.

    Raises OptionError.
    """
    _check(room, indices)
    indices = room.editable(indices)
    gone = {room.paths[index] for index in indices}
    stay = {room.files[index] for index, path in enumerate(room.paths) if path not in gone}
    others = masks.files_beside(room, indices)
    for path in dict.fromkeys([*(each for index in indices for each in (room.paths[index], room.files[index])), *sorted(others)]):
        if path.is_file() and path not in stay and path.is_relative_to(room.root):
            _move(path, room.root / LEFT_OUT / path.relative_to(room.root))
    return len(gone)


def bring_back(room: Room) -> int:
    """Moves all that was left out to where it was; what has another file in its place stays. Raises OptionError."""
    files = _left_out(room)
    for path in files:
        place = room.root / path.relative_to(room.root / LEFT_OUT)
        if not place.exists():
            _move(path, place)
    return len(_targets(files) - _targets(_left_out(room)))


def _targets(files: Sequence[Path]) -> set[Path]:
    """Those files that are images of their own, and no captions, masks or control images of others; without their endings."""
    found = set()
    for folder in {path.parent for path in files}:
        inside = sorted(path.name for path in files if path.parent == folder)
        pictures = [name for name in inside if Path(name).suffix.lower() in images.EXTENSIONS]
        if not folder.name.startswith((*CONTROL_FOLDERS, *MASK_FOLDERS)):
            found |= {folder / Path(name).stem for name in beside(pictures, (), with_masks=True).targets}
    return found


def _left_out(room: Room) -> list[Path]:
    with suppress(OSError):
        return sorted(path for path in (room.root / LEFT_OUT).rglob("*") if path.is_file())
    return []


def _move(path: Path, place: Path) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, place)
    except OSError as err:
        raise OptionError(f"{path} cannot be moved to {place}: {err.strerror or err}.") from err


def _check(room: Room, indices: Iterable[int]) -> None:
    if not all(0 <= index < len(room.paths) for index in indices):
        raise OptionError("The data set has other images now; open it again.")
