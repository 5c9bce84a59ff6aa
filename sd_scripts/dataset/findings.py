"""What a person should know about a data set before it is trained on; sentences, nothing is refused here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Plan

_SHOWN_NAMES = 5
_SHOWN_SIZES = 8
_ODD_ASPECT = 1.5
"""A control image whose aspect ratio differs by more than this factor from its target's is worth a look."""
_SIDES = re.compile(r"\b(left|right)\b", re.IGNORECASE)


def some_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else "")


def findings_of(plan: Plan) -> list[str]:
    """Sentences about captions, buckets and edit pairs of a plan."""
    trained = plan.trained_images()
    own = [index for index in trained if not plan.subset_of(index).is_reg]
    return [*_captions(plan, own), *_buckets(plan, own), *_pairs(plan, own)]


def findings_of_length(plan: Plan, num_steps: int) -> list[str]:
    """Sentences about what a run of this many steps leaves out, if it is as long as an epoch."""
    rows = plan.unshown(num_steps)
    if not rows or num_steps * plan.global_batch_size < plan.samples_per_epoch:
        return []
    sizes = ", ".join(f"{row.width}x{row.height}" for row in rows[:_SHOWN_SIZES])
    return [
        f"{len(rows)} buckets with {sum(row.images for row in rows)} images ({sizes}) do not fill one step of "
        f"{plan.global_batch_size} samples in {num_steps} steps, so this run never shows them; more steps, a smaller global batch or a "
        "larger bucket_reso_steps would"
    ]


def _names(plan: Plan, indices: Sequence[int]) -> str:
    return some_names([plan.images[index].name for index in indices])


def _captions(plan: Plan, own: Sequence[int]) -> list[str]:
    silent = [index for index in own if not plan.images[index].caption.strip()]
    if not silent:
        return []
    return [
        f"{len(silent)} of {len(own)} training images have no caption and no class token, "
        f"so they train on an empty text: {_names(plan, silent)}"
    ]


def _buckets(plan: Plan, own: Sequence[int]) -> list[str]:
    found = []
    single = [row for row in plan.table() if row.images == 1]
    if single and len(own) > 1:
        sizes = ", ".join(f"{row.width}x{row.height}" for row in single[:_SHOWN_SIZES])
        found.append(f"buckets with a single image: {len(single)} ({sizes}); a larger bucket_reso_steps gives fewer buckets")
    slow = [row for row in plan.table() if row.samples < plan.global_batch_size]
    if slow:
        found.append(
            f"buckets with fewer samples an epoch than one step takes ({plan.global_batch_size}): {len(slow)}; a step shows some of "
            "their images more than once, and they are still used as often as all others"
        )
    enlarged = [index for index in own if plan.cut(index, 0).resized[0] > plan.images[index].width]
    if enlarged:
        found.append(f"smaller than their bucket, and enlarged: {len(enlarged)} ({_names(plan, enlarged)})")
    return found


def _pairs(plan: Plan, own: Sequence[int]) -> list[str]:
    found = []
    pairs = [index for index in own if plan.images[index].controls]
    equal = [index for index in pairs if plan.images[index].identity and plan.images[index].identity in plan.controls_identity(index)]
    if equal:
        found.append(
            f"{len(equal)} of {len(pairs)} pairs have a control image that is the target itself, so they teach to change nothing: "
            f"{_names(plan, equal)}"
        )
    seen: set[tuple[object, ...]] = set()
    again = []
    for index in pairs:
        item = plan.images[index]
        key = (item.identity, plan.controls_identity(index), item.caption)
        if item.identity and key in seen:
            again.append(index)
        seen.add(key)
    if again:
        found.append(f"{len(again)} pairs are there already, with the same images and the same instruction: {_names(plan, again)}")
    odd = [index for index in pairs if _aspects_differ(plan, index)]
    if odd:
        found.append(
            f"{len(odd)} of {len(pairs)} pairs have a control image of a very different shape than the target; it is shown whole, "
            f"beside the target's cut: {_names(plan, odd)}"
        )
    sided = [index for index in pairs if plan.subset_of(index).options.flip_aug and _SIDES.search(plan.images[index].caption)]
    if sided:
        found.append(
            f"flip_aug mirrors images but not words such as left and right, which {len(sided)} instructions have: {_names(plan, sided)}; "
            "turn flip_aug off"
        )
    return found


def _aspects_differ(plan: Plan, index: int) -> bool:
    item = plan.images[index]
    sides = [(control.width * item.height, control.height * item.width) for control in item.controls]
    return any(max(pair) > _ODD_ASPECT * min(pair) for pair in sides)
