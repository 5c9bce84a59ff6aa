"""What a run says about its model and images: facts for the header of saved files, and summaries for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sd_scripts.dataset.findings import findings_of_length
from sd_scripts.dataset.plan import Plan
from sd_scripts.families import bases
from sd_scripts.library.core.protocols import ModelFamily, Parts, Sources
from sd_scripts.library.data.pipeline import KeptEntries
from sd_scripts.runs.resume import Start
from sd_scripts.schema.runs import RunOptions

from .metadata import BaseFacts, DatasetFacts
from .run_meta import devices


def base_facts(family: ModelFamily, parts: Parts) -> BaseFacts:
    """What the saved file's header says about the base model."""
    shift = parts.scheduler_config.get("shift", 1.0)
    return BaseFacts(parts.source, parts.kind, family.version(parts), shift, parts.training_adapter)


def dataset_facts(plan: Plan, total_steps: int) -> DatasetFacts:
    """What the saved file's header says about the images."""
    own = [index for index in plan.trained_images() if not plan.subset_of(index).is_reg]
    members = Counter(plan.images[index].subset for index in own)
    tags = Counter(
        part.strip()
        for index in own
        for part in plan.images[index].caption.split(plan.subset_of(index).options.caption_separator)
        if part.strip()
    )
    described = plan.describe()
    buckets: Counter[tuple[int, int]] = Counter()
    for row in plan.table():
        buckets[row.width, row.height] += row.samples
    return DatasetFacts(
        num_train_images=sum(plan.subsets[number].repeats * count for number, count in members.items()),
        num_reg_images=described["regularisation"],
        num_validation_images=described["validation"],
        num_batches_per_epoch=plan.steps_of_epochs(1),
        global_batch=plan.global_batch_size,
        num_epochs=plan.epoch_of(total_steps - 1) + 1,
        dataset_hash=plan.dataset_hash,
        subsets=tuple((plan.subsets[number].repeats, count) for number, count in sorted(members.items())),
        tag_frequency=dict(tags),
        buckets=dict(buckets),
    )


def lines_about_images(plan: Plan) -> list[str]:
    """How many images there are, at which sizes they are shown, and with which control images."""
    described = plan.describe()
    rows = plan.table()
    lines = [
        f"images: {described['images']}, regularisation {described['regularisation']}, held out {described['validation']}",
        "samples an epoch by size: " + ", ".join(f"{row.width}x{row.height}{_from(row.controls)}: {row.samples}" for row in rows),
    ]
    used = [*plan.trained_images(), *plan.held_out]
    counts = Counter(len(plan.images[index].controls) for index in used)
    if any(counts):
        pairs = [(index, number) for index in used for number in range(len(plan.images[index].controls))]
        shared = sum(plan.shares_cut(index, number) for index, number in pairs)
        told = ", ".join(f"{count} pairs with {number}" for number, count in sorted(counts.items()))
        lines.append(f"control images: {told}; {shared} cut as their targets, {len(pairs) - shared} at a size of their own")
    return lines


def _from(controls: Sequence[tuple[int, int]]) -> str:
    return f" from {' + '.join(f'{width}x{height}' for width, height in controls)}" if controls else ""


def about_caches(kept: Sequence[KeptEntries], folder: Path) -> str:
    """How many entries the caches hold for a run, and what they take."""
    parts = [f"{one.what} {one.num_entries} entries of {_size(one.num_bytes)}" for one in kept]
    entries, size = sum(one.num_entries for one in kept), _size(sum(one.num_bytes for one in kept))
    return f"cached in {folder}: {'; '.join(parts)}; together {entries} entries, {size}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"


def about_start(
    options: RunOptions,
    plan: Plan,
    total_steps: int,
    start: Start,
    num_previews: int,
    num_class_images: int,
    sources: Sources | None = None,
) -> str:
    """What a start would do, for --dry_run. num_class_images: how many would be made first; sources: what evaluations transfer."""
    if start.finished:
        begins = f"{start.run.path if start.run else ''} is finished already, so nothing would be trained"
    elif start.state is not None:
        begins = f"from step {start.step} of {start.state}"
    else:
        begins = "from the first step"
    about_tests = () if sources is None else sources.warnings
    lines = [
        f"{options.label}: {options.model.pretrained_model_name_or_path or 'a new model'}",
        *lines_about_images(plan),
        f"steps: {total_steps} of {plan.global_batch_size} samples, {plan.steps_of_epochs(1)} in the first epoch",
        f"starts: {begins}",
        f"precision: {options.training.mixed_precision} on {devices()[0]['name'] if devices() else 'the CPU'}",
        *([f"previews: {num_previews}"] if sources is None else sources.lines(plan)),
        *([f"class images: {num_class_images} will be made before training"] if num_class_images else []),
        *(
            f"note: {text}"
            for text in (*bases.notes(options), *start.warnings, *plan.warnings, *findings_of_length(plan, total_steps), *about_tests)
        ),
        "Nothing was started (--dry_run).",
    ]
    return "\n".join(lines)
