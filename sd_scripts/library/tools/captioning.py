"""Captions for images by a model that looks at them: which images, what is made of its words, and that nothing is lost.

Each caption is written as soon as it is there, atomically and with its history, so a work that is ended at any time keeps what it has, and
goes on under the same name.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from sd_scripts.dataset import images
from sd_scripts.dataset.caption_files import Book, CaptionChange, Words, read
from sd_scripts.dataset.progress import Bar
from sd_scripts.library.captioning.captioner import Captioner, captioner_of
from sd_scripts.schema.captioning import CaptionSection
from sd_scripts.schema.errors import OptionError, Problem

from .beside_images import Outcome, images_below, images_listed
from .report import Report

log = logging.getLogger("sd_scripts")


@dataclass(frozen=True)
class Work:
    """An image, its caption file, and the version of the words that were there when it was looked at."""

    image: Path
    file: Path
    before: str


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
    return outcome.report(order, len(listed), of_masks=False)


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
        return [(path, path.with_suffix(ending)) for path in images_below(root)]
    pairs = images_listed(options.image_list, root, "caption_file")
    both = [(image, caption or image.with_suffix(ending)) for image, caption in pairs]
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
                    outcome.nothing.append(_name(work.image, book.root))
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
