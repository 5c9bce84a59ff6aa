"""The batch of any micro-step, from caches or encoded on the spot. Knows pictures, captions and encoders, not training."""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from sd_scripts.dataset.plan import Plan, SampleRef, caption_of, texts_of_run
from sd_scripts.dataset.progress import Bars
from sd_scripts.dataset.scan import Progress
from sd_scripts.library.protocols import Batch, Condition, ModelFamily, Parts
from sd_scripts.schema.dataset import DatasetOptions

from .cache import CODE_REVISION, Cache, Caches, CorruptEntry, Entry, entry_of, fingerprint, tokenizer_fingerprint
from .fill import Job, Tensors, fill, in_groups
from .prefetch import Prefetcher
from .views import Seen, View, cached_view, facts_of, geometry_of, mask_at, normalised, see, view_of

logger = logging.getLogger(__name__)
Place = tuple[int, int, int]
"""(step, micro, rank)"""


@dataclass(frozen=True)
class _Ready:
    """What can be made of a micro-batch without an encoder: per sample either cached tensors or what is to be encoded."""

    refs: list[SampleRef]
    views: list[View]
    captions: list[str]
    latents: list[Tensors]
    seen: list[Seen]
    texts: list[Condition]


class DataPipeline:
    """Pictures and captions as batches; the same step gives the same batch, on any number of processes.

    num_steps is the length of the run: it decides which texts are encoded in advance. What the trained text encoders make of a caption
    is left to the trainer; the entries of the others are there, where the family has entries apart. With caches on disk each of `world`
    processes encodes its share and `barrier` waits for the others; with caches in memory each encodes all. warn gets sentences for the
    log, also from background threads.
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
        rank: int = 0,
        world: int = 1,
        barrier: Callable[[], None] = lambda: None,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self.options, self.family, self.plan, self.cache, self.seed = options, family, plan, cache, seed
        self.num_steps, self.trained_encoders, self.rank, self.world = num_steps, tuple(trained_encoders), rank, world
        self._barrier, self._warn = barrier, warn
        self._caption_rules = plan.caption_rules(num_steps)
        self._parts: Parts | None = None
        self._vae_print = self._text_print = ""
        self._picture_groups: list[list[View]] = []
        self._text_groups: list[list[str]] = []
        self._repairing = Lock()
        workers = options.max_data_loader_n_workers
        self._prefetcher = Prefetcher(self._load_place, self._following, workers, 2 * workers)

    def __len__(self) -> int:
        """Samples of one epoch."""
        return self.plan.samples_per_epoch

    def prepare(self, parts: Parts, progress: Progress | None = None) -> None:
        """Fills both caches, as far as the options want them; a second call finds everything there.

        Keeps parts: live encoding and the repair of damaged entries use its encoders, wherever they are by then.
        """
        self._parts = parts
        with Bars(progress, shown=self.rank == 0) as bars:
            if self.options.cache_latents:
                self._vae_print = fingerprint(parts.vae)
                self._picture_groups = self._group_views()
                job = Job(
                    "latents", self._share(self.cache.latents, self._picture_groups), self._latents_entry, self._see, self._encode_seen
                )
                fill(job, self.cache.latents, self.cache.notes, self._warn, bars, self._num_readers())
                self._barrier()
            if self.cached_encoders:
                self._text_print = self._fingerprint_text(parts)
                self._text_groups = in_groups(texts_of_run(self.plan, self.num_steps), self.options.text_encoder_batch_size)
                texts = Job("text", self._share(self.cache.texts, self._text_groups), self._text_entry, list, self._encode_texts)
                fill(texts, self.cache.texts, self.cache.notes, self._warn, bars, 1)
                self._barrier()

    def micro_batch(self, step: int, micro: int, rank: int) -> Batch:
        """The samples process `rank` sees as micro-batch `micro` of a step; the next ones are prepared meanwhile."""
        item = self._prefetcher.get((step, micro, rank))
        return item if isinstance(item, Batch) else self._finish(item)

    def validation_batches(self) -> list[Callable[[], Batch]]:
        """The held-out pictures, always the same batches; each is made when it is called."""
        batches = self.plan.validation_batches()[: self.options.max_validation_steps]
        return [partial(self._make, batch) for batch in batches]

    def close(self) -> None:
        """Ends the background threads."""
        self._prefetcher.close()

    # Filling.

    def _num_readers(self) -> int:
        # Nothing else wants the processors while the caches are filled.
        return max(self.options.max_data_loader_n_workers, min(8, (os.cpu_count() or 1) // self.world))

    def _share(self, cache: Cache, groups: list[list[Any]]) -> list[list[Any]]:
        # By position in the whole list, not in what is missing: processes must not see each other's progress.
        return groups if cache.folder is None else groups[self.rank :: self.world]

    def _group_views(self) -> list[list[View]]:
        views: dict[View, None] = {}
        held_out = set(self.plan.held_out)
        for picture, resolution in self.plan.cached_cuts():
            views[cached_view(self.plan, self.seed, picture, resolution)] = None
            if self.plan.subset_of(picture).options.flip_aug and picture not in held_out:
                views[cached_view(self.plan, self.seed, picture, resolution, mirrored=True)] = None
        return in_groups(list(views), self.options.vae_batch_size, lambda view: self.plan.cut(view.picture, view.resolution).bucket)

    def _latents_entry(self, view: View) -> Entry:
        facts = {"family": self.family.name, "encoder": self._vae_print, "revision": CODE_REVISION, **facts_of(self.plan, view)}
        path = self.plan.pictures[view.picture].path
        return entry_of(facts, f"{path}|{view.resolution}|{'mirrored' if view.mirrored else ''}")

    def _text_entry(self, text: str) -> Entry:
        settings = self._known_parts().settings
        facts = {"family": self.family.name, "encoder": self._text_print, "revision": CODE_REVISION, "settings": settings, "text": text}
        return entry_of(facts, text)

    def _fingerprint_text(self, parts: Parts) -> str:
        names = self.cached_encoders
        return "".join(
            [fingerprint(*(parts.text_encoders[name] for name in names))]
            + [tokenizer_fingerprint(parts.tokenizers[name]) for name in sorted(parts.tokenizers) if name not in self.trained_encoders]
            + (list(names) if len(names) < len(parts.text_encoders) else [])
        )

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

    def _see(self, views: Sequence[View]) -> tuple[Tensor, list[Seen]]:
        seen = [see(self.plan, self.seed, view) for view in views]
        return torch.stack([one.pixels for one in seen]), seen

    def _encode_seen(self, material: tuple[Tensor, list[Seen]]) -> list[Tensors]:
        pixels, seen = material
        latents = self._encode_pixels(pixels)
        return [self._with_mask(latent, one.mask) for latent, one in zip(latents, seen)]

    def _with_mask(self, latent: Tensor, mask: Tensor | None) -> Tensors:
        return {"latents": latent} if mask is None else {"latents": latent, "mask": mask_at(mask, (latent.shape[-2], latent.shape[-1]))}

    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        parts = self._known_parts()
        device = next(parts.vae.parameters()).device
        with torch.no_grad():
            return self.family.encode_pictures(parts, pixels.to(device, non_blocking=True))

    def _encode_texts(self, texts: Sequence[str]) -> list[Condition]:
        with torch.no_grad():
            return self.family.encode_prompts(self._known_parts(), texts, self.untrained_encoders if self.trained_encoders else None)

    def _known_parts(self) -> Parts:
        assert self._parts is not None, "prepare() comes before everything that needs an encoder"
        return self._parts

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
        views = [view_of(self.plan, self.seed, ref, cached) for ref in refs]
        captions = [caption_of(self.plan, self._caption_rules, ref) for ref in refs]
        latents = [self._cached_latents(view) for view in views] if cached else []
        seen = [] if cached else [see(self.plan, self.seed, view) for view in views]
        return _Ready(refs, views, captions, latents, seen, [self._cached_text(text) for text in captions] if self.cached_encoders else [])

    def _finish(self, ready: _Ready) -> Batch:
        """Encodes what was not cached, in the calling thread, and puts the batch together."""
        if ready.latents:
            x0 = torch.stack([entry["latents"] for entry in ready.latents]).float()
            masks = [entry.get("mask") for entry in ready.latents]
        else:
            x0 = self._encode_pixels(torch.stack([one.pixels for one in ready.seen])).float()
            masks = [None if one.mask is None else mask_at(one.mask, (x0.shape[-2], x0.shape[-1])) for one in ready.seen]
        texts = ready.texts
        if not texts:
            texts = self._encode_texts(ready.captions) if self.untrained_encoders else [{} for _ in ready.refs]
        sizes = [self.family.size_condition(geometry_of(self.plan, view)) for view in ready.views]
        return Batch(
            x0=x0,
            conditions=[{**text, **size} for text, size in zip(texts, sizes, strict=True)],
            numbers=torch.tensor([ref.number for ref in ready.refs], dtype=torch.int64),
            weights=torch.tensor([ref.weight for ref in ready.refs], dtype=torch.float32),
            names=[self.plan.pictures[ref.picture].path for ref in ready.refs],
            masks=self._masks(masks, x0) if self.options.masked_loss else None,
            captions=ready.captions,
        )

    def _masks(self, masks: Sequence[Tensor | None], x0: Tensor) -> Tensor:
        whole = torch.ones(1, *x0.shape[-2:])
        present = [whole if mask is None else mask.float() for mask in masks]
        return torch.stack([normalised(mask) for mask in present] if self.options.normalize_masked_loss else present)

    def _cached_latents(self, view: View) -> Tensors:
        entry = self._latents_entry(view)
        try:
            return self.cache.latents.get(entry.key)
        except (KeyError, CorruptEntry):
            group = next((group for group in self._picture_groups if view in group), [view])
            name = self.plan.pictures[view.picture].path
            return self._repaired(
                self.cache.latents, entry, f"{name}: the encoded picture", lambda: self._encode_seen(self._see(group))[group.index(view)]
            )

    def _cached_text(self, text: str) -> Tensors:
        entry = self._text_entry(text)
        try:
            return self.cache.texts.get(entry.key)
        except (KeyError, CorruptEntry):
            place = bisect_left(self._text_groups, text, key=lambda group: group[-1])
            group = self._text_groups[place] if place < len(self._text_groups) and text in self._text_groups[place] else [text]
            return self._repaired(
                self.cache.texts, entry, f"caption {text!r}: its encoding", lambda: self._encode_texts(group)[group.index(text)]
            )

    def _repaired(self, cache: Cache, entry: Entry, what: str, encode: Callable[[], Tensors]) -> Tensors:
        """An entry that could not be read, made again; whole groups are encoded, so that it gets the same bits."""
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
