"""In which order images are shown: which images make up each step, for any step, without walking there.

The plan works in global batches of G = batch_size * processes * accumulation samples, all of one bucket. Sample number =
step * G + position, so how the G samples are shared between processes and micro-batches changes nothing.

Each bucket b with n_b samples an epoch is a stream: seeded permutations of its samples, one after the other, cut into global
batches. In epoch e it gives floor((e + 1) n_b / G) - floor(e n_b / G) batches; the batches of all buckets of an epoch are shuffled.
So there are no short batches and no padding, every sample is used equally often, and the counts have a closed form.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.training import TrainingOptions

from . import buckets, captions
from .buckets import BucketRules, Cut, Size
from .captions import CaptionRules
from .config import Subset
from .draws import numpy_for, seed_for
from .findings import findings_of
from .records import Dataset, ImageInfo
from .weights import with_terms

Integers = NDArray[np.int64]
Shape = tuple[Size, ...]
"""Size of a sample: its target's bucket, then the size of each of its control images."""
ControlSize = Callable[[Size], Size]
"""The size at which a model takes a control image of a given size."""
ControlSet = tuple[Any, ...]
"""What decides the pixels of all control images of a sample; hashable, and made of plain JSON values."""

SAME_ASPECT = 1.01
"""Control images whose aspect ratio is within this factor of their target's are cut as the target is."""


@dataclass(frozen=True, slots=True)
class SampleRef:
    """One sample of the run; image and resolution are indices into Plan.images and into the training sizes of its subset.

    step and epoch are -1 for held-out samples, whose numbers count from 0 on their own.
    """

    number: int
    step: int
    epoch: int
    image: int
    resolution: int
    bucket: Size
    weight: float


@dataclass(frozen=True)
class BucketRow:
    """One line of the bucket table. samples counts an epoch, with repeats and regularisation images."""

    width: int
    height: int
    images: int
    samples: int
    controls: tuple[Size, ...] = ()
    """Sizes of the control images of each sample, for edit pairs."""


@dataclass(frozen=True)
class _Bucket:
    shape: Shape
    images: Integers
    resolutions: Integers

    def __len__(self) -> int:
        return len(self.images)

    @property
    def stream(self) -> str:
        """Names its random draws."""
        return "bucket/" + "+".join(f"{width}x{height}" for width, height in self.shape)


