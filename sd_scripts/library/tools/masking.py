"""Loss masks for images: which images, what is made of what a model finds, and that nothing is lost.

Each mask is written as soon as it is there, atomically and with its history, so a work that is ended at any time keeps what it has, and
goes on under the same name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from sd_scripts.dataset import images
from sd_scripts.dataset.caption_files import CaptionChange
from sd_scripts.dataset.images import Pixels
from sd_scripts.dataset.mask_files import MaskBook, png_of
from sd_scripts.dataset.pairs import MASK_LABEL
from sd_scripts.dataset.progress import Bar
from sd_scripts.library.masking.segmenter import Segmenter
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.masking import ALPHA, MaskSection

from .beside_images import Outcome, images_below, images_listed
from .report import Report

log = logging.getLogger("sd_scripts")


@dataclass(frozen=True)
class MaskWork:
    """An image, the file of its mask, the book of that file, and the version that was there when it was looked at."""

    image: Path
    file: Path
    book: MaskBook
    before: str


def mask(options: MaskSection) -> Report:
    """Writes masks. Raises OptionError."""
    root = Path(options.image_dir).expanduser().absolute()
    if not root.is_dir():
        raise OptionError(Problem("image_dir", f"image_dir: there is no folder {options.image_dir}"))
    listed = _listed(options, root)
    if not listed:
        raise OptionError(Problem("image_dir", f"image_dir: there are no images in {options.image_dir}"))
    order = options.history_order or f"masks-{time.time_ns():x}"
    outcome = Outcome()
    works = list(_left(options, listed, order, outcome))
    if works:
        _mask_all(options, works, root, order, outcome)
    return outcome.report(order, len(listed), of_masks=True)


def _listed(options: MaskSection, root: Path) -> list[tuple[Path, Path, MaskBook]]:
    """The images with the files and books of their masks. Raises OptionError."""
    folder = Path(options.mask_dir).expanduser().absolute() if options.mask_dir is not None else None
    books = [MaskBook(each) for each in (folder, root) if each is not None]
    roots = [str(book.root) for book in books]
    found = []
    for image, file in _pairs(options, root, folder):
        book = next((book for book in books if file.is_relative_to(book.root)), None)
        if book is None or ".." in (*image.parts, *file.parts) or not image.is_relative_to(root):
            raise OptionError(Problem("image_list", f"image_list: {image} or {file} lies outside of {' and '.join(roots)}"))
        found.append((image, file, book))
    return found


def _pairs(options: MaskSection, root: Path, folder: Path | None) -> list[tuple[Path, Path]]:
    def place(image: Path) -> Path:
        beside = image.with_name(f"{image.stem}{MASK_LABEL}.png")
        return beside if folder is None or not image.is_relative_to(root) else (folder / image.relative_to(root)).with_suffix(".png")

    if options.image_list is not None:
        return [(image, file or place(image)) for image, file in images_listed(options.image_list, root, "mask_file")]
    shown = [
        path for path in images_below(root) if not path.stem.endswith(MASK_LABEL) and (folder is None or not path.is_relative_to(folder))
    ]
    return [(path, place(path)) for path in shown]


def _left(options: MaskSection, listed: Sequence[tuple[Path, Path, MaskBook]], order: str, outcome: Outcome) -> Iterator[MaskWork]:
    """What is still to be done; two images of one name share a mask."""
    done = {file for book in {id(book): book for _, _, book in listed}.values() for file in book.written_by(order)}
    seen = set()
    for image, file, book in listed:
        if file in seen:
            continue
        seen.add(file)
        now = book.read(file)
        if file in done:
            outcome.done_before += 1
        elif now.text is not None and not options.overwrite:
            outcome.kept += 1
        else:
            yield MaskWork(image, file, book, now.version)


def _mask_all(options: MaskSection, works: Sequence[MaskWork], root: Path, order: str, outcome: Outcome) -> None:
    segmenter: Segmenter | None = None
    if options.mask_model != ALPHA:
        from sd_scripts.library.masking.segmenter import segmenter_of

        segmenter = segmenter_of(options)
    about = "alpha channels" if segmenter is None else segmenter.about
    log.info("%s: masks for %d images", about, len(works))
    with Bar(total=len(works), unit="image", mininterval=0.5) as bar:
        for work in works:
            name = work.image.relative_to(root).as_posix()
            try:
                found = _found(options, work.image, segmenter)
            except (images.BadImage, OSError) as err:
                outcome.bad.append(f"{name} {err}")
            else:
                if found is None:
                    outcome.nothing.append(name)
                else:
                    _write(work, found, f"masks by {about}", order, outcome, name)
            bar.update(1)


def _found(options: MaskSection, path: Path, segmenter: Segmenter | None) -> Pixels | None:
    """The mask of an image; None where nothing is found, or nothing would be left that counts. Raises BadImage."""
    decoded = images.decode(path, keep_alpha=True)
    side = (options.max_image_side, options.max_image_side)
    if segmenter is None:
        if decoded.alpha is None:
            return None
        whole = Image.fromarray(decoded.alpha)
        whole.thumbnail(side, Image.Resampling.BOX)
        found = np.array(whole)
    else:
        image = Image.fromarray(decoded.rgb if decoded.alpha is None else images.on_white(decoded.rgb, decoded.alpha))
        image.thumbnail(side, Image.Resampling.LANCZOS)
        found = segmenter.mask(image)
    counted = 255 - found if options.invert_mask else found
    return counted if found.any() and counted.any() else None


def _write(work: MaskWork, found: Pixels, what: str, order: str, outcome: Outcome, name: str) -> None:
    try:
        after = work.book.keep(png_of(found))
    except OSError as err:
        raise OptionError(f"{work.book.root} takes no more masks: {err.strerror or err}. What was written stays.") from err
    done, _ = work.book.write(what, [CaptionChange(work.file, work.before, after)], order)
    if not done:
        outcome.others.append(name)
    elif work.before == work.book.read(work.file).version:
        outcome.same += 1
    else:
        outcome.written += 1
