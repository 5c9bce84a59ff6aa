"""What a run says about its model and pictures: facts for the header of saved files, and summaries for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sd_scripts.dataset.findings import findings_of_length
from sd_scripts.dataset.plan import Plan
from sd_scripts.families.ddpm.caption_encoder import CaptionEncoder
from sd_scripts.families.lgt.evaluation import Sources
from sd_scripts.library.adapters.names import names_of
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.data.pipeline import Kept
from sd_scripts.runs.resume import Start
from sd_scripts.schema.runs import RunOptions

from .metadata import BaseFacts, DatasetFacts, Version
from .run_meta import devices

_QWEN_VERSIONS: dict[str, Version] = {
    "image": "qwen-image",
    "edit": "qwen-edit",
    "edit-2509": "qwen-edit-2509",
    "edit-2511": "qwen-edit-2511",
}


def base_facts(parts: Parts) -> BaseFacts:
    """What the saved file's header says about the base model."""
    if isinstance(parts.text_encoders.get("te1"), CaptionEncoder):
        return BaseFacts(parts.source, parts.kind, "ddpm")
    if "styles" in parts.settings:
        return BaseFacts(parts.source, parts.kind, "lgt")
    family = names_of(parts).family
    if family == "flux":
        return BaseFacts(parts.source, parts.kind, "flux-dev" if parts.backbone.config.guidance_embeds else "flux-schnell")
    if family == "qwen_edit":
        return BaseFacts(parts.source, parts.kind, _QWEN_VERSIONS[parts.settings["model_version"]])
    if family == "zimage":
        return BaseFacts(parts.source, parts.kind, "z-image", parts.scheduler_config.get("shift", 1.0), parts.training_adapter)
    return BaseFacts(parts.source, parts.kind, family)


def dataset_facts(plan: Plan, total_steps: int) -> DatasetFacts:
    """What the saved file's header says about the pictures."""
    own = [index for index in plan.trained_pictures() if not plan.subset_of(index).is_reg]
    members = Counter(plan.pictures[index].subset for index in own)
    tags = Counter(
        part.strip()
        for index in own
        for part in plan.pictures[index].caption.split(plan.subset_of(index).options.caption_separator)
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


def lines_about_pictures(plan: Plan) -> list[str]:
    """How many pictures there are, at which sizes they are shown, and with which control pictures."""
    described = plan.describe()
    rows = plan.table()
    lines = [
        f"pictures: {described['pictures']}, regularisation {described['regularisation']}, held out {described['validation']}",
        "samples an epoch by size: " + ", ".join(f"{row.width}x{row.height}{_from(row.controls)}: {row.samples}" for row in rows),
    ]
    used = [*plan.trained_pictures(), *plan.held_out]
    counts = Counter(len(plan.pictures[index].controls) for index in used)
    if any(counts):
        pairs = [(index, number) for index in used for number in range(len(plan.pictures[index].controls))]
        shared = sum(plan.shares_cut(index, number) for index, number in pairs)
        told = ", ".join(f"{count} pairs with {number}" for number, count in sorted(counts.items()))
        lines.append(f"control pictures: {told}; {shared} cut as their targets, {len(pairs) - shared} at a size of their own")
    return lines


def lines_about_styles(plan: Plan, sources: Sources) -> list[str]:
    """How many pictures each style has, and how many transfers an evaluation makes."""
    counts = Counter(plan.pictures[index].caption for index in plan.trained_pictures())
    told = ", ".join(f"{style} {count}" for style, count in sorted(counts.items()))
    tests, transfers = len(sources.items), len(sources.items) * len(counts)
    return [f"styles: {told}", f"evaluation: {transfers} transfers, of {tests} {'picture' if tests == 1 else 'pictures'}"]


def _from(controls: Sequence[tuple[int, int]]) -> str:
    return f" from {' + '.join(f'{width}x{height}' for width, height in controls)}" if controls else ""


def about_caches(kept: Sequence[Kept], folder: Path) -> str:
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
    num_class_pictures: int,
    sources: Sources | None = None,
) -> str:
    """What a start would do, for --dry_run. num_class_pictures: how many would be made first; sources: what evaluations transfer."""
    if start.finished:
        begins = f"{start.run.path if start.run else ''} is finished already, so nothing would be trained"
    elif start.state is not None:
        begins = f"from step {start.step} of {start.state}"
    else:
        begins = "from the first step"
    about_tests = () if sources is None else sources.warnings
    lines = [
        f"{options.label}: {options.model.pretrained_model_name_or_path or 'a new model'}",
        *lines_about_pictures(plan),
        f"steps: {total_steps} of {plan.global_batch_size} samples, {plan.steps_of_epochs(1)} in the first epoch",
        f"starts: {begins}",
        f"precision: {options.training.mixed_precision} on {devices()[0]['name'] if devices() else 'the CPU'}",
        *([f"previews: {num_previews}"] if sources is None else lines_about_styles(plan, sources)),
        *([f"class pictures: {num_class_pictures} will be made before training"] if num_class_pictures else []),
        *(f"note: {text}" for text in (*start.warnings, *plan.warnings, *findings_of_length(plan, total_steps), *about_tests)),
        "Nothing was started (--dry_run).",
    ]
    return "\n".join(lines)
