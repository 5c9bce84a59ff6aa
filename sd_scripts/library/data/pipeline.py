"""The batch of any micro-step, from caches or encoded on the spot. Knows images, captions and encoders, not training."""

from __future__ import annotations

import heapq
import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor

from sd_scripts.dataset.instructions import instructions_of_run
from sd_scripts.dataset.masks import normalised, with_outside
from sd_scripts.dataset.plan import Plan, SampleRef, caption_of, texts_of_run
from sd_scripts.dataset.progress import Bars
from sd_scripts.dataset.scan import Progress
from sd_scripts.library.core.protocols import Batch, Condition, ModelFamily, Parts
from sd_scripts.schema.dataset import DatasetOptions

from .cache import Cache, Caches, CorruptEntry, Entry
from .controls import check_controls
from .encoding import Encoding, Rows
from .fill import Job, Tensors, fill, in_groups
from .prefetch import Prefetcher
from .styles import StyleDraws, StyleOptions
from .views import Look, Seen, View, cached_view, control_views, geometry_of, see, see_control, view_of

logger = logging.getLogger(__name__)
Place = tuple[int, int, int]
"""(step, micro, rank)"""


@dataclass(frozen=True)
class KeptEntries:
    """What a cache holds for a run: entries the run needs, and the bytes they take."""

    what: str
    num_entries: int
    num_bytes: int
    on_disk: bool


@dataclass(frozen=True)
class _Ready:
    """What can be made of a micro-batch without an encoder: per sample either cached tensors or what is to be encoded."""

    refs: list[SampleRef]
    views: list[View]
    captions: list[str]
    latents: list[Tensors] = field(default_factory=list)
    controls: list[list[Tensor]] = field(default_factory=list)
    """Per sample the latents of its control images."""
    seen: list[Seen] = field(default_factory=list)
    control_pixels: list[list[Tensor]] = field(default_factory=list)
    texts: list[Condition] = field(default_factory=list)
    shown: list[list[Tensor]] = field(default_factory=list)
    """Per sample its control images as the text encoder sees them."""
    goals: list[str] = field(default_factory=list)
    """Per sample the style it takes on, in data sets of styles."""
    references: list[Tensor] = field(default_factory=list)
    """Per sample latents (R, C, h, w) of images of that style."""