class Plan:
    """Which samples each step trains on. Made by `make_plan`; safe to use from several threads."""

    def __init__(
        self,
        dataset: Dataset,
        entries: Sequence[tuple[int, int, int]] | Integers,
        held_out: Sequence[int],
        *,
        options: DatasetOptions,
        seed: int,
        batch_size: int,
        processes: int,
        accumulation: int,
        warnings: Sequence[str] = (),
        control_size: ControlSize | None = None,
        terms: Mapping[str, float] | None = None,
    ) -> None:
        self.subsets: tuple[Subset, ...] = dataset.subsets
        self.images: tuple[ImageInfo, ...] = dataset.images
        self.bad = dataset.bad
        self.options, self.seed = options, seed
        self.batch_size, self.processes, self.accumulation = batch_size, processes, accumulation
        self.global_batch_size = batch_size * processes * accumulation
        self.held_out = tuple(held_out)
        self._control_size = control_size or buckets.area_size
        self._terms = terms or {}
        self._rules: tuple[tuple[BucketRules, ...], ...] = tuple(buckets.rules_of(subset.options) for subset in self.subsets)
        self._buckets = self._group(np.asarray(entries, dtype=np.int64).reshape(-1, 3))
        self._sizes = np.array([len(bucket) for bucket in self._buckets], dtype=np.int64)
        self._recent: OrderedDict[tuple[str, int, int], Integers] = OrderedDict()
        self._lock = Lock()
        of_sizes = dict.fromkeys(note for subset in self.subsets for note in buckets.notes_of(subset.options))
        self.warnings = (*dataset.warnings, *warnings, *of_sizes, *findings_of(self))

    def _group(self, entries: Integers) -> tuple[_Bucket, ...]:
        """entries (N, 3): image, resolution, times shown an epoch."""
        shapes: dict[Shape, list[int]] = {}
        for row, (image, resolution, _) in enumerate(entries.tolist()):
            shapes.setdefault(self.shape_of(image, resolution), []).append(row)
        made = []
        for shape in sorted(shapes):
            rows = entries[shapes[shape]]
            made.append(_Bucket(shape, np.repeat(rows[:, 0], rows[:, 2]), np.repeat(rows[:, 1], rows[:, 2])))
        return tuple(made)

    # What one image becomes.

    def subset_of(self, image: int) -> Subset:
        """The subset an image belongs to."""
        return self.subsets[self.images[image].subset]

    def key_of(self, image: int) -> str:
        """The name that keeps the random draws of images apart; the same wherever the folder lies."""
        item = self.images[image]
        return f"{item.subset}/{item.name}"

    def cut(self, image: int, resolution: int) -> Cut:
        """How an image is resized and cut at one of its subset's training sizes."""
        item = self.images[image]
        return buckets.cut_for((item.width, item.height), self._rules[item.subset][resolution])

    def control_cut(self, image: int, resolution: int, index: int) -> Cut:
        """How one control image of an image is resized and cut.

        Of the target's aspect ratio within 1 %, it is cut as the target is, at the same place, so that both stay aligned; else all of it
        is resized to the size that the model takes for it.
        """
        item, cut = self.images[image], self.cut(image, resolution)
        if self.shares_cut(image, index):
            return cut
        control = item.controls[index]
        size = self._control_size((control.width, control.height))
        return Cut(size, size)

    def shares_cut(self, image: int, index: int) -> bool:
        """Whether a control image is resized, cut and placed as its target is."""
        item = self.images[image]
        control = item.controls[index]
        across, down = control.width * item.height, control.height * item.width
        return max(across, down) <= SAME_ASPECT * min(across, down)

    def shape_of(self, image: int, resolution: int) -> Shape:
        """Size of a sample's target, then of its control images; all samples of a batch have the same."""
        cuts = (self.control_cut(image, resolution, index).bucket for index in range(len(self.images[image].controls)))
        return self.cut(image, resolution).bucket, *cuts

    def controls_identity(self, image: int) -> tuple[str, ...]:
        """The hashes of an image's control images, in order."""
        return tuple(control.identity for control in self.images[image].controls)

    def is_mirrored(self, ref: SampleRef) -> bool:
        """Whether a sample is shown with left and right exchanged (flip_aug), and its control images with it."""
        return ref.step >= 0 and self.subset_of(ref.image).options.flip_aug and seed_for(self.seed, ref.number, "flip") % 2 == 1

    def control_set(self, image: int, resolution: int, mirrored: bool) -> ControlSet:
        """Equal for samples whose control images have the same pixels, as far as caching goes; () without control images.

        A random crop has a place of its own for each target, which control images that share the target's cut share too.
        """
        item, options = self.images[image], self.subset_of(image).options
        seen: list[tuple[Any, ...]] = []
        for index, control in enumerate(item.controls):
            cut = self.control_cut(image, resolution, index)
            placed = self.shares_cut(image, index) and options.random_crop and cut.excess != (0, 0)
            seen.append((control.identity or control.path, cut.resized, cut.bucket, item.identity or item.path if placed else ""))
        return (*seen, options.resize_interpolation, mirrored) if seen else ()

    def caption_rules(self, num_steps: int) -> tuple[CaptionRules, ...]:
        """The caption rules of each subset for a run of this many steps."""
        return tuple(captions.rules_of(subset.options, num_steps) for subset in self.subsets)

    # Order.

    def steps_of_epochs(self, epochs: int) -> int:
        """Steps in the first `epochs` epochs. 0 when the images do not fill one global batch by then."""
        return int((self._sizes * epochs // self.global_batch_size).sum())

    def steps_of_run(self, training: TrainingOptions) -> int:
        """Steps of the whole run. Raises OptionError for epochs that do not fill one."""
        if training.max_train_epochs is None:
            return training.max_train_steps
        steps = self.steps_of_epochs(training.max_train_epochs)
        if steps == 0:
            text = (
                f"max_train_epochs: {training.max_train_epochs} epochs of {self.samples_per_epoch} samples do not fill one step of "
                f"{self.global_batch_size}; take more epochs, more repeats or a smaller batch"
            )
            raise OptionError(Problem("max_train_epochs", text))
        return steps

    def epoch_of(self, step: int) -> int:
        """The epoch (from 0) that a step (from 0) belongs to."""
        # floor() takes less than one batch from each bucket, so the epoch lies between these two.
        total, group = self.samples_per_epoch, self.global_batch_size
        low, high = step * group // total, (step + len(self._buckets) + 1) * group // total + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.steps_of_epochs(middle) <= step else (low, middle)
        return low

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one pass over the data, with repeats, training sizes and regularisation images."""
        return int(self._sizes.sum())

    def global_batch(self, step: int) -> list[SampleRef]:
        """The G samples of a step, all of one bucket; any step may be asked for."""
        return self._refs(step, 0, self.global_batch_size)

    def micro_batch(self, step: int, micro: int, rank: int) -> list[SampleRef]:
        """The batch_size samples that process `rank` sees as micro-batch `micro` of a step."""
        start = (micro * self.processes + rank) * self.batch_size
        return self._refs(step, start, start + self.batch_size)

    def _refs(self, step: int, start: int, stop: int) -> list[SampleRef]:
        epoch = self.epoch_of(step)
        place = int(self._epoch_order(epoch)[step - self.steps_of_epochs(epoch)])
        before, counts = self._batches(epoch)
        ends = np.cumsum(counts)
        number = int(np.searchsorted(ends, place, side="right"))
        bucket = self._buckets[number]
        first = (int(before[number]) + place - int(ends[number] - counts[number])) * self.global_batch_size
        refs = []
        for position in range(start, stop):
            turn, index = divmod(first + position, len(bucket))
            row = int(self._permutation(bucket.stream, turn, len(bucket))[index])
            image, resolution = int(bucket.images[row]), int(bucket.resolutions[row])
            sample = step * self.global_batch_size + position
            refs.append(SampleRef(sample, step, epoch, image, resolution, bucket.shape[0], self.weight_of(image)))
        return refs

    def _batches(self, epoch: int) -> tuple[Integers, Integers]:
        """Global batches that each bucket gives before an epoch, and in it."""
        before = self._sizes * epoch // self.global_batch_size
        return before, self._sizes * (epoch + 1) // self.global_batch_size - before

    def heaviest_step(self, num_steps: int) -> int:
        """The first step of a run of this many whose images, control images among them, have most pixels."""
        areas = [sum(width * height for width, height in bucket.shape) for bucket in self._buckets]
        for number in sorted(range(len(areas)), key=lambda number: -areas[number]):
            for epoch in range(self.epoch_of(num_steps - 1) + 1):
                counts = self._batches(epoch)[1]
                end = int(np.cumsum(counts)[number])
                order = self._epoch_order(epoch)
                places = np.flatnonzero((order >= end - counts[number]) & (order < end))
                first = self.steps_of_epochs(epoch) + int(places[0]) if len(places) else num_steps
                if first < num_steps:
                    return first
        raise AssertionError("every step has a bucket")

    def unshown(self, num_steps: int) -> list[BucketRow]:
        """The buckets that give no step to a run of this many steps, because they fill less than one by then."""
        epoch = self.epoch_of(num_steps)
        before, counts = self._batches(epoch)
        part = self._epoch_order(epoch)[: num_steps - self.steps_of_epochs(epoch)]
        given = before + np.bincount(np.searchsorted(np.cumsum(counts), part, side="right"), minlength=len(before))
        return [row for row, number in zip(self.table(), given.tolist(), strict=True) if number == 0]

    def weight_of(self, image: int) -> float:
        """Weight of an image in the loss."""
        prior = self.options.prior_loss_weight if self.subset_of(image).is_reg else 1.0
        return prior * self._own_weights(image).get("loss_weight", 1.0)

    def terms_of(self, image: int) -> dict[str, float]:
        """Weights of the further terms of an image's loss: those for which any data set or image has a weight of its own."""
        own = self._own_weights(image)
        return {name: own.get(name, self._terms[name]) for name in self.own_terms}

    @cached_property
    def own_terms(self) -> tuple[str, ...]:
        """Terms of the run's loss for which a data set or an image has a weight of its own."""
        given = {name for name, _ in self._all_weights()}
        return tuple(name for name in self._terms if name in given)

    def unknown_terms(self) -> list[str]:
        """Terms that a data set or an image weights, and that the run's loss does not have."""
        return sorted({name for name, _ in self._all_weights() if name != "loss_weight"} - self._terms.keys())

    def _all_weights(self) -> Iterator[tuple[str, float]]:
        for weights in (*(subset.weights for subset in self.subsets), *(image.weights for image in self.images)):
            yield from weights

    def _own_weights(self, image: int) -> dict[str, float]:
        return dict((*self.subset_of(image).weights, *self.images[image].weights))

    def _epoch_order(self, epoch: int) -> Integers:
        return self._permutation("epoch", epoch, self.steps_of_epochs(epoch + 1) - self.steps_of_epochs(epoch))

    def _permutation(self, stream: str, turn: int, count: int) -> Integers:
        key = (stream, turn, count)
        with self._lock:
            if key in self._recent:
                self._recent.move_to_end(key)
                return self._recent[key]
        made = numpy_for(self.seed, turn, stream).permutation(count)
        with self._lock:
            self._recent[key] = made
            # Two turns of every bucket and of the epoch order: what neighbouring steps need.
            while len(self._recent) > 2 * len(self._buckets) + 4:
                self._recent.popitem(last=False)
        return made

    # Everything the caches must hold.

    def cached_cuts(self) -> Iterator[tuple[int, int]]:
        """Every (image, resolution) that training or validation shows, bucket by bucket, in an order that depends on nothing else."""
        yield from self.trained_cuts()
        for refs in self.validation_batches():
            yield from ((ref.image, ref.resolution) for ref in refs)

    def trained_cuts(self) -> Iterator[tuple[int, int]]:
        """Every (image, resolution) that training shows, bucket by bucket."""
        for bucket in self._buckets:
            pairs = np.unique(np.stack([bucket.images, bucket.resolutions], axis=1), axis=0)
            yield from ((int(image), int(resolution)) for image, resolution in pairs)

    def samples(self, num_steps: int) -> Iterator[SampleRef]:
        """All samples of the first num_steps steps."""
        for step in range(num_steps):
            yield from self.global_batch(step)

    def trained_images(self) -> list[int]:
        """Indices of all images in training (held-out ones are not), sorted."""
        used = np.concatenate([bucket.images for bucket in self._buckets]) if self._buckets else np.empty(0, np.int64)
        return [int(index) for index in np.unique(used)]

    def captions(self) -> list[str]:
        """The captions of all images in training with nothing shuffled, thinned or dropped, each once, sorted."""
        rules = self.caption_rules(0)
        trained = ((index, self.images[index]) for index in self.trained_images())
        return sorted({captions.render_plain(rules[item.subset], item.caption, self.seed, self.key_of(index)) for index, item in trained})

    def sizes(self) -> list[Size]:
        """(width, height) of all buckets, sorted."""
        return sorted({bucket.shape[0] for bucket in self._buckets})

    def validation_batches(self, fewest: int = 0) -> list[list[SampleRef]]:
        """The held-out images at their first training size, in batches of one bucket; the last of a bucket may be short.

        Once each, or as often as it takes for `fewest` samples, whose numbers go on from one pass to the next.
        """
        by_shape: dict[Shape, list[int]] = {}
        for image in self.held_out:
            by_shape.setdefault(self.shape_of(image, 0), []).append(image)
        batches: list[list[SampleRef]] = []
        number = 0
        passes = max(1, -(-fewest // len(self.held_out))) if self.held_out else 0
        for shape in sorted(by_shape) * passes:
            for start in range(0, len(by_shape[shape]), self.batch_size):
                part = by_shape[shape][start : start + self.batch_size]
                batches.append([SampleRef(number + index, -1, -1, image, 0, shape[0], 1.0) for index, image in enumerate(part)])
                number += len(part)
        return batches

    # What a person sees.

    def table(self) -> list[BucketRow]:
        """The buckets, sorted by size."""
        return [BucketRow(*bucket.shape[0], len(np.unique(bucket.images)), len(bucket), bucket.shape[1:]) for bucket in self._buckets]

    @property
    def dataset_hash(self) -> str:
        """Changes with any image, caption, size, repeat or setting of a subset; not with where folders lie."""
        digest = hashlib.blake2b(digest_size=16)
        for subset in self.subsets:
            settings = subset.options.model_dump(mode="json", exclude=_NOT_CONTENT)
            facts = [settings, subset.repeats, subset.is_reg, subset.class_tokens, *([subset.weights] if subset.weights else ())]
            digest.update(json.dumps(facts, sort_keys=True).encode())
        for image in self.images:
            seen = image.identity or f"{image.num_bytes} bytes"
            row: list[Any] = [image.subset, image.name, seen, image.width, image.height, image.caption, image.mask_identity]
            if image.controls:
                row.append([control.identity or f"{control.num_bytes} bytes" for control in image.controls])
            if image.weights:
                row.append(["weights", image.weights])
            digest.update(json.dumps(row).encode())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """What the page and the log show, as plain JSON values."""
        trained = self.trained_images()
        reg = sum(self.subset_of(image).is_reg for image in trained)
        return {
            "images": len(trained) - reg,
            "regularisation": reg,
            "validation": len(self.held_out),
            "bad": [{"path": item.path, "reason": item.reason} for item in self.bad],
            "samples_per_epoch": self.samples_per_epoch,
            "global_batch_size": self.global_batch_size,
            "steps_per_epoch": self.samples_per_epoch / self.global_batch_size,
            "buckets": [_described(row) for row in self.table()],
            "warnings": list(self.warnings),
        }


def _described(row: BucketRow) -> dict[str, Any]:
    told: dict[str, Any] = {"width": row.width, "height": row.height, "images": row.images, "samples": row.samples}
    if row.controls:
        told["controls"] = [{"width": width, "height": height} for width, height in row.controls]
    return told


_NOT_CONTENT = {
    *("control_data_dir", "train_data_dir", "reg_data_dir", "dataset_config", "in_json", "conditioning_data_dir", "cache_dir"),
    *("cache_latents", "cache_latents_to_disk", "cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"),
    *("vae_batch_size", "text_encoder_batch_size", "max_data_loader_n_workers", "on_bad_image", "train_batch_size"),
    *("validate_every_n_steps", "max_validation_steps"),
}


def make_plan(
    dataset: Dataset,
    options: DatasetOptions,
    *,
    seed: int,
    grid: int,
    batch_size: int | None = None,
    processes: int = 1,
    accumulation: int = 1,
    control_size: ControlSize | None = None,
    terms: Mapping[str, float] | None = None,
) -> Plan:
    """The plan of a run. grid: image sides the model needs are multiples of this. batch_size None takes train_batch_size.

    control_size gives the size at which the model takes a control image of a given size; None takes `buckets.area_size`.
    terms are the further terms of the run's loss with their weights, see `weights.terms_of`.

    Raises OptionError for sizes off the grid, for a validation split that leaves no training image, and for weights of terms that the
    run's loss does not have.
    """
    problems: dict[str, Problem] = {}
    for subset in dataset.subsets:
        problems.update({problem.message: problem for problem in buckets.problems_of(subset.options, grid)})
    if problems:
        raise OptionError(list(problems.values()))
    held_out = _held_out(dataset, seed)
    train, reg, warnings = _entries(dataset, set(held_out), seed)
    if not train:
        counts = f"held out: {len(held_out)}, cannot be read: {len(dataset.bad)}"
        told = f"validation_split: no image is left to train on ({counts}); set it to 0, or add images"
        raise OptionError(Problem("validation_split", told))
    plan = Plan(
        dataset,
        train + reg,
        held_out,
        options=options,
        seed=seed,
        batch_size=batch_size or options.train_batch_size,
        processes=processes,
        accumulation=accumulation,
        # Nobody can give a built-in data set other repeats.
        warnings=() if (options.train_data_dir or "").startswith("toy:") else warnings,
        control_size=control_size,
        terms=terms,
    )
    if unknown := plan.unknown_terms():
        text = f"{', '.join(unknown)}: the data set has weights for terms of the loss that this kind of model is trained without"
        raise OptionError(Problem("dataset_config", f"{text}; remove them, or train {with_terms()}"))
    return plan


def _held_out(dataset: Dataset, seed: int) -> list[int]:
    """Of each training subset the wanted part, chosen by a hash of the names, so that adding an image moves no other."""
    held_out: list[int] = []
    for number, subset in enumerate(dataset.subsets):
        split = subset.options.validation_split
        members = [index for index, image in enumerate(dataset.images) if image.subset == number]
        if subset.is_reg or split == 0 or not members:
            continue
        own_seed = subset.options.validation_seed if subset.options.validation_seed is not None else seed
        order = sorted(members, key=lambda index: seed_for(own_seed, 0, f"validation/{dataset.images[index].name}"))
        held_out += order[: max(1, round(split * len(members)))]
    return sorted(held_out)


def _entries(dataset: Dataset, held_out: set[int], seed: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]], list[str]]:
    """(image, resolution, times) of training and of regularisation images; per training size there are as many of each."""
    warnings: list[str] = []
    train: list[tuple[int, int, int]] = []
    pool: dict[int, list[tuple[int, int]]] = {}
    for index, image in enumerate(dataset.images):
        subset = dataset.subsets[image.subset]
        for resolution in range(1 + len(subset.options.additional_resolutions)):
            if subset.is_reg:
                pool.setdefault(resolution, []).append((index, subset.repeats))
            elif index not in held_out:
                train.append((index, resolution, subset.repeats))
    reg: list[tuple[int, int, int]] = []
    for resolution, members in pool.items():
        wanted = sum(times for _, at, times in train if at == resolution)
        reg += _matched(members, resolution, wanted, seed, warnings)
    return train, reg, warnings


def _matched(members: list[tuple[int, int]], resolution: int, wanted: int, seed: int, warnings: list[str]) -> list[tuple[int, int, int]]:
    """Regularisation images repeated until there are `wanted`; which ones come once more (or not at all) is drawn."""
    total = sum(repeats for _, repeats in members)
    whole, rest = divmod(wanted, total)
    slots = np.repeat(np.arange(len(members)), [repeats for _, repeats in members])
    extra = np.bincount(slots[numpy_for(seed, resolution, "regularisation").permutation(total)[:rest]], minlength=len(members))
    times = [repeats * whole + int(extra[place]) for place, (_, repeats) in enumerate(members)]
    unused = sum(count == 0 for count in times)
    if unused and resolution == 0:
        warnings.append(
            f"{unused} of {len(members)} regularisation images are not used, because there are only {wanted} training samples an epoch; "
            "more repeats of the training images would use them"
        )
    return [(index, resolution, count) for (index, _), count in zip(members, times) if count]


def caption_of(plan: Plan, rules: Sequence[CaptionRules], ref: SampleRef) -> str:
    """The text a sample is shown with; rules are plan.caption_rules(steps of the run)."""
    image = plan.images[ref.image]
    own = rules[image.subset]
    if ref.step < 0:
        return captions.render_plain(own, image.caption, plan.seed, plan.key_of(ref.image))
    if captions.is_dropped(own, plan.seed, ref.number, ref.epoch):
        return ""
    variant = captions.variant_of(own, plan.seed, ref.number)
    return captions.render(own, image.caption, plan.seed, plan.key_of(ref.image), variant, captions.warmup_stage(own, ref.step))


def texts_of_run(plan: Plan, num_steps: int) -> list[str]:
    """Every text that training and validation will show in a run of num_steps steps, each once, sorted."""
    rules = plan.caption_rules(num_steps)
    texts = {caption_of(plan, rules, ref) for batch in plan.validation_batches() for ref in batch}
    trained = plan.trained_images()
    several = {number for number, own in enumerate(rules) if own.random}
    if any(own.warmup_steps > 0 or (own.random and not own.variants) for own in rules):
        bounded = None
    else:
        bounded = sum(rules[plan.images[index].subset].variants if plan.images[index].subset in several else 1 for index in trained)
    # Walking over the samples gives exactly the texts that are shown; for a long run the list of all variants is shorter.
    if bounded is None or bounded > num_steps * plan.global_batch_size:
        return sorted(texts.union(caption_of(plan, rules, ref) for ref in plan.samples(num_steps)))
    for index in trained:
        image = plan.images[index]
        own = rules[image.subset]
        for variant in range(own.variants if own.random else 1):
            texts.add(captions.render(own, image.caption, plan.seed, plan.key_of(index), variant))
    if any(own.dropout_rate > 0 or own.dropout_every_n_epochs for own in rules):
        texts.add("")
    return sorted(texts)


def cache_folder(options: DatasetOptions, output_dir: str | Path) -> Path:
    """Where a run keeps its index and caches."""
    return Path(options.cache_dir) if options.cache_dir is not None else Path(output_dir) / ".cache"
