"""Which instructions are shown on which control images in a run, so that one look at the images serves all of their texts."""

from __future__ import annotations

from dataclasses import dataclass

from . import captions
from .plan import ControlSet, Plan, SampleRef, caption_of


@dataclass(frozen=True)
class Instructions:
    """All texts that one set of control images is shown with.

    image and resolution are the first that has this set, and stand for every other of the same `Plan.control_set`.
    """

    image: int
    resolution: int
    mirrored: bool
    texts: tuple[str, ...]
    """Each once, sorted."""


def instructions_of_run(plan: Plan, num_steps: int) -> list[Instructions]:
    """Every (control set, text) that training and validation will show in a run of num_steps steps.

    The sets come in the order of `Plan.cached_cuts`, the plain one of an image before its mirrored one; which texts there are is as
    exact as in `texts_of_run`. Images without control images have a set too, the empty one.
    """
    found: dict[ControlSet, tuple[int, int, bool, set[str]]] = {}
    for image, resolution in plan.cached_cuts():
        for mirrored in (False, True):
            found.setdefault(plan.control_set(image, resolution, mirrored), (image, resolution, mirrored, set()))

    def show(ref: SampleRef, text: str) -> None:
        found[plan.control_set(ref.image, ref.resolution, plan.is_mirrored(ref))][3].add(text)

    rules = plan.caption_rules(num_steps)
    for batch in plan.validation_batches():
        for ref in batch:
            show(ref, caption_of(plan, rules, ref))
    bounded = _num_variants(plan, rules)
    if bounded is None or bounded > num_steps * plan.global_batch_size:
        for ref in plan.samples(num_steps):
            show(ref, caption_of(plan, rules, ref))
    else:
        for image, resolution in plan.trained_cuts():
            own, item = rules[plan.images[image].subset], plan.images[image]
            texts = {
                captions.render(own, item.caption, plan.seed, plan.key_of(image), variant)
                for variant in range(own.variants if own.random else 1)
            }
            if own.dropout_rate > 0 or own.dropout_every_n_epochs:
                texts.add("")
            for mirrored in (False, True) if plan.subset_of(image).options.flip_aug else (False,):
                found[plan.control_set(image, resolution, mirrored)][3].update(texts)
    return [
        Instructions(image, resolution, mirrored, tuple(sorted(texts))) for image, resolution, mirrored, texts in found.values() if texts
    ]


def _num_variants(plan: Plan, rules: tuple[captions.CaptionRules, ...]) -> int | None:
    """How many texts the trained images have at most; None where each sample may have one of its own."""
    if any(own.warmup_steps > 0 or (own.random and not own.variants) for own in rules):
        return None
    subsets = (plan.images[image].subset for image, _ in plan.trained_cuts())
    return sum(rules[subset].variants if rules[subset].random else 1 for subset in subsets)
