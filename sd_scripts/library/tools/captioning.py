"""Captions for images by a model that looks at them: which images, what is made of its words, and that nothing is lost.

Each caption is written as soon as it is there, atomically and with its history, so a work that is ended at any time keeps what it has, and
goes on under the same name.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from sd_scripts.dataset import images
from sd_scripts.dataset.caption_files import Book, CaptionChange, Words, read
from sd_scripts.dataset.progress import Bar
from sd_scripts.library.captioning.captioner import Captioner, captioner_of
from sd_scripts.schema.captioning import CaptionSection
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.outside import json_of

from .report import Report

SHOWN = 20
log = logging.getLogger("sd_scripts")


@dataclass(frozen=True)
class Work:
    """An image, its caption file, and the version of the words that were there when it was looked at."""

    image: Path
    file: Path
    before: str


@dataclass
class Outcome:
    """What became of the images."""

    written: int = 0
    same: int = 0
    kept: int = 0
    """Had a caption, and were left as they are."""
    done_before: int = 0
    """By this work, before it was stopped."""
    silent: list[str] = field(default_factory=list)
    """The model said nothing of them."""
    others: list[str] = field(default_factory=list)
    """Somebody else has written meanwhile."""
    bad: list[str] = field(default_factory=list)


def caption(options: CaptionSection) -> Report:
    """Writes captions. Raises OptionError."""
    root = Path(options.image_dir).expanduser().absolute()
    if not root.is_dir():
        raise OptionError(Problem("image_dir", f"image_dir: there is no folder {options.image_dir}"))
    listed = listed_in(options, root)
    if not listed:
        raise OptionError(Problem("image_dir", f"image_dir: there are no images in {options.image_dir}"))
    book, order = Book(root), options.history_order or f"captions-{time.time_ns():x}"
    outcome = Outcome()
    works = list(_left(options, listed, book, order, outcome))
    if works:
        captioner = captioner_of(options)
        if options.endpoint is not None:
            log.info("what leaves this machine: %s", leaving(options, len(works)))
        _caption_all(options, works, captioner, book, order, outcome)
    return _report(outcome, order, len(listed))


def leaving(options: CaptionSection, count: int) -> str:
    """What a work at an endpoint sends, and to whom, in one sentence."""
    return (
        f"{count} images, shrunk to at most {options.max_image_side} pixels and without what their files tell of place, time and camera, "
        f"the instruction and the model's name {options.caption_model} are sent to {options.endpoint}"
    )


def listed_in(options: CaptionSection, root: Path) -> list[tuple[Path, Path]]:
    """The images with their caption files, in the order of their names or of the list. Raises OptionError."""
    ending = f".{options.caption_extension.strip('.')}"
    if options.image_list is None:
        found = (path for path in sorted(root.rglob("*")) if path.suffix.lower() in images.EXTENSIONS and path.is_file())
        shown = (path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts))
        return [(path, path.with_suffix(ending)) for path in shown]
    try:
        rows = [json_of(line) for line in Path(options.image_list).expanduser().read_text(encoding="utf-8").splitlines() if line.strip()]
        pairs = [(root / row["file_name"], row.get("caption_file")) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise OptionError(Problem("image_list", f"image_list: {options.image_list} is not JSON lines with file_name ({err})")) from err
    both = [(image, root / caption if caption else image.with_suffix(ending)) for image, caption in pairs]
    outside = [path for pair in both for path in pair if ".." in path.parts or not path.is_relative_to(root)]
    if outside:
        raise OptionError(Problem("image_list", f"image_list: {outside[0]} lies outside of {root}"))
    return both


def _left(options: CaptionSection, listed: Sequence[tuple[Path, Path]], book: Book, order: str, outcome: Outcome) -> Iterator[Work]:
    """What is still to be done; two images of one name share a caption."""
    done, seen = book.written_by(order), set()
    for image, file in listed:
        if file in seen:
            continue
        seen.add(file)
        words = read(file)
        if file in done:
            outcome.done_before += 1
        elif words.text and not options.overwrite:
            outcome.kept += 1
        else:
            yield Work(image, file, words.version)


def _caption_all(options: CaptionSection, works: Sequence[Work], captioner: Captioner, book: Book, order: str, outcome: Outcome) -> None:
    log.info("%s looks at %d images", captioner.about, len(works))
    with Bar(total=len(works), unit="image", mininterval=0.5) as bar:
        for start in range(0, len(works), options.caption_batch_size):
            batch = works[start : start + options.caption_batch_size]
            seen = [(work, image) for work in batch if (image := _image_of(work, options.max_image_side, book.root, outcome)) is not None]
            said = captioner.captions([image for _, image in seen]) if seen else []
            changes = []
            for (work, _), words in zip(seen, said, strict=True):
                text = finished(words, options)
                if text:
                    changes.append(CaptionChange(work.file, work.before, text))
                else:
                    outcome.silent.append(_name(work.image, book.root))
            _write(changes, captioner.about, book, order, outcome)
            bar.update(len(batch))


def _write(changes: Sequence[CaptionChange], about: str, book: Book, order: str, outcome: Outcome) -> None:
    same = sum(change.before == Words(change.after).version for change in changes)
    done, others = book.write(f"captions by {about}", changes, order)
    outcome.written += len(done) - same
    outcome.same += same
    outcome.others += [_name(file, book.root) for file in others]


def _image_of(work: Work, side: int, root: Path, outcome: Outcome) -> Image.Image | None:
    """The image as training sees it, no larger than side; None for one that cannot be read, which is noted."""
    try:
        image = Image.fromarray(images.decode(work.image).rgb)
    except (images.BadImage, OSError) as err:
        outcome.bad.append(f"{_name(work.image, root)} {err}")
        return None
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return image


def finished(words: str, options: CaptionSection) -> str:
    """What is written of a model's words: one line, words replaced, the trigger word before them; empty for no words."""
    text = " ".join(words.split())
    if not text:
        return ""
    for old, new in options.replacements:
        text = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new.replace("\\", r"\\"), text, flags=re.IGNORECASE)
    text = " ".join(text.split())
    trigger = " ".join(options.trigger_word.split())
    has_trigger = not trigger or re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text) is not None
    return text if has_trigger else f"{trigger}, {text}" if text else trigger


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _report(outcome: Outcome, order: str, count: int) -> Report:
    lines = [f"captions written: {outcome.written}, of {count} images"]
    for number, words in (
        (outcome.done_before, "written before this work was stopped"),
        (outcome.kept, "left as they are, because they have one"),
        (outcome.same, "had the same words already"),
    ):
        lines += [f"{words}: {number}"] if number else []
    for names, words in (
        (outcome.silent, "the model said nothing"),
        (outcome.others, "somebody else wrote meanwhile, and their words stay"),
        (outcome.bad, "cannot be read"),
    ):
        lines += [f"{words}: {len(names)} ({', '.join(names[:SHOWN])}{' …' if len(names) > SHOWN else ''})"] if names else []
    values = {
        "written": outcome.written,
        "kept": outcome.kept,
        "same": outcome.same,
        "done_before": outcome.done_before,
        "order": order,
        "silent": outcome.silent,
        "others": outcome.others,
        "unreadable": outcome.bad,
    }
    return Report(lines, values)