class DataPipeline:
    """Images and captions as batches; the same step gives the same batch, on any number of processes.

    num_steps is the length of the run: it decides which texts are encoded in advance. What the trained text encoders make of a caption
    is left to the trainer; the entries of the others are there, where the family has entries apart. With caches on disk each of `world`
    processes encodes its share and `barrier` waits for the others; with caches in memory each encodes all. warn gets sentences for the
    log, also from background threads. empty_text keeps the condition of the empty caption at hand, for objectives that ask for it.
    validation_samples is how many samples a validation has at least: fewer held-out images are shown several times.

    Models that edit have their control images in the condition as well, control_0, control_1, ... (C, h, w), and a text of which the
    rows of the control images are kept apart from those of the instruction.
    """

    def __init__(
        self,
        options: DatasetOptions,
        family: ModelFamily,
        plan: Plan,
        cache: Caches,
        seed: int,
        *,
        num_steps: int,
        trained_encoders: Collection[str] = (),
        empty_text: bool = False,
        validation_samples: int = 0,
        rank: int = 0,
        world: int = 1,
        barrier: Callable[[], None] = lambda: None,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self.options, self.family, self.plan, self.cache, self.seed = options, family, plan, cache, seed
        self.num_steps, self.trained_encoders, self.rank, self.world = num_steps, tuple(trained_encoders), rank, world
        self._barrier, self._warn = barrier, warn
        self._caption_rules = plan.caption_rules(num_steps)
        self._wants_empty, self._validation_samples = empty_text, validation_samples
        self._empty: Condition | None = None
        self._parts: Parts | None = None
        self._encoding: Encoding | None = None
        self._styles = StyleDraws(plan, cast(StyleOptions, options), seed) if options.by_style else None
        self._image_groups: list[list[Look]] = []
        self._text_groups: list[list[str]] = []
        self._row_groups: list[list[Rows]] = []
        self._repairing = Lock()
        workers = options.max_data_loader_n_workers
        self._prefetcher = Prefetcher(self._load_place, self._following, workers, 2 * workers)

    def __len__(self) -> int:
        """Samples of one epoch."""
        return self.plan.samples_per_epoch

    def prepare(self, parts: Parts, progress: Progress | None = None, before_texts: Callable[[], None] = lambda: None) -> None:
        """Fills the caches, as far as the options want them; a second call finds everything there.

        Keeps parts: live encoding and the repair of damaged entries use its encoders, wherever they are by then. before_texts is called
        once the latents are there and before a text is encoded. Raises OptionError for images with more or fewer control images than
        the model takes.
        """
        self._parts = parts
        check_controls(self.plan, self.family, parts)
        self._encoding = Encoding(
            self.family,
            parts,
            self.plan,
            self.seed,
            encoders=self.untrained_encoders,
            trained=self.trained_encoders,
            vae_batch_size=self.options.vae_batch_size,
        )
        with Bars(progress, shown=self.rank == 0) as bars:
            if self.options.cache_latents:
                self._image_groups = self._group_looks()
                self._fill(self._images_job(), self.cache.latents, bars, self._num_readers())
            before_texts()
            if self.cached_encoders and self._encoding.edits:
                self._row_groups = self._group_rows()
                self._fill(self._rows_job(), self.cache.texts, bars, self._num_readers())
            elif self.cached_encoders:
                texts = {*texts_of_run(self.plan, self.num_steps), *([""] if self._wants_empty else ())}
                self._text_groups = in_groups(sorted(texts), self.options.text_encoder_batch_size)
                self._fill(self._texts_job(), self.cache.texts, bars, 1)
        if self._wants_empty:
            self._empty = self._encode_empty()

    def kept(self) -> list[KeptEntries]:
        """What the caches hold for this run; after `prepare`."""
        encoding, found = self._known_encoding(), []
        images = {encoding.latents_entry(look).key for group in self._image_groups for look in group}
        texts = {encoding.text_entry(text).key for group in self._text_groups for text in group}
        rows = {encoding.rows_entry(one).key for group in self._row_groups for one in group}
        for what, cache, keys in (
            ("images", self.cache.latents, images),
            ("captions", self.cache.texts, texts),
            ("instructions", self.cache.texts, rows),
        ):
            if keys:
                found.append(KeptEntries(what, len(keys), cache.num_bytes(keys), cache.folder is not None))
        return found

    def micro_batch(self, step: int, micro: int, rank: int) -> Batch:
        """The samples process `rank` sees as micro-batch `micro` of a step; the next ones are prepared meanwhile."""
        item = self._prefetcher.get((step, micro, rank))
        return item if isinstance(item, Batch) else self._finish(item)

    def validation_batches(self) -> list[Callable[[], Batch]]:
        """The held-out images, always the same batches; each is made when it is called."""
        batches = self.plan.validation_batches(self._validation_samples)[: self.options.max_validation_steps]
        return [partial(self._make, batch) for batch in batches]

    def heaviest(self) -> tuple[Batch, str]:
        """What takes most memory to train on, and what it is in words: images of the largest size in the run, each with the run's longest
        text, as its last step. Nothing that comes later depends on having asked.
        """
        step = self.plan.heaviest_step(self.num_steps)
        ready = self._load(self.plan.micro_batch(step, 0, self.rank))
        if self._text_groups:
            texts = [self._cached_text(text) for text in _longest(text for group in self._text_groups for text in group)]
            ready.texts[:] = [max(texts, key=lambda text: sum(map(torch.numel, text.values())))] * len(ready.refs)
        elif self._row_groups:
            candidates = {rows.text: rows for group in self._row_groups for rows in group if rows.text is not None}
            own = [self._rows_of(candidates[text]) for text in _longest(candidates)]
            shared = [self._rows_of(Rows(view, None)) for view in ready.views]
            ready.texts[:] = [joined(rows, [max(own, key=len)]) for rows in shared]
        else:
            ready.captions[:] = _longest(self.plan.captions())[:1] * len(ready.refs)
        last, shape = self.num_steps - 1, self.plan.shape_of(ready.refs[0].image, ready.refs[0].resolution)
        several = "s" if len(ready.refs) > 1 else ""
        target, *controls = (f"{width} x {height}" for width, height in shape)
        words = f"a batch of {len(ready.refs)} image{several} of {target}{' with control images of ' if controls else ''}"
        batch = replace(self._finish(ready), step=last, progress=last / self.num_steps)
        return batch, words + " and ".join(controls)

    def empty_text(self) -> Condition:
        """The text part of the empty caption's condition, as far as untrained encoders make it; only with empty_text."""
        assert self._empty is not None, "the empty caption is encoded only when the pipeline is told so"
        return self._empty

    def first_latents(self, count: int) -> list[Tensor]:
        """Latents (C, h, w) of the first samples of the run, the same on every process and after every start."""
        return [self._make([ref]).x0[0] for ref in islice(self.plan.samples(self.num_steps), count)]

    @property
    def styles(self) -> tuple[str, ...]:
        """The styles of a data set of styles, sorted; none in others."""
        return () if self._styles is None else self._styles.styles

    def latents_of_style(self, style: str, most: int) -> list[Tensor]:
        """Latents (C, h, w) of at most so many training images of a style, always the same ones."""
        assert self._styles is not None, "only data sets of styles have images of a style"
        return [self._cached_latents(view)["latents"].float() for view in self._styles.examples(style, most)]

    def close(self) -> None:
        """Ends the background threads."""
        self._prefetcher.close()

    # Filling.

    def _num_readers(self) -> int:
        # Nothing else wants the processors while the caches are filled.
        return max(self.options.max_data_loader_n_workers, min(8, (os.cpu_count() or 1) // self.world))

    def _fill(self, job: Job[Any, Any], cache: Cache, bars: Progress, num_readers: int) -> None:
        # Shared by position in the whole list, not in what is missing: processes must not see each other's progress.
        mine = job if cache.folder is None else replace(job, groups=job.groups[self.rank :: self.world])
        fill(mine, cache, self.cache.notes, self._warn, bars, num_readers)
        self._barrier()

    def _images_job(self) -> Job[Look, list[Seen]]:
        encoding = self._known_encoding()
        return Job("latents", self._image_groups, encoding.latents_entry, encoding.see_all, encoding.encode_seen)

    def _texts_job(self) -> Job[str, list[str]]:
        encoding = self._known_encoding()
        return Job("text", self._text_groups, encoding.text_entry, list, encoding.encode_texts)

    def _rows_job(self) -> Job[Rows, Any]:
        encoding = self._known_encoding()
        return Job("instructions", self._row_groups, encoding.rows_entry, encoding.read_controls, encoding.encode_rows)

    def _group_looks(self) -> list[list[Look]]:
        """Everything that is kept as latents, once each, in groups of one size: targets, then first, second, third control images."""
        views: dict[View, None] = {}
        held_out = set(self.plan.held_out)
        for image, resolution in self.plan.cached_cuts():
            views[cached_view(self.plan, self.seed, image, resolution)] = None
            if self.plan.subset_of(image).options.flip_aug and image not in held_out:
                views[cached_view(self.plan, self.seed, image, resolution, mirrored=True)] = None
        looks: list[Look] = list(views)
        if self._known_encoding().edits:
            controls = [control_views(self.plan, view) for view in views]
            several = {self._known_encoding().latents_entry(look).key: look for look in looks}
            for index in range(max(map(len, controls))):
                for row in controls:
                    if index < len(row):
                        several.setdefault(self._known_encoding().latents_entry(row[index]).key, row[index])
            looks = list(several.values())
        return in_groups(looks, self.options.vae_batch_size, self._size_of)

    def _size_of(self, look: Look) -> object:
        if isinstance(look, View):
            return self.plan.cut(look.image, look.resolution).bucket
        return self.plan.control_cut(look.image, look.resolution, look.index).bucket

    def _group_rows(self) -> list[list[Rows]]:
        """Of each set of control images the rows that all instructions share, and those of each instruction."""
        groups = []
        for shown in instructions_of_run(self.plan, self.num_steps):
            view = cached_view(self.plan, self.seed, shown.image, shown.resolution, shown.mirrored)
            groups.append([Rows(view, None), *(Rows(view, text) for text in shown.texts)])
        return groups

    @property
    def untrained_encoders(self) -> tuple[str, ...]:
        """Text encoders whose entries the conditions of a batch have: all, none, or those that are not trained."""
        names = tuple(sorted(self._known_parts().text_encoders))
        if not self.trained_encoders:
            return names
        return tuple(name for name in names if name not in self.trained_encoders) if self.family.separate_texts else ()

    @property
    def cached_encoders(self) -> tuple[str, ...]:
        """Text encoders that nobody needs once the caches are full."""
        return self.untrained_encoders if self.options.cache_text_encoder_outputs else ()

    @property
    def _keeps_controls(self) -> bool:
        """Whether texts are kept that saw control images, whose cut must then be the one they saw."""
        return self._known_encoding().edits and bool(self.cached_encoders)

    def _known_parts(self) -> Parts:
        assert self._parts is not None, "prepare() comes before everything that needs an encoder"
        return self._parts

    def _known_encoding(self) -> Encoding:
        assert self._encoding is not None, "prepare() comes before everything that needs an encoder"
        return self._encoding

    # Reading.

    def _following(self, place: Place) -> Place | None:
        step, micro, rank = place
        if micro + 1 < self.plan.accumulation:
            return step, micro + 1, rank
        return (step + 1, 0, rank) if step + 1 < self.num_steps else None

    def _load_place(self, place: Place) -> Batch | _Ready:
        """In a background thread: the whole batch, unless an encoder is needed, which belongs to the training thread."""
        ready = self._load(self.plan.micro_batch(*place))
        return self._finish(ready) if ready.latents and (ready.texts or not self.untrained_encoders) else ready

    def _make(self, refs: list[SampleRef]) -> Batch:
        return self._finish(self._load(refs))

    def _load(self, refs: list[SampleRef]) -> _Ready:
        cached = self.options.cache_latents
        edits, fixed = self._known_encoding().edits, self._keeps_controls
        views = [view_of(self.plan, self.seed, ref, cached, fixed) for ref in refs]
        captions = [caption_of(self.plan, self._caption_rules, ref) for ref in refs]
        ready = _Ready(refs, views, captions)
        for view, caption in zip(views, captions, strict=True):
            self._load_pixels(ready, view, edits, cached)
            if self._styles is not None:
                self._load_references(self._styles, ready, caption)
            if self.cached_encoders:
                ready.texts.append(self._cached_rows(view, caption) if edits else self._cached_text(caption))
            elif edits and self.untrained_encoders:
                ready.shown.append(self._known_encoding().shown(view))
        return ready

    def _load_pixels(self, ready: _Ready, view: View, edits: bool, cached: bool) -> None:
        """Adds what stands for a sample's image and its control images: their latents, or the pixels that are to be encoded."""
        controls = control_views(self.plan, view) if edits else ()
        if cached:
            ready.latents.append(self._cached_latents(view))
            ready.controls.append([self._cached_latents(control)["latents"] for control in controls])
        else:
            ready.seen.append(see(self.plan, self.seed, view))
            ready.control_pixels.append([see_control(self.plan, self.seed, control) for control in controls])

    def _load_references(self, styles: StyleDraws, ready: _Ready, caption: str) -> None:
        """Adds the style that the next sample takes on, and images of it."""
        ref = ready.refs[len(ready.goals)]
        goal = styles.goal(ref.number, self.plan.images[ref.image].caption, caption)
        ready.goals.append(goal)
        ready.references.append(
            torch.stack([self._cached_latents(view)["latents"].float() for view in styles.references(ref.number, goal)])
        )

    def _finish(self, ready: _Ready) -> Batch:
        """Encodes what was not cached, in the calling thread, and puts the batch together."""
        entries = ready.latents or self._known_encoding().encode_seen(ready.seen)
        x0 = torch.stack([entry["latents"] for entry in entries]).float()
        texts = ready.texts or self._encode_captions(ready)
        sizes = [self.family.size_condition(geometry_of(self.plan, view)) for view in ready.views]
        controls = [
            {f"control_{index}": latents.float() for index, latents in enumerate(row)}
            for row in ready.controls or self._encode_controls(ready)
        ]
        step = ready.refs[0].step
        return Batch(
            x0=x0,
            conditions=[{**text, **size, **control} for text, size, control in zip(texts, sizes, controls, strict=True)],
            numbers=torch.tensor([ref.number for ref in ready.refs], dtype=torch.int64),
            weights=torch.tensor([ref.weight for ref in ready.refs], dtype=torch.float32),
            names=[self.plan.images[ref.image].path for ref in ready.refs],
            masks=self._masks([entry.get("mask") for entry in entries], x0) if self.options.masked_loss else None,
            captions=ready.captions,
            regularisation=torch.tensor([self.plan.subset_of(ref.image).is_reg for ref in ready.refs]),
            terms=self._term_weights(ready.refs),
            towards=self._known_encoding().encode_texts(ready.goals) if ready.goals else [],
            goals=ready.goals,
            references=ready.references,
            step=step,
            progress=max(0, step) / self.num_steps,
        )

    def _term_weights(self, refs: Sequence[SampleRef]) -> dict[str, Tensor]:
        rows = [self.plan.terms_of(ref.image) for ref in refs]
        return {name: torch.tensor([row[name] for row in rows]) for name in self.plan.own_terms}

    def _encode_controls(self, ready: _Ready) -> list[list[Tensor]]:
        """Latents of each sample's control images, those of one place together: in a batch they have one size."""
        columns = [list(self._known_encoding().encode_pixels(pixels)) for pixels in zip(*ready.control_pixels, strict=True)]
        return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in ready.refs]

    def _encode_captions(self, ready: _Ready) -> list[Condition]:
        encoding = self._known_encoding()
        if self.trained_encoders and not self.untrained_encoders:
            return [{} for _ in ready.refs]
        if not encoding.edits:
            return encoding.encode_texts(ready.captions)
        return [joined(*encoding.encode_instructions(shown, [caption])) for shown, caption in zip(ready.shown, ready.captions, strict=True)]

    def _encode_empty(self) -> Condition:
        assert not self._known_encoding().edits, "no objective of an editing model asks for the empty caption"
        if self.cached_encoders:
            return self._cached_text("")
        return self._known_encoding().encode_texts([""])[0] if self.untrained_encoders else {}

    def _masks(self, masks: Sequence[Tensor | None], x0: Tensor) -> Tensor:
        whole = torch.ones(1, *x0.shape[-2:])
        present = [with_outside(whole if mask is None else mask.float(), self.options.masked_loss_outside_weight) for mask in masks]
        return torch.stack([normalised(mask) for mask in present] if self.options.normalize_masked_loss else present)

    # Entries, and those that are damaged.

    def _cached_latents(self, look: Look) -> Tensors:
        entry = self._known_encoding().latents_entry(look)
        item = self.plan.images[look.image]
        path = item.path if isinstance(look, View) else item.controls[look.index].path
        return self._entry(self.cache.latents, entry, f"{path}: the encoded image", lambda: self._images_again(look, entry))

    def _images_again(self, look: Look, entry: Entry) -> Tensors:
        encoding = self._known_encoding()
        group: Sequence[Look] = next((group for group in self._image_groups if look in group), [])
        # The same image may be a control of several targets, and then stands in a group of another name.
        group = group or next((group for group in self._image_groups if entry.key in self._keys(group)), [look])
        place = [encoding.latents_entry(one).key for one in group].index(entry.key)
        return encoding.encode_seen(encoding.see_all(group))[place]

    def _keys(self, group: Sequence[Look]) -> list[str]:
        return [self._known_encoding().latents_entry(look).key for look in group]

    def _cached_text(self, text: str) -> Tensors:
        entry = self._known_encoding().text_entry(text)
        return self._entry(self.cache.texts, entry, f"caption {text!r}: its encoding", lambda: self._texts_again(text))

    def _texts_again(self, text: str) -> Tensors:
        place = bisect_left(self._text_groups, text, key=lambda group: group[-1])
        group = self._text_groups[place] if place < len(self._text_groups) and text in self._text_groups[place] else [text]
        return self._known_encoding().encode_texts(group)[group.index(text)]

    def _cached_rows(self, view: View, caption: str) -> Condition:
        """The text of an instruction on the control images of a view."""
        return joined(self._rows_of(Rows(view, None)), [self._rows_of(Rows(view, caption))])

    def _rows_of(self, rows: Rows) -> Tensor:
        what = "the text encoder's reading of its control images" if rows.text is None else f"instruction {rows.text!r}: its encoding"
        named = f"{self.plan.images[rows.view.image].path}: {what}"
        return self._entry(self.cache.texts, self._known_encoding().rows_entry(rows), named, partial(self._rows_again, rows))["text"]

    def _rows_again(self, rows: Rows) -> Tensors:
        # Each instruction is encoded for itself on the shared rows, so no group is needed for the same bits.
        encoding = self._known_encoding()
        return encoding.encode_rows(encoding.read_controls([rows]))[0]

    def _entry(self, cache: Cache, entry: Entry, what: str, encode: Callable[[], Tensors]) -> Tensors:
        """An entry; one that cannot be read is made again. Whole groups are encoded then, so that it gets the same bits."""
        try:
            return cache.get(entry.key)
        except (KeyError, CorruptEntry):
            return self._repaired(cache, entry, what, encode)

    def _repaired(self, cache: Cache, entry: Entry, what: str, encode: Callable[[], Tensors]) -> Tensors:
        """An entry that could not be read, made again, by one thread at a time."""
        with self._repairing:
            try:
                # Another thread may have met the same entry and be done with it.
                return cache.get(entry.key)
            except KeyError:
                self._warn(f"{what} is not in the cache any more; it is encoded again")
            except CorruptEntry as err:
                self._warn(f"{what} is damaged ({err}); it is encoded again")
            cache.put(entry.key, encode())
            return cache.get(entry.key)


def _longest(texts: Iterable[str]) -> list[str]:
    """The texts with most characters, the longest first: among them is the one with most tokens, as good as always."""
    return heapq.nlargest(32, texts, key=len)


def joined(shared: Tensor, own: Sequence[Tensor]) -> Condition:
    """The text part of a condition: the rows of the control images, then those of the one instruction."""
    return {"text": torch.cat([shared, *own])}
