"""What training would see of a data set, before it starts: images, buckets, captions, and what is wrong with them."""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from sd_scripts.dataset import scan
from sd_scripts.dataset.buckets import Size, area_size
from sd_scripts.dataset.config import Subsets, subsets_of
from sd_scripts.dataset.plan import Plan, cache_folder, caption_of, make_plan
from sd_scripts.dataset.records import ImageInfo
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.model import ModelOptions
from sd_scripts.schema.runs import RunOptions

MOST_AT_START = 2000
"""A data set with more files than this is not looked at before a start, which should not make anybody wait; the run looks at it first."""
SHOWN_BUCKETS = 40
SHOWN_CAPTIONS = 8
SHOWN_BAD = 20
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class View:
    """What was found. bad are sentences about files that cannot be read."""

    plan: Plan
    bad: tuple[str, ...]
    num_steps: int

    def as_page(self) -> dict[str, Any]:
        """The report as the page shows it: facts, tables, notes."""
        plan = self.plan
        table = plan.table()
        trained = [row for row in plan.images if not plan.subsets[row.subset].is_reg]
        by_style = plan.options.by_style
        # Buckets give whole batches only, so the first epoch may have fewer steps than others.
        per_epoch = plan.samples_per_epoch / plan.global_batch_size
        facts = [
            *(self._styled(trained) if by_style else self._captioned(trained)),
            ("One epoch", f"{plan.samples_per_epoch} samples, {per_epoch:g} steps of {plan.global_batch_size}"),
            ("The run", f"{self.num_steps} steps, {self.num_steps / per_epoch:.4g} epochs"),
        ]
        pairs = Counter(len(image.controls) for image in trained if image.controls)
        if pairs:
            facts.insert(1, ("Edit pairs", ", ".join(f"{pairs[count]} with {_images(count)}" for count in sorted(pairs))))
        if plan.held_out:
            facts.append(("Held out", f"{len(plan.held_out)} for validation"))
        head = ["Size", *(["Control images"] if pairs else []), "Images", "Samples an epoch"]
        rows = [
            [
                _sides((row.width, row.height)),
                *([", ".join(map(_sides, row.controls))] if pairs else []),
                str(row.images),
                str(row.samples),
            ]
            for row in table[:SHOWN_BUCKETS]
        ]
        tables = [{"title": "Buckets", "head": head, "rows": rows}]
        if by_style:
            tables.insert(0, {"title": "Styles", "head": ["Style", "Images"], "rows": _styles(trained)})
        said = "Style" if by_style else "Caption"
        tables.append({"title": "First samples as they will be shown", "head": ["Image", said], "rows": self._captions()})
        notes = list(plan.warnings)
        if len(table) > SHOWN_BUCKETS:
            notes.append(f"{len(table) - SHOWN_BUCKETS} more buckets are not listed.")
        notes += [f"Cannot be used: {text}" for text in self.bad[:SHOWN_BAD]]
        if len(self.bad) > SHOWN_BAD:
            notes.append(f"Further files that cannot be used: {len(self.bad) - SHOWN_BAD}.")
        notes.append("Only the headers of the images were read; training reads all of each before it starts.")
        return {"title": "Data set", "facts": facts, "tables": tables, "notes": notes}

    def _captioned(self, trained: list[ImageInfo]) -> list[tuple[str, str]]:
        captioned = sum(1 for image in trained if image.caption.strip())
        return [
            ("Images", f"{len(trained)} to train on, {len(self.plan.images) - len(trained)} for regularisation"),
            ("Captions", f"{captioned} of {len(trained)} images"),
        ]

    def _styled(self, trained: list[ImageInfo]) -> list[tuple[str, str]]:
        return [("Images", f"{len(trained)} to train on"), ("Styles", str(len(_styles(trained))))]

    def _captions(self) -> list[list[str]]:
        rules = self.plan.caption_rules(self.num_steps)
        if self.plan.steps_of_epochs(1) == 0:
            return [[image.name, image.caption] for image in self.plan.images[:SHOWN_CAPTIONS]]
        shown: list[list[str]] = []
        for ref in self.plan.samples(min(self.num_steps, SHOWN_CAPTIONS)):
            if len(shown) < SHOWN_CAPTIONS:
                shown.append([self.plan.images[ref.image].name, caption_of(self.plan, rules, ref)])
        return shown


def _styles(trained: list[ImageInfo]) -> list[list[str]]:
    """Each style with the number of its images."""
    return [[style, str(count)] for style, count in sorted(Counter(image.caption for image in trained).items())]


def _sides(size: Size) -> str:
    return f"{size[0]} x {size[1]}"


def _images(count: int) -> str:
    return "1 control image" if count == 1 else f"{count} control images"


def look_at(options: RunOptions, output_dir: Path, needs_masks: bool = True) -> Iterator[str | View]:
    """Sentences while it scans, then the View. Raises OptionError for folders and sizes that cannot be used.

    needs_masks: whether masks that are wanted and not there are an error, as for training; where they are made, they are not.
    """
    said: queue.Queue[str | View | OptionError] = queue.Queue()

    def work() -> None:
        try:
            view = _view(options, output_dir, lambda _what, done, _total: said.put(f"{done} images so far …"))
            if needs_masks:
                scan.check_masks(view.plan.subsets, view.plan.images)
            said.put(view)
        except OptionError as err:
            said.put(err)
        except OSError as err:
            said.put(OptionError(f"train_data_dir: the images cannot be listed: {err}"))

    thread = threading.Thread(target=work, name="data set check", daemon=True)
    thread.start()
    while True:
        try:
            item = said.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if not thread.is_alive() and said.empty():
                raise RuntimeError("the data set check ended without an answer; the console says why") from None
            continue
        if isinstance(item, OptionError):
            raise item
        yield item
        if isinstance(item, View):
            return


def check(options: RunOptions, output_dir: Path) -> None:
    """Raises OptionError for a data set that training would refuse, where so few files are looked at quickly."""
    folders = (subset.folder for subset in _subsets(options, output_dir).items)
    counts = accumulate(len(files) for folder in folders for _, _, files in os.walk(folder))
    if not any(count > MOST_AT_START for count in counts):
        for _ in look_at(options, output_dir):
            continue


def _subsets(options: RunOptions, output_dir: Path) -> Subsets:
    data = options.dataset
    if data.num_class_images and not (data.reg_data_dir and Path(data.reg_data_dir).is_dir()):
        # The run makes these images.
        data = data.model_copy(update={"reg_data_dir": None})
    return subsets_of(data, cache_folder(data, output_dir))


def _view(options: RunOptions, output_dir: Path, progress: scan.Progress) -> View:
    dataset_options = options.dataset
    training = options.training
    folder = cache_folder(dataset_options, output_dir)
    found = scan.scan(_subsets(options, output_dir), folder, progress, options.model.controls)
    plan = make_plan(
        found,
        dataset_options,
        seed=training.seed,
        grid=options.model.grid,
        accumulation=training.gradient_accumulation_steps,
        control_size=_control_size(options.model),
        terms=options.objective.term_weights,
    )
    return View(plan, tuple(str(bad) for bad in found.bad), plan.steps_of_run(training))


def _control_size(model: ModelOptions) -> Callable[[Size], Size] | None:
    """The size of control images that the options name; None takes that of the published models."""
    side = model.control_side
    return None if side is None else partial(area_size, area=side * side)
